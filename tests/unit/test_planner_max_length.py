"""Settings that trade time for length: what they save, what they cost, how far each goes."""

import json
import math
import re
from bisect import bisect_left
from dataclasses import replace
from itertools import product

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner.__main__ import main
from ds_usp.planner.answer import answer
from ds_usp.planner.emit import emit, megatron_deepspeed
from ds_usp.planner.formulas import (
    input_bytes,
    layer_bytes,
    mlp_share,
    stage_elements,
)
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.max_length import (
    STEP,
    LengthQuestion,
    MaxLength,
    all_configs,
)
from ds_usp.planner.memory import (
    Memory,
    attention_peak,
    bucket_bytes,
    memory,
    offload_needed,
    states_bytes,
    step_bytes,
)
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import (
    ParallelConfig,
    Workload,
    framework_caps,
    with_setting,
)
from ds_usp.planner.search import search
from ds_usp.planner.step_time import layer_time, step_time

GIB = 2**30
LLAMA, H200 = load_model("llama3-8b"), load_cluster("h200")
WORK = Workload(LLAMA, 2**20)
FULL = ParallelConfig(ulysses=2, zero=3, recompute="full", fused_loss=True, offload_unit="layer")


@pytest.mark.parametrize("recompute", ["attention", "full"])
@pytest.mark.parametrize("layers", [3, 4, 8, 64])
def test_a_checkpoint_of_several_layers_saves_inputs_of_groups(recompute, layers):
    config = FULL.replace(recompute=recompute, checkpoint_layers=layers)
    group = min(layers, 32)
    inputs = math.ceil(32 / group) + group - 1
    kept = layer_bytes(WORK, config) - input_bytes(WORK, config)
    saved = inputs * input_bytes(WORK, config) + 32 * kept
    assert memory(WORK, config).activations == pytest.approx(saved)
    away = memory(WORK, config.replace(offload_ratio=1.0))
    assert away.activations <= 4 * input_bytes(WORK, config) + group * kept
    assert saved - away.activations <= away.offloaded <= saved


def test_states_are_on_the_gpu_for_the_step_alone():
    plain, waiting = (memory(WORK, FULL.replace(states_on_host=on)) for on in (False, True))
    optimizer = states_bytes(stage_elements(WORK, FULL, 0), FULL)[2]
    assert plain.total - waiting.total == waiting.host_states == optimizer == plain.optimizer
    assert waiting.host == waiting.offloaded + optimizer
    short = Workload(LLAMA, 4096)
    at_step = memory(short, FULL.replace(states_on_host=True))
    assert at_step.activations == at_step.transient == 0 and at_step.optimizer == optimizer
    # No ratio of offload helps the step.
    assert offload_needed(short, FULL.replace(states_on_host=True), at_step.total - 1, 0) > 1


def test_the_step_copies_the_gradients_of_the_largest_sub_group():
    """Embedding, two layers, and of the third one what attention has: then 10**9 are there. One
    H200, 65,536 tokens, 4 layers, all settings: 36.33 GiB, whose peak is at the step."""
    alone = ParallelConfig(zero=3, recompute="full", fused_loss=True, mlp_chunks=4)
    alone = alone.replace(states_on_host=True, checkpoint_layers=4, offload_ratio=0.95)
    alone = alone.replace(offload_unit="layer")
    work = Workload(replace(LLAMA, layers=4), 65536)
    needs = memory(work, alone, H200.workspace_bytes)
    table, layer, attention = 128256 * 4096, 218_103_808, 41_943_040
    elements = stage_elements(work, alone, 0)
    copies = needs.gradients - states_bytes(elements, alone)[1] - bucket_bytes(work, alone)
    assert copies == 4 * (table + 2 * layer + attention)
    assert needs.total / GIB == pytest.approx(36.33, rel=0.02)
    few = Workload(replace(LLAMA, layers=1), 65536)
    assert step_bytes(few, 10**9, alone) == 4e9  # one sub-group


