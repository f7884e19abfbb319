"""What GPTModel may ask of attention on a mesh: MLA, windows, sinks, packed documents."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import stock_megatron_core
import torch
from harness import RankContext, fork_world
from overlapped_layers import overlap
from stock_megatron_core import DenseAttention
from test_patched_megatron_core import LIMIT, programs, usp_core

import megatron_patches

GRIDS = {"1x1": (1, 1), "2x1": (2, 2), "1x2": (1, 2), "2x2": (2, 4)}  # ulysses, cp
MLA = {
    "mla": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
}
YARN = {
    **MLA,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
DOCUMENTS = {"documents": ([5, 9, 16], [8, 16, 16])}
WINDOWS = {"window_size": (5, 0), "window_attn_skip_freq": 2, "kv_heads": 2}
UP_PROJECTION = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MODELS = {
    "MLA": MLA,
    "MLA without a query projection": {**MLA, "q_lora_rank": None},
    "MLA, YaRN": YARN,
    "MLA packed and padded": {**YARN, **DOCUMENTS},
    "windows between full layers, learnable sinks": {**WINDOWS, "softmax_type": "learnable"},
    "windows in turn, softmax off by one": {
        **WINDOWS,
        "window_attn_skip_freq": [1, 0],
        "softmax_type": "off-by-one",
    },
    "packed and padded": {"kv_heads": 2, **DOCUMENTS},
    "multi-token prediction": {"mtp_num_layers": 1, "calculate_per_token_loss": True},
    "learned positions": {"rotary": False},
}
# What is computed another way, with the same result.
RECOMPUTED = {
    "MLA, YaRN": UP_PROJECTION,
    "packed and padded": CORE,
    "windows between full layers, learnable sinks": CORE,
}
# With layers that project by themselves, chunk by chunk of heads.
OVERLAPPED = (
    "packed and padded",
    "windows between full layers, learnable sinks",
    "multi-token prediction",
    "learned positions",
)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    """Each document alone on one rank: dense attention for MLA, else megatron-core's own."""
    cases = {}
    for name, model in MODELS.items():
        options = {**model, "alone": True} if "documents" in model else dict(model)
        cases[name] = ({}, {**options, "core": dense} if "mla" in model else options)
    (results,) = fork_world(programs, 1, cases=cases)
    return results


def dense() -> type:
    return DenseAttention


@pytest.mark.parametrize("grid", GRIDS)
def test_a_mesh_gives_one_ranks_loss_and_gradients(one_rank: dict[str, Any], grid: str) -> None:
    ulysses, cp = GRIDS[grid]
    settings = {"ulysses_degree": ulysses, "everywhere": True}
    cases = {name: (settings, {"cp": cp, **model}) for name, model in MODELS.items()}
    for name, extra in RECOMPUTED.items():
        cases[f"{name}: recomputed"] = cases[name][0], {**cases[name][1], **extra}
    for name in OVERLAPPED:
        cases[f"{name}: overlapped"] = cases[name][0], {**cases[name][1], "change": overlap}
    for results in fork_world(programs, 4, cases=cases):
        for name, result in results.items():
            expected = one_rank[name.partition(": ")[0]]
            replicas = result.replicas  # each has the same batch, and gradients are summed
            assert result.loss / replicas == pytest.approx(expected.loss, rel=LIMIT), name
            assert result.gradients.keys() == expected.gradients.keys()
            for weight, (gradient, _) in result.gradients.items():
                full, _ = expected.gradients[weight]
                difference = (gradient / replicas - full).norm() / full.norm()
                assert difference < LIMIT, f"{name}: {weight} differs by {difference:.1e}"


def padded_with(ctx: RankContext, *, ulysses: int, model: dict[str, Any]) -> list[Any]:
    """Loss and gradients of the same documents with two other paddings."""
    results = []
    for token in (1, 40):
        case = {"ulysses_degree": ulysses}, {"cp": ctx.world, "padding_token": token, **model}
        (result,) = programs(ctx, cases={"": case}).values()
        results.append((result.loss, {k: x for k, (x, _) in result.gradients.items()}))
    return results


@pytest.mark.parametrize("name", ["packed and padded", "MLA packed and padded"])
def test_what_padding_is_reaches_no_loss_and_no_gradient(name: str) -> None:
    for (loss, gradients), (other_loss, others) in fork_world(
        padded_with, 2, ulysses=1, model=MODELS[name]
    ):
        assert loss == other_loss
        for weight, gradient in gradients.items():
            assert torch.equal(gradient, others[weight]), weight


def named_in_the_spec(ctx: RankContext, *, model: dict[str, Any]) -> float:
    """The loss with the core named in the layer spec, without a patch of megatron-core's."""
    from megatron_patches.megatron_core import cpu_fallbacks_patch_set

    cpu_fallbacks_patch_set().apply()
    with mock.patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False):
        loss, _ = stock_megatron_core.step(cp=ctx.world, core=partial(usp_core, 2), **model)
    megatron_patches.restore()
    return loss


def test_mla_may_name_the_core_in_its_layer_spec(one_rank: dict[str, Any]) -> None:
    for loss in fork_world(named_in_the_spec, 2, model=YARN):
        assert loss == pytest.approx(one_rank["MLA, YaRN"].loss, rel=LIMIT)
