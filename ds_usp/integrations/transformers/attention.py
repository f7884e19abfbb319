"""The attention function that transformers calls in every layer of an enabled model, and the masks,
which models make once a pass. Every rank calls it in forward, once more where a checkpoint
recomputes a layer; only ``usp_attention`` communicates, in backward too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import CodeType, MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from ds_usp.attention.functional import usp_attention
from ds_usp.attention.plan import AttentionOptions
from ds_usp.attention.scores import Scores
from ds_usp.comm.readings import version_of
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec, Parents, has_only
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.training.whole_batch import NO_PACKING, Packing

IMPLEMENTATION: Final = "usp"

# Tensors that layers hand down and that change nothing about attention: positions and borders are
# those of this rank's shard; the whole batch's are in the Shard.
_KNOWN_TENSORS = frozenset(
    {"position_ids", "cache_position", "num_items_in_batch", "labels", "shift_labels"}
)


@dataclass(frozen=True, eq=False)
class Targets:
    """Labels of one forward pass.

    Args:
        model_labels: the ``labels`` that the model is called with: this rank's shard, or all where
            shards begin at its text model.
        labels: what logits are compared with, ``[b, s_local]``: shifted if the model is causal.
        count: tokens of the whole batch that the loss is divided by, or the sum of their weights.
        in_chunks: head and loss run in chunks of tokens.
        weights: factors of the tokens' losses, ``[b, s_local]``; None: 1.
    """

    model_labels: Tensor
    labels: Tensor
    count: Tensor | int
    in_chunks: bool
    weights: Tensor | None = None
    version: int = field(init=False)  # of ``model_labels``: a model may write into it

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", version_of(self.model_labels))

    # AOTAutograd compares the version of its fake tensor while it traces: 0, whatever the labels'.
    @disable_in_compile("labels are compared by their version, which a graph does not know")
    def is_given(self, labels: Tensor | None) -> bool:
        """Whether ``labels``, of a call of the loss function, are ``model_labels``, unchanged."""
        x = self.model_labels
        if labels is None or labels.data_ptr() != x.data_ptr() or labels.shape != x.shape:
            return False
        return labels.is_inference() or labels._version == self.version


class Shard:
    """One forward pass: what attention needs to know of it, and what its end needs of its start.

    Args:
        call: what all layers have in common; the mask, scale and scores are each layer's.
        packing: the documents of the whole batch, or a tree of them.

    Attributes:
        layers: class names of the modules that have run attention, or carried a state.
        rows: of the batch that is sharded.
        largest_position: of the whole batch.
        drop_last: outputs per token have none for the last one, whose label is not known.
        targets: None where no labels were given.
        shares_keys_without_graph: a layer without gradients has made keys that later layers read.
        masks: what layers whose indexer picks the keys make once a pass, by what it depends on:
            masks, "counts" of tokens and "angles" of keys.
        positions, key_positions: of this rank's tokens and of all, ``[1 or b, tokens]``, for
            decoders that are given none; None for others.
        mask_of_keys: makes a mask for layers that add it to scores themselves; None for others.
    """

    rows = 0
    largest_position: Tensor | int = 0
    drop_last = shares_keys_without_graph = False
    targets: Targets | None = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    mask_of_keys: Callable[..., Tensor] | None = None

    # Note [the pass travels with the layers]
    # A shard goes through the layers as their keyword argument `usp`, not in a global. Backward
    # recomputes checkpointed layers long after the pass: by then a pipeline or gradient
    # accumulation has run other batches, of other lengths and documents. The
    # checkpoint keeps the layer's arguments, and with them the shard that the layer had. It is no
    # dataclass, because FSDP2 casts the tensors of arguments, and copies dataclasses for that.
    # To layers that are handed no keyword arguments (Mamba, Jamba, Nemotron) it comes as PASS, set
    # while the model is given shards, and by `carry` where a checkpoint computes a layer once more.
    def __init__(self, call: AttentionOptions, packing: Packing = NO_PACKING) -> None:
        self.call, self.packing = call, packing
        self.layout = cast(TokenLayout, call.layout)
        self.layers: list[str] = []
        self.masks: dict[Any, Tensor] = {}

    @property
    def length(self) -> int:
        return self.layout.length(self.call.mesh.rank)


# The pass whose layers run now.
PASS: Final[ContextVar[Shard | None]] = ContextVar("pass", default=None)


def carry(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a checkpoint is given instead of a layer's forward, ``run``: it runs
    with the shard of this pass, also when it is recomputed."""
    shard = PASS.get()

    def run_with_shard(*args: Any, **kwargs: Any) -> Any:
        before = PASS.set(shard)
        try:
            return run(*args, **kwargs)
        finally:
            PASS.reset(before)

    return run if shard is None else run_with_shard


