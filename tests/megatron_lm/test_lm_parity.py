"""With any degrees Megatron-LM trains as one rank of the unpatched checkout does.

Plain gradient descent without clipping or decay: Adam and clipping hide a wrong gradient scale."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout_runs import (
    Numbers,
    check_close,
    degrees_of,
    losses_of,
    numbers_of,
    relative_difference,
)
from golden_curves import STEPS as RECORDED
from lm_adapter import SGD, SGD_BY_ADAM, TrainingServer, flags
from lm_packed import PATCHES

from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.planner.emit import megatron_lm

LIMIT = 1e-5  # fp32, losses and gradient norms, at every step
ROPE = "--position-embedding-type rope"
GQA = "--group-query-attention --num-query-groups 2"
MODELS = {
    "gpt": "",
    "rope": f"{ROPE} --rotary-percent 0.5",
    "gqa": GQA,
    "llama": f"{ROPE} {GQA} --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights",
    "window": "--window-size 16,0 --no-create-attention-mask-in-dataloader",
    "sinks": f"{GQA} --softmax-type learnable",
    "off-by-one": "--softmax-type off-by-one --window-size 24,0 --window-attn-skip-freq 2 "
    "--no-create-attention-mask-in-dataloader",
}
# gpt-oss has windows in every second layer, learnable sinks, YaRN and grouped queries.
RECOMPUTE = {
    "": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "usp": "--usp-recompute attention",
}
DISTRIBUTED = f"{SGD_BY_ADAM} --use-distributed-optimizer"
# name: (of all ranks, of the one rank)
OPTIMIZERS = {
    "sgd": (SGD, SGD),
    "overlap": (f"{SGD} --overlap-grad-reduce", SGD),
    "distributed": (DISTRIBUTED, SGD_BY_ADAM),
    "distributed-overlap": (
        f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
        SGD_BY_ADAM,
    ),
    "clip": (f"{SGD} --clip-grad 1", f"{SGD} --clip-grad 1"),
    "distributed-clip": (f"{DISTRIBUTED} --clip-grad 1", f"{SGD_BY_ADAM} --clip-grad 1"),
}
# v: a layer a virtual pipeline stage
GRIDS = (
    *("u2", "r2", "u2r2", "u4", "r4", "dp2", "tp2", "pp2", "pp2v", "u2-dp2", "r2-dp2", "u2-tp2"),
    *("r2-tp2", "u2-pp2v", "r2-pp2", "tp2-pp2v", "tp2-dp2", "pp2v-dp2", "u2r2-tp2", "u2r2-pp2v"),
    *("u2r2-dp2", "u4-tp2", "r4-tp2", "u4-pp2", "r4-pp2v", "u4-dp2", "r4-dp2", "u2-tp2-pp2v"),
    *("r2-tp2-pp2", "r2-tp2-dp2", "u2-pp2v-dp2", "tp2-pp2v-dp2"),
)


def ranks_of(grid: str) -> tuple[int, dict[str, int]]:
    """The number of ranks and the degrees that flags have; data parallelism is the rest."""
    degrees = degrees_of(grid)
    world = math.prod(degrees.values())
    degrees.pop("dp", None)
    return world, degrees | ({"virtual": 1} if "v" in grid else {})


def measure(server: TrainingServer, world: int, text: str, **options: Any) -> Numbers:
    ranks = server.run(world, text, **options)
    for seen in ranks:
        assert seen["norms"] == ranks[0]["norms"]
    return numbers_of(ranks)


@functools.cache
def one_rank(server: TrainingServer, more: str, **options: Any) -> Numbers:
    """As :func:`measure`, of one rank of the checkout without patches but those of CPUs."""
    return measure(server, 1, flags(more=more), patched=False, **options)


def check(
    server: TrainingServer,
    grid: str,
    model: str = "gpt",
    optimizer: str = "sgd",
    more: str = "",
    reference: str = "",
) -> None:
    """Train over a grid, and compare with one rank that gets the flags ``reference`` too."""
    world, degrees = ranks_of(grid)
    with_tp = "--sequence-parallel" if "tp" in grid and "u" in grid else ""
    optimizer_flags, reference_optimizer = OPTIMIZERS[optimizer]
    text = flags(more=f"{MODELS[model]} {optimizer_flags} {with_tp} {reference} {more}", **degrees)
    expected = one_rank(server, f"{MODELS[model]} {reference_optimizer} {reference}")
    check_close(measure(server, world, text), expected, LIMIT)


@pytest.mark.parametrize(
    ("grid", "model", "optimizer", "recompute"),
    [
        ("u2", "gpt", "sgd", "full"),
        ("u2r2", "llama", "clip", ""),
        ("r4", "rope", "sgd", "selective"),
        ("u4", "sinks", "sgd", ""),
        ("r2-dp2", "llama", "distributed-overlap", ""),
        ("u2-tp2", "llama", "distributed-overlap", "selective"),
        ("r2-tp2", "window", "sgd", "usp"),
        ("u2-pp2v", "llama", "distributed-overlap", ""),
        ("r2-pp2", "gpt", "distributed-clip", "full"),
        ("u2-tp2-pp2v", "llama", "overlap", ""),
    ],
)
def test_it_trains_as_one_rank_does(server, grid, model, optimizer, recompute):
    check(server, grid, model, optimizer, RECOMPUTE[recompute])


def test_twenty_steps_are_the_recorded_ones(golden, server):
    text = flags(u=2, r=2, more=f"{MODELS['llama']} --train-iters {RECORDED}")
    losses, norms = measure(server, 4, text)
    golden.check("Megatron-LM, 2x2, SGD", losses[:RECORDED], norms)


def test_bf16_stays_within_its_rounding_error(server):
    more = f"{MODELS['llama']} --bf16"
    losses, norms = measure(server, 4, flags(u=2, r=2, more=more))
    alone_losses, alone_norms = one_rank(server, more)
    fp32_losses, fp32_norms = one_rank(server, MODELS["llama"])
    # Without bf16 one rank would equal fp32.
    error = relative_difference(alone_losses, fp32_losses)
    assert 1e-5 < error < 5e-3
    assert relative_difference(losses, fp32_losses) < 1.5 * error
    # Later norms are of other weights: Adam turns roundings of small gradients into whole updates,
    # and the norms of one rank and of four stray by 0.2 to 0.6 % from fp32's, by another CPU's
    # roundings to either side.
    error = relative_difference(alone_norms[:1], fp32_norms[:1])
    assert relative_difference(norms[:1], fp32_norms[:1]) < 1.5 * error


MLA = (
    f"{ROPE} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8"
)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["u2r2", "r4", "u2-pp2v", "r4-dp2"])
def test_latent_attention(server, grid):
    """The stock local attention takes no ``k_channels``, so that one rank has ds_usp's too."""
    world, degrees = ranks_of(grid)
    expected = measure(server, 1, flags(more=f"{MLA} --usp-recompute attention"))
    check_close(measure(server, world, flags(more=MLA, **degrees)), expected, LIMIT)


