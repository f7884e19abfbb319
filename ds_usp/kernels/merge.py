"""Sums over blocks: attention outputs by their log-sum-exp, gradients plainly. In fp32 or fp64."""

from __future__ import annotations

from collections.abc import Sequence

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
            old_lse, new_lse = lse[:, :, rows], part_lse[:, :, start:stop]
            weight = torch.sigmoid(new_lse - old_lse).transpose(1, 2).unsqueeze(-1)
            out[:, rows].lerp_(part[:, start:stop].to(out.dtype), weight)
            old_lse.copy_(torch.logaddexp(old_lse, new_lse))
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


class GradientSum:
    """The running gradient of a shard over the calls that touch it, in fp32 (fp64 for fp64).

    A single part that covers the shard is taken over as it is, so one kernel call costs no sum.

    Args:
        like: the shard ``[B, tokens, heads, D]``, for shape, dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Add the parts of these token spans, which stand in ``part`` one after the other."""
        if self._total is None and part.shape[1] == self._like.shape[1]:
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

    def result(self) -> torch.Tensor:
        """The sum in the shard's dtype; zeros where nothing was added."""
        total = torch.zeros_like(self._like) if self._total is None else self._total
        return total.to(self._like.dtype)
