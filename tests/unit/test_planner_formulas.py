"""FLOPs, activations, memory and traffic against sums done by hand and the USP paper's table."""

from dataclasses import replace

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner.formulas import (
    chain_traffic,
    model_flop_per_token,
    recurrent_flop_per_token,
    saved_elements,
    saved_virtual_stages,
    stage_elements,
)
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.memory import (
    attention_peak,
    logits_bytes,
    memory,
    offload_needed,
    stage_memory,
    states_bytes,
    with_offload,
)
from ds_usp.planner.models import ModelShape, RecurrentMixer, load_model
from ds_usp.planner.parallel_config import (
    ParallelConfig,
    Workload,
    infeasible_reason,
)
from ds_usp.planner.step_time import step_time
from ds_usp.planner.traffic import layer_traffic, step_traffic

SMALL = ModelShape("small", 4, 64, 96, 8, 4, 1000)


def test_packed_documents_see_less():
    whole, packed = (model_flop_per_token(SMALL, 512, docs) for docs in ((), (256, 128, 128)))
    matrices = model_flop_per_token(SMALL, 0)
    assert (packed - matrices) / (whole - matrices) == pytest.approx(
        (256**2 + 2 * 128**2) / 512 / 512
    )
    assert model_flop_per_token(SMALL, 512, (512,)) == whole


@pytest.mark.parametrize(
    ("options", "cut", "whole"),
    [
        ({}, "6h+2k+4f", "0"),
        ({"fused_activation": True}, "6h+2k+3f", "0"),
        ({"recompute": "gemm-last"}, "4h+2k+2f", "0"),
        ({"recompute": "full"}, "h", "0"),
        ({"recompute": "attention-only"}, "6h+2k+4f", "0"),
        ({"recompute": "attention"}, "2h", "0"),
        ({"ulysses": 8, "recompute": "attention"}, "2h", "0"),
        ({"ulysses": 2}, "7h+2k+4f", "0"),
        ({"ulysses": 8}, "7h+4k+4f", "0"),
        ({"ulysses": 2, "recompute": "attention-only"}, "6h+2k+4f", "0"),
        ({"tp": 2, "tp_sequence": False}, "2h+2k+4f", "4*h"),
        ({"tp": 2, "tp_sequence": False, "recompute": "full"}, "0", "h"),
    ],
)
def test_saved_elements(options, cut, whole):
    names = {"h": 64, "k": 32, "f": 96}

    def value(terms: str) -> int:
        total = 0
        for term in terms.replace("*", "").split("+"):
            number, name = term.rstrip("hkf"), term.lstrip("0123456789")
            total += int(number or 1) * names.get(name, 1)
        return total

    config = replace(ParallelConfig(), **options)
    assert saved_elements(SMALL, config) == (value(cut), value(whole))


@pytest.mark.parametrize(
    ("pp", "layers", "schedule", "micro_batches", "expected"),
    [
        (1, 0, "1f1b", 8, [1]),
        (4, 0, "1f1b", 8, [4, 3, 2, 1]),
        (4, 0, "1f1b", 2, [2, 2, 2, 1]),
        (4, 0, "deepspeed", 8, [4, 3, 2, 2]),
        (2, 1, "1f1b", 4, [2 + 3, 3]),
        (2, 1, "interleaved", 2, [4, 3]),
    ],
)
def test_saved_virtual_stages(pp, layers, schedule, micro_batches, expected):
    config = ParallelConfig(pp=pp, layers_per_virtual_stage=layers, schedule=schedule)
    work = Workload(SMALL, 512, micro_batches)
    assert [saved_virtual_stages(work, config, stage) for stage in range(pp)] == expected


def test_stages_hold_all_parameters():
    for name in ("llama3-8b", "gpt-1.3b"):
        work = Workload(load_model(name), 1024, 4)
        config = ParallelConfig(pp=4)
        held = sum(stage_elements(work, config, stage) for stage in range(4))
        tied = work.model.padded_vocab(1) * work.model.hidden if work.model.tied else 0
        padding = work.model.padded_vocab(1) - work.model.vocab
        extra = padding * work.model.hidden * (1 if tied else 2)
        assert held - tied - extra == work.model.parameters(1024)


