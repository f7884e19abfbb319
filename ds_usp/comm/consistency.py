"""Ranks compare what they are about to do, so that those that differ raise instead of hanging."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from ds_usp.comm.difference import BACKWARD, ERROR, describe
from ds_usp.comm.gather import all_gather_bytes, byte_tensor
from ds_usp.comm.shm_mailbox import MAX_IN_FLIGHT, MAX_MESSAGE_BYTES, ShmMailbox
from ds_usp.errors import MeshError

# Descriptions may differ from step to step, by the seed of dropout or by documents.
_MAX_VERIFIED = 1024
_AFTER = " (after "
_END = "the end of the process"
_END_S = 1.0  # how long an ending process waits for what the others say


class ConsistencyChecker:
    """One comparison for each call and for each backward pass, on the host, so that no stream
    waits for it.

    Where tensors travel on the host, and for every description that is new, the ranks wait for
    the comparison before anything moves. On GPUs a description that they have agreed on before
    is compared while the call runs, and looked at when a later call or a backward pass
    begins: a GPU that waits for another rank does not stop the host from finding out why. A mesh
    on which that has happened is of no use any more, and says so at every call.

    The n-th comparison of a rank meets the n-th of every other, so this number is the same on all
    ranks. It names the call: its backward pass says which call it belongs to, and ranks that walk
    backward in different orders, or one call twice, differ in it.

    Args:
        group: the ranks, over a host backend; None is one process alone.
        board: memory that all of them see, which is faster; None: they say it over the group.
        name: of the mesh, the same on all ranks, where others compare over the same group.
        ending: memory in which ranks without a board say how many calls they have made when they
            end: a collective that nobody answers would abort the process.

    Attributes:
        number: of the last comparison.
        exchanges: counts those that this rank's copy engines have begun.
        when_broken: called when the ranks differ.
        refuse_backward: why no gradient could be right; asked at each backward pass.
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
        self._name = f"{name}, " if name else ""
        self._calls = self._passes = 0  # compared: forward calls, backward passes
        self._passes_in_a_row = 0  # since the last call
        self._verified: set[str] = set()
        self._pending: deque[_PendingCheck] = deque()
        self.on_failure: Callable[[], object] = lambda: None
        self.exchanges: Callable[[], int] = lambda: 0
        self.refuse_backward: Callable[[], Exception | None] = lambda: None
        self._in_pass, self._aborted_passes, self._abort_note = False, 0, ""
        self._failure: MeshError | None = None
        weakref.finalize(self, _drain_at_exit, self._pending)
        if group is not None:
            at_exit = partial(_at_exit, weakref.ref(self), os.getpid())
            atexit.register(at_exit)
            weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def check_call(
        self,
        text: str,
        *,
        error: Exception | None = None,
        wait: bool = True,
    ) -> None:
        """Compare this call with the other ranks'. Its number is :attr:`number` then.

        Args:
            text: what this rank is about to do, in fields with ``", "`` between them.
            error: what it already knows to be wrong.
            wait: wait for the comparison even if the text is known.

        Raises:
            MeshError: the ranks differ in this call or differed in an earlier one; on every rank.
            Exception: ``error`` itself, on the rank that passed it.
        """
        new = wait or error is not None or text not in self._verified
        # One may take milliseconds, and no host should wait for it: several are under way.
        self._compare(text, text, error, new, MAX_IN_FLIGHT - 1)
        self._calls += 1
        self._passes_in_a_row = 0

    def check_backward(self, call: int, part: str = "", *, wait: bool = True) -> None:
        """Compare the backward pass that begins with the other ranks'. Calls before it have been
        compared then.

        Args:
            call: the number of its forward call.
            part: which of several passes of that call.
            wait: wait for the comparison even if ranks have run backward passes before.

        Raises:
            MeshError: the ranks differ in this pass or in an earlier call; on every rank.
        """
        # The number is another one each time: what is known is that passes were compared before.
        known = f"{BACKWARD}{part}"
        error = self.refuse_backward()
        new = wait or error is not None or known not in self._verified
        said = f"{self._name}{BACKWARD}{call}{part}"
        self._compare(known, said, error, new, min(self._passes_in_a_row, MAX_IN_FLIGHT - 1))
        self._passes += 1
        self._passes_in_a_row += 1

    def _compare(
        self, known: str, said: str, error: Exception | None, new: bool, most: int
    ) -> None:
        """Compare what is said; pending unless it is new.

        Args:
            known: under which text later ones are not new.
            most: comparisons that may stay pending before it.
        """
        if self.group is None:
            if error is not None:
                raise error
            return
        self.drain(0 if new else most)
        if not new:
            self._pending.append(self._begin(said + self._position()))
            return
        self._now(said + self._position(), error)
        if len(self._verified) >= _MAX_VERIFIED:  # at the same call on every rank
            self._verified.clear()
        self._verified.add(known)

    def begin_pass(self) -> None:
        """Note that copy engines carry what follows."""
        self._record_aborted_pass()
        self._in_pass = True

    def end_pass(self) -> None:
        """Note that a pass by copy engines has ended well."""
        self._in_pass = False

    def _position(self) -> str:
        """Where this rank's copy engines broke passes off. It must not go on with the others,
        unless they all did so in the same place."""
        self._record_aborted_pass()
        return self._abort_note

    def _record_aborted_pass(self) -> None:
        if self._in_pass:
            self._in_pass = False
            self._aborted_passes += 1
            self._abort_note = (
                f"{_AFTER}{self._aborted_passes} passes by copy engines that were broken off, "
                f"the last after {self.exchanges()} exchanges)"
            )

    def check_now(self, text: str, error: Exception | None = None) -> None:
        """Compare a text now, after all that is under way; see :func:`agree`."""
        self._compare(text, text, error, True, 0)

    def check(self) -> None:
        """Compare how many calls and backward passes each rank has made.

        Raises:
            MeshError: other numbers, or a rank is about to do something else; on every rank.
        """
        self.check_now(f"{self._name}a check of the mesh, {self._counts()}")

    def _counts(self) -> str:
        return f"after {self._calls} calls, after {self._passes} backward passes"

    def clear_verified(self) -> None:
        """Wait for the comparison of every description again, as if it were new."""
        self._verified.clear()

    def drain(self, most: int = 0) -> None:
        """Wait until at most so many comparisons are under way. By their number alone, so that the
        ranks find a difference at the same call, and no collective is left without its partners.

        Raises:
            MeshError: the ranks differed in an earlier call.
        """
        while self._failure is None and len(self._pending) > most:
            comparison = self._pending.popleft()
            if comparison.all_equal():
                continue
            try:
                _raise_on_mismatch(comparison.wait(), None)
            except MeshError as error:
                self._fail(error)
        if self._failure is not None:
            raise self._failure

    def end(self) -> str:
        """Compare for the last time, when the process ends; what differs, or nothing. It waits a
        second at most for the others, and says nothing of those that do not come."""
        if self.group is None or self._failure is not None:
            return ""
        said = f"{_END}, {self._counts()}"
        if self.mailbox is not None:
            self._pending.append(self._begin(said))
        elif self._exit_mailbox is not None:
            self._exit_mailbox.post(1, _truncated(said))
            self._pending.append(_MailboxCheck(self._exit_mailbox, 1))
        try:
            while self._pending:
                everyone = self._pending.popleft().wait(_END_S)
                if any(each != everyone[0] for each in everyone):
                    return str(_mismatch_error(everyone))
        except (MeshError, RuntimeError):  # the others are gone, or go on
            pass
        return ""

    def _ended_ranks(self) -> str:
        """Which ranks have ended well, for one that cannot reach them; nothing if none has."""
        if self._exit_mailbox is None or self.group is None:
            return ""
        notes = [self._exit_mailbox.read(1, rank) for rank in range(self.group.size())]
        ended = {rank: note.decode() for rank, note in enumerate(notes) if note is not None}
        if not ended:
            return ""
        own = {
            rank: f"one call or pass more, {self._counts()}" for rank in [self._exit_mailbox.rank]
        }
        return describe([text for _, text in sorted((ended | own).items())], sorted(ended | own))

    def _now(self, said: str, error: Exception | None) -> None:
        if self.mailbox is None:
            try:
                check_same(self.group, said, error)
            except RuntimeError as lost:
                if error is None and (ended := self._ended_ranks()):
                    raise MeshError(ended) from lost
                raise
            # Not before: one that fails may have met another mesh's, and ranks that go on after
            # the error would number their calls differently.
            self.number += 1
            return
        try:
            everyone = self._begin(_with(said, error)).wait()
        except MeshError as gone:  # not a difference: somebody has left
            self._fail(gone)
            raise
        try:
            _raise_on_mismatch(everyone, error)
        except MeshError as difference:
            if difference is not error and _pass_counts_differ(everyone):
                self._fail(difference)
            raise

    def _fail(self, error: MeshError) -> None:
        self._failure = error
        self.on_failure()

    def _begin(self, said: str) -> _PendingCheck:
        self.number += 1
        if self.mailbox is not None:
            self.mailbox.post(self.number, _truncated(said))
            return _MailboxCheck(self.mailbox, self.number)
        group = cast(dist.ProcessGroup, self.group)  # one process alone never comes here
        own = byte_tensor(_padded(said), group)
        everyone = [bytearray(MAX_MESSAGE_BYTES) for _ in range(group.size())]
        places = [torch.frombuffer(each, dtype=torch.uint8) for each in everyone]
        return _GroupCheck(group.allgather([places], [own]), everyone)


