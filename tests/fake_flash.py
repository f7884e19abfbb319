"""Attention libraries for CPUs: their signatures; what they compute is in fake_math.py.

The mathematics is written out in fp64, so what a kernel hands over wrongly shows in the results.
The functions stand for: flash-attn 2.6 (plain functions) and 2.7 to 2.8 (operators of torch),
flash_attn_interface of January 2025 (plain) and of August 2026 (operators), flash_attn.cute, and
torch's own.
"""

import math
from functools import partial
from types import ModuleType
from typing import Any, Optional

import torch
from fake_math import (
    allowed,
    attend,
    attend_packed,
    fill,
    gradients,
    gradients_packed,
    packed2,
    packed3,
    version2,
    version3,
)
from torch import Tensor
from torch import library as operators

MAYBE = Optional[Tensor]  # noqa: UP045  torch reads an operator's schema off these


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
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert not dropout_p and alibi_slopes is None and rng_state is None
    seen = version2(q.shape[1], k.shape[1], causal, *window_size)
    fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap))
    return dq, dk, dv, None


def varlen_forward_26(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None,
):  # fmt: skip
    assert not dropout_p and alibi_slopes is None and not return_softmax
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seen = packed2(max_seqlen_k, causal, *window_size)
    out, lse = attend_packed(q, k, v, softmax_scale, seen, *lengths, softcap=softcap)
    return out, q, k, v, out, lse, None, None


def varlen_backward_26(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    deterministic, rng_state=None,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert not dropout_p and alibi_slopes is None and rng_state is None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seen = packed2(max_seqlen_k, causal, *window_size)
    grads = gradients_packed(
        dout, q, k, v, out, softmax_lse, softmax_scale, seen, *lengths, softcap=softcap
    )
    fill((dq, dk, dv), grads)
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
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert not dropout_p and alibi_slopes is None and rng_state is None
    seen = version2(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap))
    return q.new_empty(0)


