"""The head exchange around a local attention as an op of torch (see ``compiled``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ds_usp.attention.custom_ops import OP_TAGS, guard_ints, layout_of, own
from ds_usp.attention.validation import (
    ChunkExchanges,
    check_default_layout,
    check_on_all_ranks,
    check_tensors,
    exchange_label,
    is_on_cpu,
    plan_local_attention,
)
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.mesh import MESH_REGISTRY, SequenceMesh
from ds_usp.errors import USPError
from ds_usp.memory.saved_attention import refuse_saving


class ExchangeOpSpec(NamedTuple):
    """One exchange without its tensors, in values that an op takes.

    Args:
        mesh: its name.
        layout, tokens, kv_layout, kv_tokens: kinds and lengths of the layouts.
        heads, kv_heads: of all ranks.
        to_heads: sequence to heads, or back.
        begins: it begins a call, which the ranks compare.
        backward: it is the backward pass of an exchange, which they compare too.
        learns: q, k or v has a gradient.
        named: the caller has named the layout.
        caller: what the ranks compare besides.
    """

    mesh: str
    layout: str
    tokens: int
    kv_layout: str
    kv_tokens: int
    heads: int
    kv_heads: int
    to_heads: bool
    begins: bool
    backward: bool
    learns: bool
    named: bool
    caller: str

    @property
    def on(self) -> SequenceMesh:
        """The mesh."""
        return MESH_REGISTRY.lookup(self.mesh)

    def plan(self, tensors: list[torch.Tensor]) -> tuple[str, ChunkExchanges]:
        """What the ranks compare, and how heads travel."""
        mesh = self.on
        degrees = mesh.ulysses_degree, mesh.ring_degree, mesh.order
        layout = layout_of(self.layout, self.tokens, *degrees)
        kv_layout = layout_of(self.kv_layout, self.kv_tokens, *degrees)
        x, said = tensors[0], self.caller
        with torch.set_grad_enabled(self.learns):
            sizes = [guard_ints(each.shape) for each in tensors]
            like = [x.new_empty(()).expand(size).requires_grad_(self.learns) for size in sizes]
            if self.begins:
                said += check_tensors(like[0], like[1], like[2]) + ", "
        q, k = (
            x.new_empty(()).expand(sizes[0][0], place.length(mesh.rank), heads, 1)
            for place, heads in ((layout, self.heads), (kv_layout, self.kv_heads))
        )
        if self.begins:
            q, k = like[:2]
        text, traffic = plan_local_attention(q, k, mesh, layout, kv_layout)
        return said + text, traffic

    def checked(self, tensors: list[torch.Tensor]) -> tuple[str, ChunkExchanges]:
        """:meth:`plan`, where it can run now."""
        refuse_saving("a local attention in a graph")
        if not self.named:
            degrees = self.on.ulysses_degree, self.on.ring_degree, self.on.order
            check_default_layout(self.on, layout_of(self.layout, self.tokens, *degrees))
        return self.plan(tensors)

    def of(self, traffic: ChunkExchanges, tensors: list[torch.Tensor]) -> HeadAllToAll:
        """The exchange of q, k and v, or that of the output."""
        return traffic.qkv if len(tensors) == 3 else traffic.out


@torch.library.custom_op(
    "ds_usp::exchange",
    mutates_args=(),
    schema="(Tensor[] tensors, Tensor? call, str mesh, str layout, SymInt tokens, str kv_layout, "
    "SymInt kv_tokens, SymInt heads, SymInt kv_heads, bool to_heads, bool begins, bool backward, "
    "bool learns, bool named, str caller) -> Tensor[]",
    **OP_TAGS,
)
def exchange_op(
    tensors: list[torch.Tensor], call: torch.Tensor | None, *plain: Any
) -> list[torch.Tensor]:
    """A head exchange of q, k, v, or of the output; collective over the mesh.

    Shapes:
        See :class:`ds_usp.comm.all_to_all.HeadAllToAll`. One that begins a call also returns, last,
        the number of the call ``[]``, on the host.

    Args:
        call: that number, of any that does not begin a call.

    Raises:
        USPError: as :class:`ds_usp.USPAttention`, on every rank, when it runs.
    """
    trip = ExchangeOpSpec(*plain)
    consistency = trip.on.consistency
    if trip.begins:
        traffic = check_on_all_ranks(trip.on, lambda: trip.checked(tensors), tensors[0])
        number = torch.tensor(consistency.number, device="cpu")
        return [*own(trip.of(traffic, tensors).to_heads(tensors), tensors), number]
    if trip.backward and call is not None:
        part = exchange_label(not trip.to_heads)
        consistency.check_backward(int(call), part, wait=is_on_cpu(tensors[0]))
    _, traffic = trip.plan(tensors)
    exchange = trip.of(traffic, tensors)
    if trip.to_heads:
        return own(exchange.to_heads(tensors), tensors)
    places = exchange.places(tensors)
    exchange.to_sequence(tensors, places)
    return list(places)


@exchange_op.register_fake
def _(tensors: list[torch.Tensor], call: torch.Tensor | None, *plain: Any) -> list[torch.Tensor]:
    trip = ExchangeOpSpec(*guard_ints(plain))
    begun = [torch.empty((), dtype=torch.int64, device="cpu")] if trip.begins else []
    try:
        _, traffic = trip.plan(tensors)
    except USPError:  # raised when the op runs: on all ranks, where the others hear of it
        wrong = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        return wrong + begun
    exchange = trip.of(traffic, tensors)
    if not trip.to_heads:
        return list(exchange.places(tensors))
    sizes = zip(exchange.layouts, exchange.widths(), tensors, strict=True)
    come = [
        x.new_empty(x.shape[0], place.ring_length(trip.on.ring_rank), width, x.shape[3])
        for place, width, x in sizes
    ]
    return come + begun


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.trip = ExchangeOpSpec(*inputs[2:])
    ctx.save_for_backward(output[-1] if ctx.trip.begins else inputs[1])


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    (call,) = ctx.saved_tensors
    trip = ctx.trip
    back = trip._replace(to_heads=not trip.to_heads, begins=False, backward=True)
    sent = grads[:-1] if trip.begins else grads  # the number has none
    return exchange_op(list(sent), call, *back), None, *(None for _ in back)


exchange_op.register_autograd(_backward, setup_context=_save)
