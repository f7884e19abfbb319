"""How far each way to keep less goes: up to there it fits, one step further it does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import pytest

from ds_usp.planner.__main__ import main
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.max_length import STEP, MaxLength, all_configs, max_lengths
from ds_usp.planner.memory import memory
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import RECOMPUTE, ParallelConfig, Workload

GIB = 2**30
H200 = load_cluster("h200")
CASES = {
    "one GPU": ("gpt-1.3b", ParallelConfig()),
    "ulysses 4": ("gpt-6.7b", ParallelConfig(ulysses=4, fused_loss=True)),
    "2 x 2, ZeRO-3": ("llama3-8b", ParallelConfig(ulysses=2, ring=2, zero=3)),
    "tp, pp, virtual stages": (
        "gpt-6.7b",
        ParallelConfig(tp=2, ring=2, pp=2, dp=2, layers_per_virtual_stage=4, micro_batch=2),
    ),
}


def ends(case: str, budget_gib: float = 135.0, host_gib: float = 1024.0) -> list[MaxLength]:
    model, config = CASES[case]
    cluster = replace(H200, host_memory_bytes=host_gib * GIB)
    return max_lengths(load_model(model), [config], cluster, budget_gib * GIB, GIB)


def fits(case: str, end: MaxLength, seq_len: int, budget_gib: float, host_gib: float) -> bool:
    """Whether any offload ratio will do, tried one by one."""
    model, config = CASES[case]
    work = Workload(load_model(model), seq_len, 2 * config.pp * config.dp * config.micro_batch)
    ratios = [n / 1000 for n in range(1001)] if end.config.offload_ratio else [0.0]
    for ratio in ratios:
        asked = replace(
            config, recompute=end.config.recompute, offload_ratio=ratio, offload_unit="layer"
        )
        memory_needed = memory(work, asked, GIB)
        on_host = memory_needed.offloaded * min(config.gpus, H200.gpus_per_node)
        if memory_needed.total <= budget_gib * GIB and on_host <= 0.8 * host_gib * GIB:
            return True
    return False


@pytest.mark.parametrize("host_gib", [1024.0, 64.0])
@pytest.mark.parametrize("case", CASES)
def test_it_fits_to_the_end_and_not_a_step_further(case: str, host_gib: float) -> None:
    longest = ends(case, 135.0, host_gib)
    assert [(end.config.recompute, end.config.offload_ratio > 0) for end in longest] == [
        (recompute, offload) for recompute in RECOMPUTE for offload in (False, True)
    ]
    for end in longest:
        assert end.seq_len and end.seq_len % STEP == 0
        assert fits(case, end, end.seq_len, 135.0, host_gib)
        assert not fits(case, end, end.seq_len + STEP, 135.0, host_gib)
        assert end.memory_needed.total <= 135 * GIB
        assert end.limit in ("GPU memory", "host memory" if end.config.offload_ratio else "")


@pytest.mark.parametrize("case", CASES)
def test_who_keeps_less_goes_further(case: str) -> None:
    far = {(end.config.recompute, end.config.offload_ratio > 0): end.seq_len for end in ends(case)}
    for recompute in RECOMPUTE:
        assert far[recompute, True] >= far[recompute, False]
    for offload in (False, True):
        assert far["none", offload] < far["gemm-last", offload] < far["attention", offload]
        assert far["attention", offload] < far["full", offload]
    more = {
        (end.config.recompute, end.config.offload_ratio > 0): end.seq_len for end in ends(case, 140)
    }
    assert all(more[way] > far[way] for way in far if not way[1])


def test_where_nothing_fits_the_memory_says_why() -> None:
    for end in ends("ulysses 4", budget_gib=20.0):
        assert end.seq_len == 0 and end.limit == "GPU memory" and end.memory_needed.total > 20 * GIB


def test_without_degrees_those_that_go_furthest_are_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As asking for each of them alone finds them."""
    line = "longest --model llama3-8b --zero 3 --gpus 4 --json"
    assert main(line.split()) == 0
    report = json.loads(capsys.readouterr().out)
    model, base = load_model("llama3-8b"), ParallelConfig(zero=3)
    cluster = load_cluster("h800")
    configs = all_configs(model, base, 4, cluster)
    assert {(s.tp, s.ulysses, s.ring, s.pp) for s in configs} == {
        cut for cut in product((1, 2, 4), repeat=4) if math.prod(cut) == 4 and cut[3] == 1
    }
    alone = [
        max_lengths(model, [config], cluster, cluster.budget_bytes, cluster.workspace_bytes)
        for config in configs
    ]
    assert not any("added" in row for row in report[: len(alone[0])])
    for row, ways in zip(report[: len(alone[0])], zip(*alone, strict=True), strict=True):
        assert row["seq_len"] == max(way.seq_len for way in ways)
        assert row["tp"] * row["ulysses"] * row["ring"] * row["pp"] == 4
    text = line.replace(" --json", "")
    assert main(text.split()) == 0
    printed = capsys.readouterr().out
    assert "each row with the degrees that go furthest" in printed and "ulysses x ring" in printed


def test_searched_degrees_leave_those_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(more: str) -> list[dict[str, object]]:
        assert main(f"longest --model gpt-1.3b --zero 3 --json {more}".split()) == 0
        return json.loads(capsys.readouterr().out)

    assert {row["ulysses"] for row in rows("--gpus 8 --ulysses 4")} == {4}
    assert {row["dp"] for row in rows("--gpus 8 --dp 2")} == {2}
    assert {row["tp"] for row in rows("")} == {1}
    assert main(["longest", "--model", "llama3-8b", "--gpus", "9", "--dp", "2"]) == 2
    assert "has dp 2: degrees multiply" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["--gpus 8", "--ulysses 4 --ring 2"])
@pytest.mark.parametrize(
    ("setting", "modes"),
    [
        ("--mlp-chunks 4", {"none", "gemm-last", "attention", "full"}),
        ("--checkpoint-layers 2", {"attention", "full"}),
        ("--projection-overlap recompute", {"none", "full"}),
        ("--states-on-host", {"none", "gemm-last", "attention-only", "attention", "full"}),
    ],
)
def test_rows_are_those_that_a_given_setting_goes_with(
    capsys: pytest.CaptureFixture[str], setting: str, modes: set[str], where: str
) -> None:
    line = f"max-length --model llama3-8b --cluster h200 {where} {setting} --json"
    assert main(line.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["recompute"] for row in rows} == modes
    assert all(row["seq_len"] > 0 for row in rows)