@pytest.mark.parametrize("unit", ["chunk", "layer"])
@pytest.mark.parametrize("pp", [1, 4])
def test_offload_meets_the_budget(unit, pp):
    work = Workload(load_model("llama-7b"), 32768, 8)
    config = ParallelConfig(pp=pp, ring=4, offload_unit=unit)
    none, full = (memory(work, replace(config, offload_ratio=a), 1e9).total for a in (0.0, 1.0))
    if none == full:
        assert offload_needed(work, config, none - 1, 1e9) > 1
        return
    budget = (none + 2 * full) / 3
    ratio = offload_needed(work, config, budget, 1e9)
    assert 0 < ratio <= 1
    assert memory(work, replace(config, offload_ratio=ratio), 1e9).total <= budget * (1 + 1e-9)
    assert offload_needed(work, config, none, 1e9) == 0
    tiny, fits = with_offload(work, config, none - 1, 1e9)  # a percent at least is worth its copies
    assert fits and tiny.offload_ratio == 0.01
    assert with_offload(work, config, none, 1e9)[0].offload_ratio == 0
    assert offload_needed(work, config, full * 0.9, 1e9) > 1


def test_more_ring_less_memory():
    work = Workload(load_model("llama3-8b"), 131072)
    totals = [memory(work, ParallelConfig(ring=ring)).total for ring in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)
    needs = stage_memory(work, ParallelConfig(ring=8), 0, 5.0)
    assert needs.total == pytest.approx(sum(needs.components().values()))
    assert needs.formula == needs.total - 5


# ------------------------------------------------------------------ impossible cuts
# Of a call; what a command refuses is in test_planner_commands.py.


def test_impossible_cuts_name_the_constraint():
    work = Workload(SMALL, 512, 4)
    possible = ParallelConfig(pp=4, dp=2, layers_per_virtual_stage=1)
    assert infeasible_reason(work, possible) is None
    for config, says in (
        (possible.replace(pp=1, tp=3), "tp=3 must divide the 8 query heads and the 4 key/value"),
        (ParallelConfig(recompute="half"), "recompute='half' must be one of none, gemm-last"),
    ):
        reason = infeasible_reason(work, config)
        assert reason is not None and says in reason
    for borders in ((0, 5, 17), (0, 17), (17, 0)):  # which other packages take; these are lengths
        with pytest.raises(ConfigError, match="do not fill a sequence of 17: give lengths of 1"):
            Workload(SMALL, 17, document_lengths=borders)


def test_the_worst_moment_is_the_loss_or_a_layers_backward():
    """Logits and a layer's buffers are never there together."""
    config = ParallelConfig(ulysses=2, ring=2)
    work = Workload(load_model("gpt-1.3b"), 32768)
    loss = memory(work, config)
    kept = 2 * 2 * work.model.hidden  # the last norm's input and the head's
    assert loss.logits == 8192 * (50304 * 6 + kept)
    assert loss.exchange == loss.transient == 0
    chunked = replace(config, fused_loss=True)
    at_loss = memory(work, chunked)  # the head's gradient three times, inputs, their gradients
    assert at_loss.logits == 50304 * 2048 * 10 + 3 * 8192 * 2048 * 2
    assert at_loss.exchange == at_loss.transient == 0
    work = replace(work, seq_len=131072)
    layer = memory(work, chunked)
    one = 65536 * 1024 * 2  # q, k or v of a ring rank's tokens and a Ulysses rank's heads
    assert layer.logits == 0 and layer.exchange == 2 * 3 * one + 5 * 2 * one
    assert layer.transient == 0  # gradients in the MLP, 5 h a token, are fewer
    again = replace(config, fused_loss=True, recompute="full")
    needs, attention = memory(work, again), attention_peak(work, again)
    hidden = 32768 * 2048 * 2
    # In the MLP: what the layer saves but its input, which is saved already; the gradients of its
    # output and of what the activation function takes.
    in_mlp = layer.activations / 24 - hidden + hidden + 4 * hidden
    assert needs.exchange + needs.transient == pytest.approx(max(in_mlp, sum(attention)))


@pytest.mark.parametrize("tp_sequence", [True, False])
def test_only_megatrons_sequence_parallelism_cuts_what_the_head_keeps(tp_sequence):
    work, config = Workload(SMALL, 1024), ParallelConfig(tp=2, ring=2, tp_sequence=tp_sequence)
    logits = 512 * SMALL.padded_vocab(2) / 2 * 6
    kept = 512 * 2 * 2 * 64 / (2 if tp_sequence else 1)  # the last norm's input and the head's
    assert logits_bytes(work, config) == logits + kept


