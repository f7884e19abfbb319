"""What one attention call will do, checked and planned; a call like an earlier one is looked up."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from ds_usp.attention.pipeline import AttentionPlan, staging_bytes_by_kind
from ds_usp.attention.ring import RingCall
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores, check_score_mod
from ds_usp.attention.tuning import AUTO_TUNING, ResolvedTuning, Tuning, check_tuning
from ds_usp.attention.validation import (
    check_kv,
    check_layout,
    check_mask,
    check_tensors,
    checked_scale,
    head_split,
    plan_head_exchanges,
    refuse_dropout,
    token_layout,
)
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import RingSchedule, ring_schedule
from ds_usp.kernels.api import AttentionKernel, KernelRequest
from ds_usp.kernels.merge import slow_path_notice
from ds_usp.kernels.registry import AUTO, missing_libraries, select_kernel
from ds_usp.warn_once import warn_once

# Lengths may differ from call to call. Documents do so with every batch, and have large plans.
_MAX_CACHED_PLANS = 1024
_MAX_CACHED_DOCUMENT_PLANS = 32


def plan_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    softmax_scale: float | None,
    dropout_p: float,
    kernel: str,
    return_lse: bool = False,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORE_MOD,
    kv_layout: TokenLayout | str | None = None,
) -> tuple[str, AttentionPlan]:
    """Check this rank's part of a call; see :func:`usp_attention`. A call like an earlier one is
    not checked again.

    Returns:
        A description, which must be the same on every rank, and the plan.
    """
    sizes = tuple((x.shape, x.dtype, x.device, x.requires_grad) for x in (q, k, v))
    options = layout, kv_layout, mask, softmax_scale, dropout_p, kernel, return_lse, tuning
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    modes = torch.is_grad_enabled(), _is_deterministic(), capturing
    kind = scores.plan_key if isinstance(scores, Scores) else scores
    key = sizes, modes, type(softmax_scale), type(dropout_p), options, kind
    try:
        cached: tuple[str, AttentionPlan] | None = mesh.plans.get(key)
    except TypeError:  # an argument that cannot be hashed cannot be right; the checks say which
        cached = None
    if cached is None:
        cached = _new_plan(
            q,
            k,
            v,
            mesh=mesh,
            layouts=(layout, kv_layout),
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            kernel=kernel,
            return_lse=return_lse,
            tuning=tuning,
            scores=scores,
        )
        if len(mesh.plans) >= (_MAX_CACHED_DOCUMENT_PLANS if mask.documents else _MAX_CACHED_PLANS):
            mesh.plans.clear()
        mesh.plans[key] = cached
    signature, plan = cached
    if plan.score_mod.dropout_p:  # not part of the key: a new seed is no new plan
        signature = f"{signature}, dropout seed {scores.dropout_seed}"
    return signature, plan


def _new_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layouts: tuple[TokenLayout | str, TokenLayout | str | None],
    mask: MaskSpec,
    softmax_scale: float | None,
    dropout_p: float,
    kernel: str,
    return_lse: bool,
    tuning: Tuning,
    scores: Scores,
) -> tuple[str, AttentionPlan]:
    """:func:`plan_call` of a call like no earlier one."""
    check_tuning(tuning)
    signature = [check_tensors(q, k, v)]
    layout = token_layout(layouts[0], q, mesh)
    kv_layout = layout if layouts[1] is None else token_layout(layouts[1], k, mesh)
    signature.append(check_layout(q, "queries", mesh, layout))
    check_mask(mask, q, layout)
    signature.append(check_kv(q, k, mesh, (layout, kv_layout), mask))
    score_mod = check_score_mod(scores, dropout_p, q, one_sequence=layout == kv_layout)
    if scores.dropout_seed is None:
        refuse_dropout(dropout_p, mesh)
    split = head_split(q.shape[2], k.shape[2], mesh)
    scale = checked_scale(softmax_scale, q.shape[3])
    request = KernelRequest(
        q.device.type,
        q.dtype,
        q.shape[3],
        mask.band,
        documents=bool(mask.documents),
        value_dim=v.shape[3],
        score_mod=score_mod,
        deterministic=_is_deterministic(),
    )
    chosen = select_kernel(request, kernel)
    missing = missing_libraries(request) if kernel == AUTO else None
    _warn_slow_path(q, mesh, tuning, missing, _imbalance(layout, mask))
    resolved = tuning.resolve(split, layout, q, mesh, mask, kv_layout.seq_len)
    # The mesh keeps the plan; a plan that kept the mesh would leave its groups to the end of all.
    mesh_ref = cast(SequenceMesh, weakref.proxy(mesh))
    exchanges = plan_head_exchanges(
        split, mesh_ref, layout, kv_layout, resolved.chunks, resolved.use_copy_engines
    )
    signature.append(f"mask {mask}, scale {scale:.9g}, kernel {chosen.name}")
    sinks = scores.sinks
    trainable = sinks is not None and sinks.requires_grad and torch.is_grad_enabled()
    sinks_text = "no" if sinks is None else "learned" if trainable else "fixed"
    signature.append(f"{score_mod}, {sinks_text} sinks")
    signature += [str(resolved), "with lse" if return_lse else "without lse"]
    ring_calls = tuple(
        RingCall(mesh_ref, schedule, chosen, scale, resolved.use_copy_engines)
        for schedule in _schedules(mesh, (layout, kv_layout), mask, chosen, resolved)
    )
    staging_bytes = staging_bytes_by_kind(exchanges, ring_calls, q, v)
    plan = AttentionPlan(exchanges, ring_calls, return_lse, staging_bytes, score_mod)
    return ", ".join(signature), plan


def _schedules(
    mesh: SequenceMesh,
    layouts: tuple[TokenLayout, TokenLayout],
    mask: MaskSpec,
    kernel: AttentionKernel,
    resolved: ResolvedTuning,
) -> list[RingSchedule]:
    """The ring's steps for each part. Backward goes from the last to the first."""
    plan = partial(
        ring_schedule,
        layouts[0],
        mask,
        mesh.ring_rank,
        kernel.caps.tiles,
        resolved.gather_kv,
        kv_layout=layouts[1],
        inner=resolved.inner_ring,
    )
    pairs = [
        (plan(position=forward), plan(position=backward))
        for forward, backward in resolved.chunk_positions
    ]
    return [
        replace(
            forward,
            backward_steps=backward.backward_steps,
            max_merged_tokens=backward.max_merged_tokens,
        )
        for forward, backward in pairs
    ]


