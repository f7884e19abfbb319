"""Exchange among the ranks of a ring: start it, compute, take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_usp.comm.ledger import CommLedger
from ds_usp.errors import MeshError

# (rank in the group, rows of what is packed that go there), and (rank, tensor that is filled from
# there, where its first element lies in what that rank packed, elements from row to row there or 0
# if dense).
SendSlices = Sequence[tuple[int, int, int]]
RecvSpecs = Sequence[tuple[int, torch.Tensor, int, int]]
HeadShapes = tuple[tuple[int, int], ...]
_MAX_VIEWS = 64


class StagingBuffer:
    """Dense memory ``[rows, ...]`` to pack what leaves into. Its views are made once: room of a
    copy engine is used again and again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._views: dict[tuple[HeadShapes, bool], tuple[torch.Tensor, ...]] = {}

    def views(self, shapes: HeadShapes, *, tokens_first: bool = False) -> tuple[torch.Tensor, ...]:
        """:func:`cut_features` of all of it; turned, of ``[rows, B, features]``."""
        key = shapes, tokens_first
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # they outlive the call
                tensor = self.tensor.flatten(0, -3) if tokens_first else self.tensor
                found = self._views[key] = split_features(tensor, shapes, tokens_first=tokens_first)
        return found


def split_features(
    x: torch.Tensor, shapes: HeadShapes, *, tokens_first: bool = False
) -> tuple[torch.Tensor, ...]:
    """The tensors ``[..., h, D]`` that lie one after the other in ``[..., features]``, views.

    Args:
        shapes: ``h`` and ``D`` of each.
        turned: the first two dims change places.
    """
    front, strides, at = tuple(x.shape[:-1]), x.stride()[:-1], x.storage_offset()
    if tokens_first:
        front, strides = (front[1], front[0], *front[2:]), (strides[1], strides[0], *strides[2:])
    found = []
    for heads, dim in shapes:
        found.append(x.as_strided((*front, heads, dim), (*strides, dim, 1), at))
        at += heads * dim
    return tuple(found)


class Channel(Protocol):
    """A way for tensors between the ranks of a group, one exchange in flight."""

    in_flight: bool

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        """Room to pack what leaves into, on all ranks."""

    def post(self, packed: torch.Tensor, sends: SendSlices, recvs: RecvSpecs) -> None:
        """Start an exchange; see :meth:`P2PChannel.post`."""

    def wait(self) -> None:
        """Wait for it; see :meth:`P2PChannel.wait`."""

    def drain(self) -> None:
        """Wait for it if there is one; see :meth:`P2PChannel.drain`."""


class P2PChannel:
    """Sends tensors straight to the ranks that use them, one exchange in flight.

    Args:
        group: a communicator that nothing else uses, so exchanges overlap with other traffic;
            None for a ring of one, which never sends.
        ledger: where bytes are counted.
        kind: under which name.
    """

    def __init__(self, group: dist.ProcessGroup | None, ledger: CommLedger, kind: str) -> None:
        self._group = group
        self._rank = -1 if group is None else group.rank()
        self._ledger = ledger
        self._kind = kind
        self._works: list[dist.Work] = []
        self._sending: list[torch.Tensor] = []
        self.in_flight = False

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        """Room to pack what leaves into. All ranks ask for it, before they post; it serves until
        they ask again or forget the channel."""
        return StagingBuffer(like.new_empty(*shape, dtype=dtype))

    def post(self, packed: torch.Tensor, sends: SendSlices, recvs: RecvSpecs) -> None:
        """Start an exchange; either side may have nothing in it.

        What leaves may not be written, and what arrives not read, until :meth:`take`.

        Args:
            packed: what leaves, dense; for copy engines their room.
            leaving: (rank of the group, first row of ``packed`` that goes there, and the one after
                the last).
            arriving: (rank of the group, dense tensor that it fills, where in that rank's room
                the parcel starts, in elements, and 0). Two ranks name the parcels between them in
                the same order. What this rank has packed itself is copied.

        Raises:
            MeshError: the exchange before has not been taken, or there is no one to send to.
        """
        if self.in_flight or self._group is None:
            why = "before the last one was taken" if self.in_flight else "in a ring of one"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        parcels = [(to, packed[start:stop]) for to, start, stop in sends]
        places = [(source, x) for source, x, _, _ in recvs if source != self._rank]
        for source, x, at, _ in recvs:
            if source == self._rank:
                x.copy_(packed.view(-1)[at : at + x.numel()].view(x.shape))
        self._works = _exchange(self._group, parcels, places) if parcels or places else []
        self._sending = [x for _, x in parcels]
        self.in_flight = True
        if parcels:
            self._ledger.add(self._kind, sum(x.numel() * x.element_size() for x in self._sending))

    def wait(self) -> None:
        """Wait for the exchange; on GPUs the current stream waits, not the host.

        Raises:
            MeshError: none was posted.
        """
        if not self.in_flight:
            raise MeshError(f"no {self._kind} exchange was posted")
        works, sends = self._works, self._sending
        self._works, self._sending, self.in_flight = [], [], False  # also where a wait fails
        for work in works:
            work.wait()
        del sends  # what is being sent lives until it is

    def drain(self) -> None:
        """Wait for what is under way, if anything: after an error, so that the next call does not
        meet its messages."""
        if self.in_flight:
            self.wait()


def _exchange(
    group: dist.ProcessGroup,
    sends: Sequence[tuple[int, torch.Tensor]],
    recvs: Sequence[tuple[int, torch.Tensor]],
) -> list[dist.Work]:
    """``torch.distributed.batch_isend_irecv`` without its checks, which take longer on the host
    than a small message takes on the links."""

    def start() -> list[dist.Work]:
        works = [group.send([x], to, 0) for to, x in sends]
        return works + [group.recv([x], source, 0) for source, x in recvs]

    device = (*sends, *recvs)[0][1].device
    # Backends of older torch do not say; NCCL's must, where sends would wait for each other.
    backend = group._get_backend(device)
    if not getattr(backend, "supports_coalescing", device.type == "cuda"):
        return start()
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        start()
    return list(manager.works)