class RunningPass:
    """The last forward pass, for what models call without the layers' keyword arguments: the loss
    function, the head and rotary embeddings.

    Attributes:
        shard: None before the first pass.
        targets: of the pass that runs; None after it, when calls are the caller's own.
        loss: what the model's loss function has returned in it.
        router_loss: the load-balancing loss of its routers, over the whole batch.
        is_sharded: modules are given shards, from the model's or the text model's inputs on.
    """

    shard: Shard | None = None
    targets: Targets | None = None
    # No attribute of the shard: checkpoints keep that, and the loss's graph would never be freed.
    loss: Tensor | None = None
    router_loss: Tensor | None = None
    is_sharded = False

    def begin(self, shard: Shard) -> None:
        self.shard, self.targets = shard, shard.targets
        self.loss = self.router_loss = None
        self.is_sharded = False

    def __deepcopy__(self, _: dict[int, Any]) -> RunningPass:
        return RunningPass()


def usp_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    usp: Shard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens with the whole sequence.

    Shapes:
        query ``[b, h, s_local, d]``, key ``[b, h_kv, s_local, d]``, value ``[b, h_kv, s_local, e]``
        -> ``[b, s_local, h, e]``; s_aux (attention sinks) ``[h]``.

    Raises:
        ConfigError: the model was not enabled.
        UnsupportedAttentionError: dropout, or an argument that changes attention and is not known.
    """
    if dropout:
        raise UnsupportedAttentionError(text_of_dropout(module, dropout))
    if key.shape[2] != query.shape[2]:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]} keys, "
            "which are not its shard's: attention to other sequences, or to a cache, is not served"
        )
    if usp is None and query.shape[2] == getattr(PASS.get(), "length", None):
        usp = PASS.get()
    usp, mask = check_call(module, attention_mask, is_causal, sliding_window, usp, others)
    layer = getattr(module, "layer_idx", None) or 0
    q, k, v = (x.transpose(1, 2) for x in _in_one_dtype(query, key, value))
    with torch.autocast(q.device.type, enabled=False):
        scores = Scores(softcap or None, s_aux)
        call = usp.call._replace(mask=mask, softmax_scale=scaling, scores=scores)
        if not torch.compiler.is_compiling():  # which would compile each layer anew
            call = call._replace(label=f"{type(module).__name__} {layer}")
        out: Tensor = usp_attention(q, k, v, **call._asdict())
    return out, None


def outside_of_pass(layer: nn.Module) -> ConfigError:
    """The error of a layer that runs where it finds no :class:`Shard`."""
    return ConfigError(
        f"{type(layer).__name__} runs without a sharded batch. Call the model that was given to "
        "ds_usp.integrations.transformers.enable, not a part of it; checkpoints are served as "
        "gradient_checkpointing_enable and enable(..., recompute=) make them"
    )


def text_of_dropout(module: nn.Module, dropout: float, config: Any = None) -> str:
    """Why a layer's dropout is refused, with the key of its ``config``; None: the module's own."""
    values = vars(config or getattr(module, "config", object)).items()
    keys = [key for key, x in values if "att" in key and "drop" in key and x == dropout]
    return (
        f"{type(module).__name__} drops attention weights in training, {' or '.join(keys)}="
        f"{dropout} of its configuration, and which ones would depend on the degrees: make the "
        "model with 0"
    )


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    # Rotary embeddings and norms may leave queries and keys in fp32: as transformers' own functions
    # do, all are cast to autocast's dtype, else to the values'.
    kind, dtype = query.device.type, value.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) for x in (query, key, value))


def check_call(
    module: nn.Module,
    attention_mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
    usp: Shard | None,
    others: Mapping[str, Any],
) -> tuple[Shard, MaskSpec]:
    """Return the shard and the mask of a layer's call, or refuse it; notes the layer in the shard.
    Arguments are those of :func:`usp_attention_forward`, ``others`` what it does not name."""
    name = type(module).__name__
    if usp is None:  # it would be attention within a shard, or of the whole batch on every rank
        raise ConfigError(
            f"{name} runs attention 'usp' without a sharded batch. Call the model that was given "
            "to ds_usp.integrations.transformers.enable, not a part of it"
        )
    _refuse_unknown(name, others)
    usp.layers.append(name)
    mask = layer_mask(module, attention_mask, is_causal, sliding_window)
    return usp, mask_of(mask, usp.packing, usp.layout.seq_len, name)


def layer_mask(
    module: nn.Module, mask: Any, is_causal: bool | None, sliding_window: int | None
) -> LayerMask:
    """Return the mask that a layer was given, or that it means by giving none."""
    if isinstance(mask, LayerMask):
        return mask
    if mask is not None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} was given a mask of its own ({type(mask).__name__} "
            f"{list(getattr(mask, 'shape', []))}): masks are served as transformers' mask "
            "functions make them, not as tensors"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    if causal is None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} gives neither a mask nor is_causal: who sees whom is unknown"
        )
    if not sliding_window:
        return LayerMask(_Band(MaskSpec.causal() if causal else MaskSpec.full()))
    # As transformers' mask functions count: _causal_window, _two_sided_window.
    window = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    return LayerMask(_Band(MaskSpec.window(*window)))


def _refuse_unknown(name: str, others: Mapping[str, Any]) -> None:
    if others.get("output_attentions"):
        raise UnsupportedAttentionError(
            "output_attentions: weights of tokens x tokens are never made; use one rank for them"
        )
    for argument, value in others.items():
        if isinstance(value, Tensor) and argument not in _KNOWN_TENSORS:
            raise UnsupportedAttentionError(
                f"{name} gives its attention the tensor {argument} {list(value.shape)}, which is "
                "not known here: this model is not served"
            )


def register() -> None:
    """Make ``usp`` an attention implementation of transformers; may be called again."""
    AttentionInterface.register(IMPLEMENTATION, usp_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, usp_mask)


@dataclass(frozen=True, slots=True)
class _Band:
    """A mask of one kind of layers: the tokens that a query may see.

    Args:
        mask: a window in tokens.
        chunk: the chunk size of chunked attention (Llama 4).
        blocks: of all tokens of a batch, the number of its block, ``[b, seq_len]``, negative
            outside of blocks. Tokens of a block see each other both ways (images of Gemma 3).
        max_block: tokens of the longest block for which this is the mask; None: any.
        refusal: why a layer cannot use this mask; models make those of kinds that they do not have.
    """

    mask: MaskSpec
    chunk: int | None = None
    blocks: Tensor | None = None
    max_block: int | None = None
    refusal: str = ""


# Slices that leave a tensor as it is (some models cut a mask to the length of a cache).
_WHOLE = (slice(None), slice(0, None))


class StandIn(ABC):
    """Stands where a model expects a tensor that no rank has. What is computed with it (an index,
    arithmetic, its shape) would be a shard's: it raises, but for what a subclass serves."""

    @staticmethod
    @abstractmethod
    def refusal(use: str) -> UnsupportedAttentionError:
        """The error for a model that uses it so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what hooks and FSDP2 ask of any argument and output
            raise AttributeError(name)
        raise self.refusal(f"its attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise cls.refusal(f"{getattr(func, '__name__', func)} of it")

    def _refuse_operator(self, *_: Any) -> Any:
        raise self.refusal("arithmetic or a comparison with it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse_operator
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __setitem__ = _refuse_operator
    __and__ = __or__ = __invert__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse_operator
    __len__ = __iter__ = __bool__ = _refuse_operator


class LayerMask(StandIn):
    """Stands where a layer expects the mask tensor that it hands to the attention function.

    Attributes:
        ndim, shape: as of a mask of no tokens: mask functions ask for them of a mask that is given.
    """

    ndim, shape = 4, (1, 1, 0, 0)

    def __init__(self, band: _Band) -> None:
        self._band = band
        self._spec: MaskSpec | None = None  # of a batch, where it takes long to make

    @staticmethod
    def refusal(use: str) -> UnsupportedAttentionError:
        return UnsupportedAttentionError(
            f"the model computes with its attention mask ({use}), and no rank holds a mask of the "
            "whole sequence: this model is not served; or it was disabled or paused before a "
            "backward pass that computes checkpointed layers again, which belongs before that"
        )

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if all(isinstance(i, slice) and i in _WHOLE for i in indices):
            return self
        raise self.refusal(f"mask[{index!r}]")


def is_layer_mask(x: Any) -> bool:
    """Whether masks were made by transformers' functions: one, or one for each kind of layers."""
    masks = x.values() if isinstance(x, dict) else (x,)
    return bool(masks) and all(isinstance(mask, LayerMask) for mask in masks)


