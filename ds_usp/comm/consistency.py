"""Consistency check: ranks compare what they are about to do, so that those that differ raise
instead of hanging."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import FrameType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_usp.comm.call_record import (
    LAST_TURN,
    MAIN_THREAD,
    ONE_THREAD,
    OTHER_MESH_TURN,
    RECORD_BYTES,
    THREAD_FIELD,
    CallRecord,
    Kind,
    Signature,
    mismatch_error,
)
from ds_usp.comm.process_groups import all_gather_bytes, subgroup, transport_device
from ds_usp.comm.shm_mailbox import MAX_IN_FLIGHT, MAX_LEFT, ShmMailbox, open_mailbox
from ds_usp.comm.watchdog import Status, watchdog
from ds_usp.errors import MeshError

# Signatures may differ from step to step, by lengths or by documents.
_MAX_VERIFIED = 1024
# Records of calls recur; those of backward passes, with their number, do not.
_encode = lru_cache(maxsize=_MAX_VERIFIED)(CallRecord.encode)
_CALL = Kind.CALL  # an enum's lookup takes longer
_WARN_AFTER_S = 60.0
_STATUS_S, _MIN_POLL_S, _MAX_POLL_S = 1.0, 2e-5, 2e-3  # of a wait over a group
_EXIT_TIMEOUT_S = 1.0  # how long a process that ends waits for the other ranks' records
_GROUP_EXIT_TIMEOUT_S = 5.0  # and for the all-gathers of one group
_THREAD_TIMEOUT_S, _THREAD_POLL_S = 10.0, 1e-3  # of a wait for another thread's call to end
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class _Transport(Protocol):
    """All-gather of records, several in flight: :class:`ShmMailbox`, :class:`GroupTransport`. And
    what watchdogs exchange beside them, without any collective.

    Attributes:
        name: the same on all ranks, other ones for other meshes.
        posted: the number of this rank's last record.
        while_waiting: called every second of a wait with the record's number, a rank that has not
            posted it (-1: not known), and the seconds so far.
    """

    name: str
    posted: int
    while_waiting: Callable[[int, int, float], None]

    def post(self, data: bytes) -> int:
        """Start the exchange of this rank's next record; its sequence number."""

    def all_equal(self, seq: int) -> bool:
        """Whether all ranks' records have been received and are equal; False: not known yet."""

    def gather(self, seq: int, timeout_s: float | None = None) -> Sequence[bytes | bytearray]: ...

    def waiting_ranks(self, seq: int) -> list[int]:
        """Ranks that have posted this record, which this rank has not."""

    def publish(self, seq: int, data: bytes) -> None:
        """Write this rank's status, while others wait for its record of this number or it for
        the records of others."""

    def status(self, seq: int, rank: int) -> bytes:
        """A rank's status of this number; empty: none."""