def test_an_mlp_in_chunks_is_never_whole():
    config = FULL.replace(mlp_chunks=64, zero=1)
    one_input = input_bytes(WORK, config)
    none, chunked = (layer_bytes(WORK, c.replace(recompute="none")) for c in (FULL, config))
    # Norm 2's output and fc1, sigmoid, product; what is left is the input of norm 2.
    statistics = 4 * 2**20 / 2
    assert none - chunked == pytest.approx((4096 + 4 * 14336) / 4096 * one_input + statistics)
    # Attention's backward pass is worse than that of the MLP in many chunks, not in few.
    needs, peak = memory(WORK, config), attention_peak(WORK, config)
    assert needs.exchange == peak.buffers
    assert needs.transient == pytest.approx(peak.held + peak.kernel)
    few = config.replace(mlp_chunks=2)
    gradients = 2 * 14336 / 4096 * one_input  # of fc1's output
    behind = (none - chunked + gradients) / 2 + 2 * one_input
    assert memory(WORK, few).transient == pytest.approx(chunked - one_input + behind)
    assert memory(WORK, few).exchange == 0


@pytest.mark.parametrize(
    ("recompute", "mlp_chunks", "measured"),
    [("none", 0, 43.36), ("none", 4, 28.36), ("full", 4, 22.84)],
)
def test_a_loss_in_chunks_has_a_peak(recompute, mlp_chunks, measured):
    """GiB of 2 layers on 2 H100, 131,072 tokens, loss in 16 chunks (results/length_settings.csv),
    less the workspace."""
    work = Workload(replace(LLAMA, layers=2), 131072)
    config = FULL.replace(recompute=recompute, mlp_chunks=mlp_chunks)
    needs = memory(work, config)
    assert needs.total / GIB == pytest.approx(measured, rel=0.01)
    assert needs.logits > needs.exchange == 0


@pytest.mark.parametrize(
    ("tokens", "on_host", "measured"),
    [
        (524288, True, 71.29),
        (655360, False, 93.55),
        (950272, False, 127.53),
        (983040, False, 131.30),
    ],
)
def test_the_longest_sequences_of_one_gpu(tokens, on_host, measured):
    """GiB of 4 layers on one H200 (results/length.jsonl). Without states on the host the
    runs were of one step, which has no moments of Adam yet, 8 bytes a parameter."""
    work = Workload(replace(LLAMA, layers=4), tokens)
    config = FULL.replace(
        ulysses=1, mlp_chunks=32, offload_ratio=0.95, checkpoint_layers=4, states_on_host=on_host
    )
    needs = memory(work, config, H200.workspace_bytes)
    moments = 0 if on_host else needs.optimizer * 8 / 12
    assert (needs.total - moments) / GIB == pytest.approx(measured, rel=0.01)


def test_how_each_setting_is_switched_on():
    def options(setting: str, work: Workload = WORK, **changes: object) -> list[object]:
        config = FULL.replace(**changes)
        found = with_setting(work, config, setting)
        assert all(x == config.replace(**{setting: getattr(x, setting)}) for x in found)
        return [getattr(x, setting) for x in found]

    assert options("mlp_chunks") == [32] and options("mlp_chunks", Workload(LLAMA, 4)) == [2]
    assert options("mlp_chunks", Workload(LLAMA, 2)) == options("mlp_chunks", mlp_chunks=4) == []
    assert options("mlp_chunks", Workload(load_model("mixtral-8x7b"), 2**20)) == []
    assert options("states_on_host") == [True]
    assert options("states_on_host", zero=0) == options("states_on_host", states_on_host=True) == []
    groups = [options("checkpoint_layers", pp=pp) for pp in (1, 4, 8, 16, 32)]
    assert groups == [[2, 4, 8], [2, 4, 8], [2, 4], [2], []]
    assert options("checkpoint_layers", recompute="gemm-last") == []
    assert options("checkpoint_layers", checkpoint_layers=2) == []
    with pytest.raises(ConfigError, match="does not know how to switch fused_loss on"):
        options("fused_loss")


def test_time_that_each_costs():
    def seconds(**changes: object) -> float:
        return layer_time(H200, WORK, FULL.replace(**changes)).recompute

    forward = seconds()
    assert seconds(checkpoint_layers=4) == pytest.approx(1.75 * forward)
    matrices = seconds(recompute="attention")
    mlp = seconds(mlp_chunks=8) - forward
    assert mlp == pytest.approx(matrices * mlp_share(LLAMA))
    assert seconds(recompute="none", mlp_chunks=8) == pytest.approx(mlp)
    waiting = step_time(H200, WORK, FULL.replace(states_on_host=True)).offload
    assert waiting == pytest.approx(8.03e9 * 12 / 2 / H200.host_bytes_per_s, rel=0.01)