def mask_of(mask: LayerMask, packing: Packing, seq_len: int, layer: str = "a layer") -> MaskSpec:
    """The mask of one attention call over ``seq_len`` tokens; the packing is :class:`Shard`'s."""
    band: _Band = mask._band
    if band.refusal:
        raise UnsupportedAttentionError(band.refusal)
    documents = packing.documents
    if packing.parents or band.blocks is not None:
        if mask._spec is None:  # once for all layers
            parents = packing.parents
            mask._spec = (
                _in_tree(band, packing, layer) if parents else _in_blocks(band, documents, seq_len)
            )
        return mask._spec
    if band.chunk is None:
        return replace(band.mask, documents=documents)
    # Chunks are counted from the start of each document: they are shorter documents.
    chunked = tuple(
        (*(i for a, b in pairwise(borders) for i in range(a, b, band.chunk)), borders[-1])
        for borders in documents or ((0, seq_len),)
    )
    return replace(band.mask, documents=chunked)


def _in_tree(band: _Band, packing: Packing, layer: str) -> MaskSpec:
    """The mask of a layer in a tree, with its window or chunks; UnsupportedAttentionError for a
    layer whose tokens see later ones."""
    tree = packing.causal_mask
    unserved = "attention to tokens that come later" if band.mask.right != 0 else ""
    if band.blocks is not None:
        unserved = "blocks of tokens that see each other both ways"
    if not has_only(band.mask, "left", "right"):
        unserved = f"the mask {band.mask}"
    if unserved:
        raise UnsupportedAttentionError(
            f"{layer} has {unserved}, and the batch is a tree of shared prefixes: served are "
            "causal layers. Give this model each answer with its prompt as a row of its own, "
            "without tree and share_prefixes"
        )
    reach = band.chunk if band.mask.left is None else band.mask.left + 1
    longest = max(
        context + end - start
        for sample, borders in enumerate(packing.documents)
        for context, (start, end) in zip(tree.contexts(sample), pairwise(borders), strict=True)
    )
    if reach is None or reach >= longest:  # it cuts nothing off: kernels without windows do
        return tree
    if band.chunk is None:
        return replace(tree, left=band.mask.left)
    samples = [_cut_tree(tree, sample, band.chunk) for sample in range(len(tree.documents))]
    documents, parents = zip(*samples, strict=True)
    return MaskSpec(None, 0, documents, parents=parents)