def full_matrix() -> Iterator[tuple[str, str, str, str]]:
    """(grid, model, optimizer, recompute)."""
    for grid, model in itertools.product(GRIDS, MODELS):
        yield grid, model, "sgd", ""
    for grid, optimizer in itertools.product(GRIDS, list(OPTIMIZERS)[1:]):
        yield grid, "llama", optimizer, ""
    for grid, recompute in itertools.product(GRIDS, list(RECOMPUTE)[1:]):
        yield grid, "gpt", "distributed-overlap", recompute


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "model", "optimizer", "recompute"), list(full_matrix()))
def test_the_full_matrix(server, grid, model, optimizer, recompute):
    check(server, grid, model, optimizer, RECOMPUTE[recompute])


EXACT = 1e-6
PACKED = f"{ROPE} --sft --data-path any --split 50,25,25 --eval-iters 1"
EXPERTS = f"{ROPE} --num-experts 4 --disable-bias-linear"
PER_TOKEN = "--calculate-per-token-loss"
DROPOUT = "--hidden-dropout 0.1"


@pytest.mark.parametrize(
    "more",
    [
        "--usp-recompute gemm-last",
        "--usp-recompute full",
        f"{ROPE} --mtp-num-layers 1 --eod-mask-loss",
        f"{ROPE} --mtp-num-layers 1 --eod-mask-loss --calculate-per-token-loss",
        f"{ROPE} --eod-mask-loss --calculate-per-token-loss",
        f"{EXPERTS} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
    ],
)
def test_what_the_patches_add_trains_as_one_rank_does(server, more):
    two = server.run(2, flags(r=2, more=more))
    one = server.run(1, flags(more=more))
    check_close(numbers_of(two), numbers_of(one), LIMIT)


