"""``ds_usp::attention``: a torch op that ``torch.compile`` keeps in its graph as it is. While it
traces, callers ask :func:`traced_attention` for it. The op runs the code that runs without a
compiler, collective over the mesh, and nothing of it is traced.

Letters of the shapes: b batch, s tokens of this rank, t tokens of this rank's keys, h query heads,
g key/value heads; d head dim, e that of values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import torch

from ds_usp.attention.passes import BackwardPass, ForwardPass
from ds_usp.attention.plan import AttentionOptions, AttentionPlan, plan_call
from ds_usp.attention.scores import Scores
from ds_usp.attention.tuning import Tuning
from ds_usp.attention.validation import check_default_layout, module_text
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.call_record import Signature
from ds_usp.comm.mesh import MESH_REGISTRY, SequenceMesh, check_on_all_ranks
from ds_usp.errors import USPError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.memory.saved_attention import is_saving, results_or_replay

OptionalTensor = torch.Tensor | None
Shapes = Sequence[Sequence[int]]

graph_break = disable_in_compile(
    "only a plain call of attention can be in a graph. Packed documents, joint tokens, a local "
    "attention that USPAttention calls (Ulysses alone), its rotary_pos_emb, sp_stream and extra "
    "arguments cannot, nor what is refused anyway; see README"
)

# ---------------------------------------------------------------- a call in plain values
#
# Note [what Dynamo sees of a call]
#
#   usp_attention(q, k, v, mesh=, layout=, mask=, tuning=, scores=, ...)
#        |  traced: plain_values reads fields, one getattr after the other
#        v
#   ds_usp::attention(q, k, v, sinks, "mesh 0", "zigzag", 64, None, 0, ..., "auto", ...)
#        |  not traced: attention_call makes the same AttentionOptions of them
#        v
#   plan_call, check_on_all_ranks, ForwardPass       (the code that runs without a compiler)
#
# An op takes tensors, strings, numbers and bools, so a call goes through the graph as the fields of
# its parts. Dynamo guards each that it reads: a call with another mask or layout is compiled again
# and cannot find the plan of this one, as it could if the graph held a plan or an index of one.
# Lengths alone may be in a tensor, whose values are not guarded: the op plans the call of each run.
# What it must not see: the plan (it has process groups, kernels and caches), the comparison of the
# ranks (it has to happen each time the graph runs, not once while it is traced), and borders of
# documents (new in every batch: a graph for each). A mesh goes by its name, by which a weak
# registry finds it: a graph must not keep process groups alive.
#
# Schema, reader and inverse follow from the annotations of the fields by one recursion (flatten): a
# new field of Tuning is an argument of the op without another line.


class OpCall(NamedTuple):
    """Arguments that the ops of attention take besides tensors."""

    options: AttentionOptions
    requires_grad: bool  # of q, k or v, in this grad mode
    sinks_require_grad: bool  # likewise
    named: bool  # the caller has named the layout; else it is compared with the data loader's
    prefix: str  # the fields with which the call signature begins, one in a line


class OpResults(NamedTuple):
    """The results of ``ds_usp::attention``, which an op returns as one list.

    Args:
        out, lse: ``[b, s, h, e]``, ``[b, h, s]``; the log-sum-exp with ``return_lse``, and without
            Ulysses where there is a backward pass.
        chunks: with Ulysses the tensors of :meth:`AttentionPlan.pack_saved`, for a backward pass.
        call_number: ``[]``, on the CPU, where there is a backward pass.
    """

    # Who changes them changes the meta function, and "ops 6" in ``SequenceMesh.name``: torch keeps
    # graphs on disk.

    out: torch.Tensor
    lse: OptionalTensor = None
    chunks: Sequence[torch.Tensor] = ()
    call_number: OptionalTensor = None

    def as_list(self) -> list[torch.Tensor]:
        return [x for x in (self.out, self.lse, *self.chunks, self.call_number) if x is not None]

    @classmethod
    def of_list(cls, tensors: Sequence[torch.Tensor], *, has_lse: bool) -> OpResults:
        """The results of a call that has a backward pass."""
        out, *rest = tensors
        lse = rest.pop(0) if has_lse else None
        return cls(out, lse, rest[:-1], rest[-1])


class OpArg(NamedTuple):
    """One argument of an op after its tensors: ``name`` and ``schema`` there, the path of
    attributes from an :class:`OpCall` to the value, the types that it may have; ``auto``:
    ``"auto"`` is None in the op."""

    name: str
    path: tuple[str, ...]
    types: tuple[type, ...]
    schema: str
    auto: bool


_PARTS = (AttentionOptions, SequenceMesh, TokenLayout, MaskSpec, Tuning, Scores)
_LEFT_OUT: Mapping[type, frozenset[str]] = MappingProxyType(
    {
        # Those of the mesh; and a layout of documents breaks the graph.
        TokenLayout: frozenset({"ulysses", "ring", "order", "documents", "parents"}),
        MaskSpec: frozenset({"documents", "blocks", "parents", "areas"}),  # set: break the graph
        Scores: frozenset({"sinks"}),  # a tensor of the op
    }
)
_MASK_TUPLES = sorted(_LEFT_OUT[MaskSpec])
_SCHEMA_TYPES: Mapping[type, str] = MappingProxyType(
    {str: "str", int: "SymInt", float: "float", bool: "bool"}
)
_layout = lru_cache(maxsize=1024)(TokenLayout)


def flatten(part: type, path: tuple[str, ...] = ()) -> tuple[tuple[OpArg, ...], Callable[..., Any]]:
    """The plain values of a call, or of a ``part`` of one at a ``path`` of attributes, as arguments
    of an op, and what makes the part of an iterator over such values again (and of the mesh, whose
    degrees layouts have). TypeError, at import, for a field that is no plain value."""
    if part is SequenceMesh:
        by_name = OpArg("mesh", (*path, "name"), (str,), "str mesh", False)
        return (by_name,), lambda values, _: MESH_REGISTRY.lookup(next(values))
    hints, args, makers = get_type_hints(part), list[OpArg](), dict[str, Callable[..., Any]]()
    for field in getattr(part, "_fields", None) or [x.name for x in fields(part) if x.init]:
        if field in _LEFT_OUT.get(part, ()):
            continue
        inside, hint = (*path, field), hints[field]
        union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        nested = next((x for x in union if x in _PARTS), None)
        if nested is not None:
            inner, makers[field] = flatten(nested, inside)
            args += inner
            continue
        types = tuple(x for x in union if get_origin(x) is not Literal)
        if not types or not {*types} <= {*_SCHEMA_TYPES, NoneType}:
            raise TypeError(f"{part.__name__}.{field}: {hint} is no plain value, for _LEFT_OUT")
        auto, name = len(types) < len(union), "_".join(inside).removeprefix("options_")
        optional = "?" if auto or NoneType in types else ""
        schema = f"{_SCHEMA_TYPES[types[0]]}{optional} {name}"
        types += (NoneType,) if auto else (int,) if types[0] is float else ()
        args.append(OpArg(name, inside, types, schema, auto))
        makers[field] = _next_or_auto if auto else lambda values, _: next(values)

    def make(values: Iterator[Any], mesh: SequenceMesh | None = None) -> Any:
        parts: dict[str, Any] = {}
        for field, maker in makers.items():  # the mesh before layouts
            parts[field] = maker(values, parts.get("mesh", mesh))
        if part is TokenLayout and mesh is not None:
            return _layout(*parts.values(), mesh.ulysses_degree, mesh.ring_degree, mesh.order)
        return part(**parts)

    return tuple(args), make


def _next_or_auto(values: Iterator[Any], _: object) -> Any:
    value = next(values)
    return "auto" if value is None else value


ATTENTION_ARGS, attention_call = flatten(OpCall)


def op_schema(tensors: str) -> str:
    """The schema of an op ``(tensors, plain values) -> Tensor[]``."""
    return f"({tensors}, {', '.join(arg.schema for arg in ATTENTION_ARGS)}) -> Tensor[]"


def plain_values(call: Any) -> list[Any] | None:
    """The plain values of an :class:`OpCall`; None if one is of a wrong type, which is refused
    outside of graphs. Dynamo traces this."""
    values = []
    for arg in ATTENTION_ARGS:
        value = call
        for name in arg.path:
            value = getattr(value, name)
        if arg.auto and value == "auto":
            value = None
        if type(value) not in arg.types:
            return None
        values.append(value)
    return values


def _by_name(values: Iterable[Any]) -> dict[str, Any]:
    return {arg.name: x for arg, x in zip(ATTENTION_ARGS, values, strict=True)}


def guard_ints(values: Iterable[Any]) -> list[Any]:
    """The values with numbers in place of a compiler's symbols, which it guards from then on."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return [kinds[type(x)](x) if type(x) in kinds else x for x in values]


