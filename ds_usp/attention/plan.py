"""Planning of one attention call: its arguments are checked, and become data: the signature that
all ranks compare, the head chunks and the two schedules. Each rank plans for itself, within
``check_on_all_ranks``: nothing is sent. The mesh caches plans."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from ds_usp.attention.kv_exchange import KVTransfer, kv_transfers
from ds_usp.attention.scores import PLAIN_SCORES, Scores, check_scores
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
from ds_usp.comm.call_record import Signature
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import without_multicast
from ds_usp.errors import ConfigError, warn_once
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import (
    Instr,
    Schedule,
    exchange_order,
    exposed_posts,
    pipeline_schedule,
)
from ds_usp.geometry.ring_schedule import ChunkPosition, RingSchedule, RingStep, ring_schedule
from ds_usp.kernels.api import AttentionKernel, KernelRequest
from ds_usp.kernels.merge import slow_path_notice
from ds_usp.kernels.registry import AUTO, check_kernel_name, missing_libraries, select_kernel

# Note [what is saved for backward]
#
#   without Ulysses, or under keep_attention    q, k, v, out of this rank's tokens (shards), and lse
#   else                                        q, k, v, out of this rank's heads, and lse
#
# Shards need no memory where they are there anyway: a recomputed layer computes q, k and v again,
# and the output is saved for what follows attention. Backward then brings them to heads again, with
# dout, chunk by chunk under the kernels of other chunks: 2 q + 2 k features more to send, and
# 3 q + 2 k less to save of each layer. Without Ulysses a chunk's heads are views of the shards.

# Lengths may differ from call to call. Documents differ with every batch, and have large plans.
_MAX_CACHED_PLANS = 1024
_MAX_CACHED_DOCUMENT_PLANS = 32
_DETERMINISTIC_ERROR = 2  # torch's mode that refuses nondeterministic kernels; 1 warns of them


class AttentionOptions(NamedTuple):
    """One call of attention without q, k and v; see :func:`ds_usp.usp_attention`."""

    # A new field that a plan depends on goes into ``key`` too, which counts fields by position.
    mesh: SequenceMesh
    layout: TokenLayout | str
    mask: MaskSpec
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    kernel: str = AUTO
    return_lse: bool = False
    tuning: Tuning = AUTO_TUNING
    scores: Scores = PLAIN_SCORES
    kv_layout: TokenLayout | str | None = None
    label: str = ""

    @property
    def key(self) -> Hashable:
        """All of it but mesh, label and the values of the sinks, for :func:`plan_call`. An argument
        of a wrong type may not be hashable."""
        scores: object = self.scores
        if scores is not PLAIN_SCORES and isinstance(scores, Scores):
            scores = scores.plan_key
        return self[1:8], self.kv_layout, scores, type(self.softmax_scale)  # layout to tuning


@dataclass(frozen=True)
class RingCall:
    """Ring attention of one head chunk on this rank, without its tensors: the ``schedule`` of its
    steps, their ``kernel``, the ``scale`` of the scores, ``use_copy_engines`` for keys, values and
    their gradients. ``mesh`` is a weak proxy, as the mesh caches plans."""

    mesh: SequenceMesh
    schedule: RingSchedule
    kernel: AttentionKernel
    scale: float
    use_copy_engines: bool = False

    @cached_property
    def forward_transfers(self) -> tuple[KVTransfer, ...]:
        return kv_transfers(self.schedule.steps, self.schedule.ring_rank)

    @cached_property
    def backward_transfers(self) -> tuple[KVTransfer, ...]:
        """The KV exchanges of the backward pass, with those of their gradients."""
        return kv_transfers(self.schedule.backward_steps, self.schedule.ring_rank)

    def writes_block_in_place(self, step: RingStep) -> bool:
        """Whether a step's first backward kernel call writes the KV gradients of all its tokens
        into a send buffer, which :func:`_staging_bytes` makes as large."""
        if not self.kernel.caps.writes_grads_in_place or not step.calls:
            return False
        call = step.calls[0]
        return call.tile is not None and call.k_span == (0, step.num_kv_tokens)


def stages_return(ring: RingCall, dtype: torch.dtype) -> bool:
    """Whether a chunk's backward is one kernel call that can write its gradients into the return's
    send buffer, of this dtype. With a ring they are summed with those of other ranks first."""
    caps, schedule = ring.kernel.caps, ring.schedule
    if not caps.writes_grads_in_place or schedule.ring_degree > 1:
        return False
    calls = sum(len(step.calls) for step in schedule.backward_steps)
    return calls == 1 and caps.grad_dtype(dtype) == dtype


class SavedChunk(NamedTuple):
    """Tensors of one chunk saved for backward: q ``[b, S, h, d]``, k ``[b, T, g, d]``,
    v ``[b, T, g, e]``, out ``[b, S, h, e]``, lse ``[b, h, S]``: S queries and T keys of the ring
    rank, the chunk's heads of this rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that one attention over a mesh needs besides its tensors.

    Args:
        chunks, ring_calls: the head exchanges and the ring attention of each head chunk.
        forward, backward: the schedules of this rank; backward is empty without gradients.
        saves_shards: backward starts from shards of q, k, v and the output, and exchanges them.
        return_lse: the caller asks for the log-sum-exp too.
        staging_bytes: as of :func:`_staging_bytes`.
    """

    chunks: tuple[ChunkExchanges, ...]
    ring_calls: tuple[RingCall, ...]
    forward: Schedule
    backward: Schedule
    return_lse: bool
    staging_bytes: Mapping[str, int]
    saves_shards: bool

    @classmethod
    def of_chunks(
        cls,
        chunks: tuple[ChunkExchanges, ...],
        ring_calls: tuple[RingCall, ...],
        return_lse: bool,
        staging_bytes: Mapping[str, int],
        dtype: torch.dtype,
        *,
        backward: bool,
        saves_shards: bool,
    ) -> AttentionPlan:
        """Write the schedules of a plan, for q, k and v of this dtype; the backward one only with
        ``backward``."""
        ulysses = ring_calls[0].mesh.ulysses_degree > 1
        write = partial(pipeline_schedule, [ring.schedule for ring in ring_calls], ulysses=ulysses)
        forward_schedule = write(backward=False, return_lse=return_lse)
        backward_schedule: Schedule = ()
        if backward:
            one_call = ulysses and all(stages_return(ring, dtype) for ring in ring_calls)
            stage = one_call and all(chunk.has_kv for chunk in chunks)
            backward_schedule = write(backward=True, stage_return=stage, from_shards=saves_shards)
        schedules = forward_schedule, backward_schedule
        return cls(chunks, ring_calls, *schedules, return_lse, staging_bytes, saves_shards)

    @cached_property
    def mesh(self) -> SequenceMesh:
        return self.ring_calls[0].mesh

    @cached_property
    def local_heads(self) -> bool:
        """This rank computes all heads of its tokens: there is no head exchange."""
        return self.mesh.ulysses_degree == 1

    @cached_property
    def single_shot(self) -> bool:
        """One chunk and no head exchange: the inputs are used as they are."""
        return self.local_heads and len(self.chunks) == 1

    @cached_property
    def forward_exposed(self) -> frozenset[Instr]:
        return exposed_posts(self.forward)

    @cached_property
    def backward_exposed(self) -> frozenset[Instr]:
        return exposed_posts(self.backward)

    @cached_property
    def digest(self) -> str:
        """A hash of both passes' posts, which all ranks must make in one order."""
        text = f"{exchange_order(self.forward)} | {exchange_order(self.backward)}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def reserve_staging(self, device: torch.device) -> None:
        """Reserve staging buffers of copy engines for a pass. Collective where they are too small,
        on all ranks that exchange the kind at once, as all ask for the same sizes.

        Raises:
            MeshError: the memory cannot be shared, or a CUDA graph is being captured.
        """
        if self.mesh.needs_reserve(self.staging_bytes):
            with without_multicast():
                self.mesh.reserve(self.staging_bytes, device)

    def pack_saved(
        self, saved: Sequence[SavedChunk], shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what is saved for backward: the shards of q, k, v and the output, and each chunk's
        log-sum-exp; or the tensors of all chunks one after the other, k and v with the first that
        uses them. :class:`BackwardPass` of passes.py takes either."""
        # The op's meta function (custom_ops.py) keeps the second order too.
        if self.saves_shards:
            return [*shards, *[chunk.lse for chunk in saved]]
        tensors: list[torch.Tensor] = []
        for chunk, (q, k, v, out, lse) in zip(self.chunks, saved, strict=True):
            tensors += (q, k, v, out, lse) if chunk.has_kv else (q, out, lse)
        return tensors

    def unpack_saved(self, tensors: Sequence[torch.Tensor]) -> list[SavedChunk]:
        """Return the chunks that :meth:`pack_saved` was given, for the backward pass; not called
        with ``saves_shards``, where each chunk's q, k, v and output are exchanged anew."""
        saved, start = list[SavedChunk](), 0
        for chunk in self.chunks:
            stop = start + (5 if chunk.has_kv else 3)  # tensors of this chunk
            q, *kv, out, lse = tensors[start:stop]
            k, v = kv or (saved[chunk.kv_chunk].k, saved[chunk.kv_chunk].v)
            saved.append(SavedChunk(q, k, v, out, lse))
            start = stop
        return saved


# Note [one plan for all layers and steps]
#
# A model calls attention with the same few shapes thousands of times, and a plan takes
# milliseconds. The key has all that a plan or a refusal depends on: options, shapes, dtypes, which
# of q, k and v require gradients, the grad mode, deterministic algorithms, capture of a CUDA graph.
# It has no values of tensors: these come with the call. Documents differ from batch to batch and
# have large plans, so few of these plans are kept.


def plan_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    *,
    recomputed: bool = False,
) -> tuple[Signature, AttentionPlan]:
    """Check a call on this rank and plan it, or look its plan up: a call like an earlier one is not
    checked again. Returns the signature that the ranks compare too.

    Args:
        q, k, v: ``[b, s, h, d]``, ``[b, t, g, d]``, ``[b, t, g, e]``, of this rank's tokens.
        recomputed: q, k and v are computed again for backward, as under ``keep_attention``.

    Raises:
        ConfigError, LayoutError, UnsupportedAttentionError: the call cannot be served.
    """
    tensors: tuple[object, ...] = q, k, v
    if not (
        isinstance(tensors[0], torch.Tensor)
        and isinstance(tensors[1], torch.Tensor)
        and isinstance(tensors[2], torch.Tensor)
        and q.layout is k.layout is v.layout is torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
    ):
        kinds = [type(x).__name__ for x in tensors]
        for i, x in enumerate(tensors):
            if isinstance(x, torch.Tensor) and (x.is_nested or x.layout is not torch.strided):
                kinds[i] += " nested" if x.is_nested else f" {x.layout}"
        names = ", ".join(kinds)
        raise ConfigError(
            f"q, k and v must be dense tensors [b, s_local, heads, head_dim], got {names}"
        )
    plans = options.mesh.plans
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (
        (q.shape, q.dtype, q.device, q.requires_grad),
        (k.shape, k.dtype, k.device, k.requires_grad),
        (v.shape, v.dtype, v.device, v.requires_grad),
        (
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode() == _DETERMINISTIC_ERROR,
            capturing,
            recomputed,
        ),
        options.key,
    )
    try:
        cached: tuple[Signature, AttentionPlan] | None = plans.get(key)
    except TypeError:  # an argument that cannot be hashed cannot be right; the checks say which
        cached = None
    if cached is None:
        cached = _new_plan(q, k, v, options, recomputed or options.mesh.ulysses_degree == 1)
        has_documents = bool(options.mask.documents)
        if len(plans) >= (_MAX_CACHED_DOCUMENT_PLANS if has_documents else _MAX_CACHED_PLANS):
            plans.clear()
        plans[key] = cached
    signature, plan = cached
    if options.label:
        signature = Signature.of(signature, f"label {options.label}")
    return signature, plan


