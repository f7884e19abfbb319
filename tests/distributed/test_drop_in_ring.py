"""USPAttention with a ring computes what the local attention would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ALL_LAYOUTS
from harness import RankContext, WorkerPool
from sample_attentions import (
    HEAD_DIM,
    HEADS,
    TOKENS,
    Local,
    Setting,
    core_attention,
    flash_attn,
    flash_self_attention,
    full_tensors,
    in_evaluation,
    megatron_core,
    nobody_knows,
    rotary,
    triton,
)

from ds_usp import MaskSpec, UnsupportedAttentionError
from ds_usp import testing as oracle

WORLD = 4
PLAIN = HEAD_DIM**-0.5
Bounds = tuple[int | None, int | None]


def rotated(x: torch.Tensor, features: int) -> torch.Tensor:
    """Rotary embedding of the full sequence, pair by pair as complex numbers."""
    if not features:
        return x
    cos, sin = (part[:, 0, 0, : features // 2].double() for part in rotary(features, TOKENS))
    front, back = x[..., : features // 2], x[..., features // 2 : features]
    turned = torch.complex(front, back) * torch.complex(cos, sin)[None, :, None]
    return torch.cat([turned.real, turned.imag, x[..., features:]], -1)


def reference(
    bounds: Bounds, scale: float, features: int = 0, slopes: Any = None, sinks: Any = None
) -> list[torch.Tensor]:
    """The oracle's out, dq, dk and dv of the full sequence, and the gradient of its sinks."""
    q, k, v, dout = (x.double().requires_grad_() for x in full_tensors())
    learned = [] if sinks is None else [torch.tensor(sinks).double().requires_grad_()]
    out, _ = oracle.dense_attention(
        *(rotated(x, features) for x in (q, k)),
        v,
        oracle.window(range(TOKENS), range(TOKENS), *bounds),
        scale,
        bias=None if slopes is None else oracle.alibi(torch.tensor(slopes), range(TOKENS)),
        sinks=learned[0] if learned else None,
    )
    return [out, *torch.autograd.grad(out, (q, k, v, *learned), dout)]


def compare(
    ctx: RankContext,
    setting: Setting,
    bounds: Bounds,
    scale: float,
    scores: dict[str, Any] | None = None,
) -> tuple[int, list[float]]:
    """The output's number of dims, and relative errors of this rank's out, dq, dk and dv, and of
    the gradient of the local attention's sinks, summed over the ranks."""
    attention = setting.module()
    layout = attention.mesh.layout(setting.layout, TOKENS)
    shards = [layout.shard(x, 1, ctx.rank) for x in full_tensors()]
    q, k, v, dout = (x.transpose(0, 1).contiguous() if setting.batch_dim else x for x in shards)
    for x in (q, k, v):
        x.requires_grad_()
    turn = rotary(setting.rotary, TOKENS) if setting.rotary else None
    out = attention(q, k, v, setting.batch_dim, turn)
    learned = list(attention.local_attn.parameters())
    grads = torch.autograd.grad(out, (q, k, v, *learned), dout.view(out.shape))
    actual = [out.view(dout.shape), *grads[:3]]
    if setting.batch_dim:
        actual = [x.transpose(0, 1) for x in actual]
    for grad in grads[3:]:
        dist.all_reduce(grad)
    full = reference(bounds, scale, setting.rotary, **scores or {})
    expected = [*(layout.shard(x, 1, ctx.rank) for x in full[:4]), *full[4:]]
    actual += grads[3:]
    return out.ndim, [oracle.relative_error(a, b) for a, b in zip(actual, expected, strict=True)]


