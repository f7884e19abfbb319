"""One forward pass of a sharded transformer: lengths, shards and the padding of its text.

``hooks.py`` makes one for each pass, on each rank; ``join`` and attention alone communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from ds_usp.attention.custom_ops import traced_attention
from ds_usp.attention.functional import usp_attention
from ds_usp.attention.plan import AttentionOptions
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, LayoutError, UnsupportedAttentionError
from ds_usp.geometry.joint import ContinuedLayout, JointLayout
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec
from ds_usp.integrations.diffusers.plans import Kind, Plan, TokenDim, Tokens, parameters_of
from ds_usp.integrations.replicas import Reduction, ValuesComparison, check_reduction, join_shards
from ds_usp.kernels.registry import AUTO, check_kernel_name
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.training.whole_batch import real_tokens

LAYOUT = "contiguous"
_NEVER = -16384.0  # a power of two: exact in bf16, and its exp is 0
# The kinds after which a kind's longer shards begin, see ContinuedLayout.
_BEFORE: Mapping[Kind, tuple[Kind, ...]] = MappingProxyType(
    {"text": ("image",), "reference": ("image", "text")}
)


@dataclass(frozen=True)
class Options:
    """See :func:`ds_usp.integrations.diffusers.enable`; raises for a value that does not exist."""

    kernel: str = AUTO
    gradients: Reduction = "mean"
    tuning: Tuning = AUTO_TUNING
    cuda_graphs: bool = False
    step_cache: bool = False

    def __post_init__(self) -> None:
        check_kernel_name(self.kernel)
        check_reduction(self.gradients)


def mesh_attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, seq_lens: Tensor | None = None
) -> Tensor:
    """:func:`usp_attention` of ``[b, s_local, h, d]``, in the dtype of torch's own. Collective.

    Args:
        seq_lens: those of the layouts, on the CPU, with which a compiled graph serves layouts of
            other lengths too (:func:`traced_attention`); None: it serves these alone.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        if seq_lens is not None and torch.compiler.is_compiling():
            traced = traced_attention(q, k, v, options, seq_lens=seq_lens)
            if traced is not None:
                out, _lse = traced
                return out
        return usp_attention(q, k, v, **options._asdict())


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of attention of tokens in one order, known before a block runs.

    Plain values: those that ``torch.compile`` reads are constants of its graph, which it compiles
    again when they change. So it reads no number of tokens but in ``seq_lens``.

    Args:
        lengths, kv_lengths: of this rank's shards of the queries and keys, in their order.
        options: of the attention, without its scale.
        moved: how many tokens at the front attention takes last: text, whose padding is at the end.
        empty: the index in ``lengths`` of a kind of which this rank has no token: processors hold
            one that stands in for it, which attention leaves out; None: it has some of each.
        added: whether scores are given numbers of tokens, those that :class:`PassState` has.
        seq_lens: of the layouts of queries and keys; None for a call that no graph can hold.
    """

    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    options: AttentionOptions
    moved: int
    empty: int | None
    added: bool
    seq_lens: Tensor | None


class PassState:
    """Holds the tokens of one forward pass, and of its recomputation later.

    Args:
        name: of the transformer's class, for messages.
        mesh: the ranks that compute the pass: of one part with ``cfg_degree``.
        attentions: the tokens of each attention of the plan.
        values: of its arguments, which ``ShardedTransformer`` has still to compare.

    Attributes:
        joined: whether an output was joined.
        attended: how many attentions ran, but for those in compiled blocks.
        gathers: see ``gathered_if`` of the plan.
    """

    # Note [the order of a diffusion model's tokens]
    # Full attention does not depend on the order of tokens. So image and text are sharded each by
    # itself, whatever the order of a model is; and where text is padded, attention runs over image,
    # text and padding in this order, the padding being a document of its own.
    def __init__(
        self,
        name: str,
        mesh: SequenceMesh,
        options: Options,
        attentions: frozenset[Tokens],
        values: ValuesComparison,
    ) -> None:
        self.joined, self.values, self.attended = False, values, 0
        self.gathers = True
        self._name, self._mesh, self._options = name, mesh, options
        self._attentions = attentions
        self._batch: int | None = None
        self._lengths: dict[Kind, int] = {}
        self._layouts: dict[Kind, TokenLayout] = {}
        # Made once for all layers, and outside of compiled blocks.
        self._calls: dict[Tokens, AttentionCall] = {}
        # Borders of each sample of real tokens and padding; (): no padding, None: no mask yet.
        self._documents: tuple[Borders, ...] | None = None
        self._masked: frozenset[Kind] = frozenset()  # the tokens that the mask is of
        # Numbers [b, s_local] of tokens, which are added to the scores of a key, or as the product
        # of a query's and a key's.
        self._added: dict[Kind, Tensor] = {}
        self._products = False

    def layout(self, kind: Kind) -> TokenLayout:
        """The layout of the pass's tokens of a kind, once a tensor has shown how many there are.

        Raises:
            ConfigError: no tensor of them was sharded before.
            LayoutError: fewer tokens than ranks, where each rank needs one.
        """
        if kind in self._layouts:
            return self._layouts[kind]
        if kind not in self._lengths:
            raise ConfigError(f"{self._name}: its plan shards no {kind} before it is needed")
        length, ranks = self._lengths[kind], self._mesh.sp_degree
        # Shards are longer where those of what comes before, if that is known by now, are not.
        before = sum(self._lengths.get(earlier, 0) for earlier in _BEFORE.get(kind, ()))
        # A rank may have no token of a kind that takes part only beside others. References do not
        # count as others, as a pass may be without them.
        alone = any(
            kind in each and set(each) <= {kind, "reference"}
            for tokens in self._attentions
            for each in tokens
        )
        if length < ranks and (alone or not before):
            raise LayoutError(
                f"{self._name}, {kind}: {length} tokens for {ranks} ranks, each of which needs at "
                "least one. Use smaller degrees, or cfg_degree=2 where guidance is on"
            )
        layout = self._mesh.layout(LAYOUT, before or length)
        if before:
            layout = ContinuedLayout.after(layout, length)
        self._layouts[kind] = layout
        return layout

    def shard(self, x: Tensor, token_dim: TokenDim, *, argument: bool = False) -> Tensor:
        """This rank's tokens of a tensor; the tensor itself if it has none, see :class:`TokenDim`.
        With fewer tokens than ranks some get the first one, which stands in for none.

        Args:
            argument: it is a module's argument, which the caller keeps while the module runs, else
                an output.

        Raises:
            LayoutError: fewer tokens than ranks, or another number than elsewhere in this pass.
        """
        ndims = (token_dim.ndim,) if isinstance(token_dim.ndim, int) else token_dim.ndim
        if ndims is not None and (x.ndim not in ndims or x.shape[token_dim.dim] == 1):
            return x
        if not -x.ndim <= token_dim.dim < x.ndim:
            raise LayoutError(
                f"{self._name}: a tensor {list(x.shape)} has no dim {token_dim.dim} of "
                f"{token_dim.kind} tokens"
            )
        is_first = token_dim.kind not in self._lengths
        length = self._lengths.setdefault(token_dim.kind, x.shape[token_dim.dim])
        if x.shape[token_dim.dim] != length:
            raise LayoutError(
                f"{self._name}: a tensor of {x.shape[token_dim.dim]} {token_dim.kind} tokens, "
                f"dim {token_dim.dim} of {list(x.shape)}, where others of the same forward "
                f"pass have {length}"
            )
        layout = self.layout(token_dim.kind)
        if is_first:
            self._prepare_calls()
        if argument and token_dim.dim == 1:  # dim 0 is the batch; rotations have tokens there
            self._batch = len(x)
        rank = self._mesh.rank
        if not layout.length(rank):
            return x.narrow(token_dim.dim, 0, 1).clone()
        # A view of an argument costs no copy, as its caller keeps the whole tensor anyway. With
        # gradients backward would keep it; an output is copied, so that the whole tensor is freed.
        run, *others = layout.segments(rank)
        if argument and not torch.is_grad_enabled() and not others and run.stride == 1:
            view = x.narrow(token_dim.dim, run.start, run.length)
            if view.is_contiguous():
                return view
        return layout.shard(x, token_dim.dim, rank)

    def is_shard(self, x: Tensor, may_be_flat: bool) -> bool:
        """Return whether ``x`` has tokens, in a module that is given some: ``[b, tokens, ...]``
        and, where ``may_be_flat``, ``[b * tokens, c]`` have; ``[b, c]`` conditions all tokens."""
        return x.ndim > 2 or (may_be_flat and self._batch not in (None, len(x)))

    def join(self, x: Tensor, token_dim: TokenDim, last: bool = False) -> Tensor:
        """The whole tensor on every rank, from the ranks' shards. Collective.

        Args:
            last: it is an output, or every rank computes all that the pass does with it.
        """
        self.joined |= last
        layout = self.layout(token_dim.kind)
        if not layout.length(self._mesh.rank):  # ``x`` has one token, which stands in for none
            x = x.narrow(token_dim.dim, 0, 0)
        return join_shards(x, layout, self._mesh, token_dim.dim)

    def output(self, x: Tensor) -> Tensor:
        """An output of the pass. All gradients come out for a mean over the ranks, see
        :func:`join_shards`: where they are summed, the output's is divided by their number."""
        if self._options.gradients == "sum" and x.requires_grad:
            x.register_hook(lambda grad: grad / self._mesh.sp_degree)
        return x

    def count_last(self, number: int, kind: Kind) -> int:
        """Return how many of the last ``number`` tokens of a kind this rank has."""
        layout = self.layout(kind)
        first = layout.seq_len - number
        segments = layout.segments(self._mesh.rank)
        return sum(position >= first for x in segments for position in x.positions)

    def read_mask(self, mask: Tensor, order: tuple[Kind, ...], products: bool) -> None:
        """Take a mask of keys: of the whole text, of image and text, or of both in one sequence.
        The first one of a pass counts, for all its attentions.

        Args:
            mask: ``[b, ...]`` with one number for each key of the whole sequence, 0 for padding; or
                ``[b, 1, tokens, tokens]`` of segments, for keys of one kind.
            order: of the keys.
            products: one of floats is added to scores, see ``added_products`` of the plan.

        Raises:
            UnsupportedAttentionError: other numbers than 0 and 1, or no segments.
            LayoutError: a mask of another length.
        """
        if self._documents is not None:  # this is the mask of a later layer, or of a recomputation
            return
        if mask.is_floating_point() and products:
            lengths = [self.layout(kind).seq_len for kind in order]
            self._products, self._documents = True, ()
            self._add(dict(zip(order, mask.split(lengths, 1), strict=True)))
            self._prepare_calls()
            return
        if mask.is_floating_point():
            raise UnsupportedAttentionError(
                f"{self._name}: a text mask of {mask.dtype}, which attention adds to its scores: "
                "padding is not left out. Give a boolean mask, or none where no text is padded"
            )
        if len(order) == 1 and mask.ndim == 4 and mask.shape[2] > 1:
            self._read_segments(mask[:, 0])
            self._masked = frozenset(order)
            self._prepare_calls()
            return
        image = 0 if len(order) == 1 else self.layout("image").seq_len
        text = self.layout(order[0] if len(order) == 1 else "text").seq_len
        keys = mask.reshape(mask.shape[0], -1)
        if keys.shape[1] == image + text:
            keys = keys[:, image:] if order[-1] == "text" else keys[:, :text]
        elif keys.shape[1] != text:
            raise LayoutError(
                f"{self._name}: a mask {list(mask.shape)} of {keys.shape[1]} keys, for {text} text "
                f"tokens and {image} of the image"
            )
        rows = real_tokens(keys)
        if any(row.num_others for row in rows):
            raise UnsupportedAttentionError(
                f"{self._name}: a text mask has other numbers than 1, of text, and 0, of padding"
            )
        total = image + text
        padded = any(row.num < text for row in rows)
        is_last = all(row.is_prefix for row in rows)
        # Padding at the end is a document. Else, and in cross-attention, its keys get _NEVER.
        is_cross = any(
            x.keys != x.queries and not set(order).isdisjoint(x.keys) for x in self._attentions
        )
        if padded and (is_cross or not is_last):
            zeros = keys.new_zeros((len(keys), image), dtype=torch.float32)
            added = (keys == 0) * _NEVER
            self._add({order[0]: added} if len(order) == 1 else {"image": zeros, "text": added})
        documents = tuple((0, image + row.num, total) for row in rows)
        self._documents = documents if padded and is_last else ()
        self._masked = frozenset(order)
        self._prepare_calls()

    def _add(self, numbers: Mapping[Kind, Tensor]) -> None:  # [b, tokens], of all tokens
        rank = self._mesh.rank
        self._added = {kind: self.layout(kind).shard(x, 1, rank) for kind, x in numbers.items()}

    def _read_segments(self, mask: Tensor) -> None:
        """Take ``[b, tokens, tokens]``, True for tokens of one segment: segments are documents."""
        first = mask.to(torch.uint8).argmax(-1)  # of the segment of each token
        begins = (first == torch.arange(mask.shape[-1], device=first.device)).tolist()
        total = mask.shape[-1]
        rows = [tuple(i for i, is_first in enumerate(row) if is_first) for row in begins]
        if not torch.equal(mask, first[:, :, None] == first[:, None]) or not torch.equal(
            first, first.cummax(-1).values
        ):
            raise UnsupportedAttentionError(
                f"{self._name}: a mask {list(mask.shape)} that is not made of segments, each of "
                "tokens one after the other, which attend to their own segment"
            )
        padded = any(len(row) > 1 for row in rows)
        self._documents = tuple((*row, total) for row in rows) if padded else ()

    def mask_without_values(self, mask: Tensor, order: tuple[Kind, ...]) -> Tensor:
        """A mask ``[b, s_local]`` of this rank's text on ``meta``, see ``needs_mask`` of a plan."""
        kind = order[0] if len(order) == 1 else "text"
        text = max(1, self.layout(kind).length(self._mesh.rank))
        return torch.empty((mask.shape[0], text), dtype=mask.dtype, device="meta")

    def _prepare_calls(self) -> None:
        # Again for each kind and mask that comes: of all attentions whose tokens are known by then.
        for tokens in self._attentions:
            kinds = self._present((*tokens.queries, *tokens.keys))
            if kinds and all(kind in self._layouts for kind in kinds):
                self._calls[tokens] = self._call(tokens)

    def _present(self, order: tuple[Kind, ...]) -> tuple[Kind, ...]:
        # Without references in a pass that has none.
        return tuple(kind for kind in order if kind != "reference" or kind in self._lengths)

    def _call(self, tokens: Tokens) -> AttentionCall:
        tokens = Tokens(*map(self._present, tokens))
        order, keys = tokens
        lengths, kv_lengths = (
            tuple(self.layout(kind).length(self._mesh.rank) for kind in each) for each in tokens
        )
        short_kinds = [kind for kind in order if self.layout(kind).seq_len < self._mesh.sp_degree]
        empty = lengths.index(0) if 0 in lengths else None
        kv_layout = None if keys == order else self._attention_layout(keys, False)
        documents = self._documents_of(order) if kv_layout is None else ()
        # Padding is a document at the end: text in front is moved there, if this rank has any.
        is_moved = bool(documents) and order[0] == "text"
        moved = lengths[0] if is_moved else 0
        mask = MaskSpec.full(documents)
        layout = self._attention_layout(order, is_moved)
        options = AttentionOptions(
            self._mesh,
            layout,
            mask,
            kernel=self._options.kernel,
            tuning=self._options.tuning,
            kv_layout=kv_layout,
        )
        layouts = layout, layout if kv_layout is None else kv_layout
        seq_lens = None
        added = not documents and set(keys) <= self._added.keys()
        traced = not documents and not added and not short_kinds
        if traced and all(type(layout) is TokenLayout for layout in layouts):
            seq_lens = torch.tensor([layout.seq_len for layout in layouts], device="cpu")
        return AttentionCall(lengths, kv_lengths, options, moved, empty, added, seq_lens)

    def _documents_of(self, order: tuple[Kind, ...]) -> tuple[Borders, ...]:
        return (self._documents or ()) if self._masked == frozenset(order) else ()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, scale: float | None
    ) -> Tensor:
        """Attention of this rank's tokens with all, by sharded processors. Collective.
        UnsupportedAttentionError for other numbers of tokens than this rank's.

        Shapes:
            q, k, v ``[b, s_local, h, d]``: this rank's shards, in the orders of ``tokens``.
        """
        if tokens not in self._calls:
            for kind in (*tokens.queries, *tokens.keys):
                self.layout(kind)  # raises for the one that is not known
        call = self._calls[tokens]
        if not torch.compiler.is_compiling():
            self.attended += 1
            return self._attend(q, k, v, call, tokens, scale)
        if call.seq_lens is None:
            return self._attend_outside(q, k, v, call, tokens, scale)
        options = call.options._replace(softmax_scale=scale)
        return mesh_attention(q, k, v, options, call.seq_lens)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        tokens: Tokens,
        scale: float | None,
    ) -> Tensor:
        if call.empty is not None:
            row = sum(call.lengths[: call.empty])  # of the token that stands in for none
            q, k, v = (torch.cat([x[:, :row], x[:, row + 1 :]], 1) for x in (q, k, v))
        if q.shape[1] != sum(call.lengths) or k.shape[1] != sum(call.kv_lengths):
            each = zip(tokens, (call.lengths, call.kv_lengths), strict=True)
            texts = [f"{' + '.join(map(str, n))} tokens ({' + '.join(kinds)})" for kinds, n in each]
            raise UnsupportedAttentionError(
                f"{self._name}: an attention of {q.shape[1]} queries and {k.shape[1]} keys, where "
                f"this rank has {' and '.join(dict.fromkeys(texts))}"
            )
        if call.added:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            numbers = torch.cat([self._added[kind] for kind in tokens.keys], 1)
            query_numbers = numbers if self._products else numbers.new_ones(q.shape[:2])
            q, k = _with_products(q, k, query_numbers, numbers, scale)
        if call.moved:
            q, k, v = (x.roll(-call.moved, 1) for x in (q, k, v))
        out = mesh_attention(q, k, v, call.options._replace(softmax_scale=scale))
        if call.empty is not None:
            zero_row = out.new_zeros(out.shape[0], 1, *out.shape[2:])
            return torch.cat([out[:, :row], zero_row, out[:, row:]], 1)
        return out.roll(call.moved, 1) if call.moved else out

    _attend_outside = disable_in_compile("no graph has attention over padded or joint tokens")(
        _attend
    )

    def _attention_layout(self, order: tuple[Kind, ...], is_moved: bool) -> TokenLayout:
        # Without padding only the number of a rank's tokens matters: where these numbers are those
        # of one contiguous sequence it is taken, whose shards are exchanged in one piece.
        if len(order) == 1:
            return self.layout(order[0])
        layouts = [self.layout(kind) for kind in order]
        contiguous = self._mesh.layout(LAYOUT, sum(layout.seq_len for layout in layouts))
        ranks = range(self._mesh.sp_degree)
        fits = all(sum(x.length(r) for x in layouts) == contiguous.length(r) for r in ranks)
        if fits and not self._documents_of(order):
            return contiguous
        if "reference" in order:
            raise UnsupportedAttentionError(
                f"{self._name}: reference tokens are served after image and text, in this order, "
                "and beside no mask of text: a plan that shards them in it"
            )
        image, text = self.layout("image"), self.layout("text")
        front = order[0] == "text" and not is_moved
        return JointLayout.of(image, text.seq_len, front, isinstance(text, ContinuedLayout))


