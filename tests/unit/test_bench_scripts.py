"""Smoke runs: each benchmark script runs on two gloo ranks and writes the rows it should."""

import contextlib
import importlib
import io
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, WorkerPool
from programs import ROOT, torchrun
from tables import read

BENCH = ROOT / "scripts" / "bench"
SHAPE = ("--shapes", "64:2:2:16", "--kernels", "eager")

pytestmark = pytest.mark.slow


def run_main(ctx: RankContext, *, script: str, arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of a script's ``main`` on a rank that has its process group."""
    import bench_harness

    session = bench_harness.Session(torch.device("cpu"), ctx.rank, ctx.world)
    argv = [str(BENCH / f"{script}.py"), "--device", "cpu", *arguments]
    code: Any = 0
    with (
        mock.patch.object(bench_harness.Session, "start", lambda _: session),
        mock.patch.object(bench_harness.Session, "close"),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        try:
            importlib.import_module(script).main()
        except SystemExit as end:
            code = end.code
    return int(code or 0), out.getvalue()


def run(pool: WorkerPool, script: str, *arguments: str, code: int = 0) -> str:
    """Output of rank 0 of a script on two ranks."""
    results = pool.run(run_main, 2, script=script, arguments=list(arguments))
    assert [exit_code for exit_code, _ in results] == [code] * 2, results[0][1]
    return results[0][1]


def test_attention_under_torchrun(tmp_path):
    """The only run whose ranks come from torchrun: Session.start is not replaced."""
    path = tmp_path / "attention.csv"
    flags = ("--device", "cpu", *SHAPE, "--rounds", "1", "--out", str(path))
    done = torchrun(2, BENCH / "bench_attention.py", *flags)
    assert done.returncode == 0, done.stderr
    assert len(read(path)) == 3 and all(float(row["ms"]) > 0 for row in read(path))


def test_attention_and_its_errors(pool, tmp_path):
    path = tmp_path / "attention.csv"
    run(pool, "bench_attention", *SHAPE, "--rounds", "1", "--out", str(path))
    meshes = ["one GPU, eager", "ds_usp 2x1, eager", "ds_usp 1x2, eager"]
    assert [row["contender"] for row in read(path)] == meshes
    shapes = ("--shapes", "64:2:2:16", "67:4:2:16:documents=4-16")
    flags = ("--kernels", "eager", "--errors", "--peers", "plain", "--out", str(path))
    run(pool, "bench_attention", *shapes, *flags)
    assert [row["contender"] for row in read(path)] == 2 * [*meshes[1:], "plain all-to-all, eager"]
    assert all(float(row["worst_ratio"]) <= 1.5 for row in read(path))
    nothing = ("--shapes", "64:2:2:16", "--kernels", "flash4", "--errors")
    assert "0 meshes checked: FAILED" in run(pool, "bench_attention", *nothing, code=1)


PLAIN_SHAPES = {
    "65:4:2:16": "65 4/2 d16",  # uneven shards
    "64:4:4:16:full:forward:batch=2": "64 4/4 d16 b2 full forward",
    "64:4:2:16:window=8": "64 4/2 d16 window 8",
    "64:4:2:16:documents=4-16": "64 4/2 d16 documents 4-16",
}


def test_attention_beside_plain_all_to_alls(pool, tmp_path):
    path = tmp_path / "attention.csv"
    flags = ("--kernels", "eager", "--peers", "plain", "--rounds", "1", "--out", str(path))
    run(pool, "bench_attention", "--shapes", *PLAIN_SHAPES, *flags)
    methods = ["one GPU", "ds_usp 2x1", "ds_usp 1x2", "plain all-to-all"]
    expected = [(label, f"{name}, eager") for label in PLAIN_SHAPES.values() for name in methods]
    assert [(row["shape"], row["contender"]) for row in read(path)] == expected


def plain_results(ctx: RankContext, *, text: str) -> list[torch.Tensor]:
    """Out, dq, dk and dv of the plain baseline: errors against the kernel on the full sequence."""
    import baselines
    from shapes import Shape

    shape = Shape.parse(text)
    (baseline,) = baselines.plain_all_to_alls(["eager"])
    attend, _, positions = baseline.attend(shape)
    full = [x.double() for x in shape.random(torch.device("cpu"), shape.seq_len)]
    local = [x[:, positions].clone() for x in full]
    results = []
    for run_attend, tensors in ((attend, local), (baselines.local_kernel(shape, "eager"), full)):
        inputs = [x.requires_grad_() for x in tensors[:3]]
        out = run_attend(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, tensors[3])])
    return [a - b[:, positions] for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("text", ["64:4:2:16", "65:4:2:16:batch=3", "65:4:4:16:full"])
def test_plain_all_to_alls_compute_the_kernel(pool, text):
    for differences in pool.run(plain_results, 2, text=text):
        assert max(x.abs().max().item() for x in differences) < 1e-12


def test_memory_policies_and_moments(pool, tmp_path):
    path, moments = tmp_path / "memory.csv", tmp_path / "moments.csv"
    policies = ["none", "gemm-last", "attention", "full", "gemm-last+0.5", "attention+1"]
    run(
        pool, "bench_memory", "--shapes", "1024:3:64:4:128", "--rounds", "1", "--in-a-row", "1",
        "--policies", *policies, "--out", str(path), "--moments", str(moments),
    )  # fmt: skip
    rows = read(path)
    assert [row["policy"] for row in rows][-1] == "attention + offload 1"
    assert [float(row["host_gib"]) > 0 for row in rows] == [False] * 4 + [True] * 2
    assert len(read(moments)) == len(policies) * 7  # each border of 3 layers, both ways, and end


def test_a_layer_with_a_state_and_blocks_of_it(pool, tmp_path):
    pytest.importorskip("transformers")
    path, sizes = tmp_path / "recurrence.csv", ("--tokens", "64", "--shape", "32:2:4:8")
    run(pool, "bench_recurrence", *sizes, "--rounds", "1", "--out", str(path))
    rows = read(path)
    ours = ["one GPU", "ds_usp contiguous", "ds_usp zigzag"]
    assert [row["contender"] for row in rows] == [*ours, "heads exchanged", *ours]
    assert max(float(row["error"]) for row in rows) < 1e-5
