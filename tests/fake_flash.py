"""Attention libraries for CPUs: their signatures, their checks and their reading of windows.

The mathematics is written out in fp64, so what a kernel hands over wrongly shows in the results.
The functions stand for: flash-attn 2.6 (plain functions) and 2.7 to 2.8 (operators of torch),
flash_attn_interface of January 2025 (plain) and of August 2026 (operators), and torch's own.
"""

import math
from types import ModuleType
from typing import Any, Optional

import torch
from torch import Tensor
from torch import library as operators

MAYBE = Optional[Tensor]  # noqa: UP045  torch reads an operator's schema off these


def allowed(rows: int, columns: int, left: int | None, right: int | None) -> Tensor:
    """A window aligned to the bottom right corner: ``[rows, columns]`` bool."""
    distance = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (columns - rows)
    low = -math.inf if left is None else -left
    return (distance >= low) & (distance <= (math.inf if right is None else right))


def version2(rows: int, columns: int, causal: bool, left: int, right: int) -> Tensor:
    """FlashAttention-2 calls a bound of all keys or more none, and none beside a bound all keys."""
    left, right = (-1 if bound >= columns else bound for bound in (left, right))
    right = 0 if causal else right
    if left < 0 and right < 0:
        return allowed(rows, columns, None, None)
    return allowed(rows, columns, *(columns if bound < 0 else bound for bound in (left, right)))


def version3(rows: int, columns: int, causal: bool, left: int, right: int) -> Tensor:
    """FlashAttention-3 says -1 for none."""
    right = 0 if causal else right
    return allowed(rows, columns, *(None if bound < 0 else bound for bound in (left, right)))


