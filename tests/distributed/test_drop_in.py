"""USPAttention in the place of DistributedAttention: bit for bit without a ring, and with one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ALL_LAYOUTS
from harness import RankContext
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

from ds_usp import MaskSpec, MeshError, TokenLayout, UnsupportedAttentionError, USPAttention
from ds_usp import testing as oracle

WORLD = 4


@dataclass(frozen=True)
class Comparison:
    """One comparison: sizes, order of dims, and what is handed along."""

    heads: int = 8
    kv_heads: int = 8
    batch_dim: int = 0
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    rotary: int = 0  # features that are rotated
    num_kv_heads: int | None = None
    keywords: tuple[str, ...] = ()


def share(setting: Comparison, rank: int, heads: int, seed: int) -> torch.Tensor:
    """This rank's 8 tokens of a full tensor, in the setting's order of dims."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(2, 8 * WORLD, heads, setting.head_dim, generator=generator)
    local_qkv = full.to(setting.dtype)[:, 8 * rank : 8 * (rank + 1)]
    return local_qkv.clone() if setting.batch_dim == 0 else local_qkv.transpose(0, 1).contiguous()


def results(attention: torch.nn.Module, setting: Comparison, rank: int) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v."""
    counts = (setting.heads, setting.kv_heads, setting.kv_heads)
    qkv = [share(setting, rank, heads, i).requires_grad_() for i, heads in enumerate(counts)]
    turn = (rotary(setting.rotary, 8 * WORLD),) if setting.rotary else ()
    out = attention(*qkv, setting.batch_dim, *turn, **dict.fromkeys(setting.keywords, "given"))
    dout = share(setting, rank, setting.heads, 3).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout.view(out.shape))]


def deepspeeds(setting: Comparison, ctx: RankContext) -> torch.nn.Module:
    """DeepSpeed's own module, without the C++ op that its start would compile."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    with mock.patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}):
        deepspeed.init_distributed("gloo", verbose=False)
    local = Local(setting.batch_dim)
    return DistributedAttention(
        local, ctx.group, gather_idx=1 - setting.batch_dim, num_kv_heads=setting.num_kv_heads
    )


def compare(ctx: RankContext, setting: Comparison, flat: bool) -> list[tuple[bool, float]]:
    """For out, dq, dk and dv: whether ours is DeepSpeed's to the bit, and how far off it is."""
    from deepspeed.utils import groups

    local = Local(setting.batch_dim, flat)
    ours = USPAttention(
        local, ctx.group, gather_idx=1 - setting.batch_dim, num_kv_heads=setting.num_kv_heads
    )
    # DeepSpeed's uneven split asks its global mpu who this rank is.
    mpu = SimpleNamespace(get_sequence_parallel_rank=lambda: ctx.rank)
    with mock.patch.object(groups, "mpu", mpu):
        reference = deepspeeds(setting, ctx)
        expected = results(reference, setting, ctx.rank)
    actual = results(ours, setting, ctx.rank)
    assert local.handed == reference.local_attn.handed
    assert actual[0].ndim == (3 if flat else 4)
    actual[0] = actual[0].view(expected[0].shape)
    return [
        (a.dtype == b.dtype and torch.equal(a, b), oracle.relative_error(a, b))
        for a, b in zip(actual, expected, strict=True)
    ]


SETTINGS = {
    "MHA": Comparison(),
    "GQA": Comparison(kv_heads=4),
    "bf16": Comparison(kv_heads=4, dtype=torch.bfloat16),
    "fp64": Comparison(dtype=torch.float64),
    "rotary": Comparison(rotary=16),
    "rotary on a part": Comparison(kv_heads=4, rotary=8),
    "num_kv_heads": Comparison(kv_heads=4, num_kv_heads=4),
    "keywords": Comparison(keywords=("attention_mask", "my_own")),
    "6 heads": Comparison(heads=6, kv_heads=6),
    "7 heads": Comparison(heads=7, kv_heads=7, num_kv_heads=7),
}

# DeepSpeed's rotary embedding is for [b, s, h, d] only.
ORDERED = [
    pytest.param(replace(setting, batch_dim=batch_dim), id=f"{name}-{'bs'[batch_dim]} first")
    for name, setting in SETTINGS.items()
    for batch_dim in (0, 1)
    if not (setting.rotary and batch_dim)
]


@pytest.mark.parametrize("flat", [False, True], ids=["4-D", "3-D"])
@pytest.mark.parametrize("setting", ORDERED)
def test_ring_1_is_deepspeeds_result_bit_for_bit(pool, setting, flat):
    for rank, compared in enumerate(pool.run(compare, WORLD, setting=setting, flat=flat)):
        assert all(same for same, _ in compared), (rank, compared)