ROUTED = f"{EXPERTS} --moe-router-topk 2 --moe-z-loss-coeff 0.1 --moe-token-dispatcher-type"
# name: grid, flags of all ranks, those that its reference has too
SHARED_EXPERTS = {
    "over Ulysses ranks": ("u2", "", f"{ROUTED} alltoall --moe-aux-loss-coeff 0.1"),
    "over a ring": ("r2", "", f"{ROUTED} allgather --moe-aux-loss-coeff 0.1"),
    "over both": (
        "u2r2",
        "--expert-model-parallel-size 4 --usp-recompute full",
        f"{ROUTED} alltoall --moe-aux-loss-coeff 0.1",
    ),
    "over half of a group": (
        "u2r2",
        "",
        f"{ROUTED} alltoall --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
    ),
    "over replicas too": (
        "r2-dp2",
        "--expert-model-parallel-size 4 --overlap-grad-reduce --overlap-param-gather",
        f"{ROUTED} alltoall --moe-shared-expert-intermediate-size 32 --moe-layer-freq 2 "
        f"{SGD_BY_ADAM} --use-distributed-optimizer",
    ),
    "beside tensor parallelism": (
        "u2-tp2",
        "--expert-tensor-parallel-size 1 --sequence-parallel",
        f"{ROUTED} alltoall --moe-aux-loss-coeff 0.1",
    ),
    "a bias instead of a loss": (
        "u2-pp2v",
        "",
        f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.1 --moe-token-dispatcher-type alltoall",
    ),
}


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_experts_of_several_ranks_train_as_those_of_one(server, name):
    """Expert-parallel ranks are also ranks of a context-parallel group."""
    grid, more, model = SHARED_EXPERTS[name]
    world, degrees = ranks_of(grid)
    several = measure(
        server, world, flags(more=f"{model} --expert-model-parallel-size 2 {more}", **degrees)
    )
    check_close(several, one_rank(server, model), EXACT)


def test_a_loss_over_all_replicas_is_that_of_the_replicas_alone(server):
    """It counts the tokens of a step's replicas together, so that one rank has another loss."""
    model = f"{ROUTED} alltoall --moe-router-load-balancing-type global_aux_loss"
    model = f"{model} --moe-aux-loss-coeff 0.1"
    several = measure(server, 4, flags(r=2, more=f"{model} --expert-model-parallel-size 2"))
    check_close(several, measure(server, 2, flags(more=model), patched=False), EXACT)


HYBRID = """
    --spec lm_hybrid STACK --hybrid-override-pattern ME*M --swiglu --train-iters 3
    --mamba-num-heads 6 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2
    --experimental-attention-variant gated_delta_net --linear-attention-freq 1
    --linear-conv-kernel-dim 4 --linear-key-head-dim 4 --linear-value-head-dim 8
    --linear-num-key-heads 2 --linear-num-value-heads 6
"""


@pytest.mark.parametrize(
    ("grid", "more"), [("u2r2", RECOMPUTE["usp"]), ("r2", "--usp-recompute full")]
)
def test_layers_that_carry_a_state_train_as_one_rank_does(server, grid, more):
    """Mamba mixers and gated delta nets, with heads that do not divide by the ranks."""
    world, degrees = ranks_of(grid)
    script = "pretrain_mamba.py"
    several = measure(server, world, flags(more=f"{HYBRID} {more}", **degrees), script=script)
    check_close(several, one_rank(server, HYBRID, script=script), LIMIT)


