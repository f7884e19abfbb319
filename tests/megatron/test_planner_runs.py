"""The runs that judge the planner: what is measured is read back, and nothing is left behind."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, fork_world
from peak_memory import peak_of

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import planner_validation  # noqa: E402
from planner_cases import (  # noqa: E402
    CASES,
    FITTED,
    TINY_CASES,
    TINY_FITTED,
    Case,
    Measured,
    read,
    shape_of,
    write,
)

from ds_usp.planner import ModelShape, load_cluster  # noqa: E402
from ds_usp.planner.formulas import stage_elements  # noqa: E402
from ds_usp.planner.hardware import MeasuredAttention  # noqa: E402
from ds_usp.planner.memory import memory, states_bytes  # noqa: E402
from ds_usp.planner.parallel_config import require_feasible  # noqa: E402
from ds_usp.planner.step_time import step_time  # noqa: E402

PROFILE: dict[str, Any] = {"version": 1, "base": "cpu"}


def large_storages() -> int:
    """As large as half of the tiny model's embedding, which its ranks under tp 2 hold."""
    gc.collect()
    storages = (x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor))
    return len({x.data_ptr() for x in storages if x.nbytes() > 50257 // 2 * 64 * 2})


def in_bf16(case: Case, device: str, flags: Any = Case.flags) -> list[str]:
    return [*flags(case, device), "--bf16"]


def on_rank(ctx: RankContext, path: str) -> tuple[list[Measured], int]:
    import planner_runs
    from bench_harness import Session

    from ds_usp.training import prepare_deepspeed

    prepare_deepspeed()
    session = Session(torch.device("cpu"), ctx.rank, ctx.world)
    planner_runs.measure_framework(session, dict(PROFILE), TINY_FITTED[-1:], True, Path(path))
    host = planner_runs.FrameworkRun(session, TINY_CASES[-1].mesh)
    before = large_storages()
    with mock.patch.object(Case, "flags", in_bf16):  # DeepSpeed's other optimizer, as on GPUs
        runs = [host.run(case, 1) for case in TINY_CASES[-1:]]
    return runs, large_storages() - before


def waiting_step(ctx: RankContext, path: str, run: Measured) -> None:
    """What a step costs beside its layers leaves out what its GPU waits for its host."""
    from planner_runs import step_row

    cluster, (work, split) = load_cluster(path), run.case.plan()
    slow = {"forward_host_s": 1.0, "backward_host_s": 2.0}
    layers = tuple(replace(row, **slow) for row in cluster.layers)
    calls = (MeasuredAttention(split.ulysses, split.ring, 320, 4, 4, 16, 1e-3, 1e-3, **slow),)
    waits = replace(cluster, layers=layers, calls=calls)
    row = step_row(waits, replace(run, seconds=100.0))
    again = step_time(replace(waits, steps=(row,)), work, split)
    assert again.host > 1 and again.total == pytest.approx(100.0)


def test_runs_judge_the_planner(tmp_path: Path) -> None:
    profile, table = tmp_path / "trainer.json", tmp_path / "runs.csv"
    ranks = fork_world(on_rank, 4, path=str(profile))
    runs, left = ranks[0]
    assert [measured for measured, _ in ranks] == [runs] * 4 and left == 0
    cluster = load_cluster(str(profile))
    assert {row.tokens for row in cluster.layers} == {row.tokens for row in cluster.embedding_heads}
    (fitted,) = TINY_FITTED[-1:]
    assert [row.tp for row in cluster.layers] == [fitted.tp] * 2
    # The one run from which a step's cost is taken is predicted as it was measured, by definition.
    work, split = fitted.plan()
    assert step_time(cluster, work, split).optimizer == cluster.steps[0].seconds
    (kept,) = read(profile.with_name("fitted.csv"))
    assert kept.case == fitted
    fork_world(waiting_step, 1, path=str(profile), run=kept)
    write(table, "a command\na machine", runs)
    (reread,) = read(table)
    assert reread.case == runs[0].case and reread.seconds == pytest.approx(
        runs[0].seconds, rel=1e-3
    )
    out = tmp_path / "validation.csv"
    planner_validation.main(["--profile", str(profile), "--out", str(out), str(table)])
    assert "# 1 held-out runs" in out.read_text()


# Of a wider model, so that the loss's logits, kept activations and gradients' copies stand out.
PEAKS = [
    Case("tiny", 4, 1024, 1, 2, 1, "none"),  # the loss, and all activations
    Case("tiny", 4, 1024, 1, 1, 2, "full"),  # the loss
    Case("tiny", 4, 64, 1, 2, 1, "none"),  # the reduction of gradients
]
TINY, VOCABULARY = shape_of("tiny"), 12288


def wider(_: str) -> ModelShape:
    return replace(TINY, vocab=VOCABULARY, hidden=256, ffn=1024, heads=8, kv_heads=8, head_dim=32)


def peaks_on_rank(ctx: RankContext) -> list[float]:
    """Bytes that a step allocates at most beyond what it finds, over the planner's."""
    import planner_runs
    from bench_harness import Session
    from usp_trainer.engine import Trainer

    from ds_usp.training import prepare_deepspeed

    prepare_deepspeed()
    session, ratios = Session(torch.device("cpu"), ctx.rank, ctx.world), []
    with (
        mock.patch("planner_cases.shape_of", wider),
        mock.patch("planner_runs.VOCABULARY", VOCABULARY),
        mock.patch.object(Case, "flags", in_bf16),
    ):
        for case in PEAKS:
            host = planner_runs.FrameworkRun(session, case.mesh)
            model, args = host.model(case), host.arguments(case)
            trainer = Trainer(args, model, host.groups, session.device, VOCABULARY)
            batch = host.batch(case)
            trainer.train([batch], 1e-5)  # makes the optimizer's states
            peak = peak_of(lambda t=trainer, b=batch: t.train([b], 1e-5), repeats=5)
            work, split = case.plan()
            needs = memory(work, split)
            states = sum(states_bytes(stage_elements(work, split, 0), split))
            ratios.append(peak / (needs.total - states))
    return ratios


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no instructions for bf16: the steps take minutes, and memory of their own",
)
def test_the_peak_of_a_real_step_is_the_formula() -> None:
    """The trainer under DeepSpeed's bf16 optimizer, by torch's own count of what it allocates."""
    for ratios in fork_world(peaks_on_rank, 2):
        assert ratios == pytest.approx([1.0] * len(PEAKS), abs=0.02)


def case(seconds: float, memory_bytes: int, **changes: Any) -> Measured:
    fields = {"tp": 1, "ulysses": 4, "ring": 1, **changes}
    return Measured(Case("gpt-1.3b", 8, 32768, recompute="none", **fields), seconds, memory_bytes)


def test_errors_and_places() -> None:
    cluster = load_cluster("h200").with_gpus_per_node(4)
    work, split = case(1, 1).case.plan()
    true = step_time(cluster, work, split).total
    size = round(memory(work, split, cluster.workspace_bytes).total)
    runs = [case(true, size), case(true / 1.1, 2 * size), case(9.0, 0, ulysses=2, ring=2)]
    first, second, third = planner_validation.evaluate(cluster, runs)
    assert first.time_error == pytest.approx(0) and second.time_error == pytest.approx(0.1)
    assert second.memory_error == pytest.approx(-0.5) and third.memory_error is None
    assert [evaluated.position for evaluated in (first, second, third)] == [2, 1, 3]
    assert [evaluated.predicted_position for evaluated in (first, second, third)] == [1, 1, 3]
    text = "\n".join(planner_validation.summary([first, second]))
    assert "error 5.0% in the mean, 10.0% at most, 50% within 5 %" in text
    assert "memory: error 25.0% in the mean, 50.0% at most, 1 of 2 within 3 %" in text
    assert "the fastest of 2 is predicted to be number 1" in text


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns"):
        list(read(other))


def test_what_is_held_out_is_possible_and_held_out() -> None:
    assert len(CASES) >= 12
    assert {c.model for c in CASES} == {"gpt-1.3b", "gpt-6.7b"}
    assert {c.seq_len for c in CASES} == {16384, 32768, 65536, 131072}
    assert {c.recompute for c in CASES} == {"none", "full"} and {c.tp for c in CASES} == {1, 2}
    for held_out in (*CASES, *TINY_CASES):
        work, split = held_out.plan()
        require_feasible(work, split, 4)
    assert not {c.seq_len for c in CASES} & {c.seq_len for c in FITTED}
    assert len(set(CASES)) == len(CASES)
    # What a step costs is measured for every number of ranks that share a sequence.
    assert {c.tp for c in CASES} == {c.tp for c in FITTED}
