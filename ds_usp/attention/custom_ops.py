"""``ds_usp::attention`` and ``ds_usp::exchange``: torch ops that ``torch.compile`` keeps in its
graph as they are. They run the code that runs without a compiler, and nothing of it is traced.

Letters of the shapes: b batch, s tokens of this rank, t tokens of this rank's keys, h query heads,
g key/value heads; d head dim, e that of values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_usp.attention.op_specs import (
    AttentionOpSpec,
    ExchangeOpSpec,
    Shapes,
    attention_spec,
    check_unnamed_layout,
    guard_ints,
    is_valid_qkv,
    layout_spec,
    mesh_of,
    op_schema,
)
from ds_usp.attention.op_specs import (
    graph_break as graph_break,
)
from ds_usp.attention.passes import BackwardPass, ForwardPass
from ds_usp.attention.plan import AttentionOptions, AttentionPlan, check_on_all_ranks
from ds_usp.attention.score_mod import Scores
from ds_usp.attention.validation import (
    ChunkExchanges,
    exchange_label,
)
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import USPError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.memory.saved_attention import is_saving, refuse_saving, results_or_replay

OptionalTensor = torch.Tensor | None

# torch's own CUDA graphs would leave out the consistency check of the ranks.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS: dict[str, Any] = {} if _TAG is None else {"tags": (_TAG,)}


@torch.library.custom_op(
    "ds_usp::attention",
    mutates_args=(),
    schema=op_schema(
        "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes", AttentionOpSpec
    ),
    **_TAGS,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: OptionalTensor,
    slopes: OptionalTensor,
    *fields: Any,
) -> list[torch.Tensor]:
    """Attention of this rank's tokens with the whole sequence; collective over the mesh.

    Shapes:
        q ``[b, s, h, d]``, k ``[b, t, g, d]``, v ``[b, t, g, e]``, sinks and slopes ``[h]`` -> out
        ``[b, s, h, e]``; with ``return_lse``, and without Ulysses where there is a backward pass,
        the log-sum-exp ``[b, h, s]``; with Ulysses what else backward needs, chunk by chunk
        (:class:`ds_usp.attention.plan.SavedChunk`); where there is a backward pass, last the
        call number ``[]``, on the CPU.

    Raises:
        USPError: as :func:`ds_usp.usp_attention`, on every rank, when it runs.
    """
    spec, inputs = AttentionOpSpec(*fields), [x for x in (q, k, v, sinks, slopes) if x is not None]
    num_visible = 2 if spec.return_lse else 1
    # A checkpoint's first run may be without gradients, and its second one asks for the rest.
    key = "attention in a graph", spec._replace(requires_grad=False, sinks_require_grad=False)
    run = spec._replace(requires_grad=True) if is_saving() else spec
    scores = run.score_options(sinks, slopes)
    results = results_or_replay(lambda: _attention(run, q, k, v, scores), inputs, key, num_visible)
    return list(results if spec.needs_backward else results[:num_visible])


def _attention(
    spec: AttentionOpSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> list[torch.Tensor]:
    """:func:`attention`, never replayed."""

    def check() -> tuple[str, AttentionPlan]:
        check_unnamed_layout(spec)
        return spec.plan(q, (q.shape, k.shape, v.shape), scores)

    mesh = mesh_of(spec)
    plan = check_on_all_ranks(mesh, check, q)
    call_number, save = mesh.consistency.number, spec.needs_backward
    run = ForwardPass(plan, scores, (q, k, v), save=save)
    run.execute(plan.forward)
    out, lse, saved = run.out, run.lse, run.saved
    results = [out] if lse is None else [out, lse]
    if save and plan.local_heads and lse is None:
        results.append(torch.cat([chunk.lse for chunk in saved], dim=1))
    if save and not plan.local_heads:
        results += plan.pack_saved(saved)
    if save:
        results.append(torch.tensor(call_number, device="cpu"))
    return _fresh_contiguous(results, (q, k, v))


@attention.register_fake
def _(*args: Any) -> list[torch.Tensor]:
    """Meta function of :func:`attention`: empty results of the shapes that the op returns.

    A call that the op will refuse gets a result too: the error is raised when the op runs, on
    every rank.
    """
    (q, k, v, sinks, slopes), spec = args[:5], AttentionOpSpec(*args[5:])
    mesh, (batch, tokens, heads, _) = mesh_of(spec), q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    results = [q.new_empty(batch, tokens, heads, v.shape[3])]
    local_heads = mesh.ulysses_degree == 1
    if spec.return_lse or (local_heads and spec.needs_backward):
        results.append(q.new_empty(batch, heads, tokens, dtype=lse_dtype))
    if not spec.needs_backward:
        return results
    call_number = torch.empty((), dtype=torch.int64, device="cpu")
    if local_heads:
        return [*results, call_number]
    # The shapes of the exchanged chunks depend on the plan, and a plan is made of numbers, which
    # are constants of the graph.
    shapes = [guard_ints(x.shape) for x in (q, k, v)]
    spec = AttentionOpSpec(*guard_ints(spec))
    try:
        _, plan = spec.plan(q, shapes, spec.score_options(sinks, slopes))
    except USPError:  # raised when the op runs: on all ranks, where the others hear of it
        return [*results, q.new_empty(q.shape), call_number]
    for chunk in plan.chunks:
        qkv = _exchanged(chunk.qkv, (q, k, v)[: len(chunk.qkv.ranges)], mesh)
        _, rows, width, _ = qkv[0].shape
        out, lse = (batch, rows, width, v.shape[3]), (batch, width, rows)
        results += [*qkv, q.new_empty(out), q.new_empty(lse, dtype=lse_dtype)]
    return [*results, call_number]


@torch.library.custom_op(
    "ds_usp::attention_backward",
    mutates_args=(),
    schema=op_schema(
        "Tensor dout, Tensor[] saved, Tensor? sinks, Tensor? slopes, SymInt kv_length, "
        "SymInt kv_heads",
        AttentionOpSpec,
    ),
    **_TAGS,
)
def attention_backward(
    dout: torch.Tensor,
    saved: list[torch.Tensor],
    sinks: OptionalTensor,
    slopes: OptionalTensor,
    kv_length: int,
    kv_heads: int,
    *fields: Any,
) -> list[torch.Tensor]:
    """The gradients of :func:`attention`; collective over the mesh.

    Shapes:
        dout ``[b, s, h, e]`` -> dq ``[b, s, h, d]``, dk ``[b, t, g, d]``, dv ``[b, t, g, e]`` and,
        where sinks require a gradient, this rank's summand of it ``[h]``.

    Args:
        saved: without Ulysses q, k, v, out and the log-sum-exp; else each chunk's. Last the call
            number.
        kv_length, kv_heads: t and g.
    """
    spec = AttentionOpSpec(*fields)
    *saved, call_number = saved
    mesh_of(spec).consistency.check_backward(int(call_number), wait=dout.device.type == "cpu")
    scores = spec.score_options(sinks, slopes)
    shapes = _qkv_shapes(dout, saved, kv_length, kv_heads)
    _, plan = spec.plan(dout, shapes, scores)
    if plan.local_heads:  # the log-sum-exp of all heads is saved as one tensor
        lse = saved.pop()
        saved += [lse[:, slice(*x.out.ranges[0][0])].contiguous() for x in plan.chunks]
    chunks = plan.unpack_saved(saved)
    sizes = [torch.Size(shape) for shape in shapes]
    run = BackwardPass(plan, scores, dout.contiguous(), sizes, chunks)
    run.execute(plan.backward)
    grads = [*run.grads] if run.dsinks is None else [*run.grads, run.dsinks]
    return _fresh_contiguous(grads, (dout, *saved))


@attention_backward.register_fake
def _(
    dout: torch.Tensor, saved: Any, sinks: Any, _: Any, kv_length: int, kv_heads: int, *fields: Any
) -> list[torch.Tensor]:
    grads = [dout.new_empty(shape) for shape in _qkv_shapes(dout, saved, kv_length, kv_heads)]
    if sinks is not None and AttentionOpSpec(*fields).sinks_require_grad:
        grads.append(sinks.new_empty(sinks.shape))
    return grads


def _qkv_shapes(
    dout: torch.Tensor, saved: Sequence[torch.Tensor], kv_length: int, kv_heads: int
) -> Shapes:
    """Shapes of dq, dk and dv."""
    batch, dim = dout.shape[0], saved[0].shape[3]
    keys = (batch, kv_length, kv_heads)
    return (*dout.shape[:3], dim), (*keys, dim), (*keys, dout.shape[3])


def _exchanged(
    exchange: HeadAllToAll, tensors: Sequence[torch.Tensor], mesh: SequenceMesh
) -> list[torch.Tensor]:
    """Empty tensors of the shapes that these ``[b, s, h, d]`` have after their exchange."""
    return [
        x.new_empty(x.shape[0], layout.ring_length(mesh.ring_rank), width, x.shape[3])
        for layout, width, x in zip(exchange.layouts, exchange.local_heads, tensors, strict=True)
    ]


def _fresh_contiguous(
    tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors contiguous, and each in a storage of its own, as results of an op must be."""
    used = {x.untyped_storage().data_ptr() for x in inputs}
    results = []
    for x in tensors:
        if not x.is_contiguous() or x.untyped_storage().data_ptr() in used:
            x = x.clone(memory_format=torch.contiguous_format)
        used.add(x.untyped_storage().data_ptr())
        results.append(x)
    return results


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Save for backward what :func:`attention_backward` takes, and the call number last: q, k, v
    and the results without Ulysses, else the saved chunks.
    """
    q, k, v, sinks, slopes, *fields = inputs
    ctx.spec = AttentionOpSpec(*fields)
    ctx.keys = k.shape[1], k.shape[2]
    if mesh_of(ctx.spec).ulysses_degree == 1:
        saved = (q, k, v, *output)
    else:
        saved = tuple(output[2 if ctx.spec.return_lse else 1 :])
    ctx.save_for_backward(sinks, slopes, *saved)
    ctx.set_materialize_grads(False)


def _backward_of_attention(ctx: Any, grads: list[OptionalTensor]) -> tuple[Any, ...]:
    sinks, slopes, *saved = ctx.saved_tensors
    dq, dk, dv, *dsinks = attention_backward(grads[0], saved, sinks, slopes, *ctx.keys, *ctx.spec)
    return dq, dk, dv, dsinks[0] if dsinks else None, None, *(None for _ in ctx.spec)


attention.register_autograd(_backward_of_attention, setup_context=_setup_attention)


@torch.library.custom_op(
    "ds_usp::exchange",
    mutates_args=(),
    schema=op_schema("Tensor[] tensors, Tensor? call_number", ExchangeOpSpec),
    **_TAGS,
)
def exchange(
    tensors: list[torch.Tensor], call_number: OptionalTensor, *fields: Any
) -> list[torch.Tensor]:
    """A head exchange of q, k, v, or of the output; collective over the mesh.

    Shapes:
        See :class:`ds_usp.comm.all_to_all.HeadAllToAll`. One that starts a call also returns, last,
        the call number ``[]``, on the CPU.

    Args:
        call_number: of any that does not start a call.

    Raises:
        USPError: as :class:`ds_usp.USPAttention`, on every rank, when it runs.
    """
    spec = ExchangeOpSpec(*fields)
    mesh = mesh_of(spec)

    def check() -> tuple[str, ChunkExchanges]:
        refuse_saving("a local attention in a graph")
        check_unnamed_layout(spec)
        return spec.plan(tensors)

    if spec.starts_call:
        exchanges = check_on_all_ranks(mesh, check, tensors[0])
        number = torch.tensor(mesh.consistency.number, device="cpu")
        return [*_fresh_contiguous(exchanges.qkv.to_heads(tensors), tensors), number]
    if spec.backward and call_number is not None:
        label = exchange_label(not spec.to_heads)
        mesh.consistency.check_backward(
            int(call_number), label, wait=tensors[0].device.type == "cpu"
        )
    _, exchanges = spec.plan(tensors)
    head_exchange = exchanges.qkv if len(tensors) == 3 else exchanges.out
    if spec.to_heads:
        return _fresh_contiguous(head_exchange.to_heads(tensors), tensors)
    places = head_exchange.alloc_outputs(tensors)
    head_exchange.to_sequence(tensors, places)
    return list(places)


@exchange.register_fake
def _(tensors: list[torch.Tensor], call_number: OptionalTensor, *fields: Any) -> list[torch.Tensor]:
    """Meta function of :func:`exchange`: empty results of the shapes that the op returns."""
    spec = ExchangeOpSpec(*guard_ints(fields))
    number = [torch.empty((), dtype=torch.int64, device="cpu")] if spec.starts_call else []
    try:
        _, exchanges = spec.plan(tensors)
    except USPError:  # raised when the op runs: on all ranks, where the others hear of it
        wrong = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        return wrong + number
    head_exchange = exchanges.qkv if len(tensors) == 3 else exchanges.out
    if not spec.to_heads:
        return list(head_exchange.alloc_outputs(tensors))
    return _exchanged(head_exchange, tensors, mesh_of(spec)) + number


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.spec = ExchangeOpSpec(*inputs[2:])
    ctx.save_for_backward(output[-1] if ctx.spec.starts_call else inputs[1])


def _backward_of_exchange(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """The exchange in the other direction, of the gradients."""
    (call_number,) = ctx.saved_tensors
    spec = ctx.spec
    reverse = spec._replace(to_heads=not spec.to_heads, starts_call=False, backward=True)
    sent = grads[:-1] if spec.starts_call else grads  # the call number has none
    return exchange(list(sent), call_number, *reverse), None, *(None for _ in reverse)


exchange.register_autograd(_backward_of_exchange, setup_context=_setup_exchange)


def traced_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, **caller: Any
) -> list[torch.Tensor] | None:
    """The results of :func:`attention` in a graph; None if no op can compute the call.

    Args:
        caller: ``named`` and ``prefix_text`` of the spec.
    """
    spec = attention_spec(q, k, v, options, **caller)
    if spec is None:
        return None
    results: list[torch.Tensor] = attention(
        q, k, v, options.scores.sinks, options.scores.alibi_slopes, *spec
    )
    return results


def traced_exchange(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    named: bool,
    prefix_text: str,
) -> Callable[..., tuple[torch.Tensor, ...]] | None:
    """A function ``(to_heads, *tensors)`` that exchanges q, k and v to heads, and the output back;
    None if no op can. See :class:`ExchangeOpSpec` for the arguments."""
    queries, keys = layout_spec(layout, q, mesh), layout_spec(layout, k, mesh)
    if queries is None or keys is None:
        return None
    if mesh.ulysses_degree == 1:  # nothing to exchange
        return _identity if is_valid_qkv(q, k, v, queries[1], keys[1]) else None
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    flags = True, True, False, torch.is_grad_enabled() and requires_grad, named
    heads = q.shape[2], k.shape[2]
    return _TracedExchange(ExchangeOpSpec(mesh.name, *queries, *keys, *heads, *flags, prefix_text))


def _identity(to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


class _TracedExchange:
    """The two exchanges of one call; the second takes the call number of the first."""

    def __init__(self, spec: ExchangeOpSpec) -> None:
        self._spec = spec
        self._call_number: OptionalTensor = None

    def __call__(self, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange to heads, or back with the call number that the first exchange returned."""
        if to_heads:
            *exchanged, self._call_number = exchange(list(tensors), None, *self._spec)
            return tuple(exchanged)
        reverse = self._spec._replace(to_heads=False, starts_call=False)
        return tuple(exchange(list(tensors), self._call_number, *reverse))
