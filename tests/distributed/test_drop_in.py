"""USPAttention where DeepSpeed's DistributedAttention stands: ring 1, bit for bit the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, WorkerPool
from sample_attentions import Local, rotary

from ds_usp import MaskSpec, TokenLayout, USPAttention
from ds_usp import testing as oracle

WORLD = 4


@dataclass(frozen=True)
class Setting:
    """One comparison: sizes, order of dims, and what is handed along."""

    heads: int = 8
    kv_heads: int = 8
    batch_dim: int = 0
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    rotary: int = 0  # features that are rotated
    num_kv_heads: int | None = None
    keywords: tuple[str, ...] = ()


def share(setting: Setting, rank: int, heads: int, seed: int) -> torch.Tensor:
    """This rank's 8 tokens of a full tensor, in the setting's order of dims."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(2, 8 * WORLD, heads, setting.head_dim, generator=generator)
    local_qkv = full.to(setting.dtype)[:, 8 * rank : 8 * (rank + 1)]
    return local_qkv.clone() if setting.batch_dim == 0 else local_qkv.transpose(0, 1).contiguous()


def results(attention: torch.nn.Module, setting: Setting, rank: int) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v."""
    counts = (setting.heads, setting.kv_heads, setting.kv_heads)
    qkv = [share(setting, rank, heads, i).requires_grad_() for i, heads in enumerate(counts)]
    turn = (rotary(setting.rotary, 8 * WORLD),) if setting.rotary else ()
    out = attention(*qkv, setting.batch_dim, *turn, **dict.fromkeys(setting.keywords, "given"))
    dout = share(setting, rank, setting.heads, 3).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout.view(out.shape))]


def deepspeeds(setting: Setting, ctx: RankContext) -> torch.nn.Module:
    """DeepSpeed's own module, without the C++ op that its start would compile."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    with mock.patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}):
        deepspeed.init_distributed("gloo", verbose=False)
    local = Local(setting.batch_dim)
    return DistributedAttention(
        local, ctx.group, gather_idx=1 - setting.batch_dim, num_kv_heads=setting.num_kv_heads
    )


def compare(ctx: RankContext, setting: Setting, flat: bool) -> list[tuple[bool, float]]:
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
    "MHA": Setting(),
    "GQA": Setting(kv_heads=4),
    "bf16": Setting(kv_heads=4, dtype=torch.bfloat16),
    "fp64": Setting(dtype=torch.float64),
    "rotary": Setting(rotary=16),
    "rotary on a part": Setting(kv_heads=4, rotary=8),
    "num_kv_heads": Setting(kv_heads=4, num_kv_heads=4),
    "keywords": Setting(keywords=("attention_mask", "my_own")),
    "6 heads": Setting(heads=6, kv_heads=6),
    "7 heads": Setting(heads=7, kv_heads=7, num_kv_heads=7),
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
def test_ring_1_is_deepspeeds_result_bit_for_bit(
    pool: WorkerPool, setting: Setting, flat: bool
) -> None:
    for rank, compared in enumerate(pool.run(compare, WORLD, setting=setting, flat=flat)):
        assert all(same for same, _ in compared), (rank, compared)


def test_head_groups_chunked_differently_agree_to_rounding(pool: WorkerPool) -> None:
    # 12 query heads of 6 KV heads on 4 ranks: DeepSpeed cuts by KV heads, 4 4 2 2; ours 3 each.
    setting = Setting(heads=12, kv_heads=6)
    for compared in pool.run(compare, WORLD, setting=setting, flat=False):
        assert max(error for _, error in compared) < 1e-6


def handed(ctx: RankContext, gather_idx: int) -> list[Any]:
    """What the local attention is handed for each way to pass a mask."""
    local = Local(1 - gather_idx)
    attention = USPAttention(local, ctx.group, gather_idx=gather_idx)
    qkv = [share(Setting(batch_dim=1 - gather_idx), ctx.rank, 8, i) for i in range(3)]
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
def test_masks_are_handed_through_wherever_they_stand(pool: WorkerPool, gather_idx: int) -> None:
    for calls in pool.run(handed, WORLD, gather_idx=gather_idx):
        assert calls == [
            ([True], {}),
            ([], {"attention_mask": True}),
            ([True], {}),
            ([True, "more"], {}),
            ([True], {}),
        ]


def many_calls(ctx: RankContext) -> list[str]:
    """Errors of later calls with other KV heads, for a layout by name and by value."""
    messages = []
    for layout in ("zigzag", TokenLayout("zigzag", 32, WORLD)):
        attention = USPAttention(
            Local(0), ctx.group, gather_idx=1, num_kv_heads=8, layout=layout, ulysses_degree=WORLD
        )
        q = share(Setting(), ctx.rank, 8, 0)
        attention(q, q, q, 0)
        with pytest.raises(ValueError) as caught:
            attention(q, q[:, :, :4], q[:, :, :4], 0)
        messages.append(str(caught.value))
    return messages


def test_num_kv_heads_is_checked_at_every_call(pool: WorkerPool) -> None:
    for messages in pool.run(many_calls, WORLD):
        assert all("num_kv_heads=8" in text and "[2, 8, 4, 16]" in text for text in messages)


def uneven_tokens(ctx: RankContext, seq_len: int) -> float:
    """A sequence that does not divide, given as a layout; DeepSpeed has none."""
    layout = TokenLayout("contiguous", seq_len, WORLD)
    attention = USPAttention(Local(0), ctx.group, gather_idx=1, layout=layout)
    full = torch.randn(3, 2, seq_len, 8, 16)
    local_qkv = [layout.shard(x, 1, ctx.rank) for x in full]
    positions = range(seq_len)
    expected, _ = oracle.dense_attention(*full, oracle.causal(positions, positions))
    return oracle.relative_error(attention(*local_qkv, 0), layout.shard(expected, 1, ctx.rank))


def test_a_layout_has_the_length_of_a_sequence_that_does_not_divide(pool: WorkerPool) -> None:
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
    q, k, v = (share(Setting(), ctx.rank, 8, i).requires_grad_() for i in range(3))
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


def test_a_second_derivative_is_right_or_refused(pool: WorkerPool) -> None:
    assert pool.run(second_derivative, WORLD, ulysses=WORLD) == ["True"] * WORLD
    for message in pool.run(second_derivative, WORLD, ulysses=2):
        assert "create_graph=True" in message


def construct(ctx: RankContext, arguments: dict[str, Any]) -> str:
    """The error on this rank where one rank constructs with wrong arguments."""
    wrong = arguments if ctx.rank == 0 else {}
    try:
        USPAttention(Local(0), ctx.group, **wrong)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scatter_idx": 1}, "scatter_idx=1"),
        ({"layout": "zig"}, "unknown token layout 'zig'"),
        ({"kernel": "flash9"}, "unknown attention kernel 'flash9'"),
        ({"layout": TokenLayout("zigzag", 32, 2, 2)}, "is not for this mesh"),
    ],
)
def test_one_rank_that_is_constructed_wrongly_stops_all(
    pool: WorkerPool, arguments: dict[str, Any], message: str
) -> None:
    for text in pool.run(construct, WORLD, arguments=arguments):
        assert message in text
