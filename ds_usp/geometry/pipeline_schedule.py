"""The order in which one rank exchanges and computes the head chunks of one pass, as a value.

``pipeline_schedule`` is the whole policy of overlap. ``attention/plan.py`` asks for each pass of a
new call; ``attention/passes.py`` executes the instructions one after the other and decides nothing;
the planner times them. As printed, ``1kv0`` posts the first KV exchange of chunk 1, ``1kv0?`` waits
for it, ``1attn2.0`` is the first kernel call of its ring step 2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from ds_usp.geometry.ring_schedule import RingSchedule

# Up to so many exchanges of KV gradients of a chunk each have a receive buffer of their own, and
# are summed in one kernel; more share one buffer, which is read before the chunk ends.
MAX_DKV_BUFFERS = 2


class Op(str, Enum):
    """Names of what an instruction does for its chunk, as they are printed.

    A post starts an exchange; the wait for it has its text and ``?``, and makes the current stream
    wait. ``attention/passes.py`` has a method for each, ``planner/attention_time.py`` a cost.

    Attributes:
        channel: the kind of channel on which it posts or waits; "" if it does neither.
    """

    channel: str

    def __new__(cls, text: str, channel: str = "") -> Op:
        member = str.__new__(cls, text)
        member._value_, member.channel = text, channel
        return member

    @property
    def is_post(self) -> bool:
        return bool(self.channel) and not self.is_wait

    @property
    def is_wait(self) -> bool:
        return self.endswith("?")

    A2A_POST, A2A_WAIT = ("a2a", "all_to_all"), ("a2a?", "all_to_all")  # sequence to heads
    SLICE_HEADS = "slice"  # without Ulysses: the chunk's heads, of the local tensors
    KV_POST, KV_WAIT = ("kv", "ring_kv"), ("kv?", "ring_kv")  # KV of other ring ranks
    ATTN = "attn"  # one kernel call
    DKV_POST, DKV_WAIT = ("dkv", "ring_dkv"), ("dkv?", "ring_dkv")  # gradients, to KV's owners
    END = "end"  # of the kernel calls: partial results are merged, what only calls read is freed
    RETURN_STAGE = "stage"  # the staging buffer of the return, which a kernel writes directly
    RETURN_POST, RETURN_WAIT = ("ret", "all_to_all"), ("ret?", "all_to_all")  # heads to sequence
    LSE_POST, LSE_WAIT = ("lse", "all_to_all"), ("lse?", "all_to_all")  # for the log-sum-exp
    STORE = "store"  # without Ulysses: results into the outputs


_NUMBERED = frozenset({"kv", "dkv", "attn"})
# Kinds of channels, in the order in which they are reported.
CHANNELS = "all_to_all", "ring_kv", "ring_dkv"


class Instr(NamedTuple):
    """One instruction for a head chunk.

    Attributes:
        op: what is done; ``chunk``: the number of the head chunk.
        number: of a ring exchange, among the chunk's steps that are not local; of a kernel call,
            of its step among all.
        call: of a kernel call, its number in the ring step.
    """

    op: Op
    chunk: int
    number: int = 0
    call: int = 0

    def __str__(self) -> str:
        name, wait, _ = self.op.value.partition("?")
        number = f"{self.number}" if name in _NUMBERED else ""
        number += f".{self.call}" if self.op is Op.ATTN else ""
        return f"{self.chunk}{name}{number}{wait}"


Schedule = tuple[Instr, ...]


def render(schedule: Schedule) -> str:
    """The schedule in one line."""
    return " ".join(map(str, schedule))


def parse(text: str) -> Schedule:
    """The schedule that :func:`render` has printed.

    Raises:
        ValueError: a word is no instruction.
    """
    by_text = {op.value: op for op in Op}
    names = "|".join(sorted({name.rstrip("?") for name in by_text}, key=len, reverse=True))
    pattern = re.compile(rf"(\d+)({names})(?:(\d+)(?:\.(\d+))?)?(\??)")
    instrs = []
    for word in text.split():
        match = pattern.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no instruction, as '0a2a' or '1kv0?'")
        chunk, name, number, call, wait = match.groups(default="")
        instrs.append(Instr(by_text[name + wait], int(chunk), int(number or 0), int(call or 0)))
    return tuple(instrs)


# Note [what overlaps what]
#
# Two head chunks forward, Ulysses 2 x ring 2 (the schedule in ARCHITECTURE.md); time runs to the
# right, a row is what is in flight there:
#
#   all-to-all  [0 q k v][1 q k v ......]                    [0 out .....]            [1 out]
#   ring KV                [0 kv .......]    [1 kv ........................]
#   kernels                [0 local     ][0 remote     ][1 local     ][1 remote    ]
#
# The first all-to-all is exposed because no chunk is there to be computed yet, and the last return
# because none is left; everything between is under the kernels of another chunk or another block.
#
# A chunk's KV exchange is posted before the chunk before it is computed, if its keys and values are
# there by then, and not after the first kernel call of that chunk: a rank whose chunk is a single
# kernel call has no "after the first", and all its ring exchanges stood between two kernels (0.4 ms
# for each of 16 chunks, 2 x 2, 128K tokens). Where K and V come by an all-to-all, that one is
# posted another chunk earlier for the same reason; the first chunks have no time for that and post
# after the first call. Backward as well, where a checkpoint keeps no exchanged tensors
# (``from_shards``): q, k, v and the output then come to heads again, with dout.
#
# Every rank writes its own schedule, and only the order of posts of one kind must be the same on
# all (exchange_order). So posts never depend on how many kernel calls this rank has: "after the
# first call" is written also for a step without any.
#
# Note [why backward takes the last chunk first]
#
# Forward three tensors come first (q, k, v) and one returns last (out); backward one comes first
# (dout) and three return last (dq, dk, dv). Chunk 0 is cut small (HeadSplit.chunk), so it must be
# where three tensors are exposed: first forward, last backward. And where chunks divide a KV group,
# K and V are exchanged with the group's first chunk, whose return brings dK and dV back: they are
# complete when all chunks of the group are done, that is, when the first of them comes last. Where
# backward exchanges K and V again, they come with the group's last chunk.
#
# Note [when a chunk is returned]
#
# At its end, but for backward with a ring: the last dK/dV of the ring are still in flight there.
# They arrive under the next chunk's first kernel call, so the return is posted after that one. A
# return is waited for one chunk later, so that no more than two hold buffers.
def pipeline_schedule(
    chunks: Sequence[RingSchedule],
    *,
    ulysses: bool,
    backward: bool,
    return_lse: bool = False,
    stage_return: bool = False,
    from_shards: bool = False,
) -> Schedule:
    """Instructions of one pass of one rank, in the order in which they are issued.

    Args:
        chunks: the ring schedule of each head chunk on this rank.
        ulysses: heads are exchanged.
        backward: it is the backward pass, which takes the chunks from the last to the first.
        return_lse: the log-sum-exp is returned in an exchange of its own.
        stage_return: a kernel writes what is returned into the staging buffer.
        from_shards: keys and values come with a chunk's heads in backward, too: what is saved is
            this rank's shards of all heads, as it always is without Ulysses.
    """
    writer = _ScheduleWriter(chunks, ulysses, backward, return_lse, stage_return, from_shards)
    writer.write_pass()
    return tuple(writer.instrs)


class _ScheduleWriter:
    """Writes the instructions of one pass: one that is there already is not written again."""

    def __init__(
        self,
        chunks: Sequence[RingSchedule],
        ulysses: bool,
        backward: bool,
        return_lse: bool,
        stage_return: bool,
        from_shards: bool,
    ) -> None:
        self._order = list(range(len(chunks)))[:: -1 if backward else 1]  # position -> chunk
        self._steps = [x.backward_steps if backward else x.steps for x in chunks]
        self._has_ring = chunks[0].ring_degree > 1
        self._ulysses, self._backward = ulysses, backward
        self._return_lse, self._stage_return = return_lse, stage_return
        self._defer_return = self._has_ring and backward
        self._kv_with_heads = not backward or from_shards or not ulysses  # else saved exchanged
        self._dkv_in_flight: dict[int, int] = {}  # chunk -> number of the exchange of gradients
        self._written: set[Instr] = set()
        self.instrs: list[Instr] = []

    def write_pass(self) -> None:
        # Whether keys and values are there before a chunk's exchange: all heads are, or were saved.
        kv_early = self._has_ring and not (self._ulysses and self._kv_with_heads)
        lookahead = 2 if self._has_ring and not kv_early else 1
        for position, chunk in enumerate(self._order):
            self._post_until(position + 1)
            self._start_kv(position)
            self._post_until(position + lookahead)
            if kv_early or (self._has_ring and position > 1):  # in flight for one chunk already
                self._start_kv(position + 1)
            self._take_heads(chunk)
            if self._stage_return:
                self._write(Op.RETURN_STAGE, chunk)
            self._compute(position, chunk)
            self._write(Op.END, chunk)
            if not self._defer_return or chunk == self._order[-1]:
                self._return(position)
        self._wait_return(len(self._order) - 1)

    def _write(self, op: Op, chunk: int, number: int = 0, call: int = 0) -> None:
        instr = Instr(op, chunk, number, call)
        if instr not in self._written:
            self._written.add(instr)
            self.instrs.append(instr)

    def _post_until(self, position: int) -> None:
        if self._ulysses:
            for chunk in self._order[: position + 1]:
                self._write(Op.A2A_POST, chunk)

    def _take_heads(self, chunk: int) -> None:
        self._write(Op.A2A_WAIT if self._ulysses else Op.SLICE_HEADS, chunk)

    def _start_kv(self, position: int) -> None:
        """Post the first KV exchange of the chunk at a position, if there is one."""
        if position >= len(self._order):
            return
        chunk = self._order[position]
        if self._kv_with_heads:
            self._take_heads(chunk)
        self._post_kv(chunk, 0)

    def _post_kv(self, chunk: int, number: int) -> None:
        """Post the KV exchange with this number, if the chunk has so many."""
        if number < sum(not step.is_local for step in self._steps[chunk]):
            self._write(Op.KV_POST, chunk, number)

    def _compute(self, position: int, chunk: int) -> None:
        """Write a chunk's ring steps: receive, call kernels, and backward return dK/dV."""
        received = 0
        for index, step in enumerate(self._steps[chunk]):
            if not step.is_local:
                self._write(Op.KV_WAIT, chunk, received)
                received += 1
                self._post_kv(chunk, received)
            for call in range(len(step.calls)):
                self._write(Op.ATTN, chunk, index, call)
                self._mid_chunk(position)
            self._mid_chunk(position)  # on every rank, also where it has no calls
            if self._backward and not step.is_local:
                self._wait_dkv(chunk)
                self._write(Op.DKV_POST, chunk, received - 1)
                self._dkv_in_flight[chunk] = received - 1
        if received > MAX_DKV_BUFFERS:
            self._wait_dkv(chunk)

    def _mid_chunk(self, position: int) -> None:
        """Write what follows the first kernel call of a chunk; after later ones it is there."""
        if self._defer_return and position:
            self._return(position - 1)
        if self._has_ring:
            self._start_kv(position + 1)
        if not self._defer_return and position:
            self._wait_return(position - 1)

    def _wait_dkv(self, chunk: int) -> None:
        """Wait for the chunk's exchange of KV gradients in flight, if there is one."""
        number = self._dkv_in_flight.pop(chunk, None)
        if number is not None:
            self._write(Op.DKV_WAIT, chunk, number)

    def _return(self, position: int) -> None:
        """Post the return of a chunk; wait for the return before, whose buffers are then free."""
        chunk = self._order[position]
        self._wait_dkv(chunk)
        if not self._ulysses:
            self._write(Op.STORE, chunk)
            return
        self._write(Op.RETURN_POST, chunk)
        if self._return_lse:
            self._write(Op.RETURN_WAIT, chunk)
            self._write(Op.LSE_POST, chunk)
        if position:
            self._wait_return(position - 1)

    def _wait_return(self, position: int) -> None:
        if self._ulysses:
            op = Op.LSE_WAIT if self._return_lse else Op.RETURN_WAIT
            self._write(op, self._order[position])


