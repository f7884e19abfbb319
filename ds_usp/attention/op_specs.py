"""Calls in plain values, as torch ops take them: what ``torch.compile`` reads of a call.

An op takes tensors and strings, numbers and bools. So each op has a spec, a named tuple of such
values, whose fields are the op's arguments after its tensors; the mesh goes by its registered name.
Dynamo reads the values while it traces and guards them: a call with others is compiled again. A
call that has no spec breaks the graph, and runs, or is refused, outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch

from ds_usp.attention.plan import AttentionOptions, AttentionPlan, plan_call
from ds_usp.attention.score_mod import Scores
from ds_usp.attention.tuning import Tuning
from ds_usp.attention.validation import (
    ChunkExchanges,
    check_default_layout,
    check_tensors,
    plan_local_attention,
)
from ds_usp.comm.mesh import MESH_REGISTRY, SequenceMesh
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.memory.compile_guard import disable_in_compile

Shapes = Sequence[Sequence[int]]
Layouts = tuple[TokenLayout, TokenLayout]

graph_break = disable_in_compile(
    "only a plain call of attention can be in a graph. Packed documents, joint tokens, and of "
    "USPAttention rotary_pos_emb, sp_stream and, with a ring, extra arguments cannot, nor what is "
    "refused anyway; see README"
)

_SCHEMA_TYPES: Mapping[type, str] = MappingProxyType(
    {str: "str", int: "SymInt", float: "float", bool: "bool"}
)


def op_schema(tensors: str, spec: type[Any]) -> str:
    """The schema of an op ``(tensors, fields of the spec) -> Tensor[]``."""
    arguments = [tensors]
    for name, hint in get_type_hints(spec).items():
        (kind,) = set(get_args(hint) or [hint]) - {NoneType}
        arguments.append(f"{_SCHEMA_TYPES[kind]}{'?' if get_args(hint) else ''} {name}")
    return f"({', '.join(arguments)}) -> Tensor[]"


class AttentionOpSpec(NamedTuple):
    """One call of attention without its tensors.

    Args:
        mesh: its registered name.
        layout, num_tokens, kv_layout, num_kv_tokens: kinds and global lengths of the layouts.
        left, right, prefix: of the mask, which has no documents.
        chunks, gather, copies, inner_ring: of the tuning; None is ``"auto"``.
        softcap, dropout_seed: of the scores.
        requires_grad, sinks_require_grad: of q, k or v, and of the sinks.
        named: the caller has named the layout.
        prefix_text: what the call signature begins with.
    """

    mesh: str
    layout: str
    num_tokens: int
    kv_layout: str
    num_kv_tokens: int
    left: int | None
    right: int | None
    prefix: int
    softmax_scale: float | None
    dropout_p: float
    kernel: str
    return_lse: bool
    chunks: int | None
    gather: bool | None
    copies: bool | None
    inner_ring: int | None
    softcap: float | None
    dropout_seed: int | None
    requires_grad: bool
    sinks_require_grad: bool
    named: bool
    prefix_text: str

    @property
    def needs_backward(self) -> bool:
        """Something of it requires a gradient."""
        return self.requires_grad or self.sinks_require_grad

    def score_options(self, sinks: torch.Tensor | None, slopes: torch.Tensor | None) -> Scores:
        """The scores of a call with these tensors."""
        if sinks is not None:
            sinks = sinks.detach().requires_grad_(self.sinks_require_grad)
        return Scores(self.softcap, slopes, sinks, self.dropout_seed)

    def plan(self, like: torch.Tensor, shapes: Shapes, scores: Scores) -> tuple[str, AttentionPlan]:
        """Plan the call by :func:`plan_call`, on stand-ins of q, k and v: one element each,
        expanded to the shape.

        Args:
            like: any tensor with the call's dtype and device.
            shapes: of q, k and v.
            scores: the score modifiers with this call's tensors (:meth:`score_options`).

        Returns:
            The call signature, with ``prefix_text`` before it, and the plan.

        Raises:
            USPError: a call that cannot be computed exactly.
        """
        layout, kv_layout = layouts_of(self)
        tuning = (self.chunks, self.gather, self.copies, self.inner_ring)
        options = AttentionOptions(
            mesh_of(self),
            layout,
            MaskSpec(self.left, self.right, prefix=self.prefix),
            self.softmax_scale,
            self.dropout_p,
            self.kernel,
            self.return_lse,
            Tuning(*("auto" if value is None else value for value in tuning)),  # type: ignore[arg-type]
            scores,
            kv_layout,
        )
        with torch.set_grad_enabled(self.needs_backward):
            q, k, v = (like.new_empty(()).expand(shape) for shape in shapes)
            signature, plan = plan_call(q.requires_grad_(self.requires_grad), k, v, options)
        return self.prefix_text + signature, plan


class ExchangeOpSpec(NamedTuple):
    """One head exchange around a local attention, without its tensors.

    Args:
        mesh, layout, num_tokens, kv_layout, num_kv_tokens, named, prefix_text: as of
            :class:`AttentionOpSpec`.
        heads, kv_heads: of all ranks.
        to_heads: sequence to heads, or back.
        starts_call: it is the first exchange of a call, whose signature the ranks compare.
        backward: it is the backward pass of an exchange, which they compare too.
        requires_grad: of q, k or v.
    """

    mesh: str
    layout: str
    num_tokens: int
    kv_layout: str
    num_kv_tokens: int
    heads: int
    kv_heads: int
    to_heads: bool
    starts_call: bool
    backward: bool
    requires_grad: bool
    named: bool
    prefix_text: str

    def plan(self, tensors: Sequence[torch.Tensor]) -> tuple[str, ChunkExchanges]:
        """The call signature, and the exchanges of all heads."""
        mesh, layouts, like = mesh_of(self), layouts_of(self), tensors[0]
        if not self.starts_call:
            heads = self.heads, self.kv_heads
            q, k = (
                like.new_empty(()).expand(like.shape[0], layout.length(mesh.rank), count, 1)
                for layout, count in zip(layouts, heads, strict=True)
            )
            return plan_local_attention(q, k, mesh, *layouts)
        with torch.set_grad_enabled(self.requires_grad):
            shapes = [guard_ints(x.shape) for x in tensors]
            q, k, v = (
                like.new_empty(()).expand(shape).requires_grad_(self.requires_grad)
                for shape in shapes
            )
            text = check_tensors(q, k, v)
        signature, exchanges = plan_local_attention(q, k, mesh, *layouts)
        return f"{self.prefix_text}{text}, {signature}", exchanges


def mesh_of(spec: AttentionOpSpec | ExchangeOpSpec) -> SequenceMesh:
    """The mesh of that name."""
    return MESH_REGISTRY.lookup(spec.mesh)


_layout = lru_cache(maxsize=1024)(TokenLayout)


def layouts_of(spec: AttentionOpSpec | ExchangeOpSpec) -> Layouts:
    """The token layouts of the queries and of the keys."""
    mesh = mesh_of(spec)
    degrees = mesh.ulysses_degree, mesh.ring_degree, mesh.order
    layout = _layout(spec.layout, spec.num_tokens, *degrees)
    return layout, _layout(spec.kv_layout, spec.num_kv_tokens, *degrees)


def check_unnamed_layout(spec: AttentionOpSpec | ExchangeOpSpec) -> None:
    """See :func:`check_default_layout`; when the op runs, as batches change after tracing."""
    if not spec.named:
        check_default_layout(mesh_of(spec), layouts_of(spec)[0])


def guard_ints(values: Iterable[Any]) -> list[Any]:
    """Values without symbols: those that a compiler has seen, which it then guards."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return [kinds[type(x)](x) if type(x) in kinds else x for x in values]