def test_or_the_worst_moment_is_the_step():
    """DeepSpeed's bf16 optimizer: gradients in bf16 too, and flat once more where a bucket holds
    them, when the activations are gone."""
    plain = ParallelConfig(dp=8, zero=1)
    copied = replace(plain, unsharded_grad_reduce=True)
    for model, copies in ((replace(load_model("gpt-1.3b"), layers=4), 6), (load_model("6.7b"), 2)):
        work = Workload(model, 256, 8)
        elements = stage_elements(work, plain, 0)
        needs = memory(work, copied)
        assert needs.activations == needs.logits == 0
        assert needs.gradients == (4 + copies) * elements and needs.weights == 2 * elements
        assert step_traffic(work, copied).gradients == 2 * step_traffic(work, plain).gradients
        cluster, hidden = load_cluster("h200"), replace(copied, overlap_gradients=True)
        assert step_time(cluster, work, hidden) == step_time(cluster, work, copied)
    assert memory(work, replace(copied, zero=2)) == memory(work, replace(plain, zero=2))
    long = Workload(load_model("gpt-6.7b"), 131072, 8)
    assert memory(long, copied) == memory(long, plain)


def test_documents_may_be_any_sequence():
    shape = load_model("gpt-1.3b")
    listed, cluster = Workload(shape, 64, document_lengths=[24, 40]), load_cluster("h200")  # type: ignore[arg-type]
    packed = Workload(shape, 64, document_lengths=(24, 40))
    assert listed == packed and hash(listed) == hash(packed)
    assert step_time(cluster, listed, ParallelConfig()) == step_time(
        cluster, packed, ParallelConfig()
    )


# ------------------------------------------------------------------ table 2 of the USP paper
# arXiv 2405.07719, by the planner's formulas, as docs/planner.md has it: what each kind of
# parallelism sends and holds, for a GPT-2-like block of 12 d^2 elements in bf16 on N ranks. Where a
# value differs from the printed one, the docs page states why.


