"""Sums over blocks: attention outputs by their log-sum-exp, gradients plainly. In fp32 or fp64.

Parts are kept as the kernel returned them until too many of them cover some row, and summed in one
pass that reads them and writes the result. More are summed into an accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch

from ds_usp.strided_copy import dense_copy
from ds_usp.triton_launch import fused

_NO_LSE = torch.empty(0, 0, 0)


class _Part(NamedTuple):
    """Rows ``start : stop`` of a shard: values ``[B, rows, H, D]`` and, of an output, the
    log-sum-exp ``[B, H, rows]``."""

    start: int
    stop: int
    value: torch.Tensor
    lse: torch.Tensor = _NO_LSE

    def cut(self, start: int, stop: int) -> _Part:
        """The rows ``start : stop`` of them, counted in the shard."""
        if (start, stop) == (self.start, self.stop):
            return self
        rows = slice(start - self.start, stop - self.start)
        return _Part(start, stop, self.value[:, rows], self.lse[:, :, rows])


class OutputSum:
    """The running attention output of a query shard over the key blocks seen so far.

    Rows that no block has touched hold out 0 and lse -inf. A single part that covers the shard
    is taken over as it is, so one kernel call costs no merge.

    Args:
        q: the query shard ``[B, S, H, .]``, for shape, dtype and device.
        dim: head dim of the output; the queries' if None.
    """

    def __init__(self, q: torch.Tensor, dim: int | None = None) -> None:
        self._q = q
        self._shape = (*q.shape[:3], dim or q.shape[3])
        self._parts: list[_Part] = []
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, part: torch.Tensor, part_lse: torch.Tensor, span: tuple[int, int]) -> None:
        """Take a call's rows, and over: they may be written. Those that see none of its keys have
        lse ``-inf`` and add nothing.

        Shapes:
            part ``[B, rows, H, D]``, part_lse ``[B, H, rows]``, the rows of the span.
        """
        self._parts.append(_Part(*span, part, part_lse))
        if self._sums is not None or _deepest(self._parts) > _most_kept(part):
            self._fold()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [B, S, H, D]`` in the queries' dtype and ``lse [B, H, S]``; to be asked for once.

        Where the first part covers the shard, the others are merged into it: rows that it alone
        has are not touched. Unless it lies in more memory than it fills, which would be kept.
        """
        if self._sums is not None:
            out, lse = self._sums
            return out.to(self._q.dtype), lse
        first = self._parts[0] if self._parts else None
        if first is not None and first.value.shape[1] == self._q.shape[1]:
            if len(self._parts) == 1:
                return first.value.to(self._q.dtype), first.lse
            if first.value.dtype == self._q.dtype and _fills(first.value) and _fills(first.lse):
                self._settle(first.value, first.lse)
                return first.value, first.lse
        out, lse = self._q.new_empty(self._shape), self._new_lse()
        self._settle(out, lse)
        return out, lse

    def _new_lse(self) -> torch.Tensor:
        batch, tokens, heads, _ = self._q.shape
        wide = torch.promote_types(self._q.dtype, torch.float32)
        return self._q.new_full((batch, heads, tokens), float("-inf"), dtype=wide)

    def _settle(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the sum of the parts; ``out`` may be the first one's values."""
        for start, stop, parts in _covered(self._parts, self._q.shape[1]):
            place, place_lse = out[:, start:stop], lse[:, :, start:stop]
            if not parts:
                place.zero_()
            elif len(parts) > 1:
                _merge(place, place_lse, [(part.value, part.lse) for part in parts])
            elif out is not self._parts[0].value:
                dense_copy(place, parts[0].value)
                place_lse.copy_(parts[0].lse)

    def _fold(self) -> None:
        """Sum the parts into the accumulators."""
        if self._sums is None:
            wide = torch.promote_types(self._q.dtype, torch.float32)
            self._sums = self._q.new_zeros(self._shape, dtype=wide), self._new_lse()
        out, lse = self._sums
        for start, stop, value, part_lse in self._parts:
            rows = out[:, start:stop], lse[:, :, start:stop]
            _merge(*rows, [rows, (value, part_lse)])
        self._parts = []


class GradientSum:
    """The running gradient of a shard over the calls that touch it, in fp32 (fp64 for fp64).

    A single part that covers the shard is taken over as it is, so one kernel call costs no sum;
    unless it lies in memory of others, as in a copy engine's room, which is filled again.

    Args:
        like: the shard ``[B, tokens, heads, D]``, for shape, dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._parts: list[_Part] = []
        self._total: torch.Tensor | None = None

    def add(
        self,
        part: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        *,
        borrowed: bool = False,
        held: bool = False,
    ) -> None:
        """Add the parts of these token spans, which stand in ``part`` one after the other.

        Args:
            borrowed: the memory of ``part`` will be used again, so it is summed at once.
            held: the memory is there until the sum is read, so it may as well wait.
        """
        start = 0
        for begin, end in spans:
            self._parts.append(_Part(begin, end, part[:, start : start + end - begin]))
            start += end - begin
        full = self._total is not None or _deepest(self._parts) > _most_kept(part)
        if borrowed or (not held and full):
            self._fold()

    def result(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum in a dtype, the shard's if none is given; zeros where nothing was added."""
        dtype = dtype or self._like.dtype
        if self._total is None and len(self._parts) == 1:
            (only,) = self._parts
            if only.value.shape == self._like.shape and _alone(only.value):
                return only.value.to(dtype)
        if self._total is not None and not self._parts:
            return self._total.to(dtype)
        total = _dense_like(self._like, dtype)
        self.write(total)
        return total

    def whole(self) -> torch.Tensor | None:
        """The sum in the shard's dtype, where it is a tensor already."""
        if self._total is None and len(self._parts) == 1:
            only = self._parts[0].value
            if only.shape == self._like.shape and only.dtype == self._like.dtype:
                return only
        return None

    def write(self, place: torch.Tensor, first: int = 0) -> None:
        """Write the sum of the tokens from ``first`` on into a tensor that has room for some."""
        last = first + place.shape[1]
        parts = self._all()
        if any(part.start < first or last < part.stop for part in parts):
            parts = [
                part.cut(max(part.start, first), min(part.stop, last))
                for part in parts
                if part.start < last and first < part.stop
            ]
        for start, stop, inside in _covered(parts, last, first):
            if start == first and stop == last:
                _sum(place, [part.value for part in inside])
                return
            _sum(place[:, start - first : stop - first], [part.value for part in inside])

    def hand_over(self, start: int, other: GradientSum) -> None:
        """Add what there is from token ``start`` on to another sum, as its first tokens."""
        for part in self._all():
            if part.stop > start:
                rest = part.cut(max(part.start, start), part.stop)
                other.add(rest.value, [(rest.start - start, rest.stop - start)], held=True)

    def _all(self) -> list[_Part]:
        whole = [] if self._total is None else [_Part(0, self._like.shape[1], self._total)]
        return [*whole, *self._parts]

    def _fold(self) -> None:
        """Sum the parts into the accumulator."""
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._total is None:
            total = _dense_like(self._like, wide)
            self.write(total)
            self._total = total
        else:
            for start, stop, value, _ in self._parts:
                self._total[:, start:stop] += value
        self._parts = []


def _fills(x: torch.Tensor) -> bool:
    """Dense, and all that its memory holds."""
    return x.is_contiguous() and _alone(x)


def _alone(x: torch.Tensor) -> bool:
    """All that its memory holds."""
    return bool(x.untyped_storage().nbytes() == x.numel() * x.element_size())


def _dense_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fused_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, if they can read these tensors: on a GPU, the last dim dense."""
    if not tensors[0].is_cuda or any(x.stride(-1) != 1 for x in tensors):
        return None
    return _fused()


def _covered(
    parts: Sequence[_Part], last: int, first: int = 0
) -> Iterator[tuple[int, int, list[_Part]]]:
    """Runs of rows between which the set of parts that cover them changes, with the parts."""
    if all(part.start == first and part.stop == last for part in parts):
        yield first, last, list(parts)
        return
    edges = sorted({first, last, *(edge for part in parts for edge in part[:2])})
    for start, stop in pairwise(edges):
        inside = [part for part in parts if part.start <= start and stop <= part.stop]
        yield start, stop, [part.cut(start, stop) for part in inside]


def _most_kept(part: torch.Tensor) -> int:
    """Parts of a row that are kept: in about the memory of the accumulator and another part."""
    return 4 if part.element_size() == 2 else 2


def _deepest(parts: Sequence[_Part]) -> int:
    """Most parts that cover one row."""
    return max((sum(a.start <= b.start < a.stop for a in parts) for b in parts), default=0)


def _sum(place: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write a sum of tensors of one shape in one pass, added in fp32 and rounded once; the first
    may be where it goes."""
    if not parts:
        place.zero_()
    elif len(parts) == 1:
        if not place.is_set_to(parts[0]):  # else a kernel has written it there
            dense_copy(place, parts[0])
    elif (triton := _fused_for(place, *parts)) is not None:
        triton.sum_fused(place, parts)
    else:
        wide = torch.promote_types(place.dtype, torch.float32)
        total = place if place.dtype == wide else torch.empty_like(place, dtype=wide)
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
        if total is not place:
            place.copy_(total)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Write the attention over several sets of keys from that over each; the first may be where the
    result goes."""
    triton = _fused_for(out, lse, *(x for part in parts for x in part))
    if len(parts) == 2:
        (merge_rows if triton is None else triton.merge_fused)(out, lse, *parts[0], *parts[1])
    elif triton is not None:
        triton.merge_few_fused(out, lse, parts)
    else:
        total = torch.empty_like(out, dtype=lse.dtype)
        merge_rows(total, lse, *parts[0], *parts[1])
        for part in parts[2:]:
            merge_rows(total, lse, total, lse, *part)
        out.copy_(total)


def merge_rows(
    out: torch.Tensor,
    lse: torch.Tensor,
    old: torch.Tensor,
    old_lse: torch.Tensor,
    new: torch.Tensor,
    new_lse: torch.Tensor,
) -> None:
    """Write the attention over two sets of keys from that over each, operation by operation.

    The output moves from the old one towards the new one by the weight
    ``sigmoid(new_lse - old_lse)``, which is ``exp(new_lse - log(exp(old_lse) + exp(new_lse)))``
    without overflow (online softmax, arXiv 1805.02867). ``out`` and ``lse`` may be ``old`` and
    ``old_lse``.

    Shapes:
        out, old, new ``[B, S, H, D]``, lse, old_lse, new_lse ``[B, H, S]``.
    """
    wide = lse.dtype
    apart = (new_lse - old_lse).masked_fill_(new_lse == float("-inf"), float("-inf"))  # not NaN
    weight = torch.sigmoid(apart).transpose(1, 2).unsqueeze(-1)
    out.copy_(torch.lerp(old.to(wide), new.to(wide), weight))
    lse.copy_(torch.logaddexp(old_lse, new_lse))


def fallback(device: torch.device) -> str | None:
    """What to tell the user if sums take more passes here than they could; None if not."""
    if device.type != "cuda" or _fused() is not None:
        return None
    return "Triton is not installed: blocks of attention are summed by torch, in more passes"


def _fused() -> ModuleType | None:
    """The Triton kernels; None where Triton is not installed."""
    return fused("ds_usp.kernels.merge_triton")
