"""Helper functions of scripts/bench: timer, intervals, result files, fp64 reference, checks."""

import math
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import baselines
import bench_attention
import bench_harness
import pytest
import reference
import shapes
import tables
import torch

from ds_usp.geometry.layout import TokenLayout

SESSION = bench_harness.Session(torch.device("cpu"), rank=0, world=4)


@pytest.mark.parametrize(("warm_up_s", "before"), [(0.0, []), (0.25, ["1 timed", *["a"] * 3])])
def test_a_baseline_warms_up_the_clock_before_it_is_timed(warm_up_s, before, monkeypatch):
    calls: list[str] = []

    def seconds(_: bench_harness.Session, step: bench_harness.Step, repeats: int = 1) -> float:
        calls.append(f"{repeats} timed")
        return 0.1

    monkeypatch.setattr(bench_harness.Session, "seconds", seconds)
    steps = {"first": lambda: calls.append("a"), "second": lambda: calls.append("b")}
    assert SESSION.medians(steps, 2, 5, warm_up_s) == {"first": 0.1, "second": 0.1}
    before_second = [call.replace("a", "b") for call in before]
    assert calls == 2 * [*before, "5 timed", *before_second, "5 timed"]


def test_warm_up_defaults_to_gpus_only():
    for text, expected in (("cuda", 0.3), ("cpu", 0.0), ("cpu --settle 2", 2.0)):
        parser = bench_harness.common_flags("")
        bench_harness.comparison_flags(parser)
        args = parser.parse_args(["--device", *text.split()])
        assert bench_harness.warm_up_seconds(args) == expected


def test_rank_0_alone_writes_a_table_that_reads_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    other = bench_harness.Session(torch.device("cpu"), rank=1, world=4)
    bench_harness.Table(other, tmp_path / "links.csv", ("shape",), "").add(["8K"])
    assert not list(tmp_path.iterdir())
    table = bench_harness.Table(SESSION, tmp_path / "links.csv", ("shape", "contender"), "a note")
    table.add(["8K", "ds_usp, flash4"])
    assert tables.read("links.csv") == [{"shape": "8K", "contender": "ds_usp, flash4"}]
    command, versions = (tmp_path / "links.csv").read_text().splitlines()[:2]
    assert command.startswith("# torchrun --nproc-per-node 4 scripts/bench/")
    assert "4 x CPU" in versions and torch.__version__ in versions
    assert versions.endswith("; a note")


def test_a_command_names_no_folder_outside_the_repository():
    argv = [
        "/home/me/x/bench_memory.py",
        "--shapes",
        "8:2:2:16:documents=4-8/2",
        "--out",
        "/home/me/a.csv",
        "--x=/b/c",
    ]
    environment = {"NCCL_P2P_DISABLE": "1", "HOME": "/home/me"}
    assert bench_harness.command(argv, 2, environment) == (
        "NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 scripts/bench/bench_memory.py "
        "--shapes 8:2:2:16:documents=4-8/2 --out a.csv --x=c"
    )


@pytest.mark.parametrize("seed", range(4))
def test_document_lengths_are_log_uniform_and_equal_in_every_run(seed):
    """Over a thousand draws: a range a fifth too wide or too narrow leaves its bounds or a bin."""
    borders = shapes.packed(1 << 24, 2048, 32768, seed)
    assert borders == shapes.packed(1 << 24, 2048, 32768, seed)
    assert borders != shapes.packed(1 << 24, 2048, 32768, seed + 1)
    assert borders[0] == 0 and borders[-1] == 1 << 24
    *lengths, last = (end - start for start, end in pairwise(borders))
    assert len(lengths) > 1000 and min(lengths) >= 2048 and max(*lengths, last) <= 32768
    bins = [sum(low <= x < 2 * low for x in lengths) for low in (2048, 4096, 8192, 16384)]
    assert bins == pytest.approx([len(lengths) / 4] * 4, rel=0.2)
    assert min(lengths) < 2048 * 1.02 and max(lengths) > 32768 / 1.02
    even = shapes.packed(1 << 24, 2048, 32768, seed, multiple=8)
    assert all(border % 8 == 0 for border in even) and even[-1] == 1 << 24
    pairs = zip(lengths, (b - a for a, b in pairwise(even)), strict=False)
    assert all(0 <= length - rounded < 8 for length, rounded in pairs)