class _PendingCheck(Protocol):
    """One under way."""

    def all_equal(self) -> bool:
        """Whether it has ended and all ranks say the same; False says nothing."""

    def wait(self, timeout_s: float | None = None) -> Sequence[bytes | bytearray]:
        """What each rank says."""


class _GroupCheck(NamedTuple):
    work: dist.Work
    said: list[bytearray]

    def all_equal(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> Sequence[bytearray]:
        if timeout_s is None:
            self.work.wait()
        else:
            self.work.wait(datetime.timedelta(seconds=timeout_s))
        return self.said


class _MailboxCheck(NamedTuple):
    mailbox: ShmMailbox
    number: int

    def all_equal(self) -> bool:
        return self.mailbox.all_equal(self.number)

    def wait(self, timeout_s: float | None = None) -> Sequence[bytes]:
        return self.mailbox.gather(self.number, timeout_s)


def _drain_at_exit(pending: deque[_PendingCheck]) -> None:
    """At the end of the process: torch aborts one that leaves a collective behind."""
    for each in pending:
        if isinstance(each, _GroupCheck):
            with contextlib.suppress(RuntimeError):
                each.work.wait(datetime.timedelta(seconds=5))


def _at_exit(checker: weakref.ref[ConsistencyChecker], process: int) -> None:
    """Say what differs between ranks that end. After an error there is enough to read."""
    exit_mailbox = checker()
    failed = getattr(sys, "last_value", None) is not None
    if (
        exit_mailbox is not None
        and not failed
        and os.getpid() == process
        and (text := exit_mailbox.end())
    ):
        sys.stderr.write(f"ds_usp: {text}\n")


def check_same(group: dist.ProcessGroup | None, text: str, error: Exception | None = None) -> None:
    """Check that every rank of a group says the same; collective over it.

    Args:
        group: the ranks; None is this process alone.
        text: what this rank is about to do.
        error: what this rank already knows to be wrong; all ranks then fail with it.

    Raises:
        MeshError: the ranks differ; the message shows in what, and which ranks. On every rank.
        Exception: ``error`` itself, on the rank that passed it.
    """
    # The full text, as comparisons in flight send it: a rank with an error may meet them.
    said = _padded(_with(text, error))
    _raise_on_mismatch(all_gather_bytes(said, group) if group is not None else [], error)


def _with(text: str, error: Exception | None) -> str:
    return f"{ERROR}{error}" if error else text


def _pass_counts_differ(said: Sequence[bytes | bytearray]) -> bool:
    """Whether ranks are after other passes, which no later call can mend; not whether their calls
    differ, or one has an error."""
    texts = [bytes(each).rstrip(b"\0") for each in said]
    ends = [
        each.rpartition(_AFTER.encode())[1:]
        for each in texts
        if not each.startswith(ERROR.encode())
    ]
    return len({end if end[0] else (b"", b"") for end in ends}) > 1


def _raise_on_mismatch(said: Sequence[bytes | bytearray], error: Exception | None) -> None:
    """Raise this rank's error, or the difference between the ranks."""
    if error is not None:
        raise error
    if any(each != said[0] for each in said):
        raise _mismatch_error(said)


def _mismatch_error(said: Sequence[bytes | bytearray]) -> MeshError:
    """The error that shows in what ranks differ."""
    texts = tuple(bytes(each).rstrip(b"\0").decode(errors="replace") for each in said)
    return MeshError(describe(texts), texts)


def _padded(text: str) -> bytes:
    """As long for every text."""
    return _truncated(text).ljust(MAX_MESSAGE_BYTES, b"\0")


def _truncated(text: str) -> bytes:
    data = text.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data
    digest = f"... (sha256 {hashlib.sha256(data).hexdigest()[:16]})".encode()
    return data[: MAX_MESSAGE_BYTES - len(digest)] + digest