def mask_losses(original: Any, dataset: Any, index: int | None) -> Any:
    """``GPTDataset.__getitem__`` with 5 loss tokens, of which a rank may have none."""
    sample = original(dataset, index)
    mask = torch.zeros_like(sample["loss_mask"])
    start = (index or 0) % 3 * 16
    mask[start : start + 5] = 1
    return sample | {"loss_mask": sample["loss_mask"] * mask}


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(2, {"r": 2}), (2, {"u": 2}), (4, {"u": 2, "pp": 2}), (4, {"r": 2})]
)
def test_ranks_with_other_numbers_of_loss_tokens_train_as_one_rank(server, ranks, degrees):
    more = f"{ROPE} --eod-mask-loss"
    masks = (("megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__", mask_losses),)
    several = server.run(ranks, flags(more=more, **degrees), extra=masks)
    one = server.run(1, flags(more=more), extra=masks, patched=False)
    check_close(numbers_of(several), numbers_of(one), EXACT)
    assert relative_difference(several[-1]["evaluations"], one[0]["evaluations"]) < EXACT


@pytest.mark.parametrize("more", [PACKED, f"{PACKED} {PER_TOKEN}"])
@pytest.mark.parametrize("degrees", [{"r": 2}, {"u": 2}, {"u": 2, "r": 2}])
def test_packed_documents_train_as_on_one_rank(server, degrees, more):
    ranks = degrees.get("u", 1) * degrees.get("r", 1)
    several = server.run(ranks, flags(more=more, **degrees), extra=PATCHES)
    one = server.run(1, flags(more=f"{more} --usp-recompute attention"), extra=PATCHES)
    check_close(numbers_of(several), numbers_of(one), LIMIT)
    assert relative_difference(several[0]["evaluations"], one[0]["evaluations"]) < LIMIT


def test_dropout_is_recomputed(server):
    plain = server.run(2, flags(r=2, more=DROPOUT))
    recomputed = server.run(2, flags(r=2, more=f"{DROPOUT} --usp-recompute full"))
    assert numbers_of(plain) == numbers_of(recomputed)


@pytest.mark.parametrize("drawn", [{}, {"hidden_dropout": 0.1}, {"moe_input_jitter_eps": 0.01}])
def test_a_step_is_seeded_where_shards_would_draw_the_same(monkeypatch, drawn):
    from megatron_patches.megatron_lm import step as training_step

    seeded: list[Any] = []
    monkeypatch.setattr(training_step, "_seed", seeded.append)
    flags = {"hidden_dropout": 0.0, "moe_input_jitter_eps": None, **drawn}
    training_step.seed_step(SimpleNamespace(context_parallel_size=2, cp_comm_type=["usp"], **flags))
    assert len(seeded) == len(drawn)


def test_ranks_with_other_tokens_draw_other_masks(monkeypatch):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    from megatron.core import tensor_parallel

    from megatron_patches.megatron_lm import step as training_step

    seeds: list[int] = []
    monkeypatch.setattr(
        tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed, *_: seeds.append(seed)
    )
    for step, pp, dp, cp in itertools.product(range(2), repeat=4):
        ranks = {"pipeline_model": pp, "data": dp, "context": cp}
        for axis, rank in ranks.items():
            name = f"get_{axis}_parallel_rank"
            monkeypatch.setattr(parallel_state, name, lambda rank=rank: rank)
        args = SimpleNamespace(
            seed=1234, curr_iteration=step, te_rng_tracker=False, inference_rng_tracker=False
        )
        training_step._seed(args)
    assert len(set(seeds)) == len(seeds) == 16


ADAM = "--optimizer adam --lr 1e-2 --min-lr 1e-2"
RESUMABLE = f"{ADAM} --use-distributed-optimizer"
ANY_SPLIT = f"{RESUMABLE} --dist-ckpt-optim-fully-reshardable"
TORCH, TORCH_DIST = "--ckpt-format torch", "--ckpt-format torch_dist"
V = {"pp": 2, "virtual": 1}