def _imbalance(layout: TokenLayout, mask: MaskSpec) -> str | None:
    """How the causal work of a ring is unbalanced by its layout; None if it is not."""
    ring = layout.ring
    # Not where the axes' order gives each ring rank early and late pieces.
    in_pieces = ring > 1 and len(layout.ring_segments(ring - 1)) == 1
    if layout.kind != TokenLayout.CALLERS_KIND or not mask.is_causal or not in_pieces:
        return None
    return (
        f"causal attention on a ring of {ring} ranks, whose tokens are {layout.kind}: the last "
        f"rank computes {2 - 1 / ring:.2f} times the mean, and the others wait for it. For "
        "balanced work ask for layout='zigzag' by name, and shard tokens, labels and positions by "
        "it: mesh.layout('zigzag', seq_len).shard(x, dim, mesh.rank)"
    )


def _warn_slow_path(
    q: torch.Tensor, mesh: SequenceMesh, tuning: Tuning, missing: str | None, work: str | None
) -> None:
    """Say what would make such calls faster, once."""
    messages = [slow_path_notice(q.device), missing, work]
    if (
        q.is_cuda
        and mesh.sp_degree > 1
        and mesh.copy_engine_unavailable
        and tuning.copies == "auto"
    ):
        messages.append(
            f"exchanges go by NCCL, not by copy engines: {mesh.copy_engine_unavailable}"
        )
    for text in filter(None, messages):
        warn_once(text, rank=dist.get_rank() if dist.is_initialized() else 0)


def _is_deterministic() -> bool:
    """Whether torch is asked for the same bits every time, and not only to warn."""
    requested = torch.are_deterministic_algorithms_enabled()
    return requested and not torch.is_deterministic_algorithms_warn_only_enabled()