def _cut_tree(tree: MaskSpec, sample: int, chunk: int) -> tuple[Borders, Parents]:
    """Cut the rows of a sample's tree into chunks. Returns the borders of the pieces of segments,
    and the parent of each: the piece before it in its chunk, -1 where it begins one."""
    starts, parents, last_pieces = list[int](), list[int](), list[int]()
    borders, depths = tree.documents[sample], tree.contexts(sample)
    for (start, stop), depth, parent in zip(
        pairwise(borders), depths, tree.parents[sample], strict=True
    ):
        goes_on = parent >= 0 and depth % chunk
        further = range(start + chunk - depth % chunk, stop, chunk)
        starts += (start, *further)
        parents += (last_pieces[parent] if goes_on else -1, *(-1 for _ in further))
        last_pieces.append(len(starts) - 1)
    return (*starts, borders[-1]), tuple(parents)


@disable_in_compile("blocks are read from a tensor")
def _in_blocks(band: _Band, documents: tuple[Borders, ...], seq_len: int) -> MaskSpec:
    """The mask with the blocks of each row, cut where a document begins.

    Raises:
        UnsupportedAttentionError: numbers of a shard, or those of a block with others between.
    """
    numbers = cast(Tensor, band.blocks)
    if numbers.is_meta or bool(((numbers := numbers.cpu()) < 0).all()):  # or in a trial
        return replace(band.mask, documents=documents)
    if numbers.shape[1] != seq_len:
        raise UnsupportedAttentionError(
            f"the model makes masks by blocks of {numbers.shape[1]} tokens, and the batch has "
            f"{seq_len}: no rank knows the blocks of the whole batch. Not served"
        )
    rows = documents or ((0, seq_len),)
    rows = rows * len(numbers) if len(rows) == 1 else rows
    blocks = []
    for row, (block_numbers, borders) in enumerate(zip(numbers, rows, strict=True)):
        begins = (block_numbers.diff().nonzero().flatten() + 1).tolist()
        runs = list(pairwise(sorted({*borders, *begins})))
        # The document of each run, and the number of its block; below 0: in none.
        numbered = [(bisect_right(borders, start), int(block_numbers[start])) for start, _ in runs]
        run_blocks = [(document, block) for document, block in numbered if block >= 0]
        if len(set(run_blocks)) < len(run_blocks):
            raise UnsupportedAttentionError(
                f"a block of row {row} has other tokens between its own, which see each other "
                "both ways: served are blocks of consecutive tokens"
            )
        pairs = zip(runs, numbered, strict=True)
        blocks.append(tuple(run for run, (_, block) in pairs if block >= 0))
        longest = max((stop - start for start, stop in blocks[-1]), default=0)
        if band.max_block is not None and longest > band.max_block:
            raise UnsupportedAttentionError(
                f"a block of row {row} has {longest} tokens, which all see each other, beside a "
                f"sliding window of {band.max_block}: served are blocks that fit into the window"
            )
    return replace(band.mask, documents=rows, blocks=tuple(blocks))


