"""Copy between strided tensors, 16 bytes at a time where alignment allows it."""

from __future__ import annotations

from functools import lru_cache

import torch


def strided_copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """``out.copy_(x)``, on GPUs as 16-byte elements where the last dim allows it: twice as fast as
    2-byte elements."""
    if x.is_cuda and out.dtype == x.dtype and not x.is_neg():
        size = x.element_size()
        aligned = _rows_are_16_byte_aligned(size, x.shape[-1], out.stride(), x.stride())
        starts = int(out.storage_offset() * size) | int(x.storage_offset() * size)
        if aligned and not (starts | out.data_ptr() | x.data_ptr()) % 16:
            out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


@lru_cache(maxsize=4096)
def _rows_are_16_byte_aligned(size: int, length: int, *strides: tuple[int, ...]) -> bool:
    """Whether all rows of a dense last dim of this length start and end at multiples of 16 bytes.

    Args:
        size, length, strides: bytes of an element, elements of a row, strides of each tensor.
    """
    distances = [length, *(stride for row in strides for stride in row[:-1])]
    dense = all(row[-1] == 1 for row in strides)
    return dense and not any(n * size % 16 for n in distances)
