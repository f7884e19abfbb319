"""Neighbour exchange along the ring: start it, compute, take it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_usp.comm.ledger import CommLedger
from ds_usp.errors import MeshError


class RingChannel:
    """Two flat buffers that swap at every hop: one is here, the other arrives.

    One hop is in flight at a time. What is here may be read, not written, until :meth:`take`.

    Args:
        group: a communicator that nothing else uses, so hops overlap with other traffic; None
            for a ring of one, which never hops.
        ledger: where bytes are counted.
        kind: under which name.
        capacity: elements of the longest block that comes by.
        like: a tensor with the device and dtype of the buffers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ledger: CommLedger,
        kind: str,
        *,
        capacity: int,
        like: torch.Tensor,
    ) -> None:
        self._group = group
        self._ledger = ledger
        self._kind = kind
        self._here, self._there = (like.new_empty(capacity) for _ in range(2))
        self._works: list[dist.Work] = []
        self._arriving = 0

    @property
    def busy(self) -> bool:
        """Whether a hop was posted and not yet taken."""
        return bool(self._works)

    def here(self, length: int) -> torch.Tensor:
        """The first ``length`` elements of the buffer that is here."""
        return self._here[:length]

    def post(self, leaving: int, arriving: int, shift: int) -> None:
        """Start a hop: what is here goes ``shift`` ranks on, as much comes from behind.

        Args:
            leaving: elements to send.
            arriving: elements to receive; blocks of different ranks may differ in length.
            shift: distance along the ring; negative is backwards.

        Raises:
            MeshError: the hop before has not been taken, or there is no one to hop to.
        """
        if self.busy:
            raise MeshError(f"a {self._kind} hop was posted before the last one was taken")
        if self._group is None:
            raise MeshError(f"a {self._kind} hop was posted in a ring of one")
        ranks, rank = dist.get_process_group_ranks(self._group), dist.get_rank(self._group)
        to, source = (ranks[(rank + step) % len(ranks)] for step in (shift, -shift))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._here[:leaving], to, self._group),
                dist.P2POp(dist.irecv, self._there[:arriving], source, self._group),
            ]
        )
        self._arriving = arriving
        self._ledger.add(self._kind, leaving * self._here.element_size())

    def take(self) -> torch.Tensor:
        """Wait for the hop; what arrived is here now.

        Raises:
            MeshError: no hop was posted.
        """
        if not self.busy:
            raise MeshError(f"no {self._kind} hop was posted")
        for work in self._works:
            work.wait()
        self._works = []
        self._here, self._there = self._there, self._here
        return self.here(self._arriving)
