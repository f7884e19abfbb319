"""Ranks compare what they are about to do, so that those that differ raise instead of hanging."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from ds_usp.comm.board import MOST_AHEAD, MOST_BYTES, Board
from ds_usp.comm.gather import all_gather_bytes, byte_tensor
from ds_usp.errors import MeshError

# Descriptions may differ from step to step, by the seed of dropout or by documents.
_MOST_KNOWN = 1024
_AFTER, _ERROR = " (after ", b"error: "


class Agreement:
    """One comparison a call, on the host, so that no stream waits for it.

    Where tensors travel on the host, and for every description that is new, the ranks wait for
    the comparison before anything moves. On GPUs a description that they have agreed on before
    is compared while the call runs, and looked at when the next call or the backward pass
    begins: a GPU that waits for another rank does not stop the host from finding out why. A mesh
    on which that has happened is of no use any more, and says so at every call.

    Args:
        group: the ranks, over a host backend; None is one process alone.
        board: memory that all of them see, which is faster; None: they say it over the group.

    Attributes:
        exchanges: counts those that this rank's copy engines have begun.
        when_broken: called when the ranks differ.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, board: Board | None = None) -> None:
        self.group, self.board = group, board
        self._known: set[str] = set()
        self._pending: deque[_Comparison] = deque()
        self._said = 0  # comparisons on the board
        self.when_broken: Callable[[], object] = lambda: None
        self.exchanges: Callable[[], int] = lambda: 0
        self._passes, self._under_way, self._unsaid, self._broken_off = 0, False, False, ""
        self._broken: MeshError | None = None
        weakref.finalize(self, _wait_out, self._pending)

    def before_call(
        self,
        text: str,
        *,
        error: Exception | None = None,
        wait: bool = True,
    ) -> None:
        """Compare this call with the other ranks'.

        Args:
            text: what this rank is about to do.
            error: what it already knows to be wrong.
            wait: wait for the comparison even if the text is known.

        Raises:
            MeshError: the ranks differ in this call or differed in an earlier one; on every rank.
            Exception: ``error`` itself, on the rank that passed it.
        """
        new = self.group is None or wait or error is not None or text not in self._known
        # One may take milliseconds, and no host should wait for it: several are under way.
        self.settle(0 if new else MOST_AHEAD - 1)
        said = self._after_passes(text)
        if not new:
            self._pending.append(self._begin(said))
            return
        self._now(said, error)
        if len(self._known) >= _MOST_KNOWN:  # on every rank at once: they know the same
            self._known.clear()
        self._known.add(text)

    def begin_pass(self) -> None:
        """Note that copy engines carry what follows.

        Raises:
            MeshError: this rank has broken a pass off, and the others do not know it yet.
        """
        self._note_a_broken_pass()
        if self._unsaid:
            raise MeshError(
                "a pass by copy engines was broken off on this rank. Go on with a forward call, in "
                "which the ranks compare where they are, not with another backward pass"
            )
        self._under_way = True

    def end_pass(self) -> None:
        """Note that a pass by copy engines has ended well."""
        self._passes, self._under_way = self._passes + 1, False

    def _after_passes(self, text: str) -> str:
        """A text, with the passes by copy engines so far. A rank that broke one off must not go on
        with the others, unless they all did so in the same place."""
        self._note_a_broken_pass()
        self._unsaid = False
        if self._passes or self._broken_off:
            return f"{text}{_AFTER}{self._passes} passes by copy engines{self._broken_off})"
        return text

    def _note_a_broken_pass(self) -> None:
        if self._under_way:
            self._under_way, self._unsaid = False, True
            self._broken_off += f", one broken off after {self.exchanges()} exchanges"

    def now(self, text: str, error: Exception | None = None) -> None:
        """Compare a text now, after all that is under way; see :func:`agree`."""
        self.settle()
        self._now(self._after_passes(text), error)

    def forget(self) -> None:
        """Wait for the comparison of every description again, as if it were new."""
        self._known.clear()

    def settle(self, most: int = 0) -> None:
        """Wait until at most so many comparisons are under way. By their number alone, so that the
        ranks find a difference at the same call, and no collective is left without its partners.

        Raises:
            MeshError: the ranks differed in an earlier call.
        """
        while self._broken is None and len(self._pending) > most:
            try:
                _judge(self._pending.popleft().wait(), None)
            except MeshError as error:
                self._break(error)
        if self._broken is not None:
            raise self._broken

    def _now(self, said: str, error: Exception | None) -> None:
        if self.board is None:
            agree(self.group, said, error)
            return
        try:
            everyone = self._begin(_with(said, error)).wait()
        except MeshError as gone:  # not a difference: somebody has left
            self._break(gone)
            raise
        try:
            _judge(everyone, error)
        except MeshError as difference:
            if difference is not error and _were_broken_off(everyone):
                self._break(difference)
            raise

    def _break(self, error: MeshError) -> None:
        self._broken = error
        self.when_broken()

    def _begin(self, said: str) -> _Comparison:
        if self.board is not None:
            note = _clipped(said)
            self._said += 1
            self.board.write(self._said, note)
            return _OnBoard(self.board, self._said)
        group = cast(dist.ProcessGroup, self.group)  # one process alone never comes here
        mine = byte_tensor(_filled(said), group)
        everyone = [bytearray(MOST_BYTES) for _ in range(group.size())]
        places = [torch.frombuffer(each, dtype=torch.uint8) for each in everyone]
        return _OverGroup(group.allgather([places], [mine]), everyone)