def _new_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, saves_shards: bool
) -> tuple[Signature, AttentionPlan]:
    """:func:`plan_call` of a new call. All that decides what is sent must be in the signature,
    which ranks compare before they use the plan. ``saves_shards``: as of :class:`AttentionPlan`."""
    mesh, _, mask, softmax_scale, dropout_p, kernel, return_lse, tuning, scores, *_ = options
    check_tuning(tuning)
    parts: list[Signature | str] = [check_tensors(q, k, v)]
    layout = token_layout(options.layout, q, mesh)
    kv_layout = layout
    if options.kv_layout is not None:
        kv_layout = token_layout(options.kv_layout, k, mesh)
    parts.append(check_layout(q, "queries", mesh, layout))
    check_mask(mask, q, layout)
    parts.append(check_kv(q, k, mesh, (layout, kv_layout), mask))
    check_scores(scores, q)
    refuse_dropout(dropout_p, mesh)
    split = head_split(q.shape[2], k.shape[2], mesh)
    scale = checked_scale(softmax_scale, q.shape[3])
    # A kernel is chosen before the tuning: whether it takes documents in one call changes the
    # chunks.
    request = KernelRequest(
        q.device.type,
        q.dtype,
        q.shape[3],
        mask.band,
        documents=bool(mask.documents),
        value_dim=v.shape[3],
        softcap=scores.softcap,
        deterministic=torch.get_deterministic_debug_mode() == _DETERMINISTIC_ERROR,
    )
    check_kernel_name(kernel)  # before the cache of select_kernel, which hashes it
    chosen = select_kernel(request, kernel)
    missing = missing_libraries(request) if kernel == AUTO else None
    _warn_slow_path(q, mesh, tuning, missing, _imbalance(layout, mask))
    sinks, grad = scores.sinks, torch.is_grad_enabled()
    trainable = grad and sinks is not None and sinks.requires_grad
    # The same on all ranks: the signature says "with gradients" and "learned sinks".
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
        split,
        mesh_ref,
        layout,
        kv_layout,
        resolved.chunks,
        resolved.use_copy_engines,
        resolved.use_fused,
    )
    parts += f"mask {mask}", f"scale {scale:.9g}", f"kernel {chosen.name}"
    sinks_text = "no" if sinks is None else "learned" if trainable else "fixed"
    parts += f"softcap {scores.softcap or 'none'}", f"{sinks_text} sinks"
    parts += *resolved.texts, "with lse" if return_lse else "without lse"
    parts += ("shards saved" if saves_shards else "heads saved",)
    schedules = _schedules(mesh, (layout, kv_layout), mask, chosen, resolved)
    calls_by_position = {
        position: RingCall(mesh_ref, schedule, chosen, scale, resolved.use_copy_engines)
        for position, schedule in schedules.items()
    }
    ring_calls = tuple(calls_by_position[position] for position in resolved.chunk_positions)
    flags = {"backward": backward, "saves_shards": saves_shards}
    staging_bytes = _staging_bytes(exchanges, ring_calls, q, v, **flags)
    plan = AttentionPlan.of_chunks(
        exchanges, ring_calls, return_lse, staging_bytes, q.dtype, **flags
    )
    return Signature.of(*parts, f"schedule {plan.digest}"), plan


