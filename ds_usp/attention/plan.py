"""What one attention over a mesh executes, as data: its head chunks and its two schedules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ds_usp.attention.kv_exchange import KVTransfer, kv_transfers
from ds_usp.attention.score_mod import ChunkScoreMod, Scores
from ds_usp.attention.validation import ChunkExchanges
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import without_multicast
from ds_usp.geometry.pipeline_schedule import (
    Instr,
    Schedule,
    exchange_order,
    exposed_posts,
    pipeline_schedule,
)
from ds_usp.geometry.ring_schedule import RingSchedule, RingStep
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.score_mod import PLAIN, ScoreMod


@dataclass(frozen=True)
class RingCall:
    """Ring attention of one head chunk, without its tensors.

    Args:
        use_copy_engines: blocks are copied by copy engines, else sent by NCCL/gloo P2P.
    """

    mesh: SequenceMesh
    schedule: RingSchedule
    kernel: AttentionKernel
    scale: float
    use_copy_engines: bool = False

    @cached_property
    def forward_transfers(self) -> tuple[KVTransfer, ...]:
        """The KV exchanges of the forward pass."""
        return kv_transfers(self.schedule.steps, self.schedule.ring_rank)

    @cached_property
    def backward_transfers(self) -> tuple[KVTransfer, ...]:
        """The KV exchanges of the backward pass, and those of their gradients."""
        return kv_transfers(self.schedule.backward_steps, self.schedule.ring_rank)

    @cached_property
    def outer_transfers(self) -> tuple[KVTransfer, ...]:
        """The exchanges across nodes of a double ring, in either pass."""
        return kv_transfers(self.schedule.outer_steps, self.schedule.ring_rank)

    def writes_block_in_place(self, step: RingStep) -> bool:
        """Whether a step's first backward kernel call can write the KV gradients of all tokens of
        the step into a send buffer; those of its other calls are added there."""
        if not self.kernel.caps.writes_grads_in_place or not step.calls:
            return False
        call = step.calls[0]
        return call.tile is not None and call.k_span == (0, step.num_kv_tokens)


def stages_return(ring: RingCall, dtype: torch.dtype) -> bool:
    """Whether backward is one kernel call that can write its gradients into the send buffer, in the
    dtype of the tensors. With a ring they are summed with those of other ranks first."""
    caps, schedule = ring.kernel.caps, ring.schedule
    if not caps.writes_grads_in_place or schedule.ring_degree > 1:
        return False
    calls = sum(len(step.calls) for step in schedule.backward_steps)
    return calls == 1 and caps.grad_dtype(dtype) == dtype


class SavedChunk(NamedTuple):
    """Tensors of one chunk saved for backward: q ``[b, S, h, d]``, k ``[b, S, g, d]``,
    v ``[b, S, g, e]``, out ``[b, S, h, e]``, lse ``[b, h, S]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that one attention over a mesh needs besides its tensors.

    Args:
        chunks: the head exchanges of each head chunk.
        ring_calls: the ring attention of each head chunk.
        forward, backward: the schedules of this rank.
        return_lse: the log-sum-exp is a result too.
        staging_bytes: of one staging slot, by kind of exchange; empty without copy engines.
        score_mod: what the kernel does to scores.
    """

    chunks: tuple[ChunkExchanges, ...]
    ring_calls: tuple[RingCall, ...]
    forward: Schedule
    backward: Schedule
    return_lse: bool
    staging_bytes: Mapping[str, int]
    score_mod: ScoreMod = PLAIN

    @classmethod
    def of_chunks(
        cls,
        chunks: tuple[ChunkExchanges, ...],
        ring_calls: tuple[RingCall, ...],
        return_lse: bool,
        staging_bytes: Mapping[str, int],
        score_mod: ScoreMod,
        dtype: torch.dtype,
        *,
        backward: bool,
    ) -> AttentionPlan:
        """Write the schedules of a plan.

        Args:
            dtype: of q, k and v.
            backward: there may be a backward pass.
        """
        rings = [ring.schedule for ring in ring_calls]
        ulysses = ring_calls[0].mesh.ulysses_degree > 1
        stage = (
            ulysses
            and all(stages_return(ring, dtype) for ring in ring_calls)
            and all(chunk.has_kv for chunk in chunks)
        )
        schedules = (
            pipeline_schedule(rings, ulysses=ulysses, backward=False, return_lse=return_lse),
            pipeline_schedule(rings, ulysses=ulysses, backward=True, stage_return=stage)
            if backward
            else (),
        )
        return cls(chunks, ring_calls, *schedules, return_lse, staging_bytes, score_mod)

    @cached_property
    def mesh(self) -> SequenceMesh:
        """The ranks."""
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
        """See :func:`exposed_posts`."""
        return exposed_posts(self.forward)

    @cached_property
    def backward_exposed(self) -> frozenset[Instr]:
        """See :func:`exposed_posts`."""
        return exposed_posts(self.backward)

    @cached_property
    def digest(self) -> str:
        """Of the exchanges of both passes, in the order in which every rank posts them."""
        text = f"{exchange_order(self.forward)} | {exchange_order(self.backward)}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @cached_property
    def needs_resources(self) -> bool:
        """Passes need process groups or staging buffers: :meth:`reserve_resources` must be called
        before, :meth:`mark_pass_done` after a pass."""
        return bool(self.staging_bytes or self.ring_calls[0].schedule.outer_steps)

    def reserve_resources(self, device: torch.device) -> None:
        """Open the process groups of a double ring, reserve staging buffers of copy engines and
        start a pass; collective where there are too few buffers yet."""
        if self.ring_calls[0].schedule.outer_steps:
            self.mesh.create_outer_groups()
        if self.staging_bytes:
            if self.mesh.needs_reserve(self.staging_bytes):
                with without_multicast():
                    self.mesh.reserve(self.staging_bytes, device)
            self.mesh.consistency.begin_pass()

    def mark_pass_done(self) -> None:
        """Count a pass as ended, not aborted."""
        if self.staging_bytes:
            self.mesh.consistency.end_pass()

    def score_mod_for_chunk(self, index: int, scores: Scores, x: torch.Tensor) -> ChunkScoreMod:
        """The score modifiers of one chunk, for tensors like ``x`` (batch, device)."""
        chunk = self.chunks[index]
        return ChunkScoreMod(self.mesh, chunk, self.score_mod, scores, x.shape[0], x.device)

    def pack_saved(self, saved: Sequence[SavedChunk]) -> list[torch.Tensor]:
        """The saved tensors of all chunks one after the other; chunks that share keys and values
        have them once. Not for local heads."""
        tensors: list[torch.Tensor] = []
        for chunk, (q, k, v, out, lse) in zip(self.chunks, saved, strict=True):
            tensors += (q, k, v, out, lse) if chunk.has_kv else (q, out, lse)
        return tensors

    def unpack_saved(self, tensors: Sequence[torch.Tensor]) -> list[SavedChunk]:
        """The saved tensors of each chunk, from :meth:`pack_saved`, or, without a head exchange,
        from q, k, v and out of all heads and each chunk's lse."""
        if not self.local_heads:
            saved, start = list[SavedChunk](), 0
            for chunk in self.chunks:
                stop = start + (5 if chunk.has_kv else 3)
                q, *kv, out, lse = tensors[start:stop]
                k, v = kv or saved[chunk.kv_chunk][1:3]
                saved.append(SavedChunk(q, k, v, out, lse))
                start = stop
            return saved
        views = ((*x.qkv.to_heads(tensors[:3]), *x.out.to_heads(tensors[3:4])) for x in self.chunks)
        return [SavedChunk._make((*x, lse)) for x, lse in zip(views, tensors[4:], strict=True)]