class PlainLayout(NamedTuple):
    """A token layout as an op takes it, equal shards where the caller gave a kind only."""

    kind: str
    seq_len: int


def plain_layout(
    layout: TokenLayout | str, x: torch.Tensor, mesh: SequenceMesh, lengths_in_tensor: bool = False
) -> PlainLayout | None:
    """The layout of ``x [b, s, h, d]``; None if it is of another mesh, or of documents.
    ``lengths_in_tensor``: the op takes lengths of layouts from ``seq_lens``; 0 here, as
    torch.compile guards each length that is read."""
    if type(layout) is str:
        return PlainLayout(layout, x.shape[1] * mesh.sp_degree)
    if type(layout) is not TokenLayout or layout.documents:
        return None
    if (layout.ulysses, layout.ring) != (mesh.ulysses_degree, mesh.ring_degree):
        return None
    if layout.order != mesh.order:
        return None
    return PlainLayout(layout.kind, 0 if lengths_in_tensor else layout.seq_len)


def attention_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    *,
    named: bool = True,
    prefix: str = "",
    lengths_in_tensor: bool = False,
) -> list[Any] | None:
    """The plain values of a call that torch.compile traces; None, for a graph break, if the call
    has documents or arguments that are refused. Flags and prefix are those of :class:`OpCall` and
    :func:`plain_layout`."""
    mesh, mask, scores = options.mesh, options.mask, options.scores
    if type(mesh) is not SequenceMesh or type(mask) is not MaskSpec:
        return None
    if type(scores) is not Scores or type(options.tuning) is not Tuning:
        return None
    queries = keys = plain_layout(options.layout, q, mesh, lengths_in_tensor)
    if options.kv_layout is not None:
        keys = plain_layout(options.kv_layout, k, mesh, lengths_in_tensor)
    if queries is None or keys is None or any(getattr(mask, name) for name in _MASK_TUPLES):
        return None
    if not q.ndim == k.ndim == v.ndim == 4:
        return None
    sinks, grad = scores.sinks, torch.is_grad_enabled()
    plain: Any = options._replace(layout=queries, kv_layout=keys)  # type: ignore[arg-type]
    call = OpCall(
        plain,
        grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        grad and sinks is not None and sinks.requires_grad,
        named,
        prefix,
    )
    return plain_values(call)


