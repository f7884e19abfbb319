"""The benchmarks' arithmetic, their files and their picture; and that the scripts run, on gloo."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from harness import RankContext, WorkerPool
from oracle import causal, dense_attention, relative_error

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts" / "bench"
sys.path.append(str(BENCH))

import bench_attention  # noqa: E402 - found through the path above
import bench_documents  # noqa: E402
import bench_harness  # noqa: E402
import overlap  # noqa: E402
import plot  # noqa: E402
import plot_memory  # noqa: E402
import reference  # noqa: E402

HERE = bench_harness.Session(torch.device("cpu"), rank=0, world=4)


# ------------------------------------------------------------------ the clock


@pytest.mark.parametrize(("settle_s", "before"), [(0.0, []), (0.25, ["1 timed", *["a"] * 3])])
def test_a_contender_settles_at_its_own_clock_before_it_is_timed(
    settle_s: float, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def seconds(_: bench_harness.Session, step: bench_harness.Step, repeats: int = 1) -> float:
        ran.append(f"{repeats} timed")
        return 0.1

    monkeypatch.setattr(bench_harness.Session, "seconds", seconds)
    steps = {"one": lambda: ran.append("a"), "other": lambda: ran.append("b")}
    assert HERE.medians(steps, 2, 5, settle_s) == {"one": 0.1, "other": 0.1}
    others = [each.replace("a", "b") for each in before]
    assert ran == 2 * [*before, "5 timed", *others, "5 timed"]


def test_only_gpus_need_time_to_settle() -> None:
    for text, expected in (("cuda", 0.3), ("cpu", 0.0), ("cpu --settle 2", 2.0)):
        parser = bench_harness.flags("")
        bench_harness.race_flags(parser)
        assert bench_harness.settling(parser.parse_args(["--device", *text.split()])) == expected


# ------------------------------------------------------------------ intervals


def test_intervals_that_meet_are_one() -> None:
    assert overlap.joined([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert overlap.joined([(0, 9), (1, 2)]) == [(0, 9)]
    assert overlap.joined([]) == []


def test_a_moment_counts_once() -> None:
    assert overlap.length([(0, 4), (2, 6), (10, 11)]) == 7


def test_communication_is_exposed_where_nothing_computes_under_it() -> None:
    events = [
        ("flash_fwd_kernel", 0, 4_000_000),
        ("ncclDevKernel_SendRecv", 3_000_000, 6_000_000),  # 1 ms hidden, 2 ms exposed
        ("vectorized_elementwise_kernel", 7_000_000, 8_000_000),  # after 1 ms of nothing
    ]
    assert overlap.figures(events) == {
        "span": 8.0,
        "attention": 4.0,
        "other_compute": 1.0,
        "communication": 3.0,
        "exposed": 2.0,
        "idle": 1.0,
    }


# ------------------------------------------------------------------ tables


def test_a_table_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "found.csv"
    table = bench_harness.Table(HERE, path, ("shape", "contender"), "a note")
    table.add(["8K", "ours, flash4"])
    head, rows = plot.read(path)
    assert rows == [{"shape": "8K", "contender": "ours, flash4"}]
    assert head[0].startswith("torchrun --nproc-per-node 4 scripts/bench/")
    assert "4 x CPU" in head[1]
    assert torch.__version__ in head[1]
    assert head[1].endswith("; a note")


def test_only_rank_0_writes(tmp_path: Path) -> None:
    other = bench_harness.Session(torch.device("cpu"), rank=1, world=4)
    bench_harness.Table(other, tmp_path / "found.csv", ("shape",), "").add(["8K"])
    assert not list(tmp_path.iterdir())


def test_a_command_names_no_folder_outside_the_repository() -> None:
    argv = ["/home/me/x/bench_links.py", "--sizes", "1", "--out", "/home/me/a.csv", "--x=/home/b"]
    environment = {"NCCL_P2P_DISABLE": "1", "HOME": "/home/me"}
    assert bench_harness.command(argv, 2, environment) == (
        "NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 scripts/bench/bench_links.py "
        "--sizes 1 --out a.csv --x=b"
    )


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_truth_is_the_oracles(kv_heads: int) -> None:
    length = reference.QUERIES + 44
    torch.manual_seed(0)
    shapes = [(1, length, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    found = reference.causal_truth(q, k, v, dout)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(q, k, v, causal(range(length), range(length)))
    for mine, true in zip(found, (out, *torch.autograd.grad(out, leaves, dout)), strict=True):
        assert relative_error(mine, true) < 1e-13


def test_no_number_is_the_worst_ratio() -> None:
    assert reference.worst_ratio([1.0, 3.0], [1.0, 2.0]) == 1.5
    assert math.isnan(reference.worst_ratio([float("nan"), 3.0], [1.0, 2.0]))


Tried = Callable[..., "list[float] | str"]


def over_mesh(found: list[float] | str) -> Tried:
    """One GPU's kernel errs by 1; the mesh as given."""
    return lambda _session, mesh, *_: found if mesh.ring_degree > 1 else [1.0] * 4