def test_settings_go_further_and_say_what_ends_them():
    cluster = replace(H200, host_memory_bytes=256 * GIB).with_gpus_per_node(2)
    base = ParallelConfig(ulysses=2, zero=3)
    trainer = framework_caps("trainer")
    asked = LengthQuestion(LLAMA, [base], cluster, trainer)
    *_, full, loss, mlp, fourth, fifth, last = asked.lengths()
    assert (full.config.recompute, full.added, full.config.fused_loss) == ("full", "", False)
    assert loss.added == "loss in chunks" and re.fullmatch(r"MLP in \d+ chunks", mlp.added)
    added = [full, loss, mlp, fourth, fifth, last]
    lengths = [row.seq_len for row in added]
    assert lengths == sorted(set(lengths)) and lengths[-1] > 1_750_000
    for row in added:
        assert row.memory_needed.total <= cluster.budget_bytes
        assert cluster.host_memory_fits(row.memory_needed.host, 2)
        assert row.limit in ("GPU memory", "host memory")
    assert all(row.added in row.config.length_words() for row in added[2:])
    # What is asked for stays, and is not proposed again.
    fixed_base = base.replace(fused_loss=True, mlp_chunks=4)
    fixed = replace(asked, bases=[fixed_base]).lengths()
    assert {row.config.mlp_chunks for row in fixed} == {4}
    assert not any("loss" in row.added or "MLP" in row.added for row in fixed)
    assert STEP < fixed[-1].seq_len < lengths[-1]


def test_a_plan_has_them_where_nothing_fits_without():
    cluster = replace(H200, host_memory_bytes=256 * GIB).with_gpus_per_node(2)
    trainer = framework_caps("trainer")
    fixed = {"ulysses": 2}
    short = search(cluster, Workload(LLAMA, 2**15), 2, trainer, fixed=fixed)
    assert short.plans[0].config.mlp_chunks == 0
    long = Workload(LLAMA, 3 * 2**19)
    assert not search(cluster, long, 2, replace(trainer, length_settings=()), fixed=fixed).plans
    results = search(cluster, long, 2, trainer, fixed=fixed)
    best = results.plans[0]
    assert best.config.mlp_chunks == 48
    assert cluster.host_memory_fits(best.memory.host, 2)
    flags = emit("trainer", long, best.config)
    assert "--usp-mlp-chunks 48" in flags
    assert f"--usp-checkpoint-layers {best.config.checkpoint_layers}" in flags
    assert ("--usp-states-on-host" in flags) == best.config.states_on_host
    waiting = best.config.replace(states_on_host=True)
    assert "--usp-states-on-host" in megatron_deepspeed(long, waiting)
    too_long = Workload(LLAMA, 2**23)
    lines = answer(search(cluster, too_long, 2, trainer, fixed=fixed)).why
    assert "nothing fits into" in lines[0]
    assert "MLP in 256 chunks, states on the host" in lines[0]


def test_each_setting_that_is_switched_on_has_its_own_time() -> None:
    """The search remembers micro batches and bytes of layers by all that they depend on."""
    cluster = replace(load_cluster("h100"), host_memory_bytes=2048 * GIB)
    work = Workload(load_model("gpt-1.3b"), 3 * 2**19)
    results = search(cluster, work, 2, framework_caps("trainer"))
    assert any(plan.config.mlp_chunks > 1 for plan in results.plans)
    for plan in results.plans:
        assert step_time(results.cluster, work, plan.config).total == plan.time.total


# ------------------------------------------------------------------ the longest sequences
# Up to there it fits, one step further it does not.


H200 = load_cluster("h200")

DEEP = framework_caps("megatron-deepspeed")
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
    sizes = {"host_memory_bytes": host_gib * GIB, "memory_bytes": budget_gib * GIB / 0.96}
    cluster = replace(H200, workspace_bytes=GIB, **sizes)
    rows = LengthQuestion(load_model(model), [config], cluster, DEEP).lengths()
    return [row for row in rows if not row.added]


def fits(case: str, end: MaxLength, seq_len: int, budget_gib: float, host_gib: float) -> bool:
    """Whether any offload ratio will do: the least that leaves the GPU enough needs the least of
    the host, of a thousand ratios."""
    model, config = CASES[case]
    stages = 2 * config.pp if config.pp > 1 else 1
    work = Workload(load_model(model), seq_len, stages * config.dp * config.micro_batch)
    asked = replace(config, recompute=end.config.recompute, offload_unit="layer")

    def needed(thousandths: int) -> Memory:
        return memory(work, replace(asked, offload_ratio=thousandths / 1000), GIB)

    most = 1000 if end.config.offload_ratio else 0
    least = bisect_left(range(most), True, key=lambda n: needed(n).total <= budget_gib * GIB)
    on_host = needed(least).offloaded * min(config.gpus, H200.gpus_per_node)
    return needed(least).total <= budget_gib * GIB and on_host <= 0.8 * host_gib * GIB