@disable_in_compile("masks are read from functions, which torch.compile cannot trace")
def usp_mask(
    *,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    **_: Any,
) -> LayerMask | Tensor:
    """The mask interface of ``usp``: a stand-in, or a tensor for layers that need one. Padding is
    among the documents of the packing. UnsupportedAttentionError for an unknown mask function."""
    if isinstance(attention_mask, LayerMask):  # made around the text model, for all of its layers
        return attention_mask
    mask, shard = LayerMask(_band_of(mask_function)), PASS.get()
    if shard is None or shard.mask_of_keys is None:
        return mask
    return shard.mask_of_keys(shard, mask, batch_size, dtype, device)


def _band_of(function: Callable[..., Any]) -> _Band:
    """Return the mask that a function of transformers' ``masking_utils`` makes; refuses others."""
    if function is masking_utils.causal_mask_function:
        return _Band(MaskSpec.causal())
    if function is masking_utils.bidirectional_mask_function:
        return _Band(MaskSpec.full())
    for join, overlays in _OVERLAYS.items():
        parts = _closure(function)["mask_functions"] if _code(function) is join else []
        for first, second in zip(parts, parts[::-1], strict=True) if len(parts) == 2 else []:
            reader = overlays.get(_code(first))
            if reader is not None:
                return reader(_closure(first), _band_of(second))
    name = getattr(function, "__qualname__", repr(function))
    raise UnsupportedAttentionError(
        f"a layer asks for the mask function {name}, which is none of causal, bidirectional, "
        "sliding window, chunked or by blocks of consecutive tokens: others are not served"
    )


