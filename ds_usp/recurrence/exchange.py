"""Differentiable exchanges of flat buffers between all ranks of a mesh, in calls that the ranks
compare in both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_usp.comm.call_record import Signature
from ds_usp.comm.channel import NO_RANGE, exchange_range, profiler_enabled
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.lowlevel import refuse_second_derivative

ResultT = TypeVar("ResultT")


# Note [a call is one node to its neighbours]
#
#     tensors --> enter --> kernels, exchanges, folds --> leave --> out
#
# What lies between is another graph on each rank: one imports no state, another sends none. And
# autograd runs what is ready. Without the two ends ranks would run the backward exchanges of
# neighbouring calls (the convolutions of q, k and v) in different orders, or leave out one in which
# the others wait:
#
#   - `leave` gives the buffer of each exchange a gradient, zeros where a rank needed nothing, and
#     `enter` gives each send buffer an empty part: every rank is in every backward exchange.
#   - `enter` hands on the gradients of all inputs at once: between calls, ranks' graphs are alike.
#   - `leave` saves a tensor: what a checkpoint recomputes runs, with its exchanges, before this
#     rank's first backward exchange, and as far as the end of the call, on every rank.
class ExchangeCall:
    """One call over a mesh, with exchanges of one kind.

    Args:
        kind: of its exchanges in the ledger.
        tensors: inputs of the call.

    Attributes:
        inputs: the tensors, for what is computed in the call.
    """

    def __init__(self, mesh: SequenceMesh, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        if not isinstance(mesh, SequenceMesh):
            raise ConfigError(
                f"mesh={mesh!r} must be a SequenceMesh: SequenceMesh.from_group(group, "
                "ulysses_degree=...), or SequenceMesh.single() for one process"
            )
        self.mesh, self.kind = mesh, kind
        self.is_on_cpu = tensors[0].device.type == "cpu"
        self.number = 0  # of the call, once it has been compared
        self._received: list[torch.Tensor] = []
        self.inputs = list(tensors)
        self._anchor = tensors[0].new_empty(0)
        floating = [i for i, x in enumerate(tensors) if x.requires_grad]
        if floating and torch.is_grad_enabled():
            self._anchor, *inside = _Enter.apply(*(tensors[i] for i in floating))
            for i, x in zip(floating, inside, strict=True):
                self.inputs[i] = x

    def compare(self, begin: Callable[[], tuple[Signature, ResultT]]) -> ResultT:
        """Compute up to the first exchange, and go on only if all ranks are there in equal calls.

        Args:
            begin: returns the signature of the call, and a result.

        Raises:
            Exception: what ``begin`` raised; on the other ranks a MeshError with it.
        """
        consistency = self.mesh.consistency
        try:
            signature, result = begin()
        except Exception as error:
            consistency.check_call("", error=error)
            raise
        consistency.check_call(signature, wait=self.is_on_cpu)
        self.number = consistency.number
        return result

    def exchange(
        self,
        parts: Sequence[torch.Tensor],
        sent: Sequence[int],
        received: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """What the ranks send to this one, flat, in their order; collective over the mesh.

        Args:
            parts: for each rank in order, of any shapes.
            sent, received: elements to and from each rank.
        """
        flat = [part.reshape(-1).to(dtype) for part in parts]
        buffer = torch.cat([self._anchor.to(dtype), *flat])
        out: torch.Tensor = _Exchange.apply(buffer, self, tuple(sent), tuple(received))
        self._received.append(out)
        return out

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """The output, for what is computed after the call."""
        left: torch.Tensor = _Leave.apply(self, out, *self._received) if self._received else out
        return left

    def all_to_all(
        self, buffer: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> torch.Tensor:
        mesh, out = self.mesh, buffer.new_empty(sum(received))
        sent_bytes = (sum(sent) - sent[mesh.rank]) * buffer.element_size()
        mesh.ledger.add(self.kind, sent_bytes)
        with exchange_range(self.kind, sent_bytes) if profiler_enabled() else NO_RANGE:
            dist.all_to_all_single(out, buffer, list(received), list(sent), group=mesh.sp_group)
        return out


class _Enter(torch.autograd.Function):
    """An empty tensor, and the tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors[0].new_empty(0), *(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return grads


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: torch.Tensor,
        call: ExchangeCall,
        sent: tuple[int, ...],
        received: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.call, ctx.sent, ctx.received = call, sent, received
        return call.all_to_all(buffer, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        returned = ctx.call.all_to_all(grad.contiguous(), ctx.received, ctx.sent)
        return returned, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ExchangeCall, out: torch.Tensor, *received: torch.Tensor
    ) -> torch.Tensor:
        ctx.mesh, ctx.number, ctx.is_on_cpu = call.mesh, call.number, call.is_on_cpu
        ctx.like = [(x.shape, x.dtype, x.device) for x in received]
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        consistency = ctx.mesh.consistency
        num_raised = consistency.num_raised
        try:
            refuse_second_derivative("a layer that carries a state")
            ctx.saved_tensors  # noqa: B018 - recomputes
        except Exception as error:
            consistency.raise_everywhere(error, num_raised)
            raise
        consistency.check_backward(ctx.number, wait=ctx.is_on_cpu)
        zeros = (torch.zeros((), dtype=t, device=d).expand(shape) for shape, t, d in ctx.like)
        return None, grad, *zeros
