"""A smoke run of the benchmark of diffusion transformers on two ranks of the pool."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext

WORKLOADS = ("tiny-wan-small:forward", "tiny-wan-small:train")
METHODS = ("one GPU", "ds_usp 2x1", "ds_usp 1x2", "diffusers ulysses 2")

pytestmark = pytest.mark.slow


def run_all(ctx: RankContext, path: str) -> None:
    """Run the program with a session on this rank, and with a case whose first block has other
    weights than one GPU's; what the program changes in this process is restored."""
    import bench_diffusers
    import diffusers_cases

    session = bench_diffusers.Session(torch.device("cpu"), ctx.rank, ctx.world)
    argv = ["bench_diffusers.py", "--device", "cpu", "--smoke", "--out", path]
    argv += ["--run-id", "1", "--workloads", *WORKLOADS]
    every = bench_diffusers.cases(2, ["sdpa"], [False])
    known = {f"{name}, sdpa": every[f"{name}, sdpa"] for name in METHODS}
    right = known["ds_usp 2x1, sdpa"].prepare

    def and_change(modules: Any) -> Any:
        weight = modules.blocks[0].attn1.to_q.weight
        modules.blocks[0].attn1.to_q.weight = torch.nn.Parameter(1.01 * weight.detach())
        return right(modules)

    known["wrong, sdpa"] = diffusers_cases.Case(and_change)
    with ExitStack() as stack:
        for target, name, value in (
            (bench_diffusers, "cases", lambda *_: known),
            (bench_diffusers.Session, "start", lambda *_: session),
            (bench_diffusers.Session, "close", lambda _: None),
            (torch.accelerator, "device_count", torch.accelerator.device_count),
            (torch._dynamo.config, "recompile_limit", torch._dynamo.config.recompile_limit),
            (sys, "argv", argv),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        assert bench_diffusers.main() == 0
    diffusers_cases._mesh_of_ds_usp.cache_clear()
    diffusers_cases._mesh_of_diffusers.cache_clear()


def test_cases_are_compared_and_a_wrong_result_is_marked(pool, tmp_path, capsys):
    import bench_diffusers

    path = tmp_path / "rows.jsonl"
    pool.run(run_all, 2, path=str(path))
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    found = {(row["workload"], row["case"].removesuffix(", sdpa")): row for row in rows}
    assert found.keys() == {
        (workload, name) for workload in WORKLOADS for name in (*METHODS, "wrong")
    }
    for (workload, name), row in found.items():
        assert row["ms"][0] > 0 and row["wrong"] == (name == "wrong"), row
        assert ("gradient_difference" in row) == workload.endswith("train")
    assert bench_diffusers.summarize(bench_diffusers.read_rows(path), WORKLOADS) == 1
    assert capsys.readouterr().out.count("WRONG") == len(WORKLOADS)