RANKS, SIDE = 4096, 64  # N large enough for the printed limits
WIDTH, LENGTH = 8192, 65536
BLOCK = ModelShape("block", 1, WIDTH, 4 * WIDTH, WIDTH // 2, WIDTH // 2, 128, gated=False)
UNIFIED = {"ulysses": SIDE, "ring": SIDE}
UNIFIED_SENT = 8 / RANKS + 4.5 / SIDE  # all-to-all, and the ring's volume over the Ulysses degree

# Method -> degrees; elements sent for parameters in d^2 and for activations in b s d;
# fractions held of weights and gradients, and of optimizer states.
ROWS = {
    "SP-Ulysses": ({"ulysses": RANKS, "zero": 0}, 24, 8 / RANKS, 1, 1),
    "SP-Ring": ({"ring": RANKS, "zero": 0}, 24, 4.5, 1, 1),
    "DP": ({"dp": RANKS, "zero": 0}, 24, 0, 1, 1),
    "ZeRO-1": ({"dp": RANKS, "zero": 1}, 24, 0, 1, 1 / RANKS),
    "Unified, ZeRO-1": ({**UNIFIED, "zero": 1}, 24, UNIFIED_SENT, 1, 1 / RANKS),
    "Unified, ZeRO-2": ({**UNIFIED, "zero": 2}, 24, UNIFIED_SENT, 0.5, 1 / RANKS),
    "Unified, ZeRO-3": ({**UNIFIED, "zero": 3}, 36, UNIFIED_SENT, 1 / RANKS, 1 / RANKS),
    "TP": ({"tp": RANKS, "tp_sequence": False, "zero": 0}, 0, 8, 1 / RANKS, 1 / RANKS),
    "TP-sp": ({"tp": RANKS, "zero": 0}, 0, 10, 1 / RANKS, 1 / RANKS),
}


@pytest.mark.parametrize("method", ROWS)
def test_the_table_of_the_usp_paper(method):
    degrees, parameters, activations, weights_held, optimizer_held = ROWS[method]
    config = ParallelConfig(**degrees, grad_bytes=2)
    work = Workload(BLOCK, LENGTH, config.dp)
    block = BLOCK.matrix_elements
    of_block = block / config.tp / stage_elements(work, config, 0)  # without embedding and head
    step = step_traffic(work, config)
    sent = (step.gradients + step.parameters) * of_block / (2 * WIDTH**2)
    assert sent == pytest.approx(parameters, rel=0.001, abs=1e-9)
    layer = layer_traffic(work, config)
    both = layer.tp_forward + layer.tp_backward + 2 * layer.ulysses
    total = both + 3 * layer.ring_forward
    assert total / (2 * LENGTH * WIDTH) == pytest.approx(activations, rel=0.05, abs=1e-9)
    weights, gradients, optimizer = states_bytes(block / config.tp, config)
    held = (weights + gradients) / (4 * block), optimizer / (12 * block)
    assert held == pytest.approx((weights_held, optimizer_held), rel=0.001)


def test_tensor_parallelism_alone_replicates_what_norms_save():
    sharded, replicated = saved_elements(BLOCK, ParallelConfig(tp=RANKS, tp_sequence=False))
    assert (sharded / RANKS + replicated) / (sharded + replicated) > 0.2
    assert saved_elements(BLOCK, ParallelConfig(tp=RANKS))[1] == 0


# ------------------------------------------------------------------ layers of several kinds


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_kinds_that_are_alike_are_one_model(recompute, zero):
    """What the planner says of layers of several kinds is what it says of alike ones."""
    alike = load_model("llama3-8b")
    kinds = tuple(replace(alike, layers=layers) for layers in (20, 12))
    cluster = load_cluster("h100")
    config = ParallelConfig(ulysses=2, ring=4, zero=zero, recompute=recompute, offload_ratio=0.5)
    config = config.replace(overlap_gradients=True, micro_batch=2)
    times, needs, flop = [], [], []
    for model in (alike, replace(alike, kinds=kinds)):
        work = Workload(model, 2**16, 4)
        assert infeasible_reason(work, config) is None
        times.append([*step_time(cluster, work, config).components().values()])
        needs.append([*memory(work, config).components().values()])
        flop.append(model_flop_per_token(work.model, work.seq_len))
    assert times[0] == pytest.approx(times[1], rel=1e-12)
    assert needs[0] == pytest.approx(needs[1], rel=1e-12)
    assert flop[0] == flop[1]


def test_kinds_are_all_layers():
    with pytest.raises(ConfigError, match="model small: its kinds of layers are not 4 layers"):
        replace(SMALL, kinds=(replace(SMALL, layers=3),))


def test_a_recurrence_by_hand():
    """A delta rule, a decay a head: in chunks of 64 tokens, with the maps of pieces."""
    delta = RecurrentMixer(1, 1, heads=2, key=16, value=8, decay="matrix")
    model = replace(SMALL, attention=False, recurrent=delta)
    state = 16 * 8
    assert recurrent_flop_per_token(model) == 2 * (6 * state + 128 * (3 * 16 + 2 * 8))
    carries = 2 * (6 * state + 128 * (3 * 16 + 2 * 8) + 4 * state)
    assert recurrent_flop_per_token(model, carries=True) == carries
    scan = replace(model, recurrent=replace(delta, decay="head"))
    assert recurrent_flop_per_token(scan) == 2 * (4 * state + 128 * (16 + 8))
    assert recurrent_flop_per_token(SMALL) == 0
    # Of MFU: three times the forward pass, and no attention, whatever the length.
    short, long = (model_flop_per_token(model, length) for length in (2**10, 2**20))
    assert short == long
    matrices = 6 * (4 * model.matrix_elements + 64 * 1000)
    assert short == matrices + 3 * 4 * recurrent_flop_per_token(model)


def test_states_do_not_grow_with_tokens():
    """What a recurrent layer sends, and keeps of it, is by the ranks, not by the tokens; a layer
    whose documents are whole on their ranks sends nothing."""
    mixer = RecurrentMixer(64, 32, 96, 4, heads=4, key=8, value=8, decay="matrix")
    model = replace(SMALL, attention=False, recurrent=mixer)
    config = ParallelConfig(ring=4, micro_batch=2)
    sent = [layer_traffic(Workload(model, tokens), config) for tokens in (512, 4096)]
    assert sent[0] == replace(sent[1], tp_forward=0.0) and sent[0].states > 0 and sent[0].halo > 0
    kept = [chain_traffic(Workload(model, tokens), config).kept for tokens in (512, 4096)]
    assert kept[0] == kept[1] > 0
    assert sent[0].ulysses == sent[0].ring_forward == 0
    whole = layer_traffic(Workload(model, 512, document_lengths=(64,) * 8), config)
    assert whole.states == whole.halo == 0