def _schedules(
    mesh: SequenceMesh,
    layouts: tuple[TokenLayout, TokenLayout],
    mask: MaskSpec,
    kernel: AttentionKernel,
    resolved: ResolvedTuning,
) -> dict[tuple[ChunkPosition, ChunkPosition], RingSchedule]:
    """One ring schedule for each pair (forward, backward) of positions that chunks have, with the
    steps of both passes. ``ring_schedule`` is cached; ``planner/attention_time.py`` joins the steps
    of both passes too, and needs no ``max_merged_tokens``. ``max_recv_tokens`` is equal in both, as
    no pair mixes "only" with another position."""
    query_layout, kv_layout = layouts
    plan = partial(
        ring_schedule,
        query_layout,
        mask,
        mesh.ring_rank,
        kernel.caps.tiles,
        resolved.gather_kv,
        kv_layout=kv_layout,
    )
    schedules = {}
    for position in dict.fromkeys(resolved.chunk_positions):
        forward, backward = (plan(position=pass_position) for pass_position in position)
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
    saves_shards: bool,
) -> dict[str, int]:
    """Bytes of one staging slot, by kind of exchange, the largest of a kind in either pass:
    ``all_to_all``, with a ring ``ring_kv`` (a block of keys and values) and before a backward pass
    ``ring_dkv`` (its gradients), ``fused`` (the largest tensor) where FlashInfer's kernel carries
    one. Empty where exchanges go by NCCL.

    Args:
        q, v: before the head exchange: ``[B, tokens of this rank, H, D]``, ``[B, ..., G, E]``.
        backward: a backward pass follows; ``saves_shards``: it exchanges q, k, v and out too.
    """
    # Ranks that exchange a kind reserve it together, of the same size: numbers of tokens are maxima
    # over ranks, and the ranks of a ring compute the same heads. Beside ``fused``, all_to_all is
    # for a CUDA graph of the call, which takes copy engines.
    ring, schedules = ring_calls[0], [ring.schedule for ring in ring_calls]
    if not ring.use_copy_engines:
        return {}
    batch, dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    acc_itemsize = torch.promote_types(q.dtype, torch.float32).itemsize
    itemsize, qkv_dims = q.element_size(), (dim, dim, value_dim)

    def all_to_all(chunk: ChunkExchanges) -> int:
        sizes = [
            chunk.qkv.staging_bytes(batch, qkv_dims[: len(chunk.qkv.ranges)], itemsize),
            chunk.out.staging_bytes(batch, (value_dim,), itemsize),
            chunk.out.staging_bytes(batch, (1,), acc_itemsize),  # the log-sum-exp
        ]
        if backward and saves_shards:
            dims = *qkv_dims[: len(chunk.shards.ranges) - 2], value_dim, value_dim
            sizes.append(chunk.shards.staging_bytes(batch, dims, itemsize))
        return max(sizes)

    sizes = {"all_to_all": max(map(all_to_all, chunks))}
    fused = max(
        max(
            chunk.qkv.fused_bytes(batch, qkv_dims, itemsize),
            chunk.out.fused_bytes(batch, (value_dim,), itemsize),
            chunk.out.fused_bytes(batch, (1,), acc_itemsize),
        )
        for chunk in chunks
    )
    if fused:
        sizes["fused"] = fused
    if ring.schedule.ring_degree > 1:
        heads_of_qkv = [chunk.qkv.local_heads for chunk in chunks if chunk.has_kv]
        kv_heads = max(k_heads for _q_heads, k_heads, _v_heads in heads_of_qkv)
        token_elements = batch * kv_heads * (dim + value_dim)  # keys and values of one token
        sizes["ring_kv"] = ring.schedule.max_local_tokens * token_elements * itemsize
        if not backward:
            return sizes
        tokens = ring.schedule.max_recv_tokens
        if ring.kernel.caps.writes_grads_in_place:  # own KV too (KVGradExchange.staging_views)
            tokens = max(tokens, *(schedule.max_merged_tokens for schedule in schedules))
        grad_dtype = ring.kernel.caps.grad_dtype(q.dtype)
        sizes["ring_dkv"] = tokens * token_elements * grad_dtype.itemsize
    return sizes


