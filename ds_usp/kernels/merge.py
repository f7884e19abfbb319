"""Sums over blocks: attention outputs by their log-sum-exp, gradients plainly. In fp32 or fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from ds_usp.geometry.tiles import Tile


class OutputSum:
    """The running attention output of a query shard over the key blocks seen so far.

    Rows that no block has touched hold out 0 and lse -inf. A single part that covers the shard
    is taken over as it is, so one kernel call costs no merge.

    Args:
        q: the query shard ``[B, S, H, D]``, for shape, dtype and device.
    """

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, part: torch.Tensor, part_lse: torch.Tensor, tiles: Sequence[Tile]) -> None:
        """Merge a call's rows in place.

        ``out`` moves from its value towards ``part`` by the weight
        ``sigmoid(part_lse - lse)``, which is ``exp(part_lse - log(exp(lse) + exp(part_lse)))``
        without overflow (online softmax, arXiv 1805.02867).

        Shapes:
            part ``[B, rows, H, D]``, part_lse ``[B, H, rows]``, rows of the tiles in order.
        """
        if self._sums is None and part.shape[1] == self._q.shape[1]:
            self._sums = part, part_lse
            return
        out, lse = self._accumulators()
        start = 0
        for tile in tiles:
            rows, stop = slice(tile.q_start, tile.q_stop), start + tile.rows
            merge = _fused_merge() if out.is_cuda else _merge_rows
            merge(out[:, rows], lse[:, :, rows], part[:, start:stop], part_lse[:, :, start:stop])
            start = stop

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [B, S, H, D]`` in the queries' dtype and ``lse [B, H, S]``."""
        out, lse = self._sums or self._accumulators()
        return out.to(self._q.dtype), lse

    def _accumulators(self) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(self._q.dtype, torch.float32)
        if self._sums is None:
            batch, tokens, heads, _ = self._q.shape
            lse = self._q.new_full((batch, heads, tokens), float("-inf"), dtype=dtype)
            self._sums = torch.zeros_like(self._q, dtype=dtype), lse
        out, lse = self._sums
        self._sums = out.to(dtype), lse
        return self._sums


Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _merge_rows(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge ``[B, S, H, D]`` and ``[B, H, S]`` in place, operation by operation."""
    weight = torch.sigmoid(part_lse - lse).transpose(1, 2).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, part_lse))


@lru_cache(maxsize=1)
def _fused_merge() -> Merge:
    """The Triton kernel, or the plain merge where Triton is not installed."""
    try:
        from ds_usp.kernels.merge_triton import merge_rows
    except ImportError:
        return _merge_rows
    return merge_rows


class GradientSum:
    """The running gradient of a shard over the calls that touch it, in fp32 (fp64 for fp64).

    A single part that covers the shard is taken over as it is, so one kernel call costs no sum.

    Args:
        like: the shard ``[B, tokens, heads, D]``, for shape, dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._total: torch.Tensor | None = None

    def add(
        self, part: torch.Tensor, spans: Sequence[tuple[int, int]], *, borrowed: bool = False
    ) -> None:
        """Add the parts of these token spans, which stand in ``part`` one after the other.

        Args:
            borrowed: the memory of ``part`` will be used again, so it cannot be taken over.
        """
        whole = self._total is None and part.shape[1] == self._like.shape[1]
        if whole and not borrowed:
            self._total = part
            return
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=wide)
        self._total = self._total.to(wide)
        start = 0
        for begin, end in spans:
            self._total[:, begin:end] += part[:, start : start + end - begin]
            start += end - begin

    def result(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum in a dtype, the shard's if none is given; zeros where nothing was added."""
        total = torch.zeros_like(self._like) if self._total is None else self._total
        return total.to(dtype or self._like.dtype)