class GroupTransport:
    """Records by asynchronous all-gathers over a process group of a CPU backend.

    Args:
        store: of the job, in which ranks that wait longer than a second publish their status; None:
            no watchdog knows of them.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store | None = None) -> None:
        self._group, self._ranks, self.posted = group, group.size(), 0
        self.name, self._store = f"ds_usp {group.group_name}", store
        self._count, self._found = 0, list[int]()
        self._publishing: list[threading.Thread] = []  # one at most
        self.while_waiting: Callable[[int, int, float], None] = lambda *_: None
        self._works: dict[int, tuple[dist.Work, list[bytearray]]] = {}
        # torch aborts a process that ends and leaves a collective or a request to the store behind.
        # Not when the transport is garbage collected, which may be in mid-training.
        atexit.register(_wait_for, self._works, self._publishing)
        # A job that torchrun has restarted has what its ranks published before, by the same names.
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"{self.name} {group.rank()}", "0 ")  # no record has this number

    def post(self, data: bytes) -> int:
        self.posted += 1
        local = torch.frombuffer(bytearray(data.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)
        received, out = [], []
        for _ in range(self._ranks):
            buffer = bytearray(RECORD_BYTES)
            received.append(buffer)
            out.append(torch.frombuffer(buffer, dtype=torch.uint8))
        self._works[self.posted] = self._group.allgather([out], [local]), received
        return self.posted

    def all_equal(self, seq: int) -> bool:
        return False

    def gather(self, seq: int, timeout_s: float | None = None) -> list[bytearray]:
        work, received = self._works.pop(seq)
        if timeout_s is not None:
            work.wait(datetime.timedelta(seconds=timeout_s))
            return received
        start = time.monotonic()
        next_status = start + _STATUS_S
        while self._store is not None and not work.is_completed():
            now = time.monotonic()
            if now > next_status:
                next_status = now + _STATUS_S
                self.while_waiting(seq, -1, now - start)
            time.sleep(min(max(0.1 * (now - start), _MIN_POLL_S), _MAX_POLL_S))
        work.wait()
        return received

    def waiting_ranks(self, seq: int) -> list[int]:
        if self._store is None:
            return []
        count = self._store.add(self.name, 0)  # one small request a look, while nobody waits
        if count != self._count or self._found:
            others = (rank for rank in range(self._ranks) if rank != self._group.rank())
            self._found = [rank for rank in others if self.status(seq, rank)]
        self._count = count
        return self._found

    def publish(self, seq: int, data: bytes) -> None:
        # A host that vanishes may be the store's, and a request to it ends when TCP gives up, after
        # a quarter of an hour. Who waits for it must not wait for that, but for the group's time.
        store, key = self._store, f"{self.name} {self._group.rank()}"
        if store is None or any(thread.is_alive() for thread in self._publishing):
            return

        def request() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone: wait without it
                store.set(key, f"{seq} {data.decode()}")
                store.add(self.name, 1)

        self._publishing[:] = [threading.Thread(target=request, daemon=True)]
        self._publishing[0].start()

    def status(self, seq: int, rank: int) -> bytes:
        key = f"{self.name} {rank}"
        if self._store is None or not self._store.check([key]):
            return b""
        number, _, data = self._store.get(key).partition(b" ")
        return data if int(number) == seq else b""


def _wait_for(
    works: Mapping[int, tuple[dist.Work, list[bytearray]]], requests: Sequence[threading.Thread]
) -> None:
    """Other ranks may still join these all-gathers."""
    deadline = time.monotonic() + _GROUP_EXIT_TIMEOUT_S
    for work, _ in works.values():
        left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(RuntimeError):
            work.wait(left)
    for thread in requests:
        thread.join(max(0.0, deadline - time.monotonic()))


# Note [every rank compares]
#
# Ranks that make different calls wait for messages that never come, or take each other's for their
# own. Only a comparison of all with all finds out, and all must find out: one that continues alone
# posts an exchange that nobody answers. So each rank gathers every record and comes to the same
# result by itself; there is no rank that decides and would have to tell the others.
#
# The n-th comparison that did not fail is the same on all ranks, so its number names the call: a
# backward pass declares the call it belongs to, and ranks whose backward passes run in different
# orders, or twice for one call, differ in it.
#
# Note [deferred comparison]
#
#   CPU   call 1 compare....launch | call 2 post, launch | call 3 post, launch | ... read 2, 3
#   GPU                      call 1 ........................ call 2 ........... call 3 ........
#
# Where tensors are on CPUs, and for every signature that is new, the ranks wait for the comparison
# before anything moves. Waiting at each call would end the CPU's run ahead of the GPU, by as much
# as the slowest rank is late. So on GPUs a signature that was equal before is compared while the
# call runs, and the result is read when a later call or a backward pass begins: after a number of
# calls, not a time, so that all ranks raise at the same call and no collective is left without its
# partners. No CUDA stream waits for a comparison: a GPU that waits for another rank does not keep
# its CPU from reading on and finding out why.
#
# The price: if ranks differ and one of them had started its call, streams wait for exchanges that
# never come, and the mesh is unusable: it raises at every call on every rank. After any other
# difference all ranks can continue.
#
# Note [a rank that leaves]
#
#   rank 0    call 6 | loss of pass 1: compare 7 ...... MeshError | pass 2: compare 8
#   rank 1    call 6 | out of memory: declares as 7 that it left  | pass 2: read 7, compare 8
#
# A rank that an exception takes out of a forward pass declares at once, in the place of its next
# comparison, that it has left, and does not wait. The others read it in their own and raise. The
# rank reads their records of that number before it compares again, so all are in step. Its
# watchdog declares the same where it is blocked in a collective that the others will not join.
#
# Ranks that left at different places may begin different passes next. So a record has its turn:
# ended requests, forward passes begun. Where turns differ, the ranks behind raise, and those ahead
# compare the same call again, until the others have come.
class ConsistencyChecker:
    """Compares the ranks' signatures of each call and each backward pass, on the CPU.

    Args:
        group: the ranks, over a CPU backend; None is one process alone.
        mailbox: shared memory of all of them, which is faster; None: all-gathers over the group, in
            which nothing else may come between them.
        store: what watchdogs exchange goes through it, where there is no mailbox.

    Attributes:
        number: comparisons so far, less failed ones; after :meth:`check_call`, that call's number.
        num_raised: comparisons that raised, on every rank or as other ranks could not be reached.
        num_exchanges: returns how many exchanges this rank's copy engines have started.
        on_failure: called once when the ranks differ for good.
        refuse_backward: returns why no gradient could be right; asked at each backward pass.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        mailbox: ShmMailbox | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.group, self.mailbox = group, mailbox
        self.number = 0
        self.thread = threading.get_ident()
        self._calls = self._passes = 0  # compared: forward calls, backward passes
        self._passes_since_call = 0
        self._verified: set[Signature | str] = set()  # signatures that were equal on all ranks
        self._pending: deque[tuple[_Transport, int]] = deque()
        self._requests = self._forward_passes = 0  # this rank's turn
        self._posting = threading.Lock()  # this rank's thread and the watchdog's
        # Comparisons in whose place this rank has declared that it left, and why it must raise when
        # it comes there; None: it has raised.
        self._left: deque[tuple[int, str | None]] = deque()
        self._all_know = False  # that this rank raises: its last comparison failed on all
        self.on_failure: Callable[[], object] = lambda: None
        self.num_exchanges: Callable[[], int] = lambda: 0
        self.refuse_backward: Callable[[], Exception | None] = lambda: None
        self._in_pass, self._aborted_passes, self._exchanges_at_abort = False, 0, 0
        self.warn_at_s = _WARN_AFTER_S
        self._failure: MeshError | None = None
        self.num_raised = 0
        self._lock = threading.Lock()  # of the comparisons of other threads than the last one's
        # Whose calls these are. By a token that only that thread has: idents are used again.
        self._thread: weakref.ref[threading.Thread] | None = None
        self._turn, self._thread_turn = _Turn(), object()
        self._thread_name, self._thread_field = "", tuple[str, ...]()
        self._former_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._transport: _Transport | None = mailbox
        if group is not None:
            if mailbox is None:
                self._transport = GroupTransport(group, store)
            at_exit = partial(_at_exit, weakref.ref(self), os.getpid())
            atexit.register(at_exit)
            weakref.finalize(self, atexit.unregister, at_exit).atexit = False
            if mailbox is not None or store is not None:
                cast(_Transport, self._transport).while_waiting = partial(
                    _while_waiting, weakref.ref(self)
                )
                watchdog().add(self)

    @classmethod
    def for_mesh(cls, group: dist.ProcessGroup, nodes: Sequence[bytes]) -> ConsistencyChecker:
        """The checker of a mesh's group, by its backends; ``nodes``: each rank's. Collective over
        it."""
        # Nothing else may come between comparisons, of which several are in flight, and a rank that
        # left must not answer them by another collective: a mailbox, or a group of its own.
        backends = {type(group._get_backend(device)) for device in group._device_types}
        gloo = transport_device(group).type == "cpu" and len(backends) == 1  # which is for both
        if gloo and (mailbox := open_mailbox(group, nodes)) is not None:
            return cls(group, mailbox)
        control = subgroup(group, dist.get_process_group_ranks(group), backend="gloo")
        mailbox = None if gloo else open_mailbox(control, nodes)
        return cls(control, mailbox, _store_of_watchdogs() if mailbox is None else None)

    def check_call(
        self, signature: Signature | str, *, error: Exception | None = None, wait: bool = True
    ) -> None:
        """Compare this call with the other ranks'. Its number is :attr:`number` then.

        Args:
            signature: of the call; a text has ``", "`` between its fields.
            error: what this rank already knows to be wrong.
            wait: wait for the comparison even if the signature is verified.

        Raises:
            MeshError: the ranks differ in this call or differed in an earlier one; on every rank.
            Exception: ``error`` itself, on the rank that passed it.
        """
        # A comparison may take milliseconds, so several are in flight.
        if isinstance(signature, str):
            signature = Signature.of_text(signature)
        self._compare(signature, Kind.CALL, signature, error, wait, MAX_IN_FLIGHT - 1)
        self._calls += 1
        self._passes_since_call = 0

    def check_part(self, text: str, *, wait: bool = True) -> None:
        """:meth:`check_call` in the middle of a call, which it is part of."""
        signature = Signature((text,))
        self._compare(signature, Kind.CALL, text, None, wait, MAX_IN_FLIGHT - 1)

    @contextlib.contextmanager
    def raising_everywhere(self) -> Iterator[None]:
        """Around what may raise on this rank alone, right before a comparison: then it raises on
        every rank."""
        num_raised = self.num_raised
        try:
            yield
        except Exception as error:
            self.raise_everywhere(error, num_raised)
            raise

    def raise_everywhere(self, error: Exception, num_raised: int) -> None:
        """Raise on every rank what this one has raised right before a comparison: pass it to that
        comparison, in which the others wait or will. Returns where the others know: a comparison
        has raised since ``num_raised`` was :attr:`num_raised`."""
        if self.num_raised == num_raised:
            self.check_call("", error=error)

    def check_backward(self, call: int, part: str = "", *, wait: bool = True) -> None:
        """Compare the backward pass that begins with the other ranks'; calls before it have been
        compared then.

        Args:
            call: the number of its forward call.
            part: which of several passes of that call.
            wait: wait for the comparison even if ranks have run backward passes before.

        Raises:
            MeshError: the ranks differ in this pass or in an earlier call; on every rank.
        """
        signature = Signature((f"backward pass of call {call}{part}",))
        # The call's number is new each time: verified is that passes were compared before.
        key = f"backward pass{part}"
        max_pending = min(self._passes_since_call, MAX_IN_FLIGHT - 1)
        self._compare(signature, Kind.BACKWARD, key, self.refuse_backward(), wait, max_pending)
        self._passes += 1
        self._passes_since_call += 1

    def check_now(self, text: str, error: Exception | None = None) -> None:
        """:func:`check_same` over this group, after all comparisons in flight."""
        signature = Signature.of_text(text)
        self._compare(signature, Kind.CALL, signature, error, True, 0)

    def check(self) -> None:
        """Compare how many calls and backward passes each rank has made. Collective; it takes a
        number of the comparisons, as a call does, and reads those in flight first.

        Raises:
            MeshError: other numbers, or a rank is about to do something else; on every rank.
        """
        signature = Signature(("a check of the mesh", *self._counts()))
        self._compare(signature, Kind.CALL, signature, None, True, 0)

    def begin_forward_pass(self) -> None:
        """Of an enabled model: what is compared from here on belongs to it."""
        self._forward_passes += 1

    @contextlib.contextmanager
    def forward_pass_of(self, name: str) -> Iterator[None]:
        """A part of the forward pass that has begun; an error in it is declared to the others."""
        try:
            yield
        except Exception as error:
            self.leave_forward_pass(name, error)
            raise

    def leave_forward_pass(self, name: str, error: BaseException | None) -> None:
        """:meth:`leave` the forward pass of a model that has begun."""
        reason = f": {type(error).__name__}: {error}" if error is not None else ""
        self.leave(f"it has left forward pass {self._forward_passes}, of {name}{reason}")

    def end_request(self, text: str, error: Exception | None = None) -> None:
        """Compare how a request ended, with an error or without; ranks that are still in it fail
        what they do there.

        Raises:
            MeshError: another rank has an error, or has ended another request.
            Exception: ``error`` itself, on the rank that passed it.
        """
        self._requests, self._forward_passes = self._requests + 1, 0
        self.check_now(f"the end of {text}", error)

    def leave(self, reason: str) -> None:
        """Declare in the place of this rank's next comparison that it has left what the others do,
        without waiting; nothing if they raise too, by the last comparison."""
        if self._transport is None or self._failure is not None or self._all_know or self._left:
            return
        with self._posting:
            record = self._record(Signature((reason,)), Kind.ERROR)
            self._left.append((self._transport.post(record.encode()), None))

    # What the watchdog needs (Watched).

    @property
    def name(self) -> str:
        return "" if self._transport is None else self._transport.name

    @property
    def posted(self) -> int:
        return 0 if self._transport is None else self._transport.posted

    def waiting_ranks(self) -> list[int]:
        if self._transport is None or self._failure is not None:
            return []
        return self._transport.waiting_ranks(self._transport.posted + 1)

    def status(self, seq: int, rank: int) -> bytes:
        return b"" if self._transport is None else self._transport.status(seq, rank)

    def publish(self, seq: int, data: bytes) -> None:
        if self._transport is not None:
            self._transport.publish(seq, data)

    def give_away(self, seq: int, reason: str, in_comparison: bool) -> None:
        with self._posting:
            transport = self._transport
            if transport is None or transport.posted + 1 != seq:
                return
            if self.mailbox is not None and len(self._left) == MAX_LEFT:
                self.mailbox.abort()  # the others go on and on without this rank
                return
            # Who is ahead must not wait for this rank, which waits for it.
            turn = OTHER_MESH_TURN if in_comparison else LAST_TURN
            record = CallRecord(Signature((reason,)), Kind.ERROR, 0, 0, False, *turn)
            self._left.append((transport.post(record.encode()), reason))

    def settle(self) -> None:
        reason = "it was in a call over another mesh, which was refused"
        record = CallRecord(Signature((reason,)), Kind.ERROR, 0, 0, False, *OTHER_MESH_TURN)
        with self._posting:
            if self._left:
                self._left = deque((seq, None) for seq, _ in self._left)
            elif self._transport is not None and self.waiting_ranks():
                self._left.append((self._transport.post(record.encode()), None))

    @property
    def has_failed(self) -> bool:
        """Every later call raises."""
        return self._failure is not None

    def begin_pass(self) -> None:
        """Exchanges by copy engines follow."""
        self._record_aborted_pass()
        self._in_pass = True

    def end_pass(self) -> None:
        self._in_pass = False

    def clear_verified(self) -> None:
        self._verified.clear()

    def drain(self, max_pending: int = 0) -> None:
        """Wait until at most so many comparisons are in flight; MeshError if the ranks differed in
        an earlier call."""
        while self._failure is None and len(self._pending) > max_pending:
            transport, seq = self._pending.popleft()
            if not transport.all_equal(seq):
                try:
                    _raise_on_mismatch(transport.gather(seq))
                except MeshError as error:
                    self._fail(error)
        if self._failure is not None:
            raise self._failure

    def compare_at_exit(self) -> str:
        """Compare for the last time, when the process ends: the difference, or "". Waits one second
        at most, and ignores ranks that do not answer."""
        if self.group is None or self._failure is not None:
            return ""
        mailbox = self.mailbox
        try:
            difference = self._pending_difference(MAX_IN_FLIGHT - 1)
            if mailbox is not None and difference is None:
                record = self._record(Signature(("the end of the process", *self._counts())))
                record = record._replace(requests=LAST_TURN[0], forward_passes=LAST_TURN[1])
                with self._posting:
                    self._pending.append((mailbox, mailbox.post(record.encode())))
            return str(difference or self._pending_difference(0) or "")
        except (MeshError, RuntimeError):  # other ranks have ended, or continue
            return ""

    def _pending_difference(self, max_pending: int) -> MeshError | None:
        """At the end of the process: the first difference in all but the last comparisons. Posting
        before that would overwrite a record not yet read by others."""
        while len(self._pending) > max_pending:
            transport, seq = self._pending.popleft()
            data = transport.gather(seq, _EXIT_TIMEOUT_S)
            if (difference := _difference(data)) is not None:
                return difference
        return None

    def _compare(
        self,
        signature: Signature,
        kind: Kind,
        key: Signature | str,
        error: Exception | None,
        wait: bool,
        max_pending: int,
    ) -> None:
        """Compare a record; without waiting if its key is verified and ``wait`` is False. So many
        comparisons may stay in flight before it."""
        if self._transport is None:
            if error is not None:
                raise error
            return
        if kind is _CALL:  # a backward pass is of its call, whichever of autograd's threads runs it
            is_other = self._turn.token is not self._thread_turn
            if is_other and torch._C._current_graph_task_id() == -1:
                self._compare_in_other_thread(signature, key, error, wait, max_pending)
                return
            if self._thread_field:
                signature = Signature.of(signature, *self._thread_field)
        wait = wait or error is not None or key not in self._verified
        self.num_raised += 1  # until it has not
        if self._pending or self._failure is not None:
            self.drain(0 if wait or self._left else max_pending)
        record = self._record(signature, kind, deferred=not wait)
        declared = record if error is None else _error_record(error, record.turn)
        with self._posting:
            seq = 0 if self._left else self._transport.post(_encode(declared))
        if not seq:
            seq = self._come_back_and_post(self._transport, declared)
        self._all_know = False
        if not wait:
            self.number += 1
            self.num_raised -= 1
            self._pending.append((self._transport, seq))
            return
        self._compare_and_wait(self._transport, seq, declared, error)
        # Not if it failed: over a group the record may have met another mesh's, and ranks that
        # catch the error and continue would give equal calls different numbers.
        self.number += 1
        self.num_raised -= 1
        if len(self._verified) >= _MAX_VERIFIED:  # at the same call on every rank
            self._verified.clear()
        self._verified.add(key)

    def _compare_and_wait(
        self, transport: _Transport, seq: int, record: CallRecord, error: Exception | None
    ) -> None:
        """Gather and compare all ranks' records of this call, of which this rank has posted its
        own; blocks until each has, and where this rank is ahead, until the others have come.

        Raises:
            MeshError: records differ, a rank has ended, or one cannot be reached.
            Exception: ``error``, this rank's own, where it has one.
        """
        while True:
            try:
                data = transport.gather(seq)
            except MeshError as unreachable:
                self._fail(unreachable)
                raise
            if error is None and data.count(data[0]) == len(data):
                return
            if (reason := _unusable_reason(data)) is not None:
                self._fail(reason)  # streams wait for exchanges that never come
            else:
                turns = [CallRecord.decode(x).turn for x in data]
                if record.turn > min(turns):
                    seq = self._come_back_and_post(transport, record)
                    continue
                if OTHER_MESH_TURN in turns:
                    watchdog().settle(self)
                if error is None and len(set(turns)) > 1:
                    # Those ahead compare on, and join nothing that a handler of this error would
                    # begin: it must not look as if all ranks had come to one call.
                    self._all_know = True
                    raise MeshError(str(_difference(data)))
            self._all_know = True
            _raise_on_mismatch(data, error)

    def _come_back_and_post(self, transport: _Transport, record: CallRecord) -> int:
        """Post a record after those of the others are read where this rank had left.

        Raises:
            MeshError: the watchdog has declared that it left.
        """
        while True:
            self._come_back(transport)
            with self._posting:
                if not self._left:
                    return transport.post(_encode(record))

    def _come_back(self, transport: _Transport) -> None:
        raises: str | None = None
        while self._left:
            seq, reason = self._left[0]
            try:
                data = transport.gather(seq)
            except MeshError as unreachable:
                self._fail(unreachable)
                raise
            self._left.popleft()
            raises = raises or reason
            if (unusable := _unusable_reason(data)) is not None:
                self._fail(unusable)
                raise unusable
        self._all_know = True
        if raises is not None:
            raise MeshError(f"the other ranks have refused the call without this rank: {raises}")

    # Note [one thread]
    #
    # Two threads that call come in another order on each rank. Their calls look alike, so that
    # ranks would take each other's tensors for the wrong call. Hence:
    #
    #   - A mesh belongs to the thread that calls first. Another one takes it over if that one is in
    #     no call (a server that warms up in the main thread), and it may not come back before the
    #     other has ended: it would be luck in which order ranks see the two.
    #   - Which thread calls is compared, by name: nothing else tells which threads of two processes
    #     belong together. A thread that stands for the main threads of others takes their name.
    #   - Backward passes are compared by the number of their call, and what they recompute runs in
    #     autograd's threads, so these are left alone.
    def _compare_in_other_thread(
        self,
        signature: Signature,
        key: Signature | str,
        error: Exception | None,
        wait: bool,
        max_pending: int,
    ) -> None:
        """Compare a call of another thread than the last one's, with an error if it may not."""
        with self._lock:  # here the last one waits, too, if it calls again
            thread, turn, refusal = threading.current_thread(), self._thread_turn, None
            owner = None if self._thread is None else self._thread()
            if self._turn.token is not turn:
                self._turn.token = self._thread_turn = object()
                if owner is not None and _frame_of(owner) is not None:
                    in_call = _wait_for_call_of(owner)
                    same_name = self._thread_name == thread.name != MAIN_THREAD
                    if in_call or same_name or thread in self._former_threads:
                        refusal = MeshError(
                            f"thread {thread.name!r} calls on a mesh whose calls run in thread "
                            f"{self._thread_name!r}, which has not ended. {ONE_THREAD}"
                        )
                    else:
                        self._former_threads.add(owner)
            if refusal is None:
                self._former_threads.discard(thread)
                self._thread, self._thread_name = weakref.ref(thread), thread.name
                self.thread = threading.get_ident()
                is_main = thread.name == MAIN_THREAD
                self._thread_field = () if is_main else (f"{THREAD_FIELD}{thread.name!r}",)
            try:
                self._compare(signature, _CALL, key, refusal or error, wait, max_pending)
            finally:
                if refusal is not None:
                    self._thread_turn = turn

    def _record(
        self, signature: Signature, kind: Kind = Kind.CALL, *, deferred: bool = False
    ) -> CallRecord:
        """With this rank's aborted passes: it must not continue with ranks that aborted none, or
        others."""
        if self._in_pass:
            self._record_aborted_pass()
        aborted = self._aborted_passes, self._exchanges_at_abort
        return CallRecord(signature, kind, *aborted, deferred, self._requests, self._forward_passes)

    def _record_aborted_pass(self) -> None:
        """Count a pass that began and did not end, and the exchanges before its end."""
        if self._in_pass:
            self._in_pass = False
            self._aborted_passes += 1
            self._exchanges_at_abort = self.num_exchanges()

    def _counts(self) -> tuple[str, str]:
        return f"after {self._calls} calls", f"after {self._passes} backward passes"

    def _fail(self, error: MeshError) -> None:
        """Every later call raises this error; streams that wait for other ranks are released."""
        self._failure = error
        self.on_failure()


