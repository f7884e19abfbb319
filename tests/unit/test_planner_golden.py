"""The planner against what others measured and published; docs/planner.md states its errors."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from planner_expectations import (
    RESULTS,
    memory_runs,
    own_attention_runs,
    own_trainer_runs,
    own_training_runs,
    rows,
    throughput_runs,
)

from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.formulas import model_flop_per_token
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.memory import memory, stage_memory
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload, infeasible_reason
from ds_usp.planner.search import search
from ds_usp.planner.step_time import MicroBatch, step_mfu, step_time

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")


def stated(title: str) -> str:
    """The row of the page's table of errors that begins so."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {title}"))
    return line


def errors(predicted: Sequence[float], true: Sequence[float]) -> list[float]:
    return [abs(p / t - 1) for p, t in zip(predicted, true, strict=True)]


@pytest.mark.parametrize("row", rows("kwai_mfu_pairs.csv"), ids=lambda row: str(row))
def test_mfu_of_a_throughput(row):
    shape, peak = load_model(row["model"]), float(row["peak_tflops"]) * 1e12
    flop = model_flop_per_token(shape, int(row["seq_len"]))
    predicted = float(row["tokens_per_s_per_gpu"]) * flop / peak
    assert 100 * predicted == pytest.approx(float(row["mfu_percent"]), rel=0.002)


@pytest.mark.parametrize("row", rows("usp_mfu_printed.csv"), ids=lambda row: str(row))
def test_mfu_of_a_rate(row: dict[str, str]) -> None:
    predicted = float(row["tflops_per_gpu"]) * 1e12 / load_cluster("a800").peak_flop_per_s
    assert abs(predicted - float(row["mfu"])) <= 0.005


def test_memory_with_nothing_fitted():
    runs = memory_runs()
    error = errors([stage_memory(w, s, 0).total for w, s, _ in runs], [t for *_, t in runs])
    assert len(runs) == 19
    assert fmean(error) < 0.03


def test_memory_with_one_constant():
    runs = memory_runs()
    formula = [stage_memory(w, s, 0).total for w, s, _ in runs]
    true = [t for *_, t in runs]
    constant = fmean(t - p for p, t in zip(formula, true, strict=True))
    error = errors([p + constant for p in formula], true)
    assert max(error) < 0.012
    # It is the one that the built-in clusters carry.
    assert load_cluster("h800").workspace_bytes == pytest.approx(constant, rel=0.01)


def affine(work: Workload, config: ParallelConfig) -> tuple[float, float]:
    """Seconds of a step are ``a`` times those of a layer, plus ``b``."""
    cluster, model = load_cluster("h800"), work.model
    head = model.hidden * model.vocab / model.matrix_elements  # its GEMMs, relative to a layer's
    one, two = (step_time(cluster, work, config, MicroBatch(s, s * head)).total for s in (1.0, 2.0))
    return two - one, 2 * one - two


def test_throughput_leave_one_out():
    """A layer's time is known from the other runs of the same tp and recomputation; all else is
    formula: the pipeline, the head, gradients on the nodes' NICs, the optimizer."""
    groups = defaultdict(list)
    for work, config, true in throughput_runs():
        assert infeasible_reason(work, config) is None
        groups[config.tp, config.ring, config.recompute].append((*affine(work, config), true))
    held_out_errors = []
    for runs in groups.values():
        for index, (a, b, true) in enumerate(runs):
            others = [run for other, run in enumerate(runs) if other != index]
            layer_s = fmean((t - shift) / slope for slope, shift, t in others)
            held_out_errors.append(abs((a * layer_s + b) / true - 1))
    assert len(held_out_errors) == 15
    assert fmean(held_out_errors) < 0.03
    assert sorted(held_out_errors)[-2] < 0.04  # the worst one, 96 GPUs, is 6.8 %


def test_throughput_from_formulas_alone():
    cluster, runs = load_cluster("h800"), throughput_runs()
    error = errors([step_time(cluster, w, s).total for w, s, _ in runs], [t for *_, t in runs])
    assert fmean(error) < 0.10


def test_llama3_on_two_nodes_from_formulas_alone():
    """No number is fitted to these rows, of which the worst contradict each other; longer
    sequences, where links matter less, come closer."""
    cluster, long, every = load_cluster("a800"), [], []
    for row in rows("usp_llama3_8b_a800.csv"):
        work = Workload(load_model("llama3-8b"), int(row["seq_len_k"]) * 1024)
        config = ParallelConfig(
            tp=int(row["tp"]), ulysses=int(row["ulysses"]), ring=int(row["ring"])
        )
        predicted = step_mfu(cluster, work, config, step_time(cluster, work, config).total)
        every.append(abs(predicted * 312 / float(row["tflops_per_gpu"]) - 1))
        if int(row["seq_len_k"]) >= 120:
            long.append(every[-1])
    assert fmean(every) < 0.10
    assert fmean(long) < 0.05
    text = stated(f"MFU of {len(every)} LLAMA3-8B runs")
    assert f"| {100 * fmean(every):.0f} % mean, {100 * max(every):.0f} % at" in text
    assert f"from 120K tokens on {100 * fmean(long):.0f} % mean" in text


def test_own_attention_on_h200():
    """The kernel's and the links' rates are of these machines; how they meet is formula."""
    cluster, runs = load_cluster("h200").with_gpus_per_node(4), own_attention_runs("cudnn")
    predicted = [
        sum(attention_s(cluster, work, config, backward=way).total for way in (False, True))
        for work, config, _ in runs
    ]
    error = errors(predicted, [true for *_, true in runs])
    assert len(error) == 6
    assert fmean(error) < 0.07 and max(error) < 0.13
    text = stated(f"attention of this package on 4 H200, {len(error)} cases")
    assert f"| {100 * min(error):.0f} to {100 * max(error):.0f} % |" in text