def _with_lengths(values: Sequence[Any], seq_lens: OptionalTensor) -> Sequence[Any]:
    """The plain values with the layouts' lengths, if a tensor has them."""
    if seq_lens is None:
        return values
    queries, keys = seq_lens.tolist()
    lengths = {"layout_seq_len": queries, "kv_layout_seq_len": keys}  # names by flatten
    return [*(_by_name(values) | lengths).values()]


def _attention_call(values: Iterable[Any], sinks: OptionalTensor) -> OpCall:
    """The call of an op's plain values and sinks, which require a gradient as the caller's do."""
    call: OpCall = attention_call(iter(values))
    if sinks is None:
        return call
    sinks = sinks.detach().requires_grad_(call.sinks_require_grad)
    scores = replace(call.options.scores, sinks=sinks)
    return call._replace(options=call.options._replace(scores=scores))


def _plan_attention(
    call: OpCall, like: Sequence[torch.Tensor], shapes: Shapes
) -> tuple[Signature, AttentionPlan]:
    """:func:`plan_call` of stand-ins for q, k and v, of these shapes and the dtypes and devices of
    ``like``, without memory. The signature begins with the call's prefix."""
    with torch.set_grad_enabled(call.requires_grad or call.sinks_require_grad):
        q, k, v = (x.new_empty(()).expand(shape) for x, shape in zip(like, shapes, strict=True))
        # On q for all three: a plan depends on whether any of them requires a gradient.
        signature, plan = plan_call(q.requires_grad_(call.requires_grad), k, v, call.options)
    return Signature.of(*call.prefix.splitlines(), signature), plan


