"""The table of errors in docs/planner.md says what the planner's formulas say today."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from planner_expectations import own_attention_runs, own_training_runs, rows

from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.model_files import load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.step_time import step_mfu, step_time

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def row(title: str) -> str:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {title}"))
    return line


def test_llama3_on_two_nodes() -> None:
    cluster, errors = load_cluster("a800"), {}
    for at, run in enumerate(rows("usp_llama3_8b_a800.csv")):
        length = int(run["seq_len_k"])
        work = Workload(load_model("llama3-8b"), length * 1024)
        config = ParallelConfig(
            tp=int(run["tp"]), ulysses=int(run["ulysses"]), ring=int(run["ring"])
        )
        predicted = step_mfu(cluster, work, config, step_time(cluster, work, config).total)
        errors[at, length] = abs(predicted * 312 / float(run["tflops_per_gpu"]) - 1)
    long = fmean(error for (_, length), error in errors.items() if length >= 120)
    text = row(f"MFU of {len(errors)} LLAMA3-8B runs")
    assert (
        f"| {fmean(errors.values()):.0%} mean, {max(errors.values()):.0%} at".replace("%", " %")
        in text
    )
    assert f"from 120K tokens on {100 * long:.0f} % mean" in text


def test_own_training() -> None:
    cluster = load_cluster("h200").with_gpus_per_node(4)
    short = [1 - step_time(cluster, w, s).total / true for w, s, true in own_training_runs()]
    text = row(f"step of GPT 1.3B under Megatron-DeepSpeed on 4 H200, {len(short)} meshes")
    assert f"| {100 * min(short):.0f} to {100 * max(short):.0f} % too few" in text


def test_own_attention() -> None:
    cluster, errors = load_cluster("h200").with_gpus_per_node(4), []
    for work, config, true in own_attention_runs("cudnn"):
        both = (attention_s(cluster, work, config, backward=way).total for way in (False, True))
        errors.append(abs(sum(both) / true - 1))
    text = row(f"attention of this package on 4 H200, {len(errors)} cases")
    assert f"| {100 * min(errors):.0f} to {100 * max(errors):.0f} % |" in text
