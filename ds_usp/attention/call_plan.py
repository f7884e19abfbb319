"""Planning of one attention call: arguments checked, plan made or found in the mesh's cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from ds_usp.attention.plan import AttentionPlan, RingCall
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores, check_score_mod
from ds_usp.attention.tuning import AUTO_TUNING, ResolvedTuning, Tuning, check_tuning
from ds_usp.attention.validation import (
    ChunkExchanges,
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
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ring_schedule import ChunkPosition, RingSchedule, ring_schedule
from ds_usp.kernels.api import AttentionKernel, KernelRequest
from ds_usp.kernels.merge import slow_path_notice
from ds_usp.kernels.registry import (
    AUTO,
    check_kernel_name,
    missing_libraries,
    select_kernel,
)
from ds_usp.kernels.score_mod import ScoreMod
from ds_usp.warn_once import warn_once

# Lengths may differ from call to call. Documents do so with every batch, and have large plans.
_MAX_CACHED_PLANS = 1024
_MAX_CACHED_DOCUMENT_PLANS = 32
_DETERMINISTIC_ERROR = 2  # torch's mode that refuses nondeterministic kernels; 1 warns of them


class AttentionOptions(NamedTuple):
    """One call of attention without q, k and v; see :func:`ds_usp.usp_attention`."""

    mesh: SequenceMesh
    layout: TokenLayout | str
    mask: MaskSpec
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    kernel: str = AUTO
    return_lse: bool = False
    tuning: Tuning = AUTO_TUNING
    scores: Scores = NO_SCORE_MOD
    kv_layout: TokenLayout | str | None = None

    @property
    def key(self) -> Hashable:
        """All of it but the mesh and the values of the scores' tensors and seed: calls with equal
        keys and alike tensors share a plan. An argument of a wrong type may not be hashable."""
        scores: object = self.scores
        if scores is not NO_SCORE_MOD and isinstance(scores, Scores):
            scores = scores.plan_key
        types = type(self.softmax_scale), type(self.dropout_p)
        return self[1:8], self.kv_layout, scores, types


def plan_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[str, AttentionPlan]:
    """Check a call on this rank and plan it, or look its plan up: a call like an earlier one is
    not checked again.

    Returns:
        The call signature, which must be the same on every rank, and the plan.
    """
    given: tuple[object, ...] = q, k, v
    if not (
        isinstance(given[0], torch.Tensor)
        and isinstance(given[1], torch.Tensor)
        and isinstance(given[2], torch.Tensor)
    ):
        names = ", ".join(type(x).__name__ for x in given)
        raise ConfigError(f"q, k and v must be tensors [b, s_local, heads, head_dim], got {names}")
    plans, scores = options.mesh.plans, options.scores
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (
        (q.shape, q.dtype, q.device, q.requires_grad),
        (k.shape, k.dtype, k.device, k.requires_grad),
        (v.shape, v.dtype, v.device, v.requires_grad),
        (
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode() == _DETERMINISTIC_ERROR,
            capturing,
        ),
        options.key,
    )
    try:
        cached: tuple[str, AttentionPlan] | None = plans.get(key)
    except TypeError:  # an argument that cannot be hashed cannot be right; the checks say which
        cached = None
    if cached is None:
        cached = _new_plan(q, k, v, options)
        has_documents = bool(options.mask.documents)
        if len(plans) >= (_MAX_CACHED_DOCUMENT_PLANS if has_documents else _MAX_CACHED_PLANS):
            plans.clear()
        plans[key] = cached
    signature, plan = cached
    if plan.score_mod.dropout_p:  # the key has no seed: another one needs no new plan
        signature = f"{signature}, dropout seed {scores.dropout_seed}"
    return signature, plan


def _new_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[str, AttentionPlan]:
    """:func:`plan_call` of a call like no earlier one."""
    mesh, _, mask, softmax_scale, dropout_p, kernel, return_lse, tuning, scores, _ = options
    check_tuning(tuning)
    signature = [check_tensors(q, k, v)]
    layout = token_layout(options.layout, q, mesh)
    kv_layout = layout
    if options.kv_layout is not None:
        kv_layout = token_layout(options.kv_layout, k, mesh)
    signature.append(check_layout(q, "queries", mesh, layout))
    check_mask(mask, q, layout)
    signature.append(check_kv(q, k, mesh, (layout, kv_layout), mask))
    score_mod = check_score_mod(scores, dropout_p, q, one_sequence=layout == kv_layout)
    if scores.dropout_seed is None:
        refuse_dropout(dropout_p, mesh)
    split = head_split(q.shape[2], k.shape[2], mesh)
    scale = checked_scale(softmax_scale, q.shape[3])
    request = _kernel_request(q, v, mask, score_mod)
    check_kernel_name(kernel)  # before the cache of select_kernel, which hashes it
    chosen = select_kernel(request, kernel)
    missing = missing_libraries(request) if kernel == AUTO else None
    _warn_slow_path(q, mesh, tuning, missing, _imbalance(layout, mask))
    sinks, grad = scores.sinks, torch.is_grad_enabled()
    trainable = grad and sinks is not None and sinks.requires_grad
    # The same on all ranks: the signature has these flags.
    backward = trainable or (grad and (q.requires_grad or k.requires_grad or v.requires_grad))
    resolved = tuning.resolve(
        split,
        layout,
        q,
        mesh,
        mask,
        kv_layout.seq_len,
        backward=backward,
        varlen=chosen.caps.varlen,
    )
    # The mesh caches the plan: a reference back would keep its process groups until the exit.
    mesh_ref = cast(SequenceMesh, weakref.proxy(mesh))
    exchanges = plan_head_exchanges(
        split, mesh_ref, layout, kv_layout, resolved.chunks, resolved.use_copy_engines
    )
    signature.append(f"mask {mask}, scale {scale:.9g}, kernel {chosen.name}")
    sinks_text = "no" if sinks is None else "learned" if trainable else "fixed"
    signature.append(f"{score_mod}, {sinks_text} sinks")
    signature += [str(resolved), "with lse" if return_lse else "without lse"]
    schedules = _schedules(mesh, (layout, kv_layout), mask, chosen, resolved)
    calls_by_position = {
        position: RingCall(mesh_ref, schedule, chosen, scale, resolved.use_copy_engines)
        for position, schedule in schedules.items()
    }
    ring_calls = tuple(calls_by_position[position] for position in resolved.chunk_positions)
    staging_bytes = _staging_bytes(exchanges, ring_calls, q, v, backward=backward)
    plan = AttentionPlan.of_chunks(
        exchanges, ring_calls, return_lse, staging_bytes, score_mod, q.dtype, backward=backward
    )
    signature.append(f"schedule {plan.digest}")
    return ", ".join(signature), plan


def _kernel_request(
    q: torch.Tensor, v: torch.Tensor, mask: MaskSpec, score_mod: ScoreMod
) -> KernelRequest:
    """What the kernel of a call must be able to do."""
    return KernelRequest(
        q.device.type,
        q.dtype,
        q.shape[3],
        mask.band,
        documents=bool(mask.documents),
        value_dim=v.shape[3],
        score_mod=score_mod,
        deterministic=torch.get_deterministic_debug_mode() == _DETERMINISTIC_ERROR,
    )


def _schedules(
    mesh: SequenceMesh,
    layouts: tuple[TokenLayout, TokenLayout],
    mask: MaskSpec,
    kernel: AttentionKernel,
    resolved: ResolvedTuning,
) -> dict[tuple[ChunkPosition, ChunkPosition], RingSchedule]:
    """The ring schedule of each position of a chunk, forward and backward: most chunks share one,
    and what follows from it."""
    planner: Callable[..., RingSchedule] = ring_schedule
    if resolved.inner_ring is not None:
        from ds_usp.experimental.double_ring import double_ring_schedule

        planner = partial(double_ring_schedule, inner=resolved.inner_ring)
    plan = partial(
        planner,
        layouts[0],
        mask,
        mesh.ring_rank,
        kernel.caps.tiles,
        resolved.gather_kv,
        kv_layout=layouts[1],
    )
    schedules = {}
    for position in dict.fromkeys(resolved.chunk_positions):
        forward, backward = (plan(position=of_pass) for of_pass in position)
        schedules[position] = replace(
            forward,
            backward_steps=backward.backward_steps,
            max_merged_tokens=backward.max_merged_tokens,
        )
    return schedules


def _staging_bytes(
    chunks: Sequence[ChunkExchanges],
    ring_calls: Sequence[RingCall],
    q: torch.Tensor,
    v: torch.Tensor,
    *,
    backward: bool,
) -> dict[str, int]:
    """Bytes of one staging slot of this rank, by kind of exchange: its largest exchange of a kind
    in either pass.

    Args:
        q, v: before the head exchange: ``[B, tokens of this rank, H, D]``, ``[B, ..., G, E]``.
        backward: a backward pass follows.

    Returns:
        ``all_to_all``, with a ring ``ring_kv`` (a block of keys and values) and before a backward
        pass ``ring_dkv`` (its gradients); empty where exchanges go by NCCL.
    """
    ring, schedules = ring_calls[0], [ring.schedule for ring in ring_calls]
    if not ring.use_copy_engines:
        return {}
    batch, dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    acc_dtype = torch.promote_types(q.dtype, torch.float32).itemsize
    sizes = {
        "all_to_all": max(
            max(
                chunk.qkv.staging_bytes(
                    batch, (dim, dim, value_dim)[: len(chunk.qkv.ranges)], q.element_size()
                ),
                chunk.out.staging_bytes(batch, (value_dim,), q.element_size()),
                chunk.out.staging_bytes(batch, (1,), acc_dtype),  # the log-sum-exp
            )
            for chunk in chunks
        )
    }
    if ring.schedule.ring_degree > 1:
        kv_heads = max(chunk.qkv.local_heads[1] for chunk in chunks)
        token_elements = batch * kv_heads * (dim + value_dim)  # keys and values of one token
        sizes["ring_kv"] = ring.schedule.max_local_tokens * token_elements * q.element_size()
        if not backward:
            return sizes
        tokens = ring.schedule.max_recv_tokens
        if ring.kernel.caps.writes_grads_in_place:  # a rank's own gradients beside those that leave
            tokens = max(tokens, *(schedule.max_merged_tokens for schedule in schedules))
        grad_dtype = ring.kernel.caps.grad_dtype(q.dtype)
        sizes["ring_dkv"] = tokens * token_elements * grad_dtype.itemsize
    return sizes


def _imbalance(layout: TokenLayout, mask: MaskSpec) -> str | None:
    """The message about causal work that the layout does not balance; None if it does."""
    ring = layout.ring
    # Not where the axes' order gives each ring rank early and late tokens.
    in_pieces = ring > 1 and len(layout.ring_segments(ring - 1)) == 1
    if layout.kind != TokenLayout.CALLERS_KIND or not mask.is_causal or not in_pieces:
        return None
    return (
        f"causal attention on a ring of {ring} ranks, whose layout is {layout.kind}: the last "
        f"rank computes {2 - 1 / ring:.2f} times the mean, and the others wait for it. For "
        "balanced work give layout='zigzag', and shard tokens, labels and positions by "
        "it: mesh.layout('zigzag', seq_len).shard(x, dim, mesh.rank)"
    )


def _warn_slow_path(
    q: torch.Tensor, mesh: SequenceMesh, tuning: Tuning, missing: str | None, work: str | None
) -> None:
    """Warn once about what would make such calls faster."""
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
