"""Differentiable exchanges of flat buffers between all ranks of a mesh, in calls that the ranks
compare in both passes: of ``scan``, ``conv``, ``kernels`` and sparse layers of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_usp.comm.call_record import Signature
from ds_usp.comm.channel import NO_RANGE, exchange_range, profiler_enabled
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.mesh import SequenceMesh, check_on_all_ranks
from ds_usp.errors import ConfigError, LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec, Parents, format_documents, has_only
from ds_usp.geometry.state_chains import StateChains, state_chains
from ds_usp.lowlevel import refuse_second_derivative

ResultT = TypeVar("ResultT")


# Note [a call is one node to its neighbours]
#
#     tensors --> enter --> kernels, exchanges, folds --> leave --> out
#
# What lies between is another graph on each rank: one imports no state, another sends none. A rank
# whose backward pass leaves out an exchange, of this call or of one before it, leaves the others
# waiting. Hence the two ends, between which all ranks' graphs are equal:
#
#   - `leave` gives the buffer of each exchange a gradient, zeros where a rank needed nothing, and
#     `enter` gives each send buffer an empty part: every rank is in every backward exchange.
#   - `enter` hands on a gradient for every input, None where a rank used none (a transition, where
#     nothing is imported): what made it runs backward all the same.
#   - `leave` saves a tensor: what a checkpoint recomputes runs, with its exchanges, before this
#     rank's first backward exchange, and as far as the end of the call, on every rank.
class ExchangeCall:
    """One call on the shards of a sequence: :meth:`begin`, equally many :meth:`exchange` on every
    rank, :meth:`leave`.

    Where rows have different documents they are one row here, one after the other: no piece of the
    chains is of some rows only.

    Args:
        name: of the function that is called.
        kind: of its exchanges in the ledger.
        tensors: rows along dim 0, and parameters.
        dims: of each tensor, the dim of its tokens; None: a parameter.

    Attributes:
        chains: of the tokens, once the call has begun.
        needs_grad: the call will have a backward pass, with exchanges.
    """

    chains: StateChains

    def __init__(
        self,
        name: str,
        kind: str,
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int | None],
        mesh: SequenceMesh,
        layout: TokenLayout,
        documents: Any,
    ) -> None:
        self.name, self.kind, self.mesh = name, kind, mesh
        self._inputs: Any = tensors, dims, layout, documents
        self.needs_grad = False
        self._received: list[torch.Tensor] = []

    def begin(
        self, compute: Callable[[list[torch.Tensor]], tuple[Sequence[str], ResultT]]
    ) -> ResultT:
        """Check the call, compute up to its first exchange, and go on only if all ranks are there
        in equal calls.

        Args:
            compute: of the tensors, rows of which are joined as said above; no collective. Returns
                the texts that the ranks compare besides, and a result.

        Raises:
            ConfigError, LayoutError: no tensors of such a call; or what ``compute`` raises. On the
                other ranks a MeshError with it.
        """

        parameters: dict[str, torch.Tensor] = {}

        def check() -> tuple[Signature, ResultT]:
            signature, inputs = self._check_and_enter(*arguments)
            for number, (x, dim) in enumerate(zip(*arguments[:2], strict=True)):
                if dim is None:
                    parameters[f"tensor {number}"] = x
            fields, result = compute(inputs)
            return Signature.of(*signature, *fields), result

        arguments, self._inputs = self._inputs, None  # the graph keeps the call: no inputs with it
        like = arguments[0][0] if isinstance(arguments[0], Sequence) and arguments[0] else None
        result = check_on_all_ranks(self.mesh, check, like, replicated=parameters)
        self.number = self.mesh.consistency.number
        return result

    def _check_and_enter(
        self,
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int | None],
        layout: TokenLayout,
        documents: Any,
    ) -> tuple[list[str | Signature], list[torch.Tensor]]:
        """Make the chains; return what the ranks compare of the arguments, and the tensors for
        ``compute``."""
        if not isinstance(layout, TokenLayout):
            raise LayoutError(
                f"layout={layout!r} must be a TokenLayout, which mesh.layout(kind, seq_len) makes"
            )
        self.mesh.check_degrees(layout)
        for argument, value in (("tensors", tensors), ("dims", dims)):
            if not isinstance(value, Sequence):
                raise ConfigError(
                    f"{argument} of {self.name} must be a list or tuple, got a "
                    f"{type(value).__name__}"
                )
        if len(dims) != len(tensors):
            raise ConfigError(f"{len(tensors)} tensors have {len(dims)} dims, one each is needed")
        rows, shapes, length = None, [], layout.length(self.mesh.rank)
        for number, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
            if not isinstance(x, torch.Tensor):
                raise ConfigError(f"tensor {number} of {self.name} is a {type(x).__name__}")
            if dim is not None and not is_dim(dim):
                raise ConfigError(
                    f"dims[{number}]={dim!r} of {self.name} must be a whole number, or None"
                )
            shape = list[object](x.shape)
            if dim is not None:
                shape[layout.check_dim(x, dim, length, f"tensor {number}")] = "s"
                rows = len(x) if rows is None else rows
                if dim % x.ndim == 0 or len(x) != rows:
                    raise ConfigError(
                        f"tensor {number} of {self.name} is {list(x.shape)} with tokens along dim "
                        f"{dim}: dim 0 is its rows, {rows} as the first tensor has"
                    )
            shapes.append(f"{shape} {x.dtype}")
        if not rows:
            raise ConfigError(f"{self.name} needs a tensor with tokens, and rows; got {shapes}")
        documents, parents = _documents_of(documents)
        self.chains = state_chains(layout, documents, rows, parents)
        inputs = self._enter(tensors)
        if self.chains.folded:
            inputs = [
                x if dim is None else _fold_rows(x, dim)
                for x, dim in zip(inputs, dims, strict=True)
            ]
        fields: list[str | Signature] = [
            self.name,
            Signature((str(layout), layout.order), ((layout.kind, layout.seq_len),)),
            format_documents(documents, parents) if documents else "one document",
            f"of {', '.join(shapes)}",
            "with gradients" if self.needs_grad else "without gradients",
        ]
        return fields, inputs

    def _enter(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors behind one node of the graph, of which the anchor is an empty part."""
        inputs = list(tensors)
        with_grad = [i for i, x in enumerate(tensors) if x.requires_grad]
        self.needs_grad = torch.is_grad_enabled() and bool(with_grad)
        self._anchor = tensors[0].new_empty(0)
        if self.needs_grad:
            self._anchor, *entered = _Enter.apply(*(tensors[i] for i in with_grad))
            for i, x in zip(with_grad, entered, strict=True):
                inputs[i] = x
        return inputs

    def exchange(
        self,
        parts: Sequence[torch.Tensor],
        sent: Sequence[int],
        received: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return what the ranks send to this one, flat, in their order; collective over the mesh,
        and so is its backward pass.

        Args:
            parts: of any shapes, in the order of the ranks that receive them.
            sent, received: elements to and from each rank, this one too.
        """
        flat = [part.reshape(-1).to(dtype) for part in parts]
        buffer = torch.cat([self._anchor.to(dtype), *flat])
        mesh, kind = self.mesh, self.kind
        out: torch.Tensor = _Exchange.apply(buffer, mesh, kind, tuple(sent), tuple(received))
        self._received.append(out)
        return out

    def leave(self, out: torch.Tensor, dim: int) -> torch.Tensor:
        """The output, rows apart again, for what is computed after the call; its tokens are along
        ``dim``."""
        if self.chains.folded:
            dim %= out.ndim
            out = out[0].unflatten(dim - 1, (self.chains.rows, -1)).movedim(dim - 1, 0)
        # No longer kept here: a graph that keeps the call would keep itself.
        received, self._received = self._received, []
        consistency = self.mesh.consistency
        if not received:
            return out
        return _Leave.apply(consistency, self.number, self.name, out, *received)


def is_dim(dim: object) -> bool:
    """It is a whole number; whether a tensor has the dim is another check."""
    return isinstance(dim, int) and not isinstance(dim, bool)


def _documents_of(value: Any) -> tuple[tuple[Borders, ...], tuple[Parents, ...]]:
    """Documents and their parents; ConfigError for a mask that hides tokens before a token."""
    mask = value if isinstance(value, MaskSpec) else MaskSpec.causal(value)
    if mask.right != 0 or not has_only(mask, "right", "documents", "parents"):
        raise ConfigError(
            f"documents={mask}, and a state has come through every token before it: give borders, "
            "MaskSpec.causal(borders) or MaskSpec.tree(segments)"
        )
    return mask.documents, mask.parents


def _fold_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``[rows, ..., tokens, ...] -> [1, ..., rows * tokens, ...]``."""
    dim %= x.ndim
    return x.movedim(0, dim - 1).flatten(dim - 1, dim)[None]


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
    """All-to-all of a flat buffer; its backward, as collective, sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        buffer: torch.Tensor,
        mesh: SequenceMesh,
        kind: str,
        sent: tuple[int, ...],
        received: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.mesh, ctx.kind, ctx.sent, ctx.received = mesh, kind, sent, received
        return _all_to_all(mesh, kind, buffer, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        back = _all_to_all(ctx.mesh, ctx.kind, grad.contiguous(), ctx.received, ctx.sent)
        return back, None, None, None, None


def _all_to_all(
    mesh: SequenceMesh,
    kind: str,
    buffer: torch.Tensor,
    sent: tuple[int, ...],
    received: tuple[int, ...],
) -> torch.Tensor:
    """Exchange elements with each rank, and count in the ledger the bytes that leave this one."""
    out = buffer.new_empty(sum(received))
    sent_bytes = (sum(sent) - sent[mesh.rank]) * buffer.element_size()
    others = mesh.other_nodes.get("sp", ())
    between_nodes = sum(sent[rank] for rank in others) * buffer.element_size()
    mesh.ledger.add(kind, sent_bytes, between_nodes)
    with exchange_range(kind, sent_bytes) if profiler_enabled() else NO_RANGE:
        dist.all_to_all_single(out, buffer, list(received), list(sent), group=mesh.sp_group)
    return out


class _Leave(torch.autograd.Function):
    """The output, with gradients for what the call has received."""

    @staticmethod
    def forward(
        ctx: Any,
        consistency: ConsistencyChecker,
        number: int,
        name: str,
        out: torch.Tensor,
        *received: torch.Tensor,
    ) -> torch.Tensor:
        ctx.consistency, ctx.number, ctx.name = consistency, number, name
        ctx.like = [(x.shape, x.dtype) for x in received]
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        with ctx.consistency.raising_everywhere():
            refuse_second_derivative(ctx.name)
            _ = ctx.saved_tensors  # may recompute, or raise: before this rank says it is ready
        ctx.consistency.check_backward(ctx.number, wait=grad.device.type == "cpu")
        zeros = (grad.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.like)
        return None, None, None, grad, *zeros