class _Turn(threading.local):
    """Each thread's token of its turn on a mesh."""

    token: object = None


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """Where a thread is; None if it has ended, also one that Python has not started."""
    return sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None


def _wait_for_call_of(thread: threading.Thread) -> bool:
    """Whether a thread is in a call; waits for the call's end. Its exchanges come first: ranks
    would post them and the comparison that follows in different orders."""
    deadline = time.monotonic() + _THREAD_TIMEOUT_S
    in_call = False
    while _is_in_call(_frame_of(thread)) and time.monotonic() < deadline:
        in_call = True
        time.sleep(_THREAD_POLL_S)
    return in_call


def _is_in_call(frame: FrameType | None) -> bool:
    """Whether the thread of a frame runs code of ds_usp; not where it waits for another thread."""
    inside = False
    while frame is not None:
        if frame.f_code is ConsistencyChecker._compare_in_other_thread.__code__:
            return False
        inside = inside or frame.f_code.co_filename.startswith(_PACKAGE)
        frame = frame.f_back
    return inside


def check_same(group: dist.ProcessGroup | None, text: str, error: Exception | None = None) -> None:
    """Raise on every rank unless all ranks of a group pass the same text and none an error.
    Collective over the group (None: this process alone), before an operation that would hang if its
    ranks differed.

    Args:
        text: what this rank is about to do.
        error: why this rank cannot do it. A rank passes its error here instead of raising it first,
            so that the others do not wait for that rank.

    Raises:
        Exception: ``error``, on a rank that passed one.
        MeshError: on the other ranks; it quotes their errors, or shows in what the texts differ and
            on which ranks.
    """
    record = CallRecord(Signature.of_text(text)) if error is None else _error_record(error)
    data = record.encode().ljust(RECORD_BYTES, b"\0")  # all-gathers need equal lengths
    _raise_on_mismatch([] if group is None else all_gather_bytes(data, group), error)


