"""Watchdog: finds that this rank is blocked in a collective that ranks which wait for it in a
comparison have not started, and ends their wait."""

from __future__ import annotations

import atexit
import dis
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_TICK_S = 0.5
_PATIENCE_S = 5.0  # for a rank that does not move
_SHORT_PATIENCE_S = 1.0  # for one that waits in another mesh's comparison, where nothing else runs
_EXIT_S = 5.0  # for the thread's last look: a request to a store whose host is lost never ends
_MAX_GROUPS = 256
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).parents[1]
_BLOCKING_FILES = tuple(
    f"{_TORCH / path}" for path in ("distributed", "nn/parallel", "autograd/graph.py")
)
_COMPARISON_FILES = tuple(f"{_OURS / 'comm' / name}.py" for name in ("shm_mailbox", "consistency"))
_P2P = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})


# Note [certain evidence]
#
# A rank that is late may save a checkpoint, load data, be stopped: nobody may refuse its call for
# that, however long it takes. What is certain is an order. Each rank counts the collectives that it
# has started, by group (c10d's sequence numbers), and the comparisons, by mesh:
#
#     rank 0    ... all-reduce 11 | call 7, waits for rank 1
#     rank 1    ... all-reduce 11 | all-reduce 12, waits for rank 0
#
# Rank 1 started number 12 before call 7, rank 0 began call 7 before number 12: each waits for the
# other. Only rank 1 can say so without a race: its next comparison is not posted before it has
# looked. So its watchdog posts an error in the place of that comparison: the others read it as a
# call that rank 1 refuses, and rank 1 raises when it comes there. Ranks stay in step.
#
# Not certain, and so no reason: a rank that still moves; a rank in a collective of a group that the
# waiting rank is not in; another thread in a collective; point-to-point messages, which gloo counts
# as collectives and of which ranks may have sent different numbers, as in a ring whose masks need
# fewer of some: groups of rings are left out.
class Watched(Protocol):
    """What a watchdog needs of a rank's comparisons over one mesh.

    Attributes:
        thread: that made the last call.
    """

    thread: int

    @property
    def name(self) -> str:
        """Of the mesh, the same on all its ranks."""

    @property
    def posted(self) -> int:
        """Comparisons of this rank so far."""

    def waiting_ranks(self) -> Sequence[int]:
        """Ranks that have posted a comparison which this rank has not."""

    def status(self, seq: int, rank: int) -> bytes:
        """What a rank has published beside a comparison; empty: nothing."""

    def publish(self, seq: int, data: bytes) -> None: ...

    def give_away(self, seq: int, reason: str, in_comparison: bool) -> None:
        """Post an error as this rank's comparison of this number, unless it has posted another.
        ``in_comparison``: this rank waits in one over another mesh."""

    def settle(self) -> None:
        """This rank raises, out of step with ranks of several meshes: ranks that wait for it here
        may not wait longer, and it need not raise here again."""


class Status(NamedTuple):
    """What a rank publishes while it waits in a comparison, or others wait for it.

    Attributes:
        waits: it waits, and so will start no collective.
        where: it is, for people.
        started: collectives and comparisons, by :class:`Counter`'s key.
    """

    waits: bool
    where: str
    started: Mapping[str, int]

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Status | None:
        try:
            return cls(*json.loads(data)) if data else None
        except (ValueError, TypeError):
            return None


class Counter(NamedTuple):
    """Operations that this rank has started, one after the other.

    Attributes:
        what: they are, for people.
        group: whose collectives they are; None: comparisons of a mesh.
        blocks: its ranks wait on the CPU, and sends and receives count too, as of gloo.
    """

    key: str
    number: int
    what: str
    group: dist.ProcessGroup | None = None
    blocks: bool = False