def scores(q: Tensor, k: Tensor, scale: float, seen: Tensor, softcap: float = 0.0) -> Tensor:
    """``[B, H, rows, columns]`` in fp64."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    found = torch.einsum("bshd,bthd->bhst", q.double(), k.double()).mul(scale)
    return (softcap * (found / softcap).tanh() if softcap else found).where(seen, -math.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Out in the queries' dtype and the natural log-sum-exp in fp32 ``[B, H, rows]``."""
    check(q, k, v)
    weights = scores(q, k, scale, seen, softcap)
    lse = weights.logsumexp(-1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhst,bthd->bshd", (weights - lse[..., None]).exp(), v.double())
    return out.to(q.dtype), lse.float()


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, seen: Tensor, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """From the output and log-sum-exp that are given, whichever keys these have seen."""
    check(dout, q, k, v, out)
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    heads = [x.repeat_interleave(q.shape[2] // x.shape[2], 2).double() for x in (k, v)]
    capped = scores(q, k, scale, seen, softcap)
    weights = (capped - lse.double()[..., None]).exp()
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)[..., None]
    dweights = torch.einsum("bshd,bthd->bhst", dout.double(), heads[1])
    dscores = weights * (dweights - delta) * scale
    if softcap:
        dscores = dscores * (1 - (capped / softcap) ** 2).where(seen, 0.0)
    dq = torch.einsum("bhst,bthd->bshd", dscores, heads[0])
    dk = torch.einsum("bhst,bshd->bthd", dscores, q.double())
    dv = torch.einsum("bhst,bshd->bthd", weights, dout.double())
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0


def fill(targets: tuple[MAYBE, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target is not None and target.dtype == value.dtype
        target.copy_(value)


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    for key, value in members.items():
        setattr(made, key, value)
    return made


# ------------------------------------------------------------------ flash-attn 2.6


def forward_26(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
):
    assert not dropout_p and alibi_slopes is None and not return_softmax
    seen = version2(q.shape[1], k.shape[1], causal, *window_size)
    out, lse = attend(q, k, v, softmax_scale, seen, softcap)
    return out, q, k, v, out, lse, None, None


def backward_26(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert not dropout_p and alibi_slopes is None and rng_state is None
    seen = version2(q.shape[1], k.shape[1], causal, *window_size)
    fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap))
    return dq, dk, dv, None


# ------------------------------------------------------------------ flash-attn 2.7 to 2.8


@operators.custom_op("fake_flash_attn::forward", mutates_args=())
def forward_28(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: MAYBE,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert not dropout_p and alibi_slopes is None and not return_softmax
    seen = version2(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return *attend(q, k, v, softmax_scale, seen, softcap), q.new_empty(0), q.new_empty(0)


@operators.custom_op("fake_flash_attn::backward", mutates_args=("dq", "dk", "dv"))
def backward_28(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: MAYBE, dk: MAYBE, dv: MAYBE, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: MAYBE,
    deterministic: bool, rng_state: MAYBE = None,
) -> Tensor:  # fmt: skip
    assert not dropout_p and alibi_slopes is None and rng_state is None
    seen = version2(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap))
    return q.new_empty(0)


# ------------------------------------------------------------------ flash_attn_interface, old


def forward_3_old(
    q, k, v, k_new, v_new, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
    rotary_sin, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
    sink_token_length=0, softcap=0.0, rotary_interleaved=True, num_splits=1, pack_gqa=None,
    sm_margin=0,
):  # fmt: skip
    unused = (k_new, v_new, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
              seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k,
              rotary_cos, rotary_sin, q_descale, k_descale, v_descale, pack_gqa)  # fmt: skip
    assert all(each is None for each in unused) and num_splits == 1
    seen = version3(q.shape[1], k.shape[1], causal, *window_size)
    return *attend(q, k, v, softmax_scale, seen, softcap), None, None


def backward_3_old(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
    max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
    sink_token_length=0, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    unused = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k)
    assert all(each is None for each in unused)
    seen = version3(q.shape[1], k.shape[1], causal, *window_size)
    fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap))
    return dq, dk, dv, None


# ------------------------------------------------------------------ flash_attn_interface, new


@operators.custom_op("fake_flash_attn_3::forward", mutates_args=())
def forward_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: MAYBE = None, qv: MAYBE = None, out_: MAYBE = None,
    page_table: MAYBE = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert all(each is None for each in (k_new, qv, out_, page_table)) and num_splits == 1
    seen = version3(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return *attend(q, k, v, softmax_scale, seen, softcap), q.new_empty(0), q.new_empty(0)


@operators.custom_op("fake_flash_attn_3::backward", mutates_args=("dq", "dk", "dv"))
def backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: MAYBE = None, sequed_q: MAYBE = None, dq: MAYBE = None, dk: MAYBE = None,
    dv: MAYBE = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    assert cu_seqlens_q is None and sequed_q is None
    seen = version3(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
    fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap))
    return q.new_empty(0)


# ------------------------------------------------------------------ torch's own, by their schemas


def torch_flash_forward(
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **unused,
):  # fmt: skip
    assert (cum_seq_q, cum_seq_k, dropout_p, return_debug_mask) == (None, None, 0.0, False)
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) and not any(unused.values())
    bounds = (-1 if each is None else each for each in (window_size_left, window_size_right))
    out, lse = attend(q, k, v, scale, version2(max_q, max_k, is_causal, *bounds))
    return out, lse, *(q.new_empty(0) for _ in range(3))


def torch_flash_backward(
    dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert (cum_seq_q, cum_seq_k, dropout_p) == (None, None, 0.0)
    bounds = (-1 if each is None else each for each in (window_size_left, window_size_right))
    seen = version2(max_q, max_k, is_causal, *bounds)
    return gradients(dout, q, k, v, out, lse, scale, seen)


def custom_mask(rows: int, columns: int, kind: int) -> Tensor:
    """1: causal from the top left, 2: from the bottom right."""
    right = {0: None, 1: rows - columns, 2: 0}[kind]
    return allowed(rows, columns, None, right)


def check_vectors(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.data_ptr() % 16 == 0
        assert not any(stride * x.element_size() % 16 for stride in x.stride()[:3])


def torch_efficient_forward(
    q, k, v, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    custom_mask_type, compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    unused = (bias, cu_seqlens_q, cu_seqlens_k, seqlen_k, window_size)
    assert all(each is None for each in unused) and not dropout_p and compute_log_sumexp
    assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
    check_vectors(q, k, v)
    rows, columns = q.shape[1], k.shape[1]
    out, lse = attend(q, k, v, scale, custom_mask(rows, columns, custom_mask_type))
    lse = torch.nn.functional.pad(lse, (0, -rows % 32), value=math.inf)
    return out, lse, q.new_empty(0), q.new_empty(0), rows, columns


def torch_efficient_backward(
    dout, q, k, v, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, lse,
    dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None,
    num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    unused = (bias, cu_seqlens_q, cu_seqlens_k, num_splits_key, window_size)
    assert all(each is None for each in unused) and not dropout_p and not bias_requires_grad
    assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
    check_vectors(dout, q, k, v, out)
    rows, columns = q.shape[1], k.shape[1]
    assert (max_seqlen_q, max_seqlen_k) == (rows, columns) and out.is_contiguous()
    assert lse.is_contiguous() and lse.shape[2] == rows + -rows % 32
    assert bool((lse[:, :, rows:] == math.inf).all())
    seen = custom_mask(rows, columns, custom_mask_type)
    grads = gradients(dout, q, k, v, out, lse[:, :, :rows].contiguous(), scale, seen)
    return *grads, q.new_empty(0)