@pytest.mark.parametrize("host_gib", [1024.0, 64.0])
@pytest.mark.parametrize("case", CASES)
def test_it_fits_to_the_end_and_not_a_step_further(case, host_gib):
    longest = ends(case, 135.0, host_gib)
    assert [(end.config.recompute, end.config.offload_ratio > 0) for end in longest] == [
        (recompute, offload) for recompute in DEEP.recompute for offload in (False, True)
    ]
    for end in longest:
        assert end.seq_len and end.seq_len % STEP == 0
        assert fits(case, end, end.seq_len, 135.0, host_gib)
        assert not fits(case, end, end.seq_len + STEP, 135.0, host_gib)
        assert end.memory_needed.total <= 135 * GIB
        assert end.limit in ("GPU memory", "host memory" if end.config.offload_ratio else "")


@pytest.mark.parametrize("case", CASES)
def test_who_keeps_less_goes_further(case):
    far = {(end.config.recompute, end.config.offload_ratio > 0): end.seq_len for end in ends(case)}
    for recompute in DEEP.recompute:
        assert far[recompute, True] >= far[recompute, False]
    for offload in (False, True):
        assert far["none", offload] < far["gemm-last", offload] < far["attention", offload]
        assert far["attention", offload] < far["full", offload]
    more = {
        (end.config.recompute, end.config.offload_ratio > 0): end.seq_len for end in ends(case, 140)
    }
    assert all(more[way] > far[way] for way in far if not way[1])


def test_without_degrees_those_that_go_furthest_are_found(capsys):
    """As asking for each of them alone finds them."""
    line = "longest --model llama3-8b --zero 3 --gpus 4 --engine megatron-deepspeed --json"
    assert main(line.split()) == 0
    report = json.loads(capsys.readouterr().out)
    model, base = load_model("llama3-8b"), ParallelConfig(zero=3)
    cluster = load_cluster("h100")
    configs = all_configs(model, base, 4, cluster, DEEP, {"dp": 1})
    assert {(s.tp, s.ulysses, s.ring, s.pp) for s in configs} == {
        cut for cut in product((1, 2, 4), repeat=4) if math.prod(cut) == 4 and cut[3] == 1
    }
    alone = [LengthQuestion(model, [config], cluster, DEEP).lengths() for config in configs]
    ways_of_each = zip(*([row for row in rows if not row.added] for rows in alone), strict=True)
    without = [row for row in report if not row["added"]]
    for row, ways in zip(without, ways_of_each, strict=True):
        assert row["seq_len"] == max(way.seq_len for way in ways)
        assert row["tp"] * row["ulysses"] * row["ring"] * row["pp"] == 4


def test_searched_degrees_leave_those_that_are_given(capsys):
    def rows(more: str) -> list[dict[str, object]]:
        assert main(f"longest --model gpt-1.3b --zero 3 --json {more}".split()) == 0
        return json.loads(capsys.readouterr().out)

    # All GPUs share a sequence, and without another program nothing is tensor parallel.
    assert {(row["tp"], row["pp"], row["dp"]) for row in rows("--gpus 8")} == {(1, 1, 1)}
    assert {(row["ulysses"], row["ring"]) for row in rows("--gpus 8 --ulysses 4")} == {(4, 2)}
    assert {row["dp"] for row in rows("--gpus 8 --dp 2")} == {2}
    assert {row["tp"] for row in rows("")} == {1}


@pytest.mark.parametrize("where", ["--gpus 8", "--ulysses 4 --ring 2"])
@pytest.mark.parametrize(
    ("setting", "modes"),
    [
        ("--mlp-chunks 4", {"none", "gemm-last", "attention", "full"}),
        ("--checkpoint-layers 2", {"attention", "full"}),
        ("--states-on-host", {"none", "gemm-last", "attention", "full"}),
    ],
)
def test_rows_are_those_that_a_given_setting_goes_with(capsys, setting, modes, where):
    line = f"max-length --model llama3-8b --cluster h200 --engine trainer {where} {setting} --json"
    assert main(line.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["recompute"] for row in rows} == modes
    assert all(row["seq_len"] > 0 for row in rows)