# ---------------------------------------------------------------- the ops

# torch's own CUDA graphs would leave out the consistency check of the ranks.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS: dict[str, Any] = {} if _TAG is None else {"tags": (_TAG,)}


@torch.library.custom_op(
    "ds_usp::attention",
    mutates_args=(),
    schema=op_schema(
        "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? module, Tensor? seq_lens"
    ),
    **_TAGS,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: OptionalTensor,
    module: OptionalTensor,
    seq_lens: OptionalTensor,
    *values: Any,
) -> list[torch.Tensor]:
    """Attention of this rank's tokens with the whole sequence; collective over the mesh.

    Shapes:
        q ``[b, s, h, d]``, k ``[b, t, g, d]``, v ``[b, t, g, e]``, sinks ``[h]`` ->
        :class:`OpResults`.

    Args:
        module: the number ``[]`` of the module that calls, on the CPU; None: a plain call.
        seq_lens: ``[2]`` integers on the CPU, the lengths of the layouts of queries and keys, in
            place of those among the values; for a graph that serves any.
        values: those of ATTENTION_ARGS, in order.

    Raises:
        USPError: as :func:`ds_usp.usp_attention`, on every rank, when it runs.
    """
    values = tuple(_with_lengths(values, seq_lens))
    call = _attention_call(values, sinks)
    if not is_saving():
        return _attention(call, q, k, v, module)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    num_visible = 2 if call.options.return_lse else 1
    # A checkpoint's first run may be without gradients, and its second one asks for the rest.
    no_grad = {"requires_grad": False, "sinks_require_grad": False}
    key = "attention in a graph", *(_by_name(values) | no_grad).values()
    full = call._replace(requires_grad=True)
    results = results_or_replay(lambda: _attention(full, q, k, v, module), inputs, key, num_visible)
    needs_backward = call.requires_grad or call.sinks_require_grad
    return list(results if needs_backward else results[:num_visible])


def _attention(
    call: OpCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: OptionalTensor
) -> list[torch.Tensor]:
    """:func:`attention`, computed: never replayed."""
    mesh, save = call.options.mesh, call.requires_grad or call.sinks_require_grad

    def check() -> tuple[Signature, AttentionPlan]:
        if not call.named:  # when the op runs, as batches change after tracing
            check_default_layout(mesh, cast(TokenLayout, call.options.layout))
        signature, plan = _plan_attention(call, (q, k, v), (q.shape, k.shape, v.shape))
        text = () if module is None else (module_text(int(module)),)
        return Signature.of(signature, *text), plan

    sinks = call.options.scores.sinks
    plan = check_on_all_ranks(
        mesh, check, q, replicated=None if sinks is None else {"sinks": sinks}
    )
    call_number = mesh.consistency.number
    run = ForwardPass(plan, sinks, (q, k, v), save=save)
    run.execute(plan.forward)
    lse, chunks, number = run.lse, list[torch.Tensor](), None
    if save:
        number = torch.tensor(call_number, device="cpu")
        if not plan.local_heads:  # no shards are saved: its plan was not asked for ``recomputed``
            chunks = plan.pack_saved(run.saved, ())
        elif lse is None:
            lse = torch.cat([chunk.lse for chunk in run.saved], dim=1)
    results = OpResults(run.out, lse, chunks, number)
    return _fresh_contiguous(results.as_list(), (q, k, v))