class Stack(NamedTuple):
    """Where a thread is.

    Attributes:
        place: equal as long as the thread does not move.
        where: for people.
        in_comparison: it waits in one.
        in_collective: it is in torch.distributed, DDP or a backward pass.
        in_p2p: it sends or receives.
    """

    place: int
    where: str
    in_comparison: bool = False
    in_collective: bool = False
    in_p2p: bool = False

    @classmethod
    def of(cls, frame: FrameType | None) -> Stack:
        frames = list(_outward(frame))
        if not frames:
            return cls(0, "it runs no Python code")
        files = [frame.f_code.co_filename for frame in frames]
        names = [frame.f_code.co_name for frame in frames]
        inner = sum(file.startswith(f"{_TORCH}{os.sep}") for file in files[:1])
        while inner and inner < len(files) and files[inner].startswith(f"{_TORCH}{os.sep}"):
            inner += 1
        user = next((i for i, file in enumerate(files) if _is_users(file)), len(files) - 1)
        codes = [frame.f_code for frame in frames[:inner] if frame.f_code.co_name != "wrapper"]
        called = getattr(codes[0], "co_qualname", codes[0].co_name) if codes else ""
        line = f"{files[user]}:{frames[user].f_lineno}"
        return cls(
            hash(tuple((id(frame.f_code), frame.f_lasti) for frame in frames)),
            f"it is in {called}, called at {line}" if called else f"it is at {line}",
            in_comparison=files[0].startswith(_COMPARISON_FILES),
            in_collective=files[0].startswith(_BLOCKING_FILES),
            in_p2p=bool(_P2P.intersection(names[:inner])),
        )


def _is_users(file: str) -> bool:
    library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not library and not file.startswith((f"{_TORCH}{os.sep}", f"{_OURS}{os.sep}"))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# What looks at local variables keeps them alive, as long as the function runs: these two are called
# where the order of collectives is known to differ.
def _group_of(frame: FrameType) -> dist.ProcessGroup | None:
    """The group of a function of c10d's, or of a module such as DDP; None for other functions."""
    if not frame.f_code.co_filename.startswith(_BLOCKING_FILES):
        return None
    if frame.f_code.co_filename == c10d.__file__ and "group" in frame.f_locals:
        group = frame.f_locals["group"] or dist.group.WORLD
    else:
        group = getattr(frame.f_locals.get("self"), "process_group", None)
    return group if isinstance(group, dist.ProcessGroup) else None


def _waits_for_work(frame: FrameType) -> bool:
    """Whether the function waits for a collective that has not ended: ``work.wait()`` is no frame.
    One that holds such work may compute meanwhile."""
    lines = [(i, j) for i, j, line in frame.f_code.co_lines() if line == frame.f_lineno]
    code = dis.get_instructions(frame.f_code)
    inside = (x.argval for x in code if any(i <= x.offset < j for i, j in lines))
    works = (x for x in frame.f_locals.values() if isinstance(x, dist.Work))
    return "wait" in inside and not all(x.is_completed() for x in works)


