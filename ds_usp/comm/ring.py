"""Exchange between pairs of ring ranks: start it, compute, take it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_usp.comm.ledger import CommLedger
from ds_usp.errors import MeshError


class RingChannel:
    """Sends tensors some ranks on and receives as far from behind, one exchange in flight.

    Args:
        group: a communicator that nothing else uses, so exchanges overlap with other traffic;
            None for a ring of one, which never sends.
        ledger: where bytes are counted.
        kind: under which name.
    """

    def __init__(self, group: dist.ProcessGroup | None, ledger: CommLedger, kind: str) -> None:
        self._group = group
        self._ledger = ledger
        self._kind = kind
        self._works: list[dist.Work] = []
        self._leaving: list[torch.Tensor] = []
        self.busy = False

    def post(
        self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], shift: int
    ) -> None:
        """Start an exchange; either side may have nothing in it.

        Neither tensor may be written, and what arrives not read, until :meth:`take`.

        Args:
            leaving: go to the rank ``shift`` places on.
            arriving: contiguous tensors, filled by the rank ``shift`` places behind.
            shift: distance along the ring; negative is backwards.

        Raises:
            MeshError: the exchange before has not been taken, or there is no one to send to.
        """
        if self.busy or self._group is None:
            why = "before the last one was taken" if self.busy else "in a ring of one"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        ranks, rank = dist.get_process_group_ranks(self._group), dist.get_rank(self._group)
        to, source = (ranks[(rank + step) % len(ranks)] for step in (shift, -shift))
        self._leaving = [x.contiguous() for x in leaving if x.numel()]
        operations = [dist.P2POp(dist.isend, x, to, self._group) for x in self._leaving]
        operations += [
            dist.P2POp(dist.irecv, x, source, self._group) for x in arriving if x.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []
        self.busy = True
        if self._leaving:
            sent = sum(x.numel() * x.element_size() for x in self._leaving)
            self._ledger.add(self._kind, sent)

    def take(self) -> None:
        """Wait for the exchange.

        Raises:
            MeshError: none was posted.
        """
        if not self.busy:
            raise MeshError(f"no {self._kind} exchange was posted")
        works, leaving = self._works, self._leaving
        self._works, self._leaving, self.busy = [], [], False  # also where a wait fails
        for work in works:
            work.wait()
        del leaving  # what is being sent lives until it is

    def close(self) -> None:
        """Wait for what is under way, if anything: after an error, so that the next call does not
        meet its messages."""
        if self.busy:
            self.take()
