"""Checks of one call on this rank, and its parts of the signature that all ranks compare next:
``check_on_all_ranks`` runs them, and raises their errors on every rank. Nothing here communicates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ds_usp.comm.all_to_all import HeadAllToAll, HeadRanges
from ds_usp.comm.call_record import Signature
from ds_usp.comm.keywords import MASKS
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, LayoutError, UnsupportedAttentionError
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import KINDS, TokenLayout
from ds_usp.geometry.masks import MaskSpec


def exchange_label(to_heads: bool) -> str:
    """The name of one exchange around a local attention, for its backward's signature."""
    return " (q, k, v)" if to_heads else " (output)"


def same_ranks(mesh: SequenceMesh) -> tuple[object, ...]:
    """Return what is equal for meshes over the same ranks, also where one is made anew."""
    return getattr(mesh, "sp_group", None), getattr(mesh, "order", None), str(mesh)


def module_text(number: int) -> str:
    """The module of a call in its signature, by the order in which the mesh's were made: else a
    rank that leaves a layer out would go unnoticed."""
    return f"USPAttention {number}"


def returned_text(out: torch.Tensor) -> str:
    """Describe, for the ranks' comparison, what a local attention returned, ``[b, s, h, e]``."""
    return f"a local attention that returned head dim {out.shape[3]} of {out.dtype}"


@dataclass(frozen=True)
class ChunkExchanges:
    """The head exchanges (all-to-all) of one head chunk. Backward ``qkv`` returns gradients, and
    ``shards`` brings all that it needs from shards of all heads: q; k and v if this is the last
    chunk that uses them; the output; its gradient."""

    qkv: HeadAllToAll  # of q, and of k and v if has_kv
    out: HeadAllToAll  # of the output forward, and of its gradient backward
    shards: HeadAllToAll
    kv_chunk: int = 0  # index of the chunk with which its k and v are exchanged
    has_kv: bool = True  # it is this one

    @cached_property
    def q_heads(self) -> slice:
        """The query heads that this rank computes, among those of all ranks."""
        q_ranges, *_ = self.qkv.ranges
        return slice(*q_ranges[self.qkv.mesh.ulysses_rank])


def head_split(heads: int, kv_heads: int, mesh: SequenceMesh) -> HeadSplit:
    """How heads are divided among the Ulysses ranks of a mesh; ConfigError if they cannot be."""
    return _head_split(heads, kv_heads, mesh.ulysses_degree, mesh.sp_degree)


@lru_cache(maxsize=1024)
def _head_split(heads: int, kv_heads: int, ulysses: int, sp: int) -> HeadSplit:
    """:func:`head_split`, cached because calls of a local attention have no cached plan."""
    Degrees(sp=sp, ulysses=ulysses, heads=heads, kv_heads=kv_heads).check()
    return HeadSplit(heads, kv_heads, ulysses)


def plan_head_exchanges(
    split: HeadSplit,
    mesh: SequenceMesh,
    layout: TokenLayout,
    kv_layout: TokenLayout,
    chunks: int = 1,
    use_copy_engines: bool = False,
    use_fused: bool = False,
) -> tuple[ChunkExchanges, ...]:
    """The head exchanges of q ``[b, s, h, d]`` and k, v ``[b, t, h_kv, d]``, for each chunk; those
    of a chunk that shares KV with one before have q alone."""

    def exchange(*tensors: tuple[TokenLayout, HeadRanges]) -> HeadAllToAll:
        layouts, ranges = zip(*tensors, strict=True)
        return HeadAllToAll(mesh, layouts, ranges, use_copy_engines, use_fused)

    heads = [split.chunk(chunks, index) for index in range(chunks)]
    exchanges = []
    for index, chunk in enumerate(heads):
        q, kv = (layout, chunk.queries), 2 * ((kv_layout, chunk.keys),)
        has_kv = chunk.kv_chunk == index
        is_last = all(later.kv_chunk != chunk.kv_chunk for later in heads[index + 1 :])
        qkv = exchange(q, *kv) if has_kv else exchange(q)
        shards = exchange(q, *kv, q, q) if is_last else exchange(q, q, q)
        exchanges.append(ChunkExchanges(qkv, exchange(q), shards, chunk.kv_chunk, has_kv))
    return tuple(exchanges)