def test_head_groups_chunked_differently_agree_to_rounding(pool):
    # 12 query heads of 6 KV heads on 4 ranks: DeepSpeed cuts by KV heads, 4 4 2 2; ours 3 each.
    setting = Comparison(heads=12, kv_heads=6)
    for compared in pool.run(compare, WORLD, setting=setting, flat=False):
        assert max(error for _, error in compared) < 1e-6


def handed(ctx: RankContext, gather_idx: int) -> list[Any]:
    """What the local attention is handed for each way to pass a mask."""
    local = Local(1 - gather_idx)
    attention = USPAttention(local, ctx.group, gather_idx=gather_idx)
    qkv = [share(Comparison(batch_dim=1 - gather_idx), ctx.rank, 8, i) for i in range(3)]
    mask = torch.ones(32, 32, dtype=torch.bool).triu(1)
    outs = [
        attention(*qkv, 1 - gather_idx, None, mask),
        attention(*qkv, 1 - gather_idx, attention_mask=mask),
        attention(*qkv, mask),
        attention(*qkv, mask, None, "more"),
        attention(*qkv, None, None, mask),
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    return [
        ([x is mask or x for x in args], {name: x is mask for name, x in kwargs.items()})
        for args, kwargs in local.handed
    ]


@pytest.mark.parametrize("gather_idx", [0, 1])
def test_masks_are_handed_through_wherever_they_stand(pool, gather_idx):
    for calls in pool.run(handed, WORLD, gather_idx=gather_idx):
        assert calls == [
            ([True], {}),
            ([], {"attention_mask": True}),
            ([True], {}),
            ([True, "more"], {}),
            ([True], {}),
        ]


def uneven_tokens(ctx: RankContext, seq_len: int) -> float:
    """A sequence that does not divide, given as a layout; DeepSpeed has none."""
    layout = TokenLayout("contiguous", seq_len, WORLD)
    attention = USPAttention(Local(0), ctx.group, gather_idx=1, layout=layout)
    full = torch.randn(3, 2, seq_len, 8, 16)
    local_qkv = [layout.shard(x, 1, ctx.rank) for x in full]
    positions = range(seq_len)
    expected, _ = oracle.dense_attention(*full, oracle.causal(positions, positions))
    return oracle.relative_error(attention(*local_qkv, 0), layout.shard(expected, 1, ctx.rank))


def test_a_layout_has_the_length_of_a_sequence_that_does_not_divide(pool):
    assert max(pool.run(uneven_tokens, WORLD, seq_len=37)) < 1e-6


def second_derivative(ctx: RankContext, ulysses: int) -> str:
    """What create_graph=True gives: a differentiable gradient, or a refusal."""
    attention = USPAttention(
        torch.nn.Identity() if ulysses < WORLD else _Product(),
        ctx.group,
        gather_idx=1,
        ulysses_degree=ulysses,
        mask=MaskSpec.causal(),
        dropout_p=0.0,
    )
    q, k, v = (share(Comparison(), ctx.rank, 8, i).requires_grad_() for i in range(3))
    try:
        (grad,) = torch.autograd.grad(attention(q, k, v, 0).sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), k)
    except ValueError as error:
        return str(error)
    return f"{float(second.abs().max()) > 0}"


class _Product(torch.nn.Module):
    """Any differentiable function of q, k and v."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * k * v


def test_a_second_derivative_is_right_or_refused(pool):
    assert pool.run(second_derivative, WORLD, ulysses=WORLD) == ["True"] * WORLD
    for message in pool.run(second_derivative, WORLD, ulysses=2):
        assert "create_graph=True" in message


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"scatter_idx": 1}, "scatter_idx=1"),
    ({"layout": "zig"}, "'zig'"),
    ({"kernel": "flash9"}, "'flash9'"),
    ({"layout": TokenLayout("zigzag", 32, 2, 2)}, "2 x ring 2"),
]


def constructed_wrongly(ctx: RankContext) -> list[str]:
    """The error on this rank where rank 0 constructs with each of these; then of a call with other
    KV heads than the module was made for."""
    said = []
    for arguments, _ in WRONG:
        with pytest.raises(ValueError) as caught:
            USPAttention(Local(0), ctx.group, **(arguments if ctx.rank == 0 else {}))
        said.append(str(caught.value))
    attention = USPAttention(Local(0), ctx.group, gather_idx=1, num_kv_heads=8)
    q = share(Comparison(), ctx.rank, 8, 0)
    attention(q, q, q, 0)
    with pytest.raises(ValueError) as caught:
        attention(q, q[:, :, :4], q[:, :, :4], 0)
    return [*said, str(caught.value)]


def test_one_rank_that_is_constructed_wrongly_stops_all(pool):
    numbers = [*(number for _, number in WRONG), "num_kv_heads=8"]
    for said in pool.run(constructed_wrongly, WORLD):
        assert all(number in text for number, text in zip(numbers, said, strict=True)), said


PLAIN = HEAD_DIM**-0.5
Bounds = tuple[int | None, int | None]
CAUSAL, FULL = (None, 0), (None, None)


def rotated(x: torch.Tensor, features: int) -> torch.Tensor:
    """Rotary embedding of the full sequence, pair by pair as complex numbers."""
    if not features:
        return x
    cos, sin = (part[:, 0, 0, : features // 2].double() for part in rotary(features, TOKENS))
    front, back = x[..., : features // 2], x[..., features // 2 : features]
    turned = torch.complex(front, back) * torch.complex(cos, sin)[None, :, None]
    return torch.cat([turned.real, turned.imag, x[..., features:]], -1)


def reference(
    bounds: Bounds, scale: float, features: int = 0, sinks: Any = None
) -> list[torch.Tensor]:
    """The oracle's out, dq, dk and dv of the full sequence, and the gradient of its sinks."""
    q, k, v, dout = (x.double().requires_grad_() for x in full_tensors())
    learned = [] if sinks is None else [torch.tensor(sinks).double().requires_grad_()]
    out, _ = oracle.dense_attention(
        *(rotated(x, features) for x in (q, k)),
        v,
        oracle.window(range(TOKENS), range(TOKENS), *bounds),
        scale,
        sinks=learned[0] if learned else None,
    )
    return [out, *torch.autograd.grad(out, (q, k, v, *learned), dout)]