@operators.custom_op("fake_flash_attn::varlen_forward", mutates_args=())
def varlen_forward_28(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: MAYBE = None, return_softmax: bool = False, block_table: MAYBE = None,
    leftpad_k: MAYBE = None, seqused_k: MAYBE = None, zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert not dropout_p and alibi_slopes is None and not return_softmax
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seen = packed2(max_seqlen_k, causal, window_size_left, window_size_right)
    found = attend_packed(q, k, v, softmax_scale, seen, *lengths, softcap=softcap)
    return *found, q.new_empty(0), q.new_empty(0)


@operators.custom_op("fake_flash_attn::varlen_backward", mutates_args=("dq", "dk", "dv"))
def varlen_backward_28(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: MAYBE, dk: MAYBE, dv: MAYBE, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: MAYBE,
    deterministic: bool, rng_state: MAYBE = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert not dropout_p and alibi_slopes is None and rng_state is None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seen = packed2(max_seqlen_k, causal, window_size_left, window_size_right)
    grads = gradients_packed(
        dout, q, k, v, out, softmax_lse, softmax_scale, seen, *lengths, softcap=softcap
    )
    fill((dq, dk, dv), grads)
    return q.new_empty(0)


# ------------------------------------------------------------------ flash_attn_interface, old


def forward_3_old(
    q, k, v, k_new, v_new, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
    rotary_sin, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
    sink_token_length=0, softcap=0.0, rotary_interleaved=True, num_splits=1, pack_gqa=None,
    sm_margin=0,
):  # fmt: skip
    unused = (k_new, v_new, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx,
              leftpad_k, rotary_cos, rotary_sin, q_descale, k_descale, v_descale,
              pack_gqa)  # fmt: skip
    assert all(each is None for each in unused) and num_splits == 1
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is not None:
        seen = packed3(causal, *window_size)
        return *attend_packed(q, k, v, softmax_scale, seen, *lengths, softcap=softcap), None, None
    assert lengths == (None,) * 4
    seen = version3(q.shape[1], k.shape[1], causal, *window_size)
    return *attend(q, k, v, softmax_scale, seen, softcap), None, None


def backward_3_old(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
    max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
    sink_token_length=0, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert sequed_q is None and sequed_k is None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is not None:
        seen = packed3(causal, *window_size)
        grads = gradients_packed(
            dout, q, k, v, out, softmax_lse, softmax_scale, seen, *lengths, softcap=softcap
        )
    else:
        assert lengths == (None,) * 4
        seen = version3(q.shape[1], k.shape[1], causal, *window_size)
        grads = gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap)
    fill((dq, dk, dv), grads)
    return dq, dk, dv, None


# ------------------------------------------------------------------ flash_attn_interface, new


@operators.custom_op("fake_flash_attn_3::forward", mutates_args=())
def forward_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: MAYBE = None, qv: MAYBE = None, out_: MAYBE = None,
    cu_seqlens_q: MAYBE = None, cu_seqlens_k: MAYBE = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, page_table: MAYBE = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert all(each is None for each in (k_new, qv, out_, page_table)) and num_splits == 1
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is not None:
        seen = packed3(causal, window_size_left, window_size_right)
        found = attend_packed(q, k, v, softmax_scale, seen, *lengths, softcap=softcap)
        return *found, q.new_empty(0), q.new_empty(0)
    assert lengths == (None,) * 4
    seen = version3(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return *attend(q, k, v, softmax_scale, seen, softcap), q.new_empty(0), q.new_empty(0)


@operators.custom_op("fake_flash_attn_3::backward", mutates_args=("dq", "dk", "dv"))
def backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: MAYBE = None, cu_seqlens_k: MAYBE = None, sequed_q: MAYBE = None,
    sequed_k: MAYBE = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: MAYBE = None, dk: MAYBE = None, dv: MAYBE = None, softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert sequed_q is None and sequed_k is None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is not None:
        seen = packed3(is_causal, window_size_left, window_size_right)
        grads = gradients_packed(
            dout, q, k, v, out, softmax_lse, softmax_scale, seen, *lengths, softcap=softcap
        )
    else:
        assert lengths == (None,) * 4
        seen = version3(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
        grads = gradients(dout, q, k, v, out, softmax_lse, softmax_scale, seen, softcap)
    fill((dq, dk, dv), grads)
    return q.new_empty(0)


# ------------------------------------------------------------------ flash_attn.cute


def forward_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, *, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, return_lse=False, **unused,
):  # fmt: skip
    softcap = softcap or 0.0
    assert return_lse and not unused and (qv, seqused_q, seqused_k) == (None, None, None)
    window = window4(causal, window_size_left, window_size_right)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is not None:
        seen = partial(allowed, left=window[0], right=window[1])
        return *attend_packed(q, k, v, softmax_scale, seen, *lengths, softcap=softcap), None, None
    assert lengths == (None,) * 4
    seen = allowed(q.shape[1], k.shape[1], *window)
    return *attend(q, k, v, softmax_scale, seen, softcap), None, None


def backward_4(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
    window_size_left=None, window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None,
    dv=None,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    window = window4(causal, window_size_left, window_size_right)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is not None:
        seen = partial(allowed, left=window[0], right=window[1])
        grads = dout, q, k, v, out, lse, softmax_scale, seen
        return gradients_packed(*grads, *lengths, softcap=softcap)
    assert lengths == (None,) * 4
    seen = allowed(q.shape[1], k.shape[1], *window)
    found = gradients(dout, q, k, v, out, lse, softmax_scale, seen, softcap)
    pairs = zip((dq, dk, dv), found, strict=True)
    return tuple(x if place is None else place.copy_(x) for place, x in pairs)


def window4(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    assert not causal or (left, right) == (None, None)
    return (None, 0) if causal else (left, right)


# ------------------------------------------------------------------ torch's own, by their schemas


def torch_flash_forward(
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **unused,
):  # fmt: skip
    assert (dropout_p, return_debug_mask) == (0.0, False) and not any(unused.values())
    bounds = [-1 if each is None else each for each in (window_size_left, window_size_right)]
    if cum_seq_q is not None:
        lengths, seen = (cum_seq_q, cum_seq_k, max_q, max_k), packed2(max_k, is_causal, *bounds)
        out, lse = attend_packed(q, k, v, scale, seen, *lengths)
        return out, lse, *(q.new_empty(0) for _ in range(3))
    assert cum_seq_k is None and (max_q, max_k) == (q.shape[1], k.shape[1])
    out, lse = attend(q, k, v, scale, version2(max_q, max_k, is_causal, *bounds))
    return out, lse, *(q.new_empty(0) for _ in range(3))


def torch_flash_backward(
    dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout_p == 0.0
    bounds = [-1 if each is None else each for each in (window_size_left, window_size_right)]
    if cum_seq_q is not None:
        lengths, seen = (cum_seq_q, cum_seq_k, max_q, max_k), packed2(max_k, is_causal, *bounds)
        return gradients_packed(dout, q, k, v, out, lse, scale, seen, *lengths)
    assert cum_seq_k is None
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
