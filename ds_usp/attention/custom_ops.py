"""Attention as ops of torch, which ``torch.compile`` takes into its graph as they are.

An op takes tensors and plain values, so a call is told in plain values (:class:`Ask`) and its mesh
by name. What Dynamo reads to tell it, it guards: a call that is told otherwise is compiled again.
The ops run the code that is run without a compiler, and nothing of it is traced.

Letters of the shapes: b batch, s tokens of this rank, t tokens of this rank's keys, h query heads,
g key/value heads; d head dim, e that of values and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ds_usp.attention.call_plan import plan_call
from ds_usp.attention.pipeline import (
    AttentionPlan,
    SavedChunk,
    pipelined_backward,
    pipelined_forward,
)
from ds_usp.attention.score_mod import Scores
from ds_usp.attention.tuning import Tuning
from ds_usp.attention.validation import check_default_layout, check_on_all_ranks, is_on_cpu
from ds_usp.comm.mesh import MESH_REGISTRY, SequenceMesh
from ds_usp.errors import USPError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.memory.saved_attention import is_saving, results_or_replay

Sizes = Sequence[Sequence[int]]


class AttentionOpSpec(NamedTuple):
    """One call of attention without its tensors, in values that an op takes.

    Args:
        mesh: its name.
        layout, tokens, kv_layout, kv_tokens: kinds and lengths of the layouts.
        left, right, prefix: of the mask, which has no documents.
        chunks, gather, copies, inner_ring: of the tuning; None is ``"auto"``.
        softcap, dropout_seed: of the scores.
        learns, sinks_learn: q, k or v has a gradient, the sinks have one.
        named: the caller has named the layout.
        caller: what the ranks compare besides.
    """

    mesh: str
    layout: str
    tokens: int
    kv_layout: str
    kv_tokens: int
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
    learns: bool
    sinks_learn: bool
    named: bool
    caller: str

    @property
    def has_backward(self) -> bool:
        """Something of it has a gradient."""
        return self.learns or self.sinks_learn

    @property
    def on(self) -> SequenceMesh:
        """The mesh."""
        return MESH_REGISTRY.lookup(self.mesh)

    def scores(self, sinks: torch.Tensor | None, slopes: torch.Tensor | None) -> Scores:
        """The scores of a call with these tensors."""
        if sinks is not None:
            sinks = sinks.detach().requires_grad_(self.sinks_learn)
        return Scores(self.softcap, slopes, sinks, self.dropout_seed)

    def plan(self, like: torch.Tensor, sizes: Sizes, scores: Scores) -> tuple[str, AttentionPlan]:
        """See :func:`plan_call`.

        Args:
            like: a tensor with the dtype and device of the call's.
            sizes: the shapes of q, k and v.
        """
        degrees = self.on.ulysses_degree, self.on.ring_degree, self.on.order
        with torch.set_grad_enabled(self.has_backward):
            q, k, v = (like.new_empty(()).expand(size) for size in sizes)
            text, call = plan_call(
                q.requires_grad_(self.learns),
                k,
                v,
                mesh=self.on,
                layout=layout_of(self.layout, self.tokens, *degrees),
                mask=MaskSpec(self.left, self.right, prefix=self.prefix),
                softmax_scale=self.softmax_scale,
                dropout_p=self.dropout_p,
                kernel=self.kernel,
                return_lse=self.return_lse,
                tuning=Tuning(
                    chunks=_auto(self.chunks),
                    gather=_auto(self.gather),
                    copies=_auto(self.copies),
                    inner_ring=_auto(self.inner_ring),
                ),
                scores=scores,
                kv_layout=layout_of(self.kv_layout, self.kv_tokens, *degrees),
            )
        return self.caller + text, call

    def checked(
        self, like: torch.Tensor, sizes: Sizes, scores: Scores
    ) -> tuple[str, AttentionPlan]:
        """:meth:`plan` of a call that runs now."""
        if not self.named:
            degrees = self.on.ulysses_degree, self.on.ring_degree, self.on.order
            check_default_layout(self.on, layout_of(self.layout, self.tokens, *degrees))
        return self.plan(like, sizes, scores)


def _auto(value: Any) -> Any:
    return "auto" if value is None else value


layout_of = lru_cache(maxsize=1024)(TokenLayout)
_ASK = (
    "str mesh, str layout, SymInt tokens, str kv_layout, SymInt kv_tokens, SymInt? left, "
    "SymInt? right, SymInt prefix, float? softmax_scale, float dropout_p, str kernel, "
    "bool return_lse, SymInt? chunks, bool? gather, bool? copies, SymInt? inner_ring, "
    "float? softcap, SymInt? dropout_seed, bool learns, bool sinks_learn, bool named, "
    "str caller"
)
# torch's own CUDA graphs would leave out the comparison of the ranks.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
OP_TAGS: dict[str, Any] = {} if _TAG is None else {"tags": (_TAG,)}


@torch.library.custom_op(
    "ds_usp::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes, {_ASK}) -> Tensor[]",
    **OP_TAGS,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    *plain: Any,
) -> list[torch.Tensor]:
    """Attention of this rank's tokens with the whole sequence; collective over the mesh.

    Shapes:
        q ``[b, s, h, d]``, k ``[b, t, g, d]``, v ``[b, t, g, e]``, sinks and slopes ``[h]`` -> out
        ``[b, s, h, e]``; with ``with_lse``, and without Ulysses where there is a backward pass,
        the log-sum-exp ``[b, h, s]``; with Ulysses what else backward needs, part by part
        (:class:`ds_usp.attention.pipeline.Kept`); where there is a backward pass, last the number
        of the call ``[]``, on the host.

    Raises:
        USPError: as :func:`ds_usp.usp_attention`, on every rank, when it runs.
    """
    ask, inputs = AttentionOpSpec(*plain), [x for x in (q, k, v, sinks, slopes) if x is not None]
    shown = 2 if ask.return_lse else 1
    # A checkpoint's first run may be without gradients, and its second one asks for the rest.
    key = "attention in a graph", ask._replace(learns=False, sinks_learn=False)
    asked = ask._replace(learns=True) if is_saving() else ask
    found = results_or_replay(lambda: _attend(asked, q, k, v, sinks, slopes), inputs, key, shown)
    return list(found if ask.has_backward else found[:shown])


def _attend(
    ask: AttentionOpSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> list[torch.Tensor]:
    """:func:`attention`, every time."""
    scores = ask.scores(sinks, slopes)
    call = check_on_all_ranks(
        ask.on, lambda: ask.checked(q, (q.shape, k.shape, v.shape), scores), q
    )
    number = ask.on.consistency.number
    saves = ask.has_backward
    out, lse, kept = pipelined_forward(call, scores, q, k, v, save_for_backward=saves)
    found = [out] if lse is None else [out, lse]
    if saves and call.local_heads and lse is None:
        found.append(torch.cat([part.lse for part in kept], dim=1))
    if saves and not call.local_heads:
        found += [x for part in kept for x in part]
    if saves:
        found.append(torch.tensor(number, device="cpu"))
    return own(found, (q, k, v))


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    *plain: Any,
) -> list[torch.Tensor]:
    ask = AttentionOpSpec(*plain)
    batch, tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    found = [q.new_empty(batch, tokens, heads, v.shape[3])]
    local_heads = ask.on.ulysses_degree == 1
    if ask.return_lse or (local_heads and ask.has_backward):
        found.append(q.new_empty(batch, heads, tokens, dtype=wide))
    if not ask.has_backward:
        return found
    number = torch.empty((), dtype=torch.int64, device="cpu")
    if local_heads:
        return [*found, number]
    # What the exchange brings depends on the plan, and a plan is made of numbers, which are
    # constants of the graph.
    sizes = [guard_ints(x.shape) for x in (q, k, v)]
    ask = AttentionOpSpec(*guard_ints(ask))
    try:
        _, call = ask.plan(q, sizes, ask.scores(sinks, slopes))
    except USPError:  # raised when the op runs: on all ranks, where the others hear of it
        return [*found, q.new_empty(q.shape), number]
    for part in call.chunks:
        places, widths = part.qkv.layouts, part.qkv.widths()
        length = [place.ring_length(ask.on.ring_rank) for place in places]
        each = zip(length, widths, (q, k, v), strict=True)
        found += [q.new_empty(batch, n, width, x.shape[3]) for n, width, x in each]
        found.append(q.new_empty(batch, length[0], widths[0], v.shape[3]))
        found.append(q.new_empty(batch, widths[0], length[0], dtype=wide))
    return [*found, number]


@torch.library.custom_op(
    "ds_usp::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor[] saved, Tensor? sinks, Tensor? slopes, SymInt kv_length, "
    f"SymInt kv_heads, {_ASK}) -> Tensor[]",
    **OP_TAGS,
)
def attention_backward(
    dout: torch.Tensor,
    saved: list[torch.Tensor],
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    kv_length: int,
    kv_heads: int,
    *plain: Any,
) -> list[torch.Tensor]:
    """The gradients of :func:`attention`; collective over the mesh.

    Shapes:
        dout ``[b, s, h, e]`` -> dq ``[b, s, h, d]``, dk ``[b, t, g, d]``, dv ``[b, t, g, e]`` and,
        where sinks learn, this rank's share of theirs ``[h]``.

    Args:
        saved: without Ulysses q, k, v, out and the log-sum-exp; else each part's. Last the number
            of the call.
        kv_length, kv_heads: t and g.
    """
    ask = AttentionOpSpec(*plain)
    *saved, number = saved
    ask.on.consistency.check_backward(int(number), wait=is_on_cpu(dout))
    scores = ask.scores(sinks, slopes)
    sizes = _sizes(dout, saved, kv_length, kv_heads)
    _, call = ask.plan(dout, sizes, scores)
    if call.local_heads:
        kept = [
            SavedChunk._make(
                (
                    *part.qkv.to_heads(saved[:3]),
                    *part.out.to_heads(saved[3:4]),
                    saved[4][:, slice(*part.out.ranges[0][0])].contiguous(),
                )
            )
            for part in call.chunks
        ]
    else:
        kept = [SavedChunk._make(saved[at : at + 5]) for at in range(0, len(saved), 5)]
    shapes = [torch.Size(size) for size in sizes]
    grads = pipelined_backward(call, scores, dout.contiguous(), shapes, kept)
    return own([x for x in grads if x is not None], (dout, *saved))


@attention_backward.register_fake
def _(
    dout: torch.Tensor,
    saved: list[torch.Tensor],
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    kv_length: int,
    kv_heads: int,
    *plain: Any,
) -> list[torch.Tensor]:
    found = [dout.new_empty(size) for size in _sizes(dout, saved, kv_length, kv_heads)]
    if sinks is not None and AttentionOpSpec(*plain).sinks_learn:
        found.append(sinks.new_empty(sinks.shape))
    return found


def _sizes(dout: torch.Tensor, saved: Sequence[torch.Tensor], length: int, heads: int) -> Sizes:
    """The shapes of q, k and v."""
    batch, dim = dout.shape[0], saved[0].shape[3]
    return (
        (*dout.shape[:3], dim),
        (batch, length, heads, dim),
        (batch, length, heads, dout.shape[3]),
    )


def guard_ints(values: Iterable[Any]) -> list[Any]:
    """Values without symbols: those that a compiler has seen, to which it then holds."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return [kinds[type(x)](x) if type(x) in kinds else x for x in values]


def own(tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors dense, and none in the memory of another one, as results of an op must be."""
    used = {x.untyped_storage().data_ptr() for x in inputs}
    found = []
    for x in tensors:
        if not x.is_contiguous() or x.untyped_storage().data_ptr() in used:
            x = x.clone(memory_format=torch.contiguous_format)
        used.add(x.untyped_storage().data_ptr())
        found.append(x)
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    q, k, v, sinks, slopes, *plain = inputs
    ctx.ask = AttentionOpSpec(*plain)
    ctx.keys = k.shape[1], k.shape[2]
    if ctx.ask.on.ulysses_degree == 1:
        saved = (q, k, v, *output)
    else:
        saved = tuple(output[2 if ctx.ask.return_lse else 1 :])
    ctx.save_for_backward(sinks, slopes, *saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    sinks, slopes, *saved = ctx.saved_tensors
    dq, dk, dv, *dsinks = attention_backward(grads[0], saved, sinks, slopes, *ctx.keys, *ctx.ask)
    return dq, dk, dv, dsinks[0] if dsinks else None, None, *(None for _ in ctx.ask)


attention.register_autograd(_backward, setup_context=_save)