def compare_with_a_ring(
    ctx: RankContext,
    setting: Setting,
    bounds: Bounds = CAUSAL,
    scale: float = PLAIN,
    sinks: Any = None,
    later: dict[str, object] | None = None,
) -> tuple[int, list[float]]:
    """The output's number of dims, and relative errors of this rank's out, dq, dk and dv, and of
    the gradient of the local attention's sinks, summed over the ranks; of a call after the local
    attention's attributes have become those of ``later``, if given."""
    attention = setting.module()
    layout = attention.mesh.layout(setting.layout, TOKENS)
    shards = [layout.shard(x, 1, ctx.rank) for x in full_tensors()]
    q, k, v, dout = (x.transpose(0, 1).contiguous() if setting.batch_dim else x for x in shards)
    for x in (q, k, v):
        x.requires_grad_()
    turn = rotary(setting.rotary, TOKENS) if setting.rotary else None
    out = attention(q, k, v, setting.batch_dim, turn)
    if later is not None:
        for path, value in later.items():
            holder, _, name = path.rpartition(".")
            setattr(attention.local_attn.get_submodule(holder), name, value)
        out = attention(q, k, v, setting.batch_dim, turn)
    learned = list(attention.local_attn.parameters())
    grads = torch.autograd.grad(out, (q, k, v, *learned), dout.view(out.shape))
    actual = [out.view(dout.shape), *grads[:3]]
    if setting.batch_dim:
        actual = [x.transpose(0, 1) for x in actual]
    for grad in grads[3:]:
        dist.all_reduce(grad)
    full = reference(bounds, scale, setting.rotary, sinks)
    expected = [*(layout.shard(x, 1, ctx.rank) for x in full[:4]), *full[4:]]
    actual += grads[3:]
    return out.ndim, [oracle.relative_error(a, b) for a, b in zip(actual, expected, strict=True)]


# What is made, its arguments, and what it computes that is not causal and scaled by default.
KNOWN: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "flash": (flash_self_attention, {}, {}),
    "flash, full": (flash_self_attention, {"causal": False}, {"bounds": FULL}),
    "flash, scaled": (flash_self_attention, {"scale": 0.1}, {"scale": 0.1}),
    "flash, derived": (flash_self_attention, {"derived": True}, {}),
    "triton": (triton, {}, {}),
    "triton ignores scale and dropout": (triton, {"scale": 0.1, "dropout": 0.5}, {}),
    "flash-attn": (flash_attn, {}, {}),
    "flash-attn, window": (flash_attn, {"window": (5, 0)}, {"bounds": (5, 0)}),
    "flash-attn, window both sides": (
        flash_attn,
        {"causal": False, "window": (5, 2)},
        {"bounds": (5, 2)},
    ),
    "flash-attn, causal window": (flash_attn, {"window": (5, 2)}, {"bounds": (5, 0)}),
    "core": (core_attention, {}, {}),
    "core, layer scaling": (core_attention, {"layer": 3, "scaling": True}, {}),
    "core, third layer": (core_attention, {"layer": 3}, {}),
    "core, full": (core_attention, {"kind": "no_mask"}, {"bounds": FULL}),
    "megatron-core": (megatron_core, {}, {}),
    "megatron-core, full": (megatron_core, {"kind": "no_mask"}, {"bounds": FULL}),
    "megatron-core, scaled": (megatron_core, {"softmax_scale": 0.1}, {"scale": 0.1}),
    "megatron-core, layer scaling": (
        megatron_core,
        {"layer": 3, "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        {},
    ),
    "megatron-core, window": (megatron_core, {"window_size": (5, 0)}, {"bounds": (5, 0)}),
    # Its window is the mask, with both bounds, whatever the mask type.
    "megatron-core, window ahead": (megatron_core, {"window_size": (5, 2)}, {"bounds": (5, 2)}),
    "megatron-core, every other layer's window": (
        megatron_core,
        {"window_size": (5, 0), "window_attn_skip_freq": 2, "layer": 2},
        {},
    ),
    "dropout out of training": (in_evaluation, {"make": core_attention, "dropout": 0.1}, {}),
}