def test_own_training_on_h200_in_the_order_of_speed():
    """Seconds are a fifth too few: what that host does beside products and attention is in no
    formula. The order holds of those that are 6 % apart."""
    cluster, runs = load_cluster("h200").with_gpus_per_node(4), own_training_runs()
    pairs = [(step_time(cluster, work, config).total, true) for work, config, true in runs]
    apart = [(a, b) for a in pairs for b in pairs if b[1] > 1.06 * a[1]]
    assert len(apart) > 4 and all(a[0] < b[0] for a, b in apart)
    too_few = [1 - time / true for time, true in pairs]
    assert max(map(abs, too_few)) < 0.25
    text = stated(f"step of GPT 1.3B under Megatron-DeepSpeed on 4 H200, {len(pairs)} meshes")
    assert f"| {100 * min(too_few):.1f} to {100 * max(too_few):.1f} % too few" in text


def test_memory_of_own_trainings_with_nothing_fitted():
    runs = own_trainer_runs()
    assert len(runs) == 19
    predicted = [memory(work, config).formula for work, config, *_ in runs]
    assert max(errors(predicted, [bytes_ for *_, bytes_ in runs])) < 0.002


def whole_model_runs() -> list[tuple[Workload, ParallelConfig, float, float]]:
    """Qwen3-8B whole under FSDP2 in bf16 on 2 H200: seconds a step and bytes; 256K comes last."""
    runs = []
    for line in (RESULTS / "qwen3_8b.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "note" in row:
            continue  # of a policy that has left
        ulysses, ring = map(int, row["case"].removeprefix("ds_usp ")[:3].split("x"))
        config = ParallelConfig(
            ulysses=ulysses,
            ring=ring,
            recompute=row["recompute"],
            mlp_chunks=int(row["command"].partition("--mlp-chunks ")[2].split()[0]),
            fused_loss=True,
            zero=3,
            fsdp2=True,
            bf16_states=True,
            grad_bytes=2,
            eager_norms=True,
            tp_sequence=False,
        )
        work = Workload(load_model("qwen3-8b"), int(row["workload"].partition(":")[2]))
        runs.append((work, config, fmean(row["seconds"]), row["peak_gib"] * 2**30))
    return sorted(runs, key=lambda run: run[0].seq_len)


def test_a_whole_model_under_fsdp2():
    cluster, runs = load_cluster("h200").with_gpus_per_node(2), whole_model_runs()
    assert len(runs) == 4
    times = [step_time(cluster, work, config).total for work, config, *_ in runs]
    sizes = [memory(work, config, cluster.workspace_bytes).total for work, config, *_ in runs]
    time = errors(times[:3], [seconds for _, _, seconds, _ in runs[:3]])
    size = errors(sizes, [measured for *_, measured in runs])
    assert max(time) < 0.08 and max(size) < 0.03
    text = stated("step of a whole Qwen3-8B at 128K on 2 H200")
    assert f"| {100 * max(time):.1f} % at most |" in text
    assert f"| {100 * max(size):.1f} % at most" in stated(
        "peak memory of the same runs, and of one"
    )
    # 512K with offload, forecast before it was run.
    *_, row = map(json.loads, (RESULTS / "long_context.jsonl").read_text().splitlines())
    work, config = replace(runs[-1][0], seq_len=row["tokens"]), runs[-1][1]
    config = config.replace(
        mlp_chunks=row["mlp_chunks"], offload_ratio=row["offload_ratio"], offload_unit="layer"
    )
    time = step_time(cluster, work, config).total / row["seconds"] - 1
    size = memory(work, config, cluster.workspace_bytes).total / row["peak_gib"] / 2**30 - 1
    assert row["tokens"] == 524288 and abs(time) < 0.08 and abs(size) < 0.03
    text = stated("step of the same model at 512K, offload 0.7")
    assert f"{100 * time:.1f} % too long, peak {-100 * size:.1f} % too low" in text
    # Two cards of 80 GB, of which the device says 79.2 GiB.
    small = replace(load_cluster("h100"), memory_bytes=79.2 * 2**30)
    base = ParallelConfig(fsdp2=True, bf16_states=True, zero=3, grad_bytes=2)
    plan = search(small, runs[0][0], 2, base=base).plans[0]
    assert plan.config.recompute == "attention" and plan.memory.total < 76.1 * 2**30


def test_time_of_own_trainings_and_the_fastest_mesh():
    """Formulas have no launch times: of the 16K tokens of three runs a step is mostly these."""
    h200, meshes, every = load_cluster("h200"), defaultdict(list), []
    for work, config, seconds, _ in own_trainer_runs():
        cluster = h200.with_gpus_per_node(min(config.gpus, 4))
        predicted = step_time(cluster, work, config).total
        meshes[work].append((seconds, predicted))
        every.append((work.seq_len, abs(predicted / seconds - 1)))
    long = [error for tokens, error in every if tokens >= 65536]
    mean, worst = fmean(error for _, error in every), max(error for _, error in every)
    assert mean < 0.12 and max(long) < 0.06
    first = sum(min(runs)[1] == min(predicted for _, predicted in runs) for runs in meshes.values())
    assert first >= 5 and len(meshes) == 6
    assert len(every) == 19
    text = stated("step of GPT 1.3B and 6.7B layers under the trainer on 4 H200, 19 runs")
    assert f"| {100 * mean:.0f} % mean, {100 * worst:.0f} % at most" in text
    assert f"from 64K tokens on {100 * max(long):.0f} % at most" in text
    assert f"the fastest mesh first in {first} of {len(meshes)}" in text
