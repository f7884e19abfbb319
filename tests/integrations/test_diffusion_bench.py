"""A smoke run of the benchmark of diffusion transformers on two ranks of the pool."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext

RUN = "1"
WORKLOADS = ("tiny-wan-small:forward", "tiny-wan-small:train", "tiny-wan-small:cached")
XDIT = ("xdit 2x1", "xdit 1x2")
GRAPHS = ("ds_usp 2x1 graphs", "ds_usp 1x2 graphs", "ds_usp cfg 2x1x1 graphs")
CACHED = tuple(
    f"{name} cached"
    for name in ("one GPU", "ds_usp 2x1", "ds_usp 1x2", "ds_usp cfg 2x1x1", "diffusers ulysses 2")
)
CASES = (
    *("one GPU", "ds_usp 2x1", "ds_usp 1x2", "ds_usp cfg 2x1x1", *GRAPHS, *CACHED),
    *("diffusers ulysses 2", "diffusers ring 2", *XDIT),
)
Rows = dict[tuple[str, str], dict[str, Any]]


@contextmanager
def as_a_rank(ctx: RankContext, path: str) -> Iterator[Any]:
    """The program with a session on this rank; what it changes in this process is restored."""
    import bench_diffusers
    import diffusers_cases

    session = bench_diffusers.Session(torch.device("cpu"), ctx.rank, ctx.world)
    argv = ["bench_diffusers.py", "--device", "cpu", "--smoke", "--out", path]
    argv += ["--run-id", RUN, "--workloads", *WORKLOADS]
    with ExitStack() as stack:
        for target, name, value in (
            (bench_diffusers.Session, "start", lambda *_: session),
            (bench_diffusers.Session, "close", lambda _: None),
            (torch.accelerator, "device_count", torch.accelerator.device_count),
            (torch._dynamo.config, "recompile_limit", torch._dynamo.config.recompile_limit),
            (sys, "argv", argv),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield bench_diffusers
        diffusers_cases._mesh_of_ds_usp.cache_clear()
        diffusers_cases._mesh_of_diffusers.cache_clear()


def run_all(ctx: RankContext, path: str) -> None:
    with as_a_rank(ctx, path) as program:
        assert program.main() == 0


def run_wrong(ctx: RankContext, path: str) -> None:
    """ds_usp on one mesh, whose first block then has other weights than one GPU's."""
    with as_a_rank(ctx, path) as program:
        case = program.cases(2, ["sdpa"], [False])["ds_usp 2x1, sdpa"]
        prepare = case.prepare

        def and_change(modules: Any) -> Any:
            weight = modules.blocks[0].attn1.to_q.weight
            modules.blocks[0].attn1.to_q.weight = torch.nn.Parameter(1.01 * weight.detach())
            return prepare(modules)

        object.__setattr__(case, "prepare", and_change)
        known = {"one GPU, sdpa": program.cases(2, ["sdpa"], [False])["one GPU, sdpa"]}
        with mock.patch.object(program, "cases", lambda *_: known | {"wrong, sdpa": case}):
            assert program.main() == 0


def rows_of(path: Path) -> Rows:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_case = {(row["workload"], row["case"].removesuffix(", sdpa")): row for row in rows}
    assert len(by_case) == len(rows)
    return by_case


def summary(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    import bench_diffusers

    code = bench_diffusers.summarize(bench_diffusers.read_rows(path), WORKLOADS)
    return code, capsys.readouterr().out


def test_cases_are_compared_and_written(pool, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    pool.run(run_all, 2, path=str(path))
    rows = rows_of(path)
    assert set(rows) == {(workload, case) for workload in WORKLOADS for case in CASES}
    for (workload, case), row in rows.items():
        if case == "diffusers ring 2":
            assert "does not support return_lse" in row["refused"]
            continue
        sampled = workload.endswith("cached")
        if not sampled and ("cfg" in case or case in CACHED):
            assert "for other kinds of steps" in row["refused"]
            continue
        if case in XDIT:  # which needs a GPU, so that CI does not have it
            reason = "is for sampling" if workload.endswith("train") else "xfuser"
            assert reason in row["refused"]
            continue
        if case in GRAPHS:
            reason = "are not captured" if workload.endswith("train") else "needs a GPU"
            assert reason in row["refused"]
            continue
        assert row["ms"][0] > 0 and row["tokens"] == 48 and not row["wrong"], row
        assert ("gradient_difference" in row) == workload.endswith("train")
    assert rows[WORKLOADS[1], "ds_usp 1x2"]["gradient_difference"] > 0
    code, text = summary(path, capsys)
    # Of both other workloads: the ring, five with a cache, two with guidance by ranks; in training
    # graphs of two meshes and xDiT's two. With a cache the ring.
    assert code == 0 and "WRONG" not in text and text.count("left out: ValueError") == 21


def test_a_wrong_result_is_marked(pool, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    pool.run(run_wrong, 2, path=str(path))
    rows = rows_of(path)
    assert all(rows[workload, "wrong"]["wrong"] for workload in WORKLOADS), rows
    assert not any(rows[workload, "one GPU"]["wrong"] for workload in WORKLOADS)
    code, text = summary(path, capsys)
    assert code == 1 and text.count("WRONG") == len(WORKLOADS)