def test_rows_of_magi_attentions_lengths_are_one_stream():
    """A document that a row cuts goes on in the next; over 1,500 of them, the share of two bins."""
    tokens, count = 1 << 17, 20
    rows = [shapes.magi_row(tokens, number) for number in range(count)]
    assert rows[7] == shapes.magi_row(tokens, 7) and all(row[-1] == tokens for row in rows)
    ends = {tokens * n + end for n, row in enumerate(rows) for end in row[1:-1]}
    lengths = [b - a for a, b in pairwise([0, *sorted(ends)])]
    middles = [(first + last) // 2 for first, last, _ in shapes.MAGI]
    assert set(lengths) <= {min(x, tokens // 4) for x in middles} | {49152 % 32768}
    share = sum(x in (350, 762) for x in lengths) / len(lengths)
    assert share == pytest.approx(0.5213, rel=0.05)  # of all pieces; by hand from the table


@pytest.mark.parametrize("name", shapes.SHAPE_SETS)
def test_a_set_names_distinct_shapes(name):
    requested = shapes.requested_shapes(Namespace(shapes=[name, "64:2:2:16"]))
    assert len(set(map(str, requested))) == len(shapes.SHAPE_SETS[name]) + 1
    assert str(requested[-1]) == "64 2/2 d16"
    forward = shapes.requested_shapes(Namespace(shapes=[name], forward=True))
    assert all(shape.forward and not str(shape).endswith("d128") for shape in forward)


def test_chunks_of_documents_are_megatrons_order_and_padding_is_behind_each_document():
    """ds_usp's layout of this name is checked against megatron-core's own slices elsewhere."""
    even, uneven = (0, 8, 24, 64), (0, 5, 24, 61)
    for rank in range(2):
        layout = TokenLayout("context_parallel", 64, 1, 2, documents=even)
        assert baselines.mirrored_chunks(even, 2, rank) == layout.positions(rank)
    padded = [baselines.mirrored_chunks(uneven, 2, rank) for rank in range(2)]
    assert [len(positions) for positions in padded] == [(8 + 20 + 40) // 2] * 2
    assert padded[0][:4] == [0, 1, -1, -1] and padded[1][:4] == [2, 3, 4, -1]
    assert sorted(p for positions in padded for p in positions if p >= 0) == list(range(61))


@pytest.mark.parametrize(
    "text", ["64:2:2:16:banded", "64:2:2:16:full:window=4", "64:2:2:16:full:documents=4-8"]
)
def test_a_shape_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match="expected seq_len:heads"):
        shapes.Shape.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "64:4:2:16",
        "64:4:2:16:full:batch=3",
        "64:4:2:16:window=8",
        "99:4:2:16:documents=4-16",
        "64:4:2:16:documents=magi-1",
    ],
)
def test_work_counts_the_pairs_of_the_mask(text):
    shape = shapes.Shape.parse(text)
    positions = range(shape.seq_len)
    pairs = sum(shape.mask.allows(query, key) for query in positions for key in positions)
    flop = 3.5 * 4 * pairs * shape.batch * shape.heads * shape.head_dim
    diagonal = 3.5 * 2 * shape.seq_len * shape.batch * shape.heads * shape.head_dim
    assert 0 <= flop - shape.tflop * 1e12 <= 1.01 * diagonal


def test_short_steps_run_more_often_in_a_round():
    def steps(text: str, tflop: float) -> int:
        parser = bench_harness.common_flags("")
        bench_harness.comparison_flags(parser)
        return bench_harness.steps_in_a_row(parser.parse_args(text.split()), tflop)

    assert [steps("", tflop) for tflop in (0.01, 1.0, 1e3)] == [40, 10, 4]
    assert (steps("--device cpu", 0.01), steps("--in-a-row 2", 0.01)) == (4, 2)


def test_nan_is_the_worst_ratio() -> None:
    assert reference.worst_ratio([1.0, 3.0], [1.0, 2.0]) == 1.5
    assert math.isnan(reference.worst_ratio([float("nan"), 3.0], [1.0, 2.0]))


ErrorsOrReason = Callable[..., "list[float] | str"]


def over_mesh(errors: list[float] | str) -> ErrorsOrReason:
    """The single-GPU kernel errs by 1; the mesh by ``errors``."""
    return lambda _session, baseline, *_: errors if baseline.mesh.ring_degree > 1 else [1.0] * 4


@pytest.mark.parametrize(
    ("errors", "passes"),
    [
        (over_mesh([1.0, 1.0, 1.5, 1.0]), True),
        (over_mesh([1.0, 1.0, 1.6, 1.0]), False),
        (over_mesh([float("nan"), 1.0, 1.0, 1.0]), False),
        (over_mesh("RuntimeError: no"), False),
        (lambda *_: "ImportError: no kernel at all", False),  # nothing checked
    ],
)
def test_a_check_fails_above_the_limit_and_if_nothing_was_checked(errors, passes, monkeypatch):
    mesh = SimpleNamespace(ulysses_degree=2, ring_degree=2)
    monkeypatch.setattr(bench_attention, "all_meshes", lambda: [mesh])
    monkeypatch.setattr(bench_attention, "errors_or_reason", errors)
    monkeypatch.setattr(reference, "fresh_inputs", lambda *_: ())
    monkeypatch.setattr(reference, "causal_reference", lambda *_: ())
    shapes = [bench_attention.Shape(length, 4, 4, 16) for length in (16384, 32768)]
    args = Namespace(out=None, kernels=["sdpa"], peers=[])
    assert bench_attention.check(SESSION, args, shapes) is passes


def test_a_library_is_checked_beside_its_kernel_or_the_first() -> None:
    peers = [SimpleNamespace(kernel=name) for name in ("cudnn", "ffa", "flash4")]
    beside = [bench_attention.kernel_beside(peer, ["flash4", "cudnn"]) for peer in peers]
    assert beside == ["cudnn", "flash4", "flash4"]


def test_magi_attention_is_timed_on_causal_documents_only() -> None:
    assert baselines.magi_borders(shapes.Shape.parse("64:4:2:16")) == (0, 64)
    packed = shapes.Shape.parse("99:4:2:16:documents=4-16")
    assert baselines.magi_borders(packed) == packed.borders
    for words in ("full", "window=4", "batch=2", "tree=16+3x16"):
        with pytest.raises(ValueError, match="causal and of one sequence"):
            baselines.magi_borders(shapes.Shape.parse(f"64:4:2:16:{words}"))