# Each reader is given what an overlay closes over, and the mask that transformers joins it with.
def _causal_window(closure: dict[str, Any], inner: _Band) -> _Band:
    _require(inner.mask.is_causal and inner.chunk is None, "a sliding window")
    size = closure["sliding_window"]
    if size < 1:
        return _Band(
            inner.mask,
            refusal=f"a sliding window of {size} tokens: a token would not even see itself; set "
            "the configuration's sliding_window to None or to 1 and more",
        )
    return replace(inner, mask=MaskSpec.window(size - 1))


def _two_sided_window(closure: dict[str, Any], inner: _Band) -> _Band:
    _require(inner.mask.is_full, "a bidirectional sliding window")
    return _Band(MaskSpec.window(closure["sliding_window"], closure["sliding_window"]))


def _chunk(closure: dict[str, Any], inner: _Band) -> _Band:
    served = inner.mask.is_causal and inner.chunk is None and inner.blocks is None
    _require(served, "chunked attention")
    return _Band(inner.mask, closure["chunk_size"])


def _block(closure: dict[str, Any], inner: _Band) -> _Band:
    served = inner.mask.right == 0 and inner.chunk is None and inner.blocks is None
    _require(served, "a mask by blocks")
    # Beside a window, and not inside of it, blocks would lift its left bound too.
    longest = None if inner.mask.left is None else inner.mask.left + 1
    return replace(inner, blocks=closure["block_sequence_ids"], max_block=longest)


def _require(condition: bool, mask_kind: str) -> None:
    if not condition:
        raise UnsupportedAttentionError(f"{mask_kind} combined with another mask is not served")


# Masks are read from the functions that transformers composes them of, and not from a tensor of
# tokens x tokens: by code objects and closures, as functions are made anew for each call.
def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {
        name: cell.cell_contents
        for name, cell in zip(names, function.__closure__ or (), strict=True)
    }


def _code(function: Callable[..., Any]) -> CodeType | None:
    return getattr(function, "__code__", None)


# Before 5.9 transformers has none for blocks: each model writes its own, which is refused.
_BLOCKWISE = getattr(masking_utils, "blockwise_overlay", None)
# One mask function of each kind is made here, for its code object.
_OVERLAYS = MappingProxyType(
    {
        masking_utils.and_masks(masking_utils.causal_mask_function).__code__: MappingProxyType(
            {
                masking_utils.sliding_window_overlay(1).__code__: _causal_window,
                masking_utils.sliding_window_bidirectional_overlay(1).__code__: _two_sided_window,
                masking_utils.chunked_overlay(1, None).__code__: _chunk,
            }
        ),
        masking_utils.or_masks(masking_utils.causal_mask_function).__code__: MappingProxyType(
            {_BLOCKWISE(None).__code__: _block} if _BLOCKWISE else {}
        ),
    }
)