@pytest.mark.parametrize("batch_dim", [0, 1], ids=["[b,s,h,d]", "[s,b,h,d]"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_local_attentions_are_computed(pool, name, batch_dim):
    make, arguments, computed = KNOWN[name]
    setting = Setting(make, arguments, {}, batch_dim=batch_dim)
    for dims, errors in pool.run(compare_with_a_ring, WORLD, setting=setting, **computed):
        assert dims == (4 if make in (flash_self_attention, flash_attn) else 3)
        assert max(errors) < 1e-5


# What is made, what its attributes become after the first call, and what it computes then.
LATER: dict[str, tuple[Callable[..., Any], dict[str, object], dict[str, Any]]] = {
    "scale": (flash_self_attention, {"softmax_scale": 0.1}, {"scale": 0.1}),
    "causal": (flash_self_attention, {"causal": False}, {"bounds": FULL}),
    "window": (flash_attn, {"window_size": (5, 0)}, {"bounds": (5, 0)}),
    "factor": (core_attention, {"norm_factor": 10.0}, {"scale": 0.1}),
    "mask type": (
        core_attention,
        {"attn_mask_type": SimpleNamespace(name="no_mask")},
        {"bounds": FULL},
    ),
    "window inside": (
        megatron_core,
        {"scale_mask_softmax.window_size": (5, 0)},
        {"bounds": (5, 0)},
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_attributes_that_change_count_from_the_next_call(pool, name):
    make, later, computed = LATER[name]
    setting = Setting(make, {}, {})
    for _, errors in pool.run(compare_with_a_ring, WORLD, setting=setting, later=later, **computed):
        assert max(errors) < 1e-5


def changed_on_one_rank(ctx: RankContext) -> None:
    """Attention after the scale has changed on the last rank alone."""
    attention = Setting(flash_self_attention, {}, {}).module()
    layout = attention.mesh.layout("zigzag", TOKENS)
    q, k, v, _ = (layout.shard(x, 1, ctx.rank) for x in full_tensors())
    attention(q, k, v, 0)
    if ctx.rank == WORLD - 1:
        attention.local_attn.softmax_scale = 0.1
    attention(q, k, v, 0)


def test_an_attribute_that_changes_on_one_rank_is_refused(pool):
    for error in pool.errors(changed_on_one_rank, WORLD):
        assert isinstance(error, MeshError) and "scale" in str(error)


def test_an_unknown_local_attention_is_computed_as_it_is_described(pool):
    given = {"mask": MaskSpec.window(3, 1), "softmax_scale": 0.2, "kernel": "eager"}
    setting = Setting(nobody_knows, {}, {"dropout_p": 0.0, **given})
    computed = {"bounds": (3, 1), "scale": 0.2}
    for _, errors in pool.run(compare_with_a_ring, WORLD, setting=setting, **computed):
        assert max(errors) < 1e-5


SINKS = (-1.0, 0.0, 2.5, 4.0)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_megatron_cores_softmax_offset_is_sinks(pool, ulysses):
    known = {"mask": MaskSpec.causal()}
    setting = Setting(megatron_core, {"sinks": SINKS}, known, ulysses=ulysses)
    for _, errors in pool.run(compare_with_a_ring, WORLD, setting=setting, sinks=SINKS):
        assert len(errors) == 5
        assert max(errors) <= 1e-5, errors


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize(("features", "batch_dim"), [(HEAD_DIM, 0), (HEAD_DIM // 2, 1)])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_rotary_is_that_of_the_full_sequence(pool, layout, features, batch_dim, ulysses):
    local, arguments = flash_self_attention, {}
    if ulysses == WORLD:
        local, arguments = Local, {"batch_dim": batch_dim}
    setting = Setting(local, arguments, {}, layout, batch_dim, features, ulysses)
    for _, errors in pool.run(compare_with_a_ring, WORLD, setting=setting):
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


def test_a_mask_may_be_passed_instead_of_the_batch_dim(pool):
    assert max(max(errors) for errors in pool.run(masks_in_place_of_the_batch_dim, WORLD)) < 1e-5
