"""What the benchmarks count, check and write: tables of results, work, errors, methods' tokens."""

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace

import baselines
import bench_attention
import bench_harness
import long_context_rows
import pytest
import reference
import shapes
import tables
import torch
from harness import RankContext
from programs import ROOT, torchrun

from ds_usp.geometry.layout import TokenLayout

BENCH = ROOT / "scripts" / "bench"
SESSION = bench_harness.Session(torch.device("cpu"), rank=0, world=4)

# ------------------------------------------------------------------ tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_made_of_the_results(name):
    text = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert tables.rewritten(text) == text, "run python scripts/bench/tables.py"
    stale = tables.BLOCK.sub(r"\g<1>| another number |\n\g<3>", text)
    assert stale != text and tables.rewritten(stale) == text


def long_row(**values: object) -> dict[str, object]:
    row = {"case": "ds_usp", "tokens": 1 << 20, "layers": 36, "ulysses": 1, "recompute": "full"}
    row |= {"offload_ratio": 0.0, "checkpointing": {}, "world": 2, "run": "day, 2 x NVIDIA H200, x"}
    row |= {
        "attention": "flash4",
        "loss": 12.75,
        "peak_gib": 1.0,
        "host_gib": 1.0,
        "tflops_per_gpu": 1.0,
        **values,
    }
    return {**row, "tokens_per_s_per_gpu": (1 << 19) / row["seconds"]}


def test_times_of_the_whole_model_are_extrapolated_and_marked_and_other_losses_found():
    rows = [long_row(layers=layers, seconds=20.0 + 25 * layers) for layers in (12, 24)]
    *_, whole = long_context_rows.cells(rows)
    assert (whole["seconds"], whole["layers"], whole["marked"]) == (920.0, 36, True)
    assert whole["tokens_per_s_per_gpu"] == pytest.approx((1 << 19) / 920)
    assert "| 920.0 (extrapolated) | 570 |" in long_context_rows.table(rows)
    assert not long_context_rows.differences(rows)
    for loss, found in ((12.77, 0), (12.78, 1)):  # 2e-3 is 0.0255
        other = long_row(case="ALST", layers=12, seconds=400.0, loss=loss)
        assert len(long_context_rows.differences([*rows, other])) == found


# ------------------------------------------------------------------ what is timed, and how


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


# ------------------------------------------------------------------ errors

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
    requested = [bench_attention.Shape(length, 4, 4, 16) for length in (16384, 32768)]
    args = Namespace(out=None, kernels=["sdpa"], peers=[])
    assert bench_attention.check(SESSION, args, requested) is passes


def plain_results(ctx: RankContext, *, text: str) -> list[torch.Tensor]:
    """Out, dq, dk and dv of the plain baseline: errors against the kernel on the full sequence."""
    shape = shapes.Shape.parse(text)
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


@pytest.mark.slow
@pytest.mark.parametrize("text", ["64:4:2:16", "65:4:2:16:batch=3"])
def test_plain_all_to_alls_compute_the_kernel(pool, text):
    for differences in pool.run(plain_results, 2, text=text):
        assert max(x.abs().max().item() for x in differences) < 1e-12


# ------------------------------------------------------------------ programs on two CPU ranks

OURS = ["one GPU", "ds_usp contiguous", "ds_usp zigzag"]
MESHES = ["ds_usp 2x1, eager", "ds_usp 1x2, eager"]
PROGRAMS = {
    "attention": ("--shapes 64:2:2:16 --kernels eager --rounds 1", ["one GPU, eager", *MESHES]),
    "attention errors": (
        "--shapes 67:4:2:16:documents=4-16 --kernels eager --errors --peers plain",
        [*MESHES, "plain all-to-all, eager"],
    ),
    "memory": ("--shapes 64:3:32:4:64 --policies full gemm-last+1 --rounds 1", None),
    "recurrence": (
        "--tokens 64 --shape 32:2:4:8 --rounds 1",
        [*OURS, "heads exchanged", *OURS],  # the layer, then the stack
    ),
    "megatron_lm": (
        "--workloads tiny:64:2 --iterations 1 --warm-up 1",
        [f"{name}, local layers" for name in ("ds_usp 2x1 auto", "ds_usp 1x2 auto", "stock")],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_writes_a_row_of_each_method(name, tmp_path):
    flags, methods = PROGRAMS[name]
    if name == "recurrence":
        pytest.importorskip("transformers")
    path = tmp_path / "rows.csv"
    program = BENCH / f"bench_{name.split()[0]}.py"
    done = torchrun(2, program, "--device", "cpu", *flags.split(), "--out", path)
    assert done.returncode == 0, done.stderr
    rows = tables.read(path)
    assert methods is None or [row["contender"] for row in rows] == methods
    assert path.read_text().startswith("# torchrun --nproc-per-node 2 scripts/bench/bench_")
    if name == "recurrence":
        assert max(float(row["error"]) for row in rows) < 1e-5
    if name == "megatron_lm":
        assert len({row["loss"] for row in rows}) == 1
