"""Consistency check: ranks compare what they are about to do, so that those that differ raise
instead of hanging."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from ds_usp.comm.call_record import (
    MAIN_THREAD,
    ONE_THREAD,
    RECORD_BYTES,
    THREAD_FIELD,
    CallRecord,
    Kind,
    Signature,
    mismatch_error,
)
from ds_usp.comm.process_groups import all_gather_bytes, subgroup, transport_device
from ds_usp.comm.shm_mailbox import MAX_IN_FLIGHT, ShmMailbox, open_mailbox
from ds_usp.errors import MeshError

# Signatures may differ from step to step, by the seed of dropout or by documents.
_MAX_VERIFIED = 1024
# Records of calls recur; those of backward passes, with their number, do not.
_encode = lru_cache(maxsize=_MAX_VERIFIED)(CallRecord.encode)
_CALL = Kind.CALL  # an enum's lookup takes longer
_EXIT_TIMEOUT_S = 1.0  # how long a process that ends waits for the other ranks' records
_GROUP_EXIT_TIMEOUT_S = 5.0  # and for the all-gathers of one group
_THREAD_TIMEOUT_S, _THREAD_POLL_S = 10.0, 1e-3  # of a wait for another thread's call to end
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class _Transport(Protocol):
    """All-gather of records, several in flight: :class:`ShmMailbox`, :class:`GroupTransport`."""

    def post(self, data: bytes) -> int:
        """Start the exchange of this rank's next record; its sequence number."""

    def all_equal(self, seq: int) -> bool:
        """Whether all ranks' records have been received and are equal; False: not known yet."""

    def gather(self, seq: int, timeout_s: float | None = None) -> Sequence[bytes | bytearray]: ...