class Watchdog:
    """Of all meshes of a process; one thread, which ends with it."""

    def __init__(self) -> None:
        self._watched: WeakSet[Watched] = WeakSet()
        self._seen: dict[str, tuple[int, int, float]] = {}  # by mesh: comparison, place, since
        self._given_away: dict[str, tuple[int, int]] = {}  # by mesh: the next comparison, place
        self._left_out: WeakSet[dist.ProcessGroup] = WeakSet()
        self._thread: threading.Thread | None = None

    def leave_out(self, *groups: dist.ProcessGroup | None) -> None:
        """Take no number of these groups for evidence: they carry point-to-point messages."""
        self._left_out.update(group for group in groups if group is not None)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._thread is None or not self._thread.is_alive():  # a fork has none
            end = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(end,), name="ds_usp watchdog", daemon=True
            )
            self._thread.start()
            # A thread that comes back from a request to the store while Python ends is ended from
            # C, and pybind11's frames below it abort the process ("terminate called without an
            # active exception"): up to Python 3.13.
            atexit.register(self._thread.join, _EXIT_S)
            atexit.register(end.set)  # first

    def _run(self, end: threading.Event) -> None:
        while not end.wait(_TICK_S):
            try:
                watched_now = list(self._watched)
            except RuntimeError:  # another thread has just added one
                continue
            while watched_now:  # it keeps no mesh alive while it sleeps
                try:
                    self._look(watched_now.pop())
                except Exception:  # a group that is being destroyed; the next look may succeed
                    logging.getLogger("ds_usp").debug("watchdog", exc_info=True)

    def _look(self, watched: Watched) -> None:
        """At what this rank does while others wait for it."""
        seq = watched.posted + 1
        ranks = watched.waiting_ranks()
        if not ranks:
            self._seen.pop(watched.name, None)
            return
        frames = sys._current_frames()
        main = threading.main_thread().ident or 0
        frame = frames.get(watched.thread) or frames.get(main)
        stack = Stack.of(frame)
        now = time.monotonic()
        before = self._seen.get(watched.name)
        if before is None or before[:2] != (seq, stack.place):
            self._seen[watched.name] = before = seq, stack.place, now
        watched.publish(seq, Status(False, stack.where, {}).encode())
        # The second time at once: it has not moved since the first.
        still = self._given_away.get(watched.name) == (seq, stack.place)
        patience = _SHORT_PATIENCE_S if stack.in_comparison or still else _PATIENCE_S
        if now - before[2] < patience or self._another_thread(watched, frames):
            return
        counters = list(self.counters())
        for rank in ranks:
            status = Status.decode(watched.status(seq, rank))
            if status is not None and status.waits:
                unmatched = _unmatched(stack, frame, counters, rank, status)
                if unmatched:
                    self._given_away[watched.name] = seq + 1, stack.place
                    watched.give_away(
                        seq,
                        in_comparison=stack.in_comparison,
                        reason=f"{stack.where} ({unmatched}), and did not come to this call in "
                        f"{now - before[2]:.0f} s. All ranks must run the same passes and "
                        "collectives in one order, backward passes too: what calls the model "
                        "(validation, a request, a batch) runs on all ranks of the mesh or on none",
                    )
                    return

    def status_of_waiting(self, watched: Watched) -> Status:
        """Of this thread, which waits in a comparison."""
        frames = sys._current_frames()
        where = Stack.of(frames.get(threading.get_ident())).where
        certain = not self._another_thread(watched, frames)
        started = {x.key: x.number for x in self.counters()} if certain else {}
        return Status(True, where, started)

    def settle(self, raising: Watched) -> None:
        """The comparisons over all meshes but one, where this rank raises."""
        for watched in list(self._watched):
            if watched is not raising:
                watched.settle()

    def counters(self) -> Iterator[Counter]:
        """Of the meshes' comparisons and of the process groups' collectives."""
        for watched in list(self._watched):
            yield Counter(watched.name, watched.posted, "a call over another mesh")
        for group, name in list(c10d._world.pg_names.items())[:_MAX_GROUPS]:
            if group in self._left_out:
                continue
            ranks = c10d._world.pg_group_ranks.get(group, {})
            seen = []
            for device in sorted(group._device_types, key=str):  # the CPU first
                backend = group._get_backend(device)
                if backend in seen:
                    continue
                seen.append(backend)
                number = _sequence_number(backend, group)
                if number is None:
                    continue
                key = hashlib.sha256(f"{name} {sorted(ranks)} {device}".encode()).hexdigest()[:10]
                what = f"the group {group.group_desc or name!r} of {len(ranks)} ranks"
                yield Counter(key, number, what, group, device.type == "cpu")

    def _another_thread(self, watched: Watched, frames: Mapping[int, FrameType]) -> bool:
        """Whether one is in torch.distributed: collectives may be its."""
        others = {
            ident: frame
            for ident, frame in frames.items()
            if ident not in (watched.thread, threading.get_ident())
        }
        folder = _BLOCKING_FILES[0] + os.sep
        return any(frame.f_code.co_filename.startswith(folder) for frame in others.values())


def _sequence_number(*sources: Any) -> int | None:
    """Of the first that has one: an older torch has it of groups of one backend only."""
    for source in sources:
        try:
            return int(source._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):
            continue
    return None


def _unmatched(
    stack: Stack, frame: FrameType | None, counters: Sequence[Counter], rank: int, status: Status
) -> str:
    """What this rank has started and a rank that waits for it has not; "" without any."""
    ahead = [x for x in counters if x.number > status.started.get(x.key, x.number)]
    if stack.in_p2p or not ahead:
        return ""
    if stack.in_comparison:
        calls = (counter for counter in ahead if counter.group is None)
        return next((f"{x.what}, which rank {rank} has not made" for x in calls), "")
    inner = takewhile(lambda x: x.f_code.co_filename.startswith(f"{_TORCH}"), _outward(frame))
    group = next(filter(None, map(_group_of, inner)), None)
    for counter in ahead:
        if counter.group is None or group not in (None, counter.group):
            continue
        if not counter.blocks or stack.in_collective or (frame and _waits_for_work(frame)):
            return (
                f"collective {counter.number} of {counter.what}, of which rank {rank} has started "
                f"{status.started[counter.key]}"
            )
    return ""


@lru_cache(maxsize=1)
def watchdog() -> Watchdog:
    """The one of this process."""
    return Watchdog()