class _Comparison(Protocol):
    """One under way."""

    def wait(self) -> Sequence[bytes | bytearray]:
        """What each rank says."""


class _OverGroup(NamedTuple):
    work: dist.Work
    said: list[bytearray]

    def wait(self) -> Sequence[bytearray]:
        self.work.wait()
        return self.said


class _OnBoard(NamedTuple):
    board: Board
    number: int

    def wait(self) -> Sequence[bytes]:
        return self.board.everyone(self.number)


def _wait_out(pending: deque[_Comparison]) -> None:
    """At the end of the process: torch aborts one that leaves a collective behind."""
    for each in pending:
        if isinstance(each, _OverGroup):
            with contextlib.suppress(RuntimeError):
                each.work.wait(datetime.timedelta(seconds=5))


def agree(group: dist.ProcessGroup | None, text: str, error: Exception | None = None) -> None:
    """Check that every rank of a group says the same; collective over it.

    Args:
        group: the ranks; None is this process alone.
        text: what this rank is about to do.
        error: what this rank already knows to be wrong; all ranks then fail with it.

    Raises:
        MeshError: the ranks differ; the message shows each rank's text. On every rank.
        Exception: ``error`` itself, on the rank that passed it.
    """
    # The whole text, not its digest: who finds a difference needs nobody to show it. Comparisons
    # that nobody waits for send as much, for a rank with an error may meet them.
    said = _filled(_with(text, error))
    _judge(all_gather_bytes(said, group) if group is not None else [], error)


def _with(text: str, error: Exception | None) -> str:
    return f"{_ERROR.decode()}{error}" if error else text


def _were_broken_off(said: Sequence[bytes | bytearray]) -> bool:
    """Whether ranks are after other passes, which no later call can mend; not whether their calls
    differ, or one has an error."""
    texts = [bytes(each).rstrip(b"\0") for each in said]
    ends = [each.rpartition(_AFTER.encode())[1:] for each in texts if not each.startswith(_ERROR)]
    return len({end if end[0] else (b"", b"") for end in ends}) > 1


def _judge(said: Sequence[bytes | bytearray], error: Exception | None) -> None:
    """Raise this rank's error, or the difference between the ranks."""
    if error is not None:
        raise error
    if any(each != said[0] for each in said):
        raise _difference(said)


def _difference(said: Sequence[bytes | bytearray]) -> MeshError:
    """The error that shows what each rank said."""
    texts = tuple(each.rstrip(b"\0").decode(errors="replace") for each in said)
    table = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    return MeshError(f"the ranks of the sequence-parallel group disagree:\n{table}", texts)


def _filled(text: str) -> bytes:
    """As long for every text."""
    return _clipped(text).ljust(MOST_BYTES, b"\0")


def _clipped(text: str) -> bytes:
    data = text.encode(errors="replace")
    if len(data) <= MOST_BYTES:
        return data
    digest = f"... (sha256 {hashlib.sha256(data).hexdigest()[:16]})".encode()
    return data[: MOST_BYTES - len(digest)] + digest
