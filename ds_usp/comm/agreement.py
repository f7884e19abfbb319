"""Ranks compare what they are about to do, so that those that differ raise instead of hanging."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_usp.errors import MeshError

_TEXT_BYTES = 2048
# Descriptions may differ from step to step, by the seed of dropout or by documents.
_MOST_KNOWN = 1024
# Comparisons under way at a time. One takes milliseconds, and no host should wait for it.
_MOST_PENDING = 4


class _Pending(NamedTuple):
    """A comparison under way, and what each rank says."""

    work: dist.Work
    said: list[bytearray]


class Agreement:
    """One comparison a call, on the host, so that no stream waits for it.

    Where tensors travel on the host, and for every description that is new, the ranks wait for
    the comparison before anything moves. On GPUs a description that they have agreed on before
    is compared while the call runs, and looked at when the next call or the backward pass
    begins: a GPU that waits for another rank does not stop the host from finding out why. A mesh
    on which that has happened is of no use any more, and says so at every call.

    Args:
        group: the ranks, over a host backend; None is one process alone.

    Attributes:
        passes: forward and backward passes by copy engines that ended well. Engines count their
            exchanges: a rank that broke one off must not go on with the others.
        when_broken: called when the ranks differ.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._known: set[str] = set()
        self._pending: deque[_Pending] = deque()
        self.when_broken: Callable[[], object] = lambda: None
        self.passes = 0
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
        self.settle(0 if new else _MOST_PENDING - 1)
        said = f"{text} (after {self.passes} passes by copy engines)" if self.passes else text
        if self.group is None or new:
            agree(self.group, said, error)
            if len(self._known) >= _MOST_KNOWN:  # on every rank at once: they know the same
                self._known.clear()
            self._known.add(text)
            return
        mine = _tensor(_filled(said), self.group)
        everyone = [bytearray(_TEXT_BYTES) for _ in range(self.group.size())]
        places = [torch.frombuffer(each, dtype=torch.uint8) for each in everyone]
        self._pending.append(_Pending(self.group.allgather([places], [mine]), everyone))

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
            work, said = self._pending.popleft()
            work.wait()
            if any(each != said[0] for each in said):
                self._broken = _difference(said)
                self.when_broken()
        if self._broken is not None:
            raise self._broken


def _wait_out(pending: deque[_Pending]) -> None:
    """At the end of the process: torch aborts one that leaves a collective behind."""
    for work, _ in pending:
        with contextlib.suppress(RuntimeError):
            work.wait(datetime.timedelta(seconds=5))


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
    said = f"error: {error}" if error else text
    # The whole text, not its digest: who finds a difference needs nobody to show it. Comparisons
    # that nobody waits for send as much, for a rank with an error may meet them.
    texts = all_gather_bytes(_filled(said), group) if group is not None else []
    if error is not None:
        raise error
    if any(each != texts[0] for each in texts):
        raise _difference(texts)


def _difference(said: Sequence[bytes | bytearray]) -> MeshError:
    """The error that shows what each rank said."""
    texts = (each.rstrip(b"\0").decode(errors="replace") for each in said)
    table = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    return MeshError(f"the ranks of the sequence-parallel group disagree:\n{table}")


def all_gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The same number of bytes from every rank."""
    mine = _tensor(data, group)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    found = bytearray(len(everyone) * len(data))
    torch.frombuffer(found, dtype=torch.uint8).copy_(torch.cat(everyone))
    return [bytes(found[at : at + len(data)]) for at in range(0, len(found), len(data))]


def _tensor(data: bytes, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(transport_device(group))


def _filled(text: str) -> bytes:
    """As long for every text."""
    return _clipped(text).ljust(_TEXT_BYTES, b"\0")


def _clipped(text: str) -> bytes:
    data = text.encode()
    if len(data) <= _TEXT_BYTES:
        return data
    digest = f"... (sha256 {hashlib.sha256(data).hexdigest()[:16]})".encode()
    return data[: _TEXT_BYTES - len(digest)] + digest


def transport_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group can send; the CPU if that is one."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())