def plan_local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    mesh: SequenceMesh,
    layout: TokenLayout,
    kv_layout: TokenLayout,
) -> tuple[Signature, ChunkExchanges]:
    """Check ``q [b, s, h, d]`` and ``k [b, t, h_kv, d]`` of a local attention's call; returns its
    signature, and the exchanges of all heads around it."""
    queries = check_layout(q, "queries", mesh, layout)
    signature = Signature.of(queries, check_layout(k, "keys", mesh, kv_layout))
    split = head_split(q.shape[2], k.shape[2], mesh)
    (traffic,) = plan_head_exchanges(split, mesh, layout, kv_layout)
    return signature, traffic


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Signature:
    """Check that the shapes, dtypes and devices of q, k, v ``[b, s, h, d]`` fit together
    (ConfigError); returns their part of the signature."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ConfigError(f"q, k and v must be [batch, tokens, heads, head_dim], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ConfigError(
            f"q, k and v must share the batch, k and v tokens and heads, q and k head_dim: {shapes}"
        )
    if not (q.numel() and k.numel() and v.numel()):
        raise ConfigError(f"q, k and v must not be empty, got {shapes}")
    kinds = {(x.dtype, x.device) for x in (q, k, v)}
    if len(kinds) > 1 or not q.is_floating_point():
        raise ConfigError(
            "q, k and v must share one floating dtype and one device, got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return Signature(
        (
            f"batch {q.shape[0]}",
            f"{q.shape[2]} query heads",
            f"{k.shape[2]} kv heads",
            f"head dims {q.shape[3]} and {v.shape[3]}",
            f"dtype {q.dtype}",
            f"device {q.device.type}",
            f"{'with' if grad else 'without'} gradients",
        )
    )


def token_layout(layout: TokenLayout | str, x: torch.Tensor, mesh: SequenceMesh) -> TokenLayout:
    """The layout of which ``x [b, s, ...]`` is this rank's shard: the given one, or one of equal
    shards where only a kind is given. LayoutError for a kind that is unknown or needs documents, or
    neither a layout nor a kind."""
    if isinstance(layout, TokenLayout):
        return layout
    if not isinstance(layout, str):
        raise LayoutError(
            f"layout={layout!r} must be a TokenLayout, which mesh.layout(kind, seq_len) makes, or "
            f"one of the kinds {', '.join(KINDS)}"
        )
    return mesh.layout(layout, x.shape[1] * mesh.sp_degree)


# A module without layout= means contiguous shards, DeepSpeed's order, as the data loader of this
# package does. A loader that was given another one (zigzag) beside a module that was not would make
# attention of permuted tokens, and nothing in the tensors shows it. So the loader leaves its
# layouts in the mesh.


def check_default_layout(mesh: SequenceMesh, layout: TokenLayout) -> None:
    """LayoutError if a data loader's last batch of this length has another layout than the default
    one, where the caller named none."""
    batch = mesh.batch_layouts.get(layout.seq_len)
    if batch is None or batch.has_same_shards_as(layout):
        return
    named = batch.kind in KINDS and not batch.documents
    raise LayoutError(
        f"SequenceParallelDataLoader gave these ranks batches of {batch.seq_len} tokens in the "
        f"layout {batch.kind!r}, and attention was given none, which means {layout.kind!r}: "
        + (f"give it layout={batch.kind!r}" if named else "call usp_attention with batch.layout")
        + f", or the loader layout={layout.kind!r}. If these are other tokens, which are "
        f"{layout.kind}, say so: layout={layout.kind!r}"
    )


def check_layout(
    x: torch.Tensor, arg_name: str, mesh: SequenceMesh, layout: TokenLayout
) -> Signature:
    """Check that ``x [b, s, ...]`` is this rank's shard; returns its part of the signature.
    LayoutError for a layout of another mesh, or not this rank's number of tokens in it."""
    mesh.check_degrees(layout)
    # [b, h, s, d], which most kernels take, is the likeliest mistake: name it where it fits.
    length = layout.length(mesh.rank)
    if x.shape[1] != length:
        if x.ndim == 4 and x.shape[2] == length:
            raise LayoutError(
                f"expected the {arg_name} as [b, s, h, d] with s = {length} tokens on rank "
                f"{mesh.rank} ({layout}), got {list(x.shape)}, which looks like [b, h, s, d]: give "
                "x.transpose(1, 2)"
            )
        raise LayoutError(
            f"rank {mesh.rank} holds {x.shape[1]} tokens of the {arg_name}, {layout} gives it "
            f"{length}; layout.shard(x, dim, rank) gives the right shard, and "
            "TokenLayout(kind, seq_len, ...) says the length of a sequence that does not divide"
        )
    return Signature((str(layout), layout.order), ((layout.kind, layout.seq_len),))


def no_mask_error(mask: object) -> ConfigError:
    """Make the error about a mask that is no :class:`MaskSpec`; it shows a tensor by its shape."""
    mask_text = f"a tensor {list(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
    return ConfigError(f"mask={mask_text} must be a MaskSpec: {MASKS}")