def _error_record(error: Exception, turn: tuple[int, int] = (0, 0)) -> CallRecord:
    signature = Signature((str(error) or type(error).__name__,))
    return CallRecord(signature, Kind.ERROR, 0, 0, False, *turn)


def _raise_on_mismatch(data: Sequence[bytes | bytearray], error: Exception | None = None) -> None:
    if error is not None:
        raise error
    if (difference := _difference(data)) is not None:
        raise difference


def _difference(data: Sequence[bytes | bytearray]) -> MeshError | None:
    if not data or data.count(data[0]) == len(data):
        return None
    return mismatch_error([CallRecord.decode(record) for record in data])


def _unusable_reason(data: Sequence[bytes | bytearray]) -> MeshError | None:
    """The difference, if no later call can mend it: ranks aborted different passes, or some have
    started an exchange that others refuse. None if all ranks wait for this comparison."""
    records = [CallRecord.decode(record) for record in data]
    aborts = {(x.aborted_passes, x.exchanges) for x in records if x.kind is not Kind.ERROR}
    if len(aborts) > 1 or any(record.deferred for record in records):
        return mismatch_error(records)
    return None


def _store_of_watchdogs() -> dist.Store | None:
    """The job's store, by a connection of its own: on others a rank may wait for a key."""
    try:
        store: Any = c10d._get_default_store()
        return store.clone()
    except (AttributeError, RuntimeError):  # an older torch, a store of one process
        return None


