"""What a compiler traces of a call of attention: its values are read, and told to an op.

What is read is guarded by the compiler. What cannot be told plainly is left to the call without a
compiler, outside of the graph, which refuses what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_usp.attention.custom_ops import AttentionOpSpec, attention
from ds_usp.attention.exchange_op import ExchangeOpSpec, exchange_op
from ds_usp.attention.local_attention import LocalAttention
from ds_usp.attention.score_mod import Scores
from ds_usp.attention.tuning import Tuning
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.memory.compile_guard import disable_in_compile

LayoutSpec = tuple[str, int]
LayoutLike = TokenLayout | LayoutSpec


graph_break = disable_in_compile(
    "only a plain call of attention can be in a graph. Packed documents, joint tokens, and of "
    "USPAttention rotary_pos_emb, sp_stream and, with a ring, extra arguments cannot, nor what is "
    "refused anyway; see README"
)


def make_op_spec(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: LayoutLike,
    mask: MaskSpec,
    softmax_scale: float | None,
    dropout_p: float,
    kernel: str,
    return_lse: bool,
    tuning: Tuning,
    scores: Scores,
    kv_layout: LayoutLike | None,
    named: bool = True,
    caller: str = "",
) -> AttentionOpSpec | None:
    """A call in plain values, told while it is traced; None if it has documents, which differ from
    batch to batch, or arguments that are refused.

    Args:
        layout, kv_layout: also as kind and length; ``named`` by the caller, or not.
        caller: what the ranks compare besides.
    """
    if type(mesh) is not SequenceMesh:
        return None
    queries, keys = (traceable_layout(each, mesh) for each in (layout, kv_layout or layout))
    plain = (
        type(mask) is MaskSpec
        and not mask.documents
        and type(softmax_scale) in (type(None), float, int)
        and type(dropout_p) in (float, int)
        and type(kernel) is str
        and type(return_lse) is bool
        and type(tuning) is Tuning
        and type(scores) is Scores
        and (scores.alibi_slopes is None or not scores.alibi_slopes.requires_grad)
        and q.ndim == k.ndim == v.ndim == 4
    )
    if queries is None or keys is None or not plain:
        return None
    sinks, grad = scores.sinks, torch.is_grad_enabled()
    return AttentionOpSpec(
        mesh=mesh.name,
        layout=queries[0],
        tokens=queries[1],
        kv_layout=keys[0],
        kv_tokens=keys[1],
        left=mask.left,
        right=mask.right,
        prefix=mask.prefix,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        kernel=kernel,
        return_lse=return_lse,
        chunks=_number(tuning.chunks),
        gather=_number(tuning.gather),
        copies=_number(tuning.copies),
        inner_ring=_number(tuning.inner_ring),
        softcap=scores.softcap,
        dropout_seed=scores.dropout_seed,
        learns=grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        sinks_learn=grad and sinks is not None and sinks.requires_grad,
        named=named,
        caller=caller,
    )


def _number(value: Any) -> Any:
    return None if value == "auto" else value


def traceable_layout(layout: LayoutLike, mesh: SequenceMesh) -> LayoutSpec | None:
    """Kind and length of a layout for a mesh, told while it is traced; None if it is another, or of
    documents."""
    if isinstance(layout, tuple):
        return layout if type(layout[0]) is str else None
    plain = (
        type(layout) is TokenLayout
        and not layout.documents
        and layout.ulysses == mesh.ulysses_degree
        and layout.ring == mesh.ring_degree
        and layout.order == mesh.order
    )
    return (layout.kind, layout.seq_len) if plain else None


def layout_spec(layout: str | TokenLayout, x: torch.Tensor, mesh: SequenceMesh) -> LayoutLike:
    """Where the tokens of ``x [b, s, h, d]`` are; as many on every rank where only a kind is
    given."""
    return layout if isinstance(layout, TokenLayout) else (layout, x.shape[1] * mesh.sp_degree)


def traced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    computed: LocalAttention,
    *,
    mesh: SequenceMesh,
    layouts: Sequence[LayoutLike],
    training: bool,
    kernel: str,
    tuning: Tuning,
    named: bool,
    caller: str,
) -> torch.Tensor | None:
    """What a local attention would compute, on the package's kernels; None if no op can.

    Shapes:
        q ``[b, s, h, d]``, k, v ``[b, t, h_kv, d]`` -> ``[b, s, h, d]`` or ``[b, s, h * d]``.
    """
    scores = computed.scores(q.device)
    ask = make_op_spec(
        q,
        k,
        v,
        mesh=mesh,
        layout=layouts[0],
        mask=computed.mask,
        softmax_scale=computed.softmax_scale,
        dropout_p=computed.dropout_p if training else 0.0,
        kernel=kernel,
        return_lse=False,
        tuning=tuning,
        scores=scores,
        kv_layout=layouts[1],
        named=named,
        caller=caller,
    )
    if ask is None:
        return None
    out = attention(q, k, v, scores.sinks, scores.alibi_slopes, *ask)[0]
    return out.flatten(2) if computed.flat_output else out


def traced_exchange(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: SequenceMesh,
    layouts: Sequence[LayoutLike],
    named: bool,
    caller: str,
) -> Callable[..., tuple[torch.Tensor, ...]] | None:
    """A function ``(to_heads, *tensors)`` that brings q, k and v to their heads, and the output
    back; None if no op can.

    Args:
        layouts: of the queries and of the keys.
        named: the caller has named them.
        caller: what the ranks compare besides.
    """
    queries, keys = (traceable_layout(each, mesh) for each in layouts)
    if queries is None or keys is None:
        return None
    if mesh.ulysses_degree == 1:  # nothing to exchange
        return _stay if _fits(q, k, v, queries[1], keys[1]) else None
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    places = *queries, *keys
    heads = q.shape[2], k.shape[2]
    trip = ExchangeOpSpec(mesh.name, *places, *heads, True, True, False, learns, named, caller)
    return _TracedExchange(trip)


def _stay(to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


class _TracedExchange:
    """The exchanges of one call; the second one is told the number that the first one gave it."""

    def __init__(self, trip: ExchangeOpSpec) -> None:
        self._trip = trip
        self._call: torch.Tensor | None = None

    def __call__(self, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if to_heads:
            *exchanged, self._call = exchange_op(list(tensors), None, *self._trip)
            return tuple(exchanged)
        back = self._trip._replace(to_heads=False, begins=False)
        return tuple(exchange_op(list(tensors), self._call, *back))


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int, keys: int) -> bool:
    """Whether these are a call that no op has to check."""
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
