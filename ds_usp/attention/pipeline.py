"""Attention over a mesh, part by part of the heads: exchange, ring, exchange back.

While one part of the heads is computed, the next one arrives and the one before it travels home.
Nothing hides the first arrival and the last departure, so these parts are small.

Letters of the shapes: b batch, s tokens of this rank, S tokens of its ring rank, h query heads,
g key/value heads, of all ranks (in the arguments) or of one part on one rank; d head dim, e that of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ds_usp.attention.request import HeadTraffic
from ds_usp.attention.ring import (
    BlockWalk,
    RingCall,
    RingGradients,
    ring_backward,
    ring_forward,
)
from ds_usp.attention.scores import PartScores, Scores
from ds_usp.comm.lane import Cargo, Lane
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import without_multicast
from ds_usp.kernels.scores import PLAIN, ScoreSpec
from ds_usp.kernels.sinks import sink_gradient, with_sinks


@dataclass(frozen=True)
class USPCall:
    """Everything that one attention over a mesh needs besides its tensors.

    Args:
        parts: the heads, in the parts in which they are computed.
        rings: the attention of each part.
        with_lse: the log-sum-exp is asked for.
        staging: bytes that copy engines need on each rank, by kind of traffic.
        spec: what the kernel does to scores.
    """

    parts: tuple[HeadTraffic, ...]
    rings: tuple[RingCall, ...]
    with_lse: bool
    staging: Mapping[str, int]
    spec: ScoreSpec = PLAIN

    @property
    def stays(self) -> bool:
        """The heads of this rank's tokens are all computed here: no exchange, all ring or none."""
        return self.mesh.ulysses_degree == 1

    @property
    def mesh(self) -> SequenceMesh:
        """The ranks."""
        return self.rings[0].mesh

    @property
    def in_place(self) -> bool:
        """All of it is computed at once, where the tensors are."""
        return self.stays and len(self.parts) == 1

    def prepare(self, device: torch.device) -> None:
        """Make room for copy engines and groups for a double ring; collective where there is not
        enough yet."""
        if self.rings[0].schedule.windows:
            self.mesh.open_outer()
        if self.staging and self.mesh.lacks(self.staging):
            with without_multicast():
                self.mesh.reserve(self.staging, device)

    def passed(self) -> None:
        """Note that a pass by copy engines has ended well."""
        if self.staging:
            self.mesh.agreement.passes += 1

    def scores_of(self, index: int, scores: Scores, x: torch.Tensor) -> PartScores:
        """The scores of one part of a call on tensors of this batch and device."""
        part = self.parts[index]
        return PartScores(self.mesh, part, self.spec, scores, x.shape[0], x.device)

    def lane(self, device: torch.device) -> Lane:
        """Where exchanges run: with one part there is nothing to run them beside."""
        return Lane(device, beside=len(self.parts) > 1)


