"""Head dims that a kernel computes exactly, by library and GPU generation: one table. A kernel's
class takes a row of it as ``caps.head_dims``, by which ``registry.py`` refuses or pads calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Dims = tuple[int, int]  # head dims of queries and keys, and of values

# Zeros after the features of a head cost as much as features: half as many at most.
_MAX_PADDED = 1.5


@dataclass(frozen=True)
class HeadDims:
    """Head dims of one kernel.

    Args:
        limit: the largest; None: any.
        multiple: all must be multiples of this.
        native: those of a kernel that computes only some of them; others are padded with zeros to
            the next one. None: all.
        pairs: (keys, values) that differ and are computed without padding.
        any_pair: values may have any other head dim than keys; else both are padded with zeros to
            one, or to one of ``pairs``.
        bf16_above: larger ones in bf16 only; None: all in every dtype of the kernel.
        note: where more are served, for refusals.
    """

    limit: int | None = None
    multiple: int = 1
    native: tuple[int, ...] | None = None
    pairs: frozenset[Dims] = frozenset()
    any_pair: bool = False
    bf16_above: int | None = None
    note: str = ""

    def refusal(self, dims: Dims, *, bf16: bool) -> str | None:
        """Why a call of these head dims cannot be served, with padding or without; None if it can.
        ``bf16``: its dtype, else another one of the kernel's."""
        for dim in dims if self.any_pair else [max(dims)]:
            if self.limit is not None and dim > self.limit:
                return f"takes head dims up to {self.limit}, not {dim}{self.note}"
            if dim % self.multiple:
                return f"takes head dims that are multiples of {self.multiple}, not {dim}"
        padded, above = self.padded(dims), self.bf16_above
        if above is not None and max(padded) > above and not bf16:
            return f"takes head dims above {above} in bfloat16 only"
        if sum(padded) > _MAX_PADDED * 2 * max(dims):
            native_dims = ", ".join(map(str, self.native or ()))
            return f"takes head dims {native_dims}, and would pad {max(dims)} to {max(padded)}"
        return None

    def padded(self, dims: Dims) -> Dims:
        """The smallest head dims that the kernel computes and that hold these, which
        :meth:`refusal` has accepted."""
        if self.any_pair or dims in self.pairs:
            return dims
        largest = max(dims)
        native = min([dim for dim in self.native or (largest,) if dim >= largest])
        holding = [pair for pair in self.pairs if pair[0] >= dims[0] and pair[1] >= dims[1]]
        return min([(native, native), *holding], key=sum)


# flash4.py and cudnn.py have these versions too: they choose the row.
_NOTE_FLASH4 = " (up to 256 on compute capability 9.x with flash-attn-4 4.0.0b36 or newer)"
_NOTE_CUDNN = " (up to 256 on compute capability 9.x with cuDNN 9.19 or newer)"
_MLA = frozenset({(192, 128)})

# By kernel and, where that matters, the GPU's major compute capability; of GPUs and versions that
# are not named the row None. Each row was compared with fp64, output and gradients, on GPUs of
# that generation (9: H100, H200).
# flash4 accepts other head dims and returns wrong gradients (4.0.0b36, H200, 40, 72, 80, 104): its
# backward pass rounds them to multiples of 16 in one kernel and of 32 in another.
# cuDNN 9.11 and 9.12 have wrong support checks for large head dims on Hopper (release notes of
# cudnn-frontend 1.14.1); 9.19 was measured.
HEAD_DIMS: Mapping[tuple[str, int | None], HeadDims] = MappingProxyType(
    {
        ("flash4", 9): HeadDims(256, 8, (32, 64, 96, 128, 160, 192, 256), _MLA, bf16_above=128),
        ("flash4", None): HeadDims(128, 8, (32, 64, 96, 128), note=_NOTE_FLASH4),
        ("cudnn", 9): HeadDims(256, 8, (*range(8, 129, 8), 160, 192, 256), _MLA, bf16_above=128),
        ("cudnn", None): HeadDims(128, 8, note=_NOTE_CUDNN),
        ("flash3", None): HeadDims(256, 8),
        ("flash2", None): HeadDims(256, 8),
        ("efficient", None): HeadDims(multiple=8, any_pair=True),
        ("sdpa", None): HeadDims(),
        ("eager", None): HeadDims(any_pair=True),
    }
)