@pytest.mark.parametrize(
    ("tried", "passes"),
    [
        (over_mesh([1.0, 1.0, 1.5, 1.0]), True),
        (over_mesh([1.0, 1.0, 1.6, 1.0]), False),
        (over_mesh([float("nan"), 1.0, 1.0, 1.0]), False),
        (over_mesh("RuntimeError: no"), False),
        (lambda *_: "ImportError: no kernel at all", False),
    ],
)
def test_a_check_fails_above_the_limit_and_where_nothing_was_checked(
    tried: Tried, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = SimpleNamespace(ulysses_degree=2, ring_degree=2)
    monkeypatch.setattr(bench_attention, "all_meshes", lambda: [mesh])
    monkeypatch.setattr(bench_attention, "tried", tried)
    monkeypatch.setattr(reference, "fresh_inputs", lambda *_: ())
    monkeypatch.setattr(reference, "causal_truth", lambda *_: ())
    shapes = [bench_attention.Shape(length, 4, 4, 16) for length in (16384, 32768)]
    args = Namespace(out=None, kernels=["sdpa"])
    assert bench_attention.check(HERE, args, shapes) is passes


# ------------------------------------------------------------------ the picture


MADE_UP = """\
# torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --out <made up>.csv
# 2026-11-20, 4 x <made up> & co, torch 2.11.0; bf16, causal, batch 1
shape,contender,ms,tflop_per_s_per_gpu,share_of_kernel,extra_gib
8K 32/32 d128,"one GPU, flash4",1,1,1.000,0.1
8K 32/32 d128,"ds_usp 4x1, flash4",1,1,0.512,0.1
8K 32/32 d128,"ds_usp 2x2, flash4",1,1,0.500,0.1
8K 32/32 d128,"DeepSpeed ulysses, cudnn",1,1,0.700,0.1
8K 32/32 d128,"DeepSpeed ulysses, flash4",1,1,nan,0.1
8K 32/8 d128,"ds_usp 1x4, flash4",1,1,0.400,0.1
128K 32/32 d128,"ds_usp 4x1, flash4",1,1,0.950,0.1
128K 32/32 d128,"ds_usp 2x2, flash4",1,1,1.010,0.1
"""


def drawn(tmp_path: Path, *texts: str) -> ElementTree.Element:
    paths = [tmp_path / f"{number}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    out = tmp_path / "out.svg"
    command = [sys.executable, BENCH / "plot.py", *paths, "--out", out]
    subprocess.run(command, check=True, timeout=180)
    return ElementTree.parse(out).getroot()


def tags(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_a_line_a_contender(tmp_path: Path) -> None:
    root = drawn(tmp_path, MADE_UP)
    lines = [line.attrib["points"].split() for line in tags(root, "polyline")]
    assert sorted(map(len, lines)) == [1, 2, 2]
    words = [text.text for text in tags(root, "text")]
    assert {"FlashAttention-4", "cuDNN", "ds_usp 4x1", "95 %", "8K", "128K"} <= set(words)
    assert "FlashAttention-2" not in words


def test_the_later_file_counts(tmp_path: Path) -> None:
    head = "".join(MADE_UP.splitlines(keepends=True)[:3])
    later = head + '128K 32/32 d128,"ds_usp 4x1, flash4",1,1,0.990,0.1\n'
    root = drawn(tmp_path, MADE_UP, later)
    words = [text.text for text in tags(root, "text")]
    assert "99 %" in words
    assert "95 %" not in words


def test_labels_do_not_overlap_and_stay_inside() -> None:
    places = plot.spread([10, 11, 12, 50, 95, 99, 99], 10, 100)
    assert all(after - before >= plot.LABEL for before, after in pairwise(places))
    assert places[0] >= 10
    assert places[-1] <= 100


# ------------------------------------------------------------------ the scripts


def started(ctx: RankContext, *, script: str, flags: list[str]) -> tuple[int, str]:
    """The exit code and the output of a script's ``main``, on a rank that has its group."""
    sys.path.append(str(BENCH))
    import bench_harness

    here = bench_harness.Session(torch.device("cpu"), ctx.rank, ctx.world)
    argv = [str(BENCH / f"{script}.py"), "--device", "cpu", *flags]
    code: Any = 0
    with (
        mock.patch.object(bench_harness.Session, "start", lambda _: here),
        mock.patch.object(bench_harness.Session, "close"),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        try:
            importlib.import_module(script).main()
        except SystemExit as end:
            code = end.code
    return int(code or 0), out.getvalue()


def ran(pool: WorkerPool, script: str, *flags: str, code: int = 0) -> str:
    """What rank 0 of a script on two ranks prints."""
    found = pool.run(started, 2, script=script, flags=list(flags))
    assert [each for each, _ in found] == [code] * 2, found[0][1]
    return found[0][1]


def test_a_script_starts_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    flags = ("--sizes", "0.01", "--rounds", "1", "--repeats", "1", "--out", str(path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        [*command, str(BENCH / "bench_links.py"), "--device", "cpu", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert plot.read(path)[1]


def test_links_on_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    flags = ("--sizes", "0.01", "0.02", "--rounds", "2", "--repeats", "2", "--out", str(path))
    text = ran(pool, "bench_links", *flags)
    _, rows = plot.read(path)
    sent = {(row["operation"], row["mib"]): float(row["sent_mib"]) for row in rows}
    assert sent["all-to-all", "0.02"] == pytest.approx(0.01, rel=0.01)
    assert sent["ring send/receive", "0.01"] == pytest.approx(0.01, rel=0.01)
    assert all(float(row["gb_per_s"]) > 0 for row in rows)
    assert text.count("left out") == 3  # what needs a GPU


def test_attention_and_its_errors_on_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    shape, path = ("--shapes", "64:2:2:16", "--kernels", "eager"), tmp_path / "found.csv"
    ran(pool, "bench_attention", *shape, "--rounds", "1", "--out", str(path))
    splits = ["one GPU, eager", "ds_usp 2x1, eager", "ds_usp 1x2, eager"]
    assert [row["contender"] for row in plot.read(path)[1]] == splits
    ran(pool, "bench_attention", *shape, "--errors", "--out", str(path))
    assert [row["contender"] for row in plot.read(path)[1]] == splits[1:]


def test_documents_and_windows_on_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    sizes = ("--shape", "64:2:2:16", "--documents", "4:16", "--window", "8", "--kernels", "eager")
    path = tmp_path / "found.csv"
    ran(pool, "bench_documents", *sizes, "--rounds", "1", "--out", str(path))
    rows = plot.read(path)[1]
    for workload, layout in (("documents", "balanced"), ("window 8", "contiguous")):
        assert [row["contender"] for row in rows if row["workload"] == workload] == [
            "one GPU, eager",
            "ds_usp 2x1 zigzag, eager",
            f"ds_usp 1x2 {layout}, eager",
            "ds_usp 1x2 zigzag, eager",
        ]
    assert len(rows) == 12


def test_lengths_are_the_same_on_every_run() -> None:
    borders = bench_documents.packed(1 << 17, 2048, 32768, seed=0)
    assert borders == bench_documents.packed(1 << 17, 2048, 32768, seed=0)
    lengths = [end - start for start, end in pairwise(borders)]
    assert borders[0] == 0 and borders[-1] == 1 << 17
    assert min(lengths[:-1]) >= 2048 and max(lengths) <= 32768


def test_nothing_checked_is_a_failure(pool: WorkerPool) -> None:
    shape = ("--shapes", "64:2:2:16", "--kernels", "flash4", "--errors")
    assert "0 checked: FAILED" in ran(pool, "bench_attention", *shape, code=1)


def test_overlap_on_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "overlap.csv"
    ran(pool, "overlap", "--shapes", "64:2:2:16", "--steps", "1", "--out", str(path))
    assert len(plot.read(path)[1]) == 3


def test_awake_links_on_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "awake.csv"
    flags = ("--shapes", "64:2:2:16", "--kernels", "eager", "--every", "1", "--rounds", "1")
    ran(pool, "idle_link_power", *flags, "--out", str(path))
    rows = plot.read(path)[1]
    assert [row["pull_every_ms"] for row in rows] == ["never", "1"]
    assert float(rows[0]["share"]) == 1


def test_memory_on_two_ranks_and_its_picture(pool: WorkerPool, tmp_path: Path) -> None:
    path, moments, picture = (tmp_path / name for name in ("a.csv", "b.csv", "c.svg"))
    policies = ["none", "gemm-last", "attention", "full", "gemm-last+0.5", "attention+1"]
    ran(
        pool, "bench_memory", "--shapes", "1024:3:64:4:128", "--rounds", "1", "--in-a-row", "1",
        "--policies", *policies, "--out", str(path), "--moments", str(moments),
    )  # fmt: skip
    _, rows = plot.read(path)
    assert [row["policy"] for row in rows][-1] == "attention + offload 1"
    assert [float(row["host_gib"]) > 0 for row in rows] == [False] * 4 + [True] * 2
    head, drawn = plot.read(moments)
    assert len(drawn) == len(policies) * 7  # each border of 3 layers, both ways, and the end
    picture.write_text(plot_memory.svg(head, "shape", plot_memory.panels(drawn)))
    found = ElementTree.parse(picture).findall(".//{*}polygon")
    assert len(found) == 2 * len(policies)
