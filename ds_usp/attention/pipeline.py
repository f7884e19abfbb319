"""Attention over a mesh, part by part of the heads: exchange, ring, exchange back.

While one part of the heads is computed, the next one arrives and the one before it travels home.
Nothing hides the first arrival and the last departure, so these parts are small. Forward three
tensors arrive and one departs, backward one arrives and three depart: it goes through the parts
from the last to the first, which is the smallest.

Letters of the shapes: b batch, s tokens of this rank, S tokens of its ring rank, h query heads,
g key/value heads, of all ranks (in the arguments) or of one part on one rank; d head dim, e that of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ds_usp.attention.ring import (
    BlockWalk,
    RingCall,
    RingGradients,
    nothing,
    ring_backward,
    ring_forward,
)
from ds_usp.attention.score_mod import PartScores, Scores
from ds_usp.attention.validation import HeadTraffic
from ds_usp.comm.all_to_all import HeadExchange
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.uniform_all_to_all import Departure, Trip
from ds_usp.config import without_multicast
from ds_usp.kernels.score_mod import PLAIN, ScoreMod
from ds_usp.kernels.sinks import apply_sinks, sink_gradient


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
    spec: ScoreMod = PLAIN

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
        if self.staging:
            self.mesh.agreement.begin_pass()

    def passed(self) -> None:
        """Note that a pass has ended well."""
        if self.staging:
            self.mesh.agreement.end_pass()

    def scores_of(self, index: int, scores: Scores, x: torch.Tensor) -> PartScores:
        """The scores of one part of a call on tensors of this batch and device."""
        part = self.parts[index]
        return PartScores(self.mesh, part, self.spec, scores, x.shape[0], x.device)

    @property
    def rings_travel(self) -> bool:
        """Keys and values of other ring ranks come here, or go there."""
        return self.rings[0].schedule.ring_degree > 1


class Kept(NamedTuple):
    """What backward needs of one part: q ``[b, S, h, d]``, k ``[b, S, g, d]``, v ``[b, S, g, e]``,
    out ``[b, S, h, e]``, lse ``[b, h, S]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class _Come(NamedTuple):
    """One part: its exchange, taken when it is computed at the latest, and its keys and values."""

    trip: Trip
    walk: BlockWalk

    def close(self) -> None:
        """After an error: nothing may stay under way."""
        try:
            self.trip.close()
        finally:
            self.walk.close()


class _Belt:
    """Brings the parts of the heads to where they are computed, ahead of it, and takes them home.

    All that computes and packs is on the current stream; copy engines and messages run beside it.
    What has to be waited for is asked for early and taken late:

    - A part is packed and sent before the part before it is computed. Then its keys and values go
      on their way around the ring, if they are here. Else they come with the part, which is sent
      another part ahead to be here by then; what comes first sets out in the middle of a part.
    - The gradients of a part that come around the ring are summed and sent home in the middle of
      the next one; where nothing comes around the ring a part goes home at once.

    Args:
        call: what is computed.
        order: the parts, in the order in which they are computed.
        send: begins a part's exchange.
        walk: lets a part's keys and values go on their way around the ring; forward they come with
            its exchange.
        backward: they are here, and what goes home has to wait for what comes around the ring.
    """

    def __init__(
        self,
        call: USPCall,
        order: Sequence[int],
        send: Callable[[int], Trip],
        walk: Callable[[int, Trip], BlockWalk],
        *,
        backward: bool,
    ) -> None:
        self._order, self._send, self._walk = order, send, walk
        self._travels = call.rings_travel
        self._goes_late = self._travels and backward
        self._keys_are_here = self._travels and (backward or call.stays)
        self._ahead = 2 if self._travels and not self._keys_are_here else 1
        self._at = self._sent = self._arrived = 0
        self._coming: list[Trip] = []
        self._here: list[_Come] = []
        self._home: list[Trip] = []
        self._late: tuple[Callable[[], Trip], Callable[[], None]] | None = None

    def run(self, compute: Callable[[int, _Come], None]) -> None:
        """Compute each part, which :meth:`leave` is to be told of. What it has needed is free
        before the next ones come."""
        for at, index in enumerate(self._order):
            self._at = at
            self._set_out(at + 1)
            self._arrive(at)
            self._set_out(at + self._ahead)
            if self._keys_are_here or (self._travels and at > 1):  # it had a part's time to come
                self._arrive(at + 1)
            compute(index, self._here[0])
            del self._here[0]
        for trip in self._home:
            trip.take()

    def between(self) -> None:
        """In the middle of a part's computation."""
        if self._late is not None:
            late, self._late = self._late, None
            self._go(*late)
        if self._travels:
            self._arrive(self._at + 1)
        while not self._goes_late and self._home:  # it went home beside this part
            self._home.pop(0).take()

    def leave(self, task: Callable[[], Trip], undo: Callable[[], None] = nothing) -> None:
        """A part is computed and may go home.

        Args:
            task: begins the exchange.
            undo: for it, after an error.
        """
        if self._goes_late and self._at + 1 < len(self._order):
            self._late = task, undo
        else:
            self._go(task, undo)

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        with ExitStack() as stack:  # all of it, whatever fails
            for trip in (*self._home, *self._coming):
                stack.callback(trip.close)
            for come in self._here:
                stack.callback(come.close)
            if self._late is not None:
                stack.callback(self._late[1])

    def _set_out(self, last: int) -> None:
        """All parts up to this one, those that have not."""
        for index in self._order[self._sent : last + 1]:
            self._coming.append(self._send(index))
            self._sent += 1

    def _arrive(self, at: int) -> None:
        """A part that comes next, if it has not: its keys and values travel."""
        if self._arrived <= at < len(self._order):
            trip = self._coming[0]
            self._here.append(_Come(trip, self._walk(self._order[at], trip)))
            self._coming.pop(0)
            self._arrived += 1

    def _go(self, task: Callable[[], Trip], undo: Callable[[], None]) -> None:
        """Begin the trip home; the one before it must have ended, so that its memory is free."""
        try:
            self._home.append(task())
        except BaseException:
            undo()
            raise
        while len(self._home) > 1:
            self._home.pop(0).take()