# name: optimizer and format, degrees that save, degrees that resume; the rest of 4 ranks is data
# parallel. --dist-ckpt-optim-fully-reshardable is for other tensor- or pipeline-parallel degrees.
SPLITS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "u2r2 to r4": (f"{ADAM} {TORCH}", {"u": 2, "r": 2}, {"r": 4}),
    "u2r2 to u4, distributed": (f"{RESUMABLE} {TORCH}", {"u": 2, "r": 2}, {"u": 4}),
    "u2 dp2 to r4, distributed": (f"{RESUMABLE} {TORCH_DIST}", {"u": 2}, {"r": 4}),
    "u2 dp2 to r2 tp2": (f"{ANY_SPLIT} {TORCH_DIST}", {"u": 2}, {"r": 2, "tp": 2}),
    "u2r2 to r2 pp2v": (f"{ANY_SPLIT} {TORCH_DIST}", {"u": 2, "r": 2}, {"r": 2, **V}),
    "tp2 pp2 to u4": (f"{ANY_SPLIT} {TORCH_DIST}", {"tp": 2, "pp": 2}, {"u": 4}),
    "u2 pp2 to r2 tp2": (f"{ADAM} {TORCH_DIST}", {"u": 2, "pp": 2}, {"r": 2, "tp": 2}),
    "bf16": (f"{ANY_SPLIT} {TORCH_DIST} --bf16", {"u": 2, "r": 2}, {"r": 4}),
}
FAST = ("u2 dp2 to r2 tp2", "u2r2 to u4, distributed")


def check_checkpoint(server: TrainingServer, folder: Path, name: str) -> None:
    """Train 4 steps without a break, and 2 + 2 with a checkpoint between."""
    text, before, after = SPLITS[name]
    text = f"{MODELS['llama']} {text}"

    def train(degrees: dict[str, int], more: str, **options: Any) -> list[dict[str, Any]]:
        return server.run(4, flags(more=f"{text} {more}", **degrees), **options)

    expected = losses_of(train(before, ""))
    saved = train(before, f"--save {folder} --save-interval 2 --exit-interval 2")
    resumed = losses_of(train(after, f"--load {folder}", own_weights=True))
    assert losses_of(saved)[:2] == expected[:2]
    limit = 1e-3 if "bf16" in text else LIMIT
    assert relative_difference(resumed, expected[2:]) < limit


@pytest.mark.parametrize("name", FAST)
def test_it_resumes_on_another_split(server, tmp_path, name):
    check_checkpoint(server, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPLITS if name not in FAST])
def test_every_format_resumes(server, tmp_path, name):
    check_checkpoint(server, tmp_path, name)


LLAMA = ModelShape("tiny", 4, 64, 96, 8, 4, 257, rope_theta=500000.0, norm_epsilon=1e-3)
GPT = replace(LLAMA, kv_heads=8, gated=False, tied=True, learned_positions=True, biases=True)
ATTENTION = ParallelConfig(ulysses=2, ring=2, recompute="attention", overlap_gradients=True)
STAGES = ParallelConfig(tp=2, ulysses=2, pp=2, layers_per_virtual_stage=1, recompute="full")
PLANS = [
    (LLAMA, ATTENTION.replace(mlp_chunks=3)),
    (GPT, STAGES.replace(mlp_chunks=2)),
]


def emitted(model: ModelShape, config: ParallelConfig) -> str:
    """The flags in fp32, with a vocabulary that is padded alike for any tensor-parallel size."""
    text = megatron_lm(Workload(model, 64, 4), config).replace("\\\n", " ")
    padding = f"--make-vocab-size-divisible-by {128 // config.tp}"
    return f"{text.replace(' --bf16', '')} {padding} {SGD_BY_ADAM}"


@pytest.mark.parametrize(("model", "config"), PLANS, ids=["llama", "gpt"])
def test_an_emitted_plan_trains_as_one_rank_does(server, model, config):
    ranks = server.run(config.gpus, emitted(model, config))
    one = server.run(1, emitted(model, ParallelConfig(zero=0)), patched=False)
    check_close(numbers_of(ranks), numbers_of(one), LIMIT)