def _while_waiting(
    reference: weakref.ref[ConsistencyChecker], seq: int, rank: int, seconds: float
) -> None:
    """Publish for the watchdogs of the ranks that are waited for; for people log where these are,
    after a minute, two, four ..."""
    checker = reference()
    if checker is None:
        return
    checker.publish(seq, watchdog().status_of_waiting(checker).encode())
    if seconds < _WARN_AFTER_S:
        checker.warn_at_s = _WARN_AFTER_S
    elif seconds >= checker.warn_at_s:
        checker.warn_at_s *= 2
        late = None if rank < 0 else Status.decode(checker.status(seq, rank))
        name = "other ranks" if rank < 0 else f"rank {rank}"
        text = f"a call has waited for {name} of the sequence-parallel group for"
        where = "" if late is None else f"; there {late.where}"
        logging.getLogger("ds_usp").warning("%s %.0f s%s", text, seconds, where)


def _at_exit(reference: weakref.ref[ConsistencyChecker], process: int) -> None:
    """Silent in forked children and after an uncaught exception, which is enough to read."""
    checker = reference()
    failed = getattr(sys, "last_value", None) is not None
    if checker is None or failed or os.getpid() != process:
        return
    if difference := checker.compare_at_exit():
        sys.stderr.write(f"ds_usp: {difference}\n")