CAUSAL, FULL = (None, 0), (None, None)
# (maker, its arguments) -> bounds, scale, dims of the output
KNOWN: dict[str, tuple[Callable[..., Any], dict[str, Any], Bounds, float, int]] = {
    "flash": (flash_self_attention, {}, CAUSAL, PLAIN, 4),
    "flash, full": (flash_self_attention, {"causal": False}, FULL, PLAIN, 4),
    "flash, scaled": (flash_self_attention, {"scale": 0.1}, CAUSAL, 0.1, 4),
    "flash, derived": (flash_self_attention, {"derived": True}, CAUSAL, PLAIN, 4),
    "triton": (triton, {}, CAUSAL, PLAIN, 3),
    "triton ignores scale and dropout": (triton, {"scale": 0.1, "dropout": 0.5}, CAUSAL, PLAIN, 3),
    "flash-attn": (flash_attn, {}, CAUSAL, PLAIN, 4),
    "flash-attn, window": (flash_attn, {"window": (5, 0)}, (5, 0), PLAIN, 4),
    "flash-attn, window both sides": (
        flash_attn,
        {"causal": False, "window": (5, 2)},
        (5, 2),
        PLAIN,
        4,
    ),
    "flash-attn, causal window": (flash_attn, {"window": (5, 2)}, (5, 0), PLAIN, 4),
    "core": (core_attention, {}, CAUSAL, PLAIN, 3),
    "core, layer scaling": (core_attention, {"layer": 3, "scaling": True}, CAUSAL, PLAIN, 3),
    "core, third layer": (core_attention, {"layer": 3}, CAUSAL, PLAIN, 3),
    "core, full": (core_attention, {"kind": "no_mask"}, FULL, PLAIN, 3),
    "megatron-core": (megatron_core, {}, CAUSAL, PLAIN, 3),
    "megatron-core, full": (megatron_core, {"kind": "no_mask"}, FULL, PLAIN, 3),
    "megatron-core, scaled": (megatron_core, {"softmax_scale": 0.1}, CAUSAL, 0.1, 3),
    "megatron-core, layer scaling": (
        megatron_core,
        {"layer": 3, "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        CAUSAL,
        PLAIN,
        3,
    ),
    "megatron-core, window": (megatron_core, {"window_size": (5, 0)}, (5, 0), PLAIN, 3),
    # Its window is the mask, with both bounds, whatever the mask type.
    "megatron-core, window ahead": (megatron_core, {"window_size": (5, 2)}, (5, 2), PLAIN, 3),
    "megatron-core, every other layer's window": (
        megatron_core,
        {"window_size": (5, 0), "window_attn_skip_freq": 2, "layer": 2},
        CAUSAL,
        PLAIN,
        3,
    ),
    "dropout out of training": (
        in_evaluation,
        {"make": core_attention, "dropout": 0.1},
        CAUSAL,
        PLAIN,
        3,
    ),
}


@pytest.mark.parametrize("batch_dim", [0, 1], ids=["[b,s,h,d]", "[s,b,h,d]"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_local_attentions_are_computed(pool: WorkerPool, name: str, batch_dim: int) -> None:
    make, arguments, bounds, scale, ndim = KNOWN[name]
    setting = Setting(make, arguments, {}, batch_dim=batch_dim)
    for dims, errors in pool.run(compare, WORLD, setting=setting, bounds=bounds, scale=scale):
        assert dims == ndim
        assert max(errors) < 1e-5


GIVEN: dict[str, tuple[dict[str, Any], Bounds, float]] = {
    "mask": ({"mask": MaskSpec.causal(), "dropout_p": 0.0}, CAUSAL, PLAIN),
    "mask and scale": (
        {"mask": MaskSpec.window(3, 1), "softmax_scale": 0.2, "dropout_p": 0.0},
        (3, 1),
        0.2,
    ),
    "kernel": ({"mask": MaskSpec.full(), "dropout_p": 0.0, "kernel": "eager"}, FULL, PLAIN),
}


@pytest.mark.parametrize("name", GIVEN)
def test_unknown_local_attentions_are_computed_as_they_are_described(
    pool: WorkerPool, name: str
) -> None:
    options, bounds, scale = GIVEN[name]
    setting = Setting(nobody_knows, {}, options)
    for _, errors in pool.run(compare, WORLD, setting=setting, bounds=bounds, scale=scale):
        assert max(errors) < 1e-5


SINKS, SLOPES = (-1.0, 0.0, 2.5, 4.0), (0.5, 0.25, 0.125, 0.0625)
SCORES = {
    "megatron-core's softmax offset": (megatron_core, {"sinks": SINKS}, {"sinks": SINKS}),
    "flash-attn's ALiBi": (flash_attn, {"alibi": torch.tensor(SLOPES)}, {"slopes": SLOPES}),
}


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_local_attention(pool: WorkerPool, name: str, ulysses: int) -> None:
    make, arguments, scores = SCORES[name]
    setting = Setting(make, arguments, {"mask": MaskSpec.causal()}, ulysses=ulysses)
    for _, errors in pool.run(
        compare, WORLD, setting=setting, bounds=CAUSAL, scale=PLAIN, scores=scores
    ):
        assert len(errors) == 4 + ("sinks" in scores)
        assert max(errors) <= 1e-5, errors


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize(("features", "batch_dim"), [(HEAD_DIM, 0), (HEAD_DIM // 2, 1)])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_rotary_is_that_of_the_full_sequence(
    pool: WorkerPool, layout: str, features: int, batch_dim: int, ulysses: int
) -> None:
    local, arguments = flash_self_attention, {}
    if ulysses == WORLD:
        local, arguments = Local, {"batch_dim": batch_dim}
    setting = Setting(local, arguments, {}, layout, batch_dim, features, ulysses)
    for _, errors in pool.run(compare, WORLD, setting=setting, bounds=CAUSAL, scale=PLAIN):
        assert max(errors) < 1e-5


def masks_in_place_of_the_batch_dim(ctx: RankContext) -> list[float]:
    """Megatron-DeepSpeed's path without flash attention: ``attn(q, k, v, attention_mask)``."""
    attention = Setting(core_attention, {}, {}, batch_dim=1).module()
    layout = attention.mesh.layout("zigzag", TOKENS)
    q, k, v, _ = (layout.shard(x, 1, ctx.rank).transpose(0, 1) for x in full_tensors())
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    out = attention(q, k, v, hidden).unflatten(2, (HEADS, HEAD_DIM)).transpose(0, 1)
    with pytest.raises(UnsupportedAttentionError, match=r"a tensor \[32, 32\]"):
        attention(q, k, v, ~hidden.tril(4))
    expected = layout.shard(reference(CAUSAL, PLAIN)[0], 1, ctx.rank)
    return [oracle.relative_error(out, expected)]


def test_a_mask_may_be_passed_instead_of_the_batch_dim(pool: WorkerPool) -> None:
    assert max(max(errors) for errors in pool.run(masks_in_place_of_the_batch_dim, WORLD)) < 1e-5
