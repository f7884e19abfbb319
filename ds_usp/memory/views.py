"""A tensor as a view of another one with the same memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StorageView(NamedTuple):
    """Where a tensor lies in the storage that it shares with another."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> StorageView:
        """The place of a tensor."""
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place in the storage of another tensor, without a gradient."""
        return tensor.detach().as_strided(self.size, self.stride, self.offset)