class GroupTransport:
    """Records by asynchronous all-gathers over a process group of a CPU backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks, self._seq = group, group.size(), 0
        self._works: dict[int, tuple[dist.Work, list[bytearray]]] = {}
        # torch aborts a process that ends and leaves a collective behind. Not when the transport is
        # garbage collected, which may be in mid-training.
        atexit.register(_wait_for, self._works)

    def post(self, data: bytes) -> int:
        self._seq += 1
        local = torch.frombuffer(bytearray(data.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)
        received, out = [], []
        for _ in range(self._ranks):
            buffer = bytearray(RECORD_BYTES)
            received.append(buffer)
            out.append(torch.frombuffer(buffer, dtype=torch.uint8))
        self._works[self._seq] = self._group.allgather([out], [local]), received
        return self._seq

    def all_equal(self, seq: int) -> bool:
        return False

    def gather(self, seq: int, timeout_s: float | None = None) -> list[bytearray]:
        work, received = self._works.pop(seq)
        work.wait() if timeout_s is None else work.wait(datetime.timedelta(seconds=timeout_s))
        return received


def _wait_for(works: Mapping[int, tuple[dist.Work, list[bytearray]]]) -> None:
    """Other ranks may still join these all-gathers."""
    deadline = time.monotonic() + _GROUP_EXIT_TIMEOUT_S
    for work, _ in works.values():
        left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(RuntimeError):
            work.wait(left)


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
class ConsistencyChecker:
    """Compares the ranks' signatures of each call and each backward pass, on the CPU.

    Args:
        group: the ranks, over a CPU backend; None is one process alone.
        mailbox: shared memory of all of them, which is faster; None: all-gathers over the group.
        name: of the mesh, the same on all ranks, where others compare over the same group.
        exit_mailbox: shared memory for ranks without a mailbox, in which a process that ends writes
            how many calls it made: a collective that nobody answers would abort it.

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
        name: str = "",
        exit_mailbox: ShmMailbox | None = None,
    ) -> None:
        self.group, self.mailbox, self._exit_mailbox = group, mailbox, exit_mailbox
        self.number = 0
        self._name = (name,) if name else ()
        self._calls = self._passes = 0  # compared: forward calls, backward passes
        self._passes_since_call = 0
        self._verified: set[Signature | str] = set()  # signatures that were equal on all ranks
        self._pending: deque[tuple[_Transport, int]] = deque()
        self.on_failure: Callable[[], object] = lambda: None
        self.num_exchanges: Callable[[], int] = lambda: 0
        self.refuse_backward: Callable[[], Exception | None] = lambda: None
        self._in_pass, self._aborted_passes, self._exchanges_at_abort = False, 0, 0
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
                self._transport = GroupTransport(group)
            at_exit = partial(_at_exit, weakref.ref(self), os.getpid())
            atexit.register(at_exit)
            weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    @classmethod
    def for_mesh(cls, group: dist.ProcessGroup, nodes: Sequence[bytes]) -> ConsistencyChecker:
        """The checker of a mesh's group, by its backends; ``nodes``: each rank's. Collective over
        it."""
        backends = {type(group._get_backend(device)) for device in group._device_types}
        if transport_device(group).type == "cpu" and len(backends) == 1:  # gloo, which is for both
            # Other meshes may compare over the same group; their calls have the same numbers.
            name = all_gather_bytes(os.urandom(2), group)[0].hex()
            return cls(group, None, f"mesh {name}", open_mailbox(group, nodes))
        # Several comparisons are in flight where tensors may be on GPUs, and nothing else may come
        # between them: a mailbox, or a group of its own.
        control = subgroup(group, dist.get_process_group_ranks(group), backend="gloo")
        return cls(control, open_mailbox(control, nodes))

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
        signature = Signature((*self._name, text))
        self._compare(signature, Kind.CALL, text, None, wait, MAX_IN_FLIGHT - 1)

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
        signature = Signature((*self._name, f"backward pass of call {call}{part}"))
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
        signature = Signature((*self._name, "a check of the mesh", *self._counts()))
        self._compare(signature, Kind.CALL, signature, None, True, 0)

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
        mailbox = self.mailbox or self._exit_mailbox
        try:
            difference = self._pending_difference(MAX_IN_FLIGHT - 1)
            if mailbox is not None and difference is None:
                record = self._record(Signature(("the end of the process", *self._counts())))
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
            self.drain(0 if wait else max_pending)
        record = self._record(signature, kind, deferred=not wait)
        if not wait:
            self.number += 1
            self.num_raised -= 1
            self._pending.append((self._transport, self._transport.post(_encode(record))))
            return
        self._compare_and_wait(self._transport, record, error)
        # Not if it failed: over a group the record may have met another mesh's, and ranks that
        # catch the error and continue would give equal calls different numbers.
        self.number += 1
        self.num_raised -= 1
        if len(self._verified) >= _MAX_VERIFIED:  # at the same call on every rank
            self._verified.clear()
        self._verified.add(key)

    def _compare_and_wait(
        self, transport: _Transport, record: CallRecord, error: Exception | None
    ) -> None:
        """Gather and compare all ranks' records of this call; blocks until each has posted one.

        Raises:
            MeshError: records differ, a rank has ended, or one cannot be reached.
            Exception: ``error``, this rank's own, where it has one.
        """
        try:
            declared = record if error is None else _error_record(error)
            data = transport.gather(transport.post(_encode(declared)))
        except MeshError as unreachable:
            self._fail(unreachable)
            raise
        except RuntimeError as lost:
            if error is None and (ended := self._ended_ranks_error()):
                raise ended from lost
            raise
        if error is None and data.count(data[0]) == len(data):
            return
        try:
            _raise_on_mismatch(data, error)
        except Exception:
            if (reason := _unusable_reason(data)) is not None:
                self._fail(reason)  # streams wait for exchanges that never come
            raise

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
        return CallRecord(signature, kind, self._aborted_passes, self._exchanges_at_abort, deferred)

    def _record_aborted_pass(self) -> None:
        """Count a pass that began and did not end, and the exchanges before its end."""
        if self._in_pass:
            self._in_pass = False
            self._aborted_passes += 1
            self._exchanges_at_abort = self.num_exchanges()

    def _ended_ranks_error(self) -> MeshError | None:
        """For a lost comparison: which ranks' processes have ended, after how many calls, by the
        records that they left in the exit mailbox; None without any."""
        if self._exit_mailbox is None or self.group is None:
            return None
        data = {rank: self._exit_mailbox.read(1, rank) for rank in range(self.group.size())}
        records = {rank: CallRecord.decode(x) for rank, x in data.items() if x is not None}
        if not records:
            return None
        ours = Signature(("one call or pass more", *self._counts()))
        records[self._exit_mailbox.rank] = CallRecord(ours)
        ranks = sorted(records)
        return mismatch_error([records[rank] for rank in ranks], ranks)

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


def _error_record(error: Exception) -> CallRecord:
    return CallRecord(Signature((str(error) or type(error).__name__,)), Kind.ERROR)


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


def _at_exit(reference: weakref.ref[ConsistencyChecker], process: int) -> None:
    """Silent in forked children and after an uncaught exception, which is enough to read."""
    checker = reference()
    failed = getattr(sys, "last_value", None) is not None
    if checker is None or failed or os.getpid() != process:
        return
    if difference := checker.compare_at_exit():
        sys.stderr.write(f"ds_usp: {difference}\n")