def attend(
    call: USPCall, scores: Scores, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, list[Kept]]:
    """Out ``[b, s, h, e]``, the log-sum-exp ``[b, h, s]`` if asked for, and what backward needs."""

    def send(index: int) -> Trip:
        return call.parts[index].qkv.send_to_heads((q, k, v))

    def walk(index: int, trip: Trip) -> BlockWalk:
        ring = call.rings[index]
        return BlockWalk(ring, ring.schedule.steps, *trip.take()[1:])

    def leave(part: HeadTraffic, mine: Kept) -> Trip:
        trip = part.out.send_to_sequence((mine.out,), (out,))
        if lse is None:
            return trip
        trip.take()
        return part.out.send_to_sequence((mine.lse.transpose(1, 2).unsqueeze(-1),), (lse,))

    def compute(index: int, come: _Come) -> None:
        part, tensors = call.scores_of(index, scores, q), come.trip.take()
        result = ring_forward(call.rings[index], tensors[0], come.walk, part, belt.between)
        if scores.sinks is not None:
            result = apply_sinks(*result, part.of_heads(scores.sinks))
        mine = Kept._make((*tensors, *result))
        if keep or call.in_place:
            kept.append(mine)
        if not call.in_place:
            belt.leave(partial(leave, call.parts[index], mine))

    call.prepare(q.device)
    kept: list[Kept] = []
    out = q if call.in_place else q.new_empty(*q.shape[:3], v.shape[3])
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(*q.shape[:3], 1, dtype=wide) if call.with_lse else None
    belt = _Belt(call, range(len(call.parts)), send, walk, backward=False)
    with closing(belt):
        belt.run(compute)
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
    grads: tuple[torch.Tensor, ...] = ()

    def send(index: int) -> Trip:
        return call.parts[index].out.send_to_heads((dout,))

    def walk(index: int, trip: Trip) -> BlockWalk:
        ring = call.rings[index]
        return BlockWalk(ring, ring.schedule.backward_steps, *kept[index][1:3])

    def leave(exchange: HeadExchange, mine: RingGradients, departure: Departure | None) -> Trip:
        return exchange.send_to_sequence(mine.sums(), grads, departure)

    def compute(index: int, come: _Come) -> None:
        nonlocal grads
        part, ring = call.scores_of(index, scores, dout), call.rings[index]
        (share,) = come.trip.take()
        exchange = call.parts[index].qkv
        departure = exchange.departure(dout, shapes) if ring.fills(dout.dtype) else None
        home = departure.parts if departure else ()
        mine = ring_backward(ring, share, *kept[index], come.walk, part, belt.between, home)
        try:
            if sinks is not None and dsinks is not None:
                dsink = sink_gradient(share, *kept[index][3:], part.of_heads(sinks))
                part.of_heads(dsinks).copy_(dsink)
            if call.in_place:
                grads = mine.result()
                return
            if not grads:  # as late as can be: they are as large as all that has come so far
                grads = tuple(dout.new_empty(shape) for shape in shapes)
        except BaseException:
            mine.close()
            raise
        belt.leave(partial(leave, exchange, mine, departure), mine.close)

    call.prepare(dout.device)
    sinks = scores.sinks
    dsinks = torch.zeros_like(sinks) if sinks is not None and sinks.requires_grad else None
    belt = _Belt(call, range(len(call.parts))[::-1], send, walk, backward=True)
    with closing(belt):
        belt.run(compute)
    call.passed()
    dq, dk, dv = grads
    return dq, dk, dv, dsinks


def staging(
    parts: Sequence[HeadTraffic], rings: Sequence[RingCall], q: torch.Tensor, v: torch.Tensor
) -> dict[str, int]:
    """Bytes of each kind of traffic that a rank packs at most at once, for copy engines.

    Args:
        q, v: ``[b, s, h, d]``, ``[b, s, g, e]``.
    """
    ring, schedules = rings[0], [ring.schedule for ring in rings]
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
        tokens = ring.schedule.most_taken_anywhere
        if ring.kernel.caps.writes_grads_in_place:  # a rank's own gradients beside those that leave
            tokens = max(tokens, *(each.most_mixed_anywhere for each in schedules))
        sizes["ring_dkv"] = tokens * token * ring.kernel.caps.grad_dtype(q.dtype).itemsize
    return sizes