def check_mask(mask: MaskSpec, q: torch.Tensor, layout: TokenLayout) -> None:
    """Check the mask, and its documents against the queries ``[b, s, h, d]``.

    Raises:
        ConfigError: no :class:`MaskSpec`, or documents of another length or batch.
        UnsupportedAttentionError: documents in a CUDA graph, which would replay these borders.
    """
    # Once a plan is enough: whether a CUDA graph is captured is in the plan's key (plan_call).
    if not isinstance(mask, MaskSpec):
        raise no_mask_error(mask)
    mask.check_length(layout.seq_len, q.shape[0])
    if mask.documents and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedAttentionError(
            "packed documents cannot be captured in a CUDA graph, which would replay the borders "
            f"of these ({mask}) for every batch. Attend to them outside of the graph"
        )


def check_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    mesh: SequenceMesh,
    layouts: tuple[TokenLayout, TokenLayout],
    mask: MaskSpec,
) -> Signature:
    """Check keys ``[b, t, g, d]``, of the queries' sequence or another; returns their signature.
    ``layouts``: of the queries and of the keys.

    Raises:
        ConfigError: other keys than queries in one layout; a layout of documents without a mask of
            documents.
        LayoutError: the keys' layout gives this rank another number of keys.
        UnsupportedAttentionError: a mask by positions, which two sequences do not share.
    """
    query_layout, kv_layout = layouts
    if query_layout == kv_layout:
        if q.shape[1] != k.shape[1]:
            raise ConfigError(
                f"q has {q.shape[1]} tokens on this rank, k and v have {k.shape[1]}: give the keys "
                "of another sequence a layout of their own (kv_layout=)"
            )
        if len(query_layout.documents) > 2 and not mask.documents:
            band = f"window({mask.left}, {mask.right}, "
            if mask.left is None and mask.right in (0, None):
                band = "causal(" if mask.right == 0 else "full("
            fix = f"Give them to the mask, MaskSpec.{band}documents=borders)"
            if mask.prefix:
                fix = (
                    "A prefix is the whole sequence's: lay the tokens out as one document, "
                    f"mesh.layout('zigzag', {query_layout.seq_len})"
                )
            raise ConfigError(
                f"the tokens are laid out for documents, {query_layout}, and the mask {mask} has "
                f"none: tokens would attend across their borders. {fix}"
            )
        return Signature(("self-attention",))
    if not mask.is_full:
        raise UnsupportedAttentionError(
            f"the keys are of another sequence ({kv_layout}) than the queries ({query_layout}), "
            f"and a {mask} mask compares positions of one: use MaskSpec.full()"
        )
    return check_layout(k, "keys", mesh, kv_layout)


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The softmax scale as a number; None is ``head_dim ** -0.5``. ConfigError if it is not a
    finite number above 0, or is a tensor, whose gradient would be lost."""
    if softmax_scale is None:
        return float(head_dim**-0.5)
    number = isinstance(softmax_scale, (int, float)) and not isinstance(softmax_scale, bool)
    if not number or not math.isfinite(softmax_scale) or softmax_scale <= 0:
        raise ConfigError(
            f"softmax_scale={softmax_scale!r} must be a finite number above 0. Multiply a "
            "trainable scale into the queries instead"
        )
    return float(softmax_scale)


def refuse_dropout(dropout_p: float, mesh: SequenceMesh) -> None:
    """Refuse attention dropout (UnsupportedAttentionError)."""
    if dropout_p != 0:
        raise UnsupportedAttentionError(
            f"attention dropout {dropout_p} is not exact under ulysses {mesh.ulysses_degree} x "
            f"ring {mesh.ring_degree}: which weights are dropped would depend on the degrees. Give "
            "dropout_p=0, and set a model's attention dropout to 0; a local attention that "
            "USPAttention calls, without a ring, still drops by itself"
        )


def check_layout_kind(layout: str | TokenLayout, mesh: SequenceMesh) -> None:
    """LayoutError if an option ``layout`` is not one of the mesh: where a ``USPAttention`` or a
    ``flash_attention_forward`` is made."""
    if isinstance(layout, TokenLayout):
        degrees = mesh.ulysses_degree, mesh.ring_degree, mesh.order
        packing = layout.documents, layout.parents
        fits = TokenLayout(layout.kind, layout.seq_len, *degrees, *packing)
        if layout != fits:
            raise LayoutError(f"layout {layout} is not for this mesh; for it: {fits}")
    elif layout not in KINDS:
        raise LayoutError(f"unknown token layout {layout!r}; there are {', '.join(KINDS)}")
    elif layout == "balanced":
        mesh.layout(layout, 2 * mesh.sp_degree)  # raises with what it needs


def check_dims(scatter_idx: int, gather_idx: int | None) -> None:
    """ConfigError for other scatter and gather dims of a module than heads and tokens."""
    if scatter_idx != 2 or gather_idx not in (None, 0, 1):
        raise ConfigError(
            f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: heads are dim 2, tokens are "
            "dim 0 of [s, b, h, d] or dim 1 of [b, s, h, d]. Transpose q, k, v and the output of "
            "[b, h, s, d], and give scatter_idx=2"
        )
