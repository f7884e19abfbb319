"""Copies between tensors whose features are dense."""

from __future__ import annotations

from functools import lru_cache

import torch


def strided_copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """Copy between strided views, on GPUs 16 bytes at a time where the last dim allows it: twice
    as fast as the elements of 2 bytes."""
    if x.is_cuda and out.dtype == x.dtype and not x.is_neg():
        size = x.element_size()
        together = _rows_are_16_byte_aligned(size, x.shape[-1], out.stride(), x.stride())
        starts = int(out.storage_offset() * size) | int(x.storage_offset() * size)
        if together and not (starts | out.data_ptr() | x.data_ptr()) % 16:
            out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


@lru_cache(maxsize=4096)
def _rows_are_16_byte_aligned(size: int, length: int, *strides: tuple[int, ...]) -> bool:
    """Whether all rows of a last dim so long, dense, of elements of so many bytes, may start and
    end at multiples of 16 bytes."""
    apart = [length, *(stride for each in strides for stride in each[:-1])]
    return all(each[-1] == 1 for each in strides) and not any(n * size % 16 for n in apart)