def exchange_order(schedule: Schedule) -> str:
    """The posts of each kind of exchange in their order, which the ranks compare."""
    posts = [instr for instr in schedule if instr.op.is_post]
    posted = ((kind, [str(x) for x in posts if x.op.channel == kind]) for kind in CHANNELS)
    return "; ".join(f"{kind}: {' '.join(instrs)}" for kind, instrs in posted if instrs)


def exposed_posts(schedule: Schedule) -> frozenset[Instr]:
    """Posts (``overlapped=False`` for channels) whose wait follows at once. The end of a chunk's
    kernel calls, which merges outputs forward, takes no time backward and may lie between."""
    backward = any(instr.op is Op.DKV_POST for instr in schedule)
    steps = [instr for instr in schedule if not (backward and instr.op is Op.END)]
    return frozenset(
        instr
        for instr, following in pairwise(steps)
        if following.op.value == f"{instr.op.value}?" and following._replace(op=instr.op) == instr
    )


def staging_slots(schedule: Schedule, kind: str) -> int:
    """Staging buffers of a kind of channel by copy engines (``comm/copy_engine.py``), in rotation,
    with which a rank need not wait to pack: one that is being pulled, beside all that are packed
    between two kernel calls or staged before one, during which what was posted is pulled."""
    staged: set[int] = set()
    posted: set[int] = set()
    slots = 2
    for op, chunk, *_ in schedule:
        if op is Op.ATTN:
            posted.clear()
        elif op is Op.RETURN_STAGE and kind == "all_to_all":
            staged.add(chunk)
        elif op.channel == kind and op.is_wait:
            posted.discard(chunk)
        elif op.channel == kind:
            staged.discard(chunk)
            posted.add(chunk)
        slots = max(slots, len(posted) + len(staged))
    return slots