class Kept(NamedTuple):
    """What backward needs of one part: q ``[b, S, h, d]``, k ``[b, S, g, d]``, v ``[b, S, g, e]``,
    out ``[b, S, h, e]``, lse ``[b, h, S]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class _Come(NamedTuple):
    """One part, ready to be computed."""

    tensors: tuple[torch.Tensor, ...]
    walk: BlockWalk


def attend(
    call: USPCall, scores: Scores, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, list[Kept]]:
    """Out ``[b, s, h, e]``, the log-sum-exp ``[b, h, s]`` if asked for, and what backward needs."""

    def arrive(index: int) -> _Come:
        mine, ring = call.parts[index].qkv.to_heads((q, k, v)), call.rings[index]
        return _Come(mine, BlockWalk(ring, ring.schedule.steps, *mine[1:]))

    def leave(part: HeadTraffic, mine: Kept) -> None:
        part.out.to_sequence((mine.out,), (out,))
        if lse is not None:
            part.out.to_sequence((mine.lse.transpose(1, 2).unsqueeze(-1),), (lse,))

    call.prepare(q.device)
    lane, kept = call.lane(q.device), []
    out = q if call.in_place else q.new_empty(*q.shape[:3], v.shape[3])
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(*q.shape[:3], 1, dtype=wide) if call.with_lse else None
    with closing(_one_ahead(lane, len(call.parts), arrive)) as parts:
        for index, come in parts:
            part = call.scores_of(index, scores, q)
            result = ring_forward(call.rings[index], come.tensors[0], come.walk, part)
            if scores.sinks is not None:
                result = with_sinks(*result, part.of_heads(scores.sinks))
            mine = Kept._make((*come.tensors, *result))
            if keep or call.in_place:
                kept.append(mine)
            if not call.in_place:
                lane.run(partial(leave, call.parts[index], mine), uses=mine)
    call.passed()
    if call.in_place:
        return kept[0].out, kept[0].lse if call.with_lse else None, kept
    return out, None if lse is None else lse.squeeze(-1).transpose(1, 2), kept


def attend_backward(
    call: USPCall,
    scores: Scores,
    dout: torch.Tensor,
    shapes: Sequence[torch.Size],
    kept: Sequence[Kept],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients ``dq [b, s, h, d]``, ``dk [b, s, g, d]`` and ``dv [b, s, g, e]``, of these shapes,
    and, where sinks are learned, this rank's share of theirs ``[h]``."""

    def arrive(index: int) -> _Come:
        (mine,) = call.parts[index].out.to_heads((dout,))
        k, v = kept[index][1:3]
        ring = call.rings[index]
        return _Come((mine,), BlockWalk(ring, ring.schedule.backward_steps, k, v))

    def leave(part: HeadTraffic, mine: RingGradients) -> None:
        part.qkv.to_sequence(mine.sums(), grads)

    call.prepare(dout.device)
    grads: tuple[torch.Tensor, ...] = ()
    sinks = scores.sinks
    dsinks = torch.zeros_like(sinks) if sinks is not None and sinks.requires_grad else None
    lane = call.lane(dout.device)
    with closing(_one_ahead(lane, len(call.parts), arrive)) as parts:
        for index, come in parts:
            part = call.scores_of(index, scores, dout)
            mine = ring_backward(call.rings[index], come.tensors[0], *kept[index], come.walk, part)
            try:
                if sinks is not None and dsinks is not None:
                    share = sink_gradient(come.tensors[0], *kept[index][3:], part.of_heads(sinks))
                    part.of_heads(dsinks).copy_(share)
                if call.in_place:
                    grads = mine.result()
                    continue
                if not grads:  # as late as can be: they are as large as all that has come so far
                    grads = tuple(dout.new_empty(shape) for shape in shapes)
                lane.run(partial(leave, call.parts[index], mine), uses=mine)
            except BaseException:
                mine.close()
                raise
    call.passed()
    dq, dk, dv = grads
    return dq, dk, dv, dsinks


def _one_ahead(
    lane: Lane, parts: int, arrive: Callable[[int], _Come]
) -> Generator[tuple[int, _Come], None, None]:
    """Each part when it has come; the one after it is on its way by then. At the end the current
    stream has waited for all that was run on the lane."""
    coming: list[Cargo[_Come]] = []
    try:
        for index in range(parts):
            if not coming:
                coming.append(lane.run(partial(arrive, index)))
            if index + 1 < parts:
                coming.append(lane.run(partial(arrive, index + 1)))
            yield index, lane.take(coming.pop(0))
    finally:
        for cargo in coming:
            cargo.result.walk.close()
        lane.join()  # also after an error: nothing may write where others will allocate


def staging(
    parts: Sequence[HeadTraffic], ring: RingCall, q: torch.Tensor, v: torch.Tensor
) -> dict[str, int]:
    """Bytes of each kind of traffic that a rank packs at most at once, for copy engines.

    Args:
        q, v: ``[b, s, h, d]``, ``[b, s, g, e]``.
    """
    if not ring.copies:
        return {}
    batch, dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32).itemsize
    sizes = {
        "all_to_all": max(
            max(
                part.qkv.staging_bytes(batch, (dim, dim, value_dim), q.element_size()),
                part.out.staging_bytes(batch, (value_dim,), q.element_size()),
                part.out.staging_bytes(batch, (1,), wide),  # the log-sum-exp
            )
            for part in parts
        )
    }
    if ring.schedule.ring_degree > 1:
        token = max(part.qkv.widths()[1] for part in parts) * batch * (dim + value_dim)
        sizes["ring_kv"] = ring.schedule.most_owned * token * q.element_size()
        values = ring.schedule.most_taken_anywhere * token
        sizes["ring_dkv"] = values * (wide if ring.kernel.caps.wide_gradients else q.element_size())
    return sizes