def _imbalance(layout: TokenLayout, mask: MaskSpec) -> str | None:
    """The warning that contiguous shards do not balance causal work over the ring; else None."""
    ring = layout.ring
    # CALLERS_KIND is contiguous; the axes' order may still give ring ranks early and late tokens.
    one_run_each = ring > 1 and len(layout.ring_segments(ring - 1)) == 1
    if layout.kind != TokenLayout.CALLERS_KIND or not mask.is_causal or not one_run_each:
        return None
    return (
        f"causal attention on a ring of {ring} ranks, whose layout is {layout.kind}: the last "
        f"rank computes {2 - 1 / ring:.2f} times the mean, and the others wait for it. For "
        "balanced work give layout='zigzag', and shard tokens, labels and positions by "
        "it: mesh.layout('zigzag', seq_len).shard(x, dim, mesh.rank)"
    )


def _warn_slow_path(
    q: torch.Tensor, mesh: SequenceMesh, tuning: Tuning, *warnings: str | None
) -> None:
    """Warn once of each thing that would make such calls faster: of ``warnings`` and of its own."""
    messages, why_not = [slow_path_notice(q.device), *warnings], mesh.copy_engine_unavailable
    if why_not and q.is_cuda and mesh.sp_degree > 1 and tuning.copies == "auto":
        messages.append(f"exchanges go by NCCL, not by copy engines: {why_not}")
    for text in filter(None, messages):
        warn_once(text, rank=dist.get_rank() if dist.is_initialized() else 0)