@attention.register_fake
def _(*args: Any) -> list[torch.Tensor]:
    """Meta function of :func:`attention`: empty results of the shapes that the op returns, also of
    a call that it will refuse. Nothing is sent."""
    q, k, v, sinks, _, _, *values = args
    # By name, as symbols: rebuilt, a call would guard all its numbers.
    call_values = _by_name(values)
    needs_backward = call_values["requires_grad"] or call_values["sinks_require_grad"]
    mesh, (batch, tokens, heads, _) = MESH_REGISTRY.lookup(call_values["mesh"]), q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    results = OpResults(q.new_empty(batch, tokens, heads, v.shape[3]))
    local_heads = mesh.ulysses_degree == 1
    if call_values["return_lse"] or (local_heads and needs_backward):
        results = results._replace(lse=q.new_empty(batch, heads, tokens, dtype=lse_dtype))
    if not needs_backward:
        return results.as_list()
    results = results._replace(call_number=torch.empty((), dtype=torch.int64, device="cpu"))
    if local_heads:
        return results.as_list()
    # The shapes of the exchanged chunks depend on the plan, and a plan is made of numbers, which
    # are constants of the graph.
    shapes = [guard_ints(x.shape) for x in (q, k, v)]
    call = _attention_call(guard_ints(values), sinks)
    try:
        _, plan = _plan_attention(call, (q, k, v), shapes)
    except USPError:  # raised when the op runs: on all ranks, by the comparison
        return results._replace(chunks=[q.new_empty(q.shape)]).as_list()
    saved: list[torch.Tensor] = []
    for chunk in plan.chunks:
        qkv = _exchanged(chunk.qkv, (q, k, v) if chunk.has_kv else (q,), mesh)
        _, rows, width, _ = qkv[0].shape
        out, lse = (batch, rows, width, v.shape[3]), (batch, width, rows)
        saved += [*qkv, q.new_empty(out), q.new_empty(lse, dtype=lse_dtype)]
    return results._replace(chunks=saved).as_list()


@torch.library.custom_op(
    "ds_usp::attention_backward",
    mutates_args=(),
    schema=op_schema(
        "Tensor dout, Tensor[] saved, Tensor? sinks, Tensor? seq_lens, "
        "SymInt kv_length, SymInt kv_heads"
    ),
    **_TAGS,
)
def attention_backward(
    dout: torch.Tensor,
    saved: list[torch.Tensor],
    sinks: OptionalTensor,
    seq_lens: OptionalTensor,
    kv_length: int,
    kv_heads: int,
    *values: Any,
) -> list[torch.Tensor]:
    """The gradients of :func:`attention`; collective over the mesh.

    Shapes:
        dout ``[b, s, h, e]`` -> dq ``[b, s, h, d]``, dk ``[b, t, g, d]``, dv ``[b, t, g, e]`` and,
        where sinks require a gradient, this rank's summand of it ``[h]``.

    Args:
        saved: as of :func:`_setup_attention`: without Ulysses q, k, v, out and the log-sum-exp,
            else each chunk's, which begin with q too. Last the call number.
        sinks, seq_lens, values: as of :func:`attention`; ``kv_length``, ``kv_heads``: t and g.
    """
    call = _attention_call(_with_lengths(values, seq_lens), sinks)
    *saved, call_number = saved
    call.options.mesh.consistency.check_backward(int(call_number), wait=dout.device.type == "cpu")
    shapes = _qkv_shapes(dout, saved, kv_length, kv_heads)
    _, plan = _plan_attention(call, 3 * [dout], shapes)
    if plan.local_heads:  # the log-sum-exp of all heads is saved as one tensor
        q, k, v, out, lse = saved
        saved = [q, k, v, out, *(lse[:, x.q_heads].contiguous() for x in plan.chunks)]
    sizes = [torch.Size(shape) for shape in shapes]
    run = BackwardPass(plan, call.options.scores.sinks, dout.contiguous(), sizes, saved)
    run.execute(plan.backward)
    grads = [*run.grads] if run.dsinks is None else [*run.grads, run.dsinks]
    return _fresh_contiguous(grads, (dout, *saved))


@attention_backward.register_fake
def _(
    dout: torch.Tensor, saved: Any, sinks: Any, _: Any, kv_length: int, kv_heads: int, *values: Any
) -> list[torch.Tensor]:
    """Meta function of :func:`attention_backward`: empty gradients of its shapes."""
    grads = [dout.new_empty(shape) for shape in _qkv_shapes(dout, saved, kv_length, kv_heads)]
    call_values = _by_name(values)
    if sinks is not None and call_values["sinks_require_grad"]:
        grads.append(sinks.new_empty(sinks.shape))
    return grads