def attention_spec(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    *,
    named: bool = True,
    prefix_text: str = "",
) -> AttentionOpSpec | None:
    """The op's spec of a call that torch.compile traces; None, for a graph break, if the call has
    documents (which differ from batch to batch) or arguments that are refused."""
    mesh, layout, mask, scale, dropout_p, kernel, return_lse, tuning, scores, kv_layout = options
    if type(mesh) is not SequenceMesh:
        return None
    queries = layout_spec(layout, q, mesh)
    keys = queries if kv_layout is None else layout_spec(kv_layout, k, mesh)
    is_plain = (
        type(mask) is MaskSpec
        and not mask.documents
        and type(scale) in (type(None), float, int)
        and type(dropout_p) in (float, int)
        and type(kernel) is str
        and type(return_lse) is bool
        and type(tuning) is Tuning
        and type(scores) is Scores
        and (scores.alibi_slopes is None or not scores.alibi_slopes.requires_grad)
        and q.ndim == k.ndim == v.ndim == 4
    )
    if queries is None or keys is None or not is_plain:
        return None
    sinks, grad = scores.sinks, torch.is_grad_enabled()
    return AttentionOpSpec(
        mesh.name,
        *queries,
        *keys,
        mask.left,
        mask.right,
        mask.prefix,
        scale,
        dropout_p,
        kernel,
        return_lse,
        _none_if_auto(tuning.chunks),
        _none_if_auto(tuning.gather),
        _none_if_auto(tuning.copies),
        _none_if_auto(tuning.inner_ring),
        scores.softcap,
        scores.dropout_seed,
        grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        grad and sinks is not None and sinks.requires_grad,
        named,
        prefix_text,
    )


def _none_if_auto(value: Any) -> Any:
    return None if value == "auto" else value


def layout_spec(
    layout: TokenLayout | str, x: torch.Tensor, mesh: SequenceMesh
) -> tuple[str, int] | None:
    """Kind and global length of the layout of ``x [b, s, h, d]``, equal shards where only a kind
    is given; None if it is of another mesh, or of documents."""
    if type(layout) is str:
        return layout, x.shape[1] * mesh.sp_degree
    is_plain = (
        type(layout) is TokenLayout
        and not layout.documents
        and layout.ulysses == mesh.ulysses_degree
        and layout.ring == mesh.ring_degree
        and layout.order == mesh.order
    )
    return (layout.kind, layout.seq_len) if is_plain and type(layout) is TokenLayout else None


def is_valid_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int, keys: int) -> bool:
    """Whether q, k and v fit together and have these numbers of tokens, so that a call that
    exchanges nothing needs no op to refuse it."""
    return (
        q.shape[1] == tokens
        and k.shape[1] == keys
        and k.shape[:3] == v.shape[:3]
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and q.shape[2] % k.shape[2] == 0
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and q.is_floating_point()
        and min(*q.shape, *k.shape, *v.shape) > 0
    )