def _with_products(
    q: Tensor, k: Tensor, query_numbers: Tensor, key_numbers: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[b, s_local, h, d + 8]`` whose scores have the product of their tokens'
    numbers added, by further features of each head, which kernels need not know of.

    Shapes:
        query_numbers, key_numbers: ``[b, s_local]``.
    """
    features = key_numbers.new_zeros(*key_numbers.shape, 1, 8)  # head dims are multiples of 8
    features[..., :2] = key_numbers[..., None, None]
    keys = features.to(k.dtype).expand(*k.shape[:-1], 8)
    features = query_numbers.new_zeros(*query_numbers.shape, 1, 8)
    features[..., :2] = query_numbers[..., None, None] / softmax_scale
    # In two parts, as 1 / softmax_scale is no number of bf16.
    features[..., 1] -= features[..., 0].to(q.dtype)
    queries = features.to(q.dtype).expand(*q.shape[:-1], 8)
    return torch.cat([q, queries], -1), torch.cat([k, keys], -1)


ATTENTION_KWARGS = frozenset(
    {"attention_kwargs", "joint_attention_kwargs", "cross_attention_kwargs"}
)
_LORA_SCALE = "scale"
_ADVICE: Mapping[str, str] = {
    "controlnet": "residuals of a ControlNet are not served for this class; leave it out",
    "ip_adapter": "IP-Adapters are served of Flux, loaded before enable; else unload them",
    "kv_cache": "a cache of keys belongs to whole tokens; leave it out",
    "num_ref_tokens": "reference tokens are known by their index; leave the cache of them out",
}


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a module's forward pass by their names, those by position first."""
    return {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}


def check_arguments(transformer: nn.Module, plan: Plan, arguments: Mapping[str, Any]) -> None:
    """UnsupportedAttentionError, shared by the ranks, before a pass with unplanned arguments."""
    served = plan.arguments | {"return_dict"}
    has_adapter = getattr(transformer, "encoder_hid_proj", None) is not None
    for name, value in arguments.items():
        if name in ATTENTION_KWARGS:
            for key, inner in (value or {}).items():
                if key == _LORA_SCALE:
                    _check_lora_scale(transformer, inner)
                elif _is_given(inner) and not (key in plan.adapters and has_adapter):
                    raise _refusal(transformer, key, f" in {name}")
        elif name not in served and _is_given(value):
            raise _refusal(transformer, name)
        elif name in plan.all_real and value is not None and not bool(value.all()):
            raise UnsupportedAttentionError(
                f"{type(transformer).__name__}: {name} has padding among tokens that are sharded: "
                "give samples of one length in a batch"
            )


def _check_lora_scale(transformer: nn.Module, scale: Any) -> None:
    # diffusers sets LoRA's layers back when the forward pass ends (apply_lora_scale).
    reruns = torch.is_grad_enabled() and getattr(transformer, "is_gradient_checkpointing", False)
    if not reruns or scale in (None, 1):
        return
    if any(map(is_adapter, transformer.modules())):
        raise UnsupportedAttentionError(
            f"{type(transformer).__name__}: LoRA's scale {scale} with gradient checkpointing: "
            "diffusers resets the scale before backward computes the blocks again, and gradients "
            "would be wrong. Put the scale into lora_alpha, or disable_gradient_checkpointing()"
        )


def is_adapter(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT."""
    return hasattr(module, "unscale_layer")


def _is_given(value: Any) -> bool:
    # diffusers' caches of keys are given to passes that neither write nor read them, too.
    layers = getattr(value, "caches", ()) if type(value).__name__ == "GlmImageKVCache" else ()
    if layers and all(layer.mode in (None, "skip") for layer in layers):
        return False
    return isinstance(value, Tensor) or bool(value)


def _refusal(transformer: nn.Module, name: str, location: str = "") -> UnsupportedAttentionError:
    advice = "its plan does not know whether that has tokens; leave it out"
    if not location and name not in parameters_of(transformer):
        advice = f"diffusers {diffusers.__version__} knows no such argument; leave it out"
    for part, text in _ADVICE.items():
        if part in name:
            advice = text
    return UnsupportedAttentionError(f"{type(transformer).__name__}: {name}{location}: {advice}")