def _qkv_shapes(
    dout: torch.Tensor, saved: Sequence[torch.Tensor], kv_length: int, kv_heads: int
) -> Shapes:
    """Shapes of q, k and v, from arguments of :func:`attention_backward`."""
    batch, dim = dout.shape[0], saved[0].shape[3]
    keys = (batch, kv_length, kv_heads)
    return (*dout.shape[:3], dim), (*keys, dim), (*keys, dout.shape[3])


def _exchanged(
    exchange: HeadAllToAll, tensors: Sequence[torch.Tensor], mesh: SequenceMesh
) -> list[torch.Tensor]:
    """Empty tensors of the shapes that these ``[b, s, h, d]`` have after an exchange to heads: all
    tokens of the ring rank, this rank's heads."""
    return [
        x.new_empty(x.shape[0], layout.ring_length(mesh.ring_rank), width, x.shape[3])
        for layout, width, x in zip(exchange.layouts, exchange.local_heads, tensors, strict=True)
    ]


# A compiler takes it for granted that an op's results share no memory with its inputs or with each
# other. Here q, k and v of an exchange, for one, are views of one receive buffer.
def _fresh_contiguous(
    tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors, contiguous and each in a storage of its own; others are copied."""
    used = {x.untyped_storage().data_ptr() for x in inputs}
    results = []
    for x in tensors:
        if not x.is_contiguous() or x.untyped_storage().data_ptr() in used:
            x = x.clone(memory_format=torch.contiguous_format)
        used.add(x.untyped_storage().data_ptr())
        results.append(x)
    return results


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Save what :func:`attention_backward` takes as ``saved``."""
    # Only the output ever has a gradient: traced_attention detaches the log-sum-exp, and the rest
    # never leaves the op. So gradients are not materialized: each chunk would get zeros of its
    # size.
    q, k, v, sinks, _, seq_lens, *ctx.values = inputs
    call_values = _by_name(ctx.values)
    ctx.kv_length, ctx.kv_heads = k.shape[1], k.shape[2]
    local_heads = MESH_REGISTRY.lookup(call_values["mesh"]).ulysses_degree == 1
    results = OpResults.of_list(output, has_lse=local_heads or call_values["return_lse"])
    saved = (q, k, v, results.out, results.lse) if local_heads else results.chunks
    ctx.save_for_backward(sinks, seq_lens, *saved, results.call_number)
    ctx.set_materialize_grads(False)


def _backward_of_attention(ctx: Any, grads: list[OptionalTensor]) -> tuple[Any, ...]:
    """Gradients of all arguments of :func:`attention`, from those of its results."""
    call_values = _by_name(ctx.values)
    consistency = MESH_REGISTRY.lookup(call_values["mesh"]).consistency
    with consistency.raising_everywhere():
        sinks, seq_lens, *saved = ctx.saved_tensors
    dq, dk, dv, *dsinks = attention_backward(
        grads[0], saved, sinks, seq_lens, ctx.kv_length, ctx.kv_heads, *ctx.values
    )
    without = None, None, *(None for _ in ctx.values)
    return dq, dk, dv, dsinks[0] if dsinks else None, *without


attention.register_autograd(_backward_of_attention, setup_context=_setup_attention)


def traced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    module: OptionalTensor = None,
    seq_lens: OptionalTensor = None,
    **caller: Any,
) -> tuple[torch.Tensor, OptionalTensor] | None:
    """The output and, with ``return_lse``, the log-sum-exp of :func:`attention` in a graph; None
    if no op can compute the call, which then breaks the graph.

    Args:
        module, seq_lens: as of :func:`attention`.
        caller: ``named`` and ``prefix`` of :class:`OpCall`.
    """
    # In a backward pass with Ulysses the chunks' shapes depend on the lengths: a graph for each.
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad and options.mesh.ulysses_degree > 1:
        seq_lens = None
    values = attention_values(q, k, v, options, lengths_in_tensor=seq_lens is not None, **caller)
    if values is None:
        return None
    out, *others = attention(q, k, v, options.scores.sinks, module, seq_lens, *values)
    return out, others[0].detach() if options.return_lse else None  # as OpResults has them
