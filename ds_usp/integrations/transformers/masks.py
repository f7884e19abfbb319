"""What a layer asked of transformers' mask functions, as a mask of positions; no tensor is made.

transformers builds masks by composing functions of (batch, head, query, key). The known ones are
recognized by their code objects and read from their closures; any other is refused. Documents and
padding are not read from these functions, which see this rank's shard only, but from the whole
batch (:mod:`ds_usp.integrations.transformers.batch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType, MappingProxyType
from typing import Any

from transformers import masking_utils

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.geometry.masks import Borders, MaskSpec
from ds_usp.memory.compile_guard import disable_in_compile


@dataclass(frozen=True, slots=True)
class _Band:
    """What a layer may see.

    Args:
        mask: a window in tokens.
        chunk: the chunk size of chunked attention (Llama 4).
        refusal: why a layer cannot use this mask. Models make the masks of all kinds of layers,
            also of those that they do not have.
    """

    mask: MaskSpec
    chunk: int | None = None
    refusal: str = ""


# Slices that leave a tensor as it is (some models cut a mask to the length of a cache).
_WHOLE = (slice(None), slice(0, None))


class LayerMask:
    """Stands where a layer expects the mask tensor that it hands to the attention function.

    Whatever else a model does with a mask tensor (index it, add to it, look at its shape) is
    computed on this rank's shard and would be wrong: it raises.
    """

    __slots__ = ("_band",)

    def __init__(self, band: _Band) -> None:
        object.__setattr__(self, "_band", band)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # FSDP2 asks whether it is a dataclass
            raise AttributeError(name)
        raise _model_reads_mask(f"its attribute {name!r}")

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if all(isinstance(i, slice) and i in _WHOLE for i in indices):
            return self
        raise _model_reads_mask(f"mask[{index!r}]")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _model_reads_mask(f"{getattr(func, '__name__', func)} of it")

    def _refuse_operator(self, *_: Any) -> Any:
        raise _model_reads_mask("arithmetic or a comparison with it")

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _refuse_operator
    __sub__ = __rsub__ = __lt__ = __gt__ = __len__ = __iter__ = __bool__ = _refuse_operator


def _model_reads_mask(what: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(
        f"the model computes with its attention mask ({what}), and no rank holds a mask of the "
        "whole sequence: this model is not served"
    )


def mask_of(mask: LayerMask, documents: tuple[Borders, ...], seq_len: int) -> MaskSpec:
    """The mask of one attention call over a sequence of ``seq_len`` tokens.

    Args:
        documents: cumulative borders, one tuple for all samples or one each; () without any.
    """
    band: _Band = mask._band
    if band.refusal:
        raise UnsupportedAttentionError(band.refusal)
    if band.chunk is None:
        return replace(band.mask, documents=documents)
    # Chunks are counted from the start of each document: they are shorter documents.
    chunked = tuple(_cut_documents(borders, band.chunk) for borders in documents or ((0, seq_len),))
    return replace(band.mask, documents=chunked)


def _cut_documents(borders: Borders, chunk: int) -> Borders:
    """Borders after cutting each document into chunks of so many tokens."""
    starts = [start for a, b in pairwise(borders) for start in range(a, b, chunk)]
    return (*starts, borders[-1])


def causal_mask() -> LayerMask:
    """The mask of a decoder layer that was given none."""
    return LayerMask(_Band(MaskSpec.causal()))


def full_mask() -> LayerMask:
    """The mask of an encoder layer that was given none."""
    return LayerMask(_Band(MaskSpec.full()))


def window_mask(left: int, right: int = 0) -> LayerMask:
    """So many tokens to either side, and the token itself."""
    return LayerMask(_Band(MaskSpec.window(left, right)))


@disable_in_compile("masks are read from functions, which torch.compile cannot trace")
def usp_mask(
    *, mask_function: Callable[..., Any] = masking_utils.causal_mask_function, **_: Any
) -> LayerMask:
    """The mask interface of the attention implementation ``usp``.

    Raises:
        UnsupportedAttentionError: a mask function that is not known.
    """
    return LayerMask(_read(mask_function))


def _read(function: Callable[..., Any]) -> _Band:
    """The band of one mask function; recursive."""
    if function is masking_utils.causal_mask_function:
        return _Band(MaskSpec.causal())
    if function is masking_utils.bidirectional_mask_function:
        return _Band(MaskSpec.full())
    if _code(function) is _AND:
        parts = _closure(function)["mask_functions"]
        if len(parts) == 2:
            for first, second in (parts, parts[::-1]):
                reader = _OVERLAYS.get(_code(first))
                if reader is not None:
                    return reader(_closure(first), _read(second))
    name = getattr(function, "__qualname__", repr(function))
    raise UnsupportedAttentionError(
        f"a layer asks for the mask function {name}, which is none of causal, bidirectional, "
        "sliding window or chunked: masks by blocks, images or prefixes are not served"
    )


def _causal_window(closure: dict[str, Any], inner: _Band) -> _Band:
    _require(inner.mask.is_causal and inner.chunk is None, "a sliding window")
    size = closure["sliding_window"]
    if size < 1:
        return _Band(
            inner.mask,
            refusal=f"a sliding window of {size} tokens: a token would not even see itself; set "
            "the configuration's sliding_window to None or to 1 and more",
        )
    return _Band(MaskSpec.window(size - 1))


def _two_sided_window(closure: dict[str, Any], inner: _Band) -> _Band:
    _require(inner.mask.is_full, "a bidirectional sliding window")
    return _Band(MaskSpec.window(closure["sliding_window"], closure["sliding_window"]))


def _chunk(closure: dict[str, Any], inner: _Band) -> _Band:
    _require(inner.mask.is_causal and inner.chunk is None, "chunked attention")
    return _Band(inner.mask, closure["chunk_size"])


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnsupportedAttentionError(f"{what} combined with another mask is not served")


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {
        name: cell.cell_contents
        for name, cell in zip(names, function.__closure__ or (), strict=True)
    }


def _code(function: Callable[..., Any]) -> CodeType | None:
    return getattr(function, "__code__", None)


# One mask function of each kind is made here, for its code object.
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_OVERLAYS = MappingProxyType(
    {
        masking_utils.sliding_window_overlay(1).__code__: _causal_window,
        masking_utils.sliding_window_bidirectional_overlay(1).__code__: _two_sided_window,
        masking_utils.chunked_overlay(1, None).__code__: _chunk,
    }
)
