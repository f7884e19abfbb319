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


class _Partial(NamedTuple):
    """Rows ``start : stop`` of a shard: values ``[B, rows, H, D]`` and, of an output, the
    log-sum-exp ``[B, H, rows]``."""

    start: int
    stop: int
    value: torch.Tensor
    lse: torch.Tensor = _NO_LSE

    def slice_rows(self, start: int, stop: int) -> _Partial:
        """The rows ``start : stop`` of them, counted in the shard."""
        if (start, stop) == (self.start, self.stop):
            return self
        rows = slice(start - self.start, stop - self.start)
        return _Partial(start, stop, self.value[:, rows], self.lse[:, :, rows])


class OutputAccumulator:
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
        self._partials: list[_Partial] = []
        self._accumulators: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, partial: torch.Tensor, partial_lse: torch.Tensor, span: tuple[int, int]) -> None:
        """Take a call's rows, and over: they may be written. Those that see none of its keys have
        lse ``-inf`` and add nothing.

        Shapes:
            part ``[B, rows, H, D]``, part_lse ``[B, H, rows]``, the rows of the span.
        """
        self._partials.append(_Partial(*span, partial, partial_lse))
        if self._accumulators is not None or _max_overlap(self._partials) > _max_deferred(partial):
            self._flush()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [B, S, H, D]`` in the queries' dtype and ``lse [B, H, S]``; to be asked for once.

        Where the first part covers the shard, the others are merged into it: rows that it alone
        has are not touched. Unless it lies in more memory than it fills, which would be kept.
        """
        if self._accumulators is not None:
            out, lse = self._accumulators
            return out.to(self._q.dtype), lse
        first = self._partials[0] if self._partials else None
        if first is not None and first.value.shape[1] == self._q.shape[1]:
            if len(self._partials) == 1:
                return first.value.to(self._q.dtype), first.lse
            if (
                first.value.dtype == self._q.dtype
                and _owns_dense_storage(first.value)
                and _owns_dense_storage(first.lse)
            ):
                self._write_result(first.value, first.lse)
                return first.value, first.lse
        out, lse = self._q.new_empty(self._shape), self._new_lse()
        self._write_result(out, lse)
        return out, lse

    def _new_lse(self) -> torch.Tensor:
        batch, tokens, heads, _ = self._q.shape
        acc_dtype = torch.promote_types(self._q.dtype, torch.float32)
        return self._q.new_full((batch, heads, tokens), float("-inf"), dtype=acc_dtype)

    def _write_result(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the sum of the parts; ``out`` may be the first one's values."""
        for start, stop, partials in _coverage_runs(self._partials, self._q.shape[1]):
            run_out, run_lse = out[:, start:stop], lse[:, :, start:stop]
            if not partials:
                run_out.zero_()
            elif len(partials) > 1:
                _merge_into(
                    run_out, run_lse, [(partial.value, partial.lse) for partial in partials]
                )
            elif out is not self._partials[0].value:
                dense_copy(run_out, partials[0].value)
                run_lse.copy_(partials[0].lse)

    def _flush(self) -> None:
        """Sum the parts into the accumulators."""
        if self._accumulators is None:
            acc_dtype = torch.promote_types(self._q.dtype, torch.float32)
            self._accumulators = self._q.new_zeros(self._shape, dtype=acc_dtype), self._new_lse()
        out, lse = self._accumulators
        for start, stop, value, partial_lse in self._partials:
            rows = out[:, start:stop], lse[:, :, start:stop]
            _merge_into(*rows, [rows, (value, partial_lse)])
        self._partials = []


class GradAccumulator:
    """The running gradient of a shard over the calls that touch it, in fp32 (fp64 for fp64).

    A single part that covers the shard is taken over as it is, so one kernel call costs no sum;
    unless it lies in memory of others, as in a copy engine's room, which is filled again.

    Args:
        like: the shard ``[B, tokens, heads, D]``, for shape, dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._partials: list[_Partial] = []
        self._accumulator: torch.Tensor | None = None

    def add(
        self,
        partial: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        *,
        sum_now: bool = False,
        defer: bool = False,
    ) -> None:
        """Add the parts of these token spans, which stand in ``part`` one after the other.

        Args:
            borrowed: the memory of ``part`` will be used again, so it is summed at once.
            held: the memory is there until the sum is read, so it may as well wait.
        """
        start = 0
        for begin, end in spans:
            self._partials.append(_Partial(begin, end, partial[:, start : start + end - begin]))
            start += end - begin
        over_limit = self._accumulator is not None or _max_overlap(self._partials) > _max_deferred(
            partial
        )
        if sum_now or (not defer and over_limit):
            self._flush()

    def result(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum in a dtype, the shard's if none is given; zeros where nothing was added."""
        dtype = dtype or self._like.dtype
        if self._accumulator is None and len(self._partials) == 1:
            (only,) = self._partials
            if only.value.shape == self._like.shape and _owns_storage(only.value):
                return only.value.to(dtype)
        if self._accumulator is not None and not self._partials:
            return self._accumulator.to(dtype)
        total = _dense_like(self._like, dtype)
        self.write(total)
        return total

    def whole(self) -> torch.Tensor | None:
        """The sum in the shard's dtype, where it is a tensor already."""
        if self._accumulator is None and len(self._partials) == 1:
            only = self._partials[0].value
            if only.shape == self._like.shape and only.dtype == self._like.dtype:
                return only
        return None

    def write(self, out: torch.Tensor, first: int = 0) -> None:
        """Write the sum of the tokens from ``first`` on into a tensor that has room for some."""
        last = first + out.shape[1]
        partials = self._all()
        if any(partial.start < first or last < partial.stop for partial in partials):
            partials = [
                partial.slice_rows(max(partial.start, first), min(partial.stop, last))
                for partial in partials
                if partial.start < last and first < partial.stop
            ]
        for start, stop, covering in _coverage_runs(partials, last, first):
            if start == first and stop == last:
                _sum_into(out, [partial.value for partial in covering])
                return
            _sum_into(out[:, start - first : stop - first], [partial.value for partial in covering])

    def transfer_to(self, start: int, target: GradAccumulator) -> None:
        """Add what there is from token ``start`` on to another sum, as its first tokens."""
        for partial in self._all():
            if partial.stop > start:
                rest = partial.slice_rows(max(partial.start, start), partial.stop)
                target.add(rest.value, [(rest.start - start, rest.stop - start)], defer=True)

    def _all(self) -> list[_Partial]:
        whole = (
            []
            if self._accumulator is None
            else [_Partial(0, self._like.shape[1], self._accumulator)]
        )
        return [*whole, *self._partials]

    def _flush(self) -> None:
        """Sum the parts into the accumulator."""
        acc_dtype = torch.promote_types(self._like.dtype, torch.float32)
        if self._accumulator is None:
            total = _dense_like(self._like, acc_dtype)
            self.write(total)
            self._accumulator = total
        else:
            for start, stop, value, _ in self._partials:
                self._accumulator[:, start:stop] += value
        self._partials = []


def _owns_dense_storage(x: torch.Tensor) -> bool:
    """Dense, and all that its memory holds."""
    return x.is_contiguous() and _owns_storage(x)


def _owns_storage(x: torch.Tensor) -> bool:
    """All that its memory holds."""
    return bool(x.untyped_storage().nbytes() == x.numel() * x.element_size())


def _dense_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fused_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, if they can read these tensors: on a GPU, the last dim dense."""
    if not tensors[0].is_cuda or any(x.stride(-1) != 1 for x in tensors):
        return None
    return _fused()


def _coverage_runs(
    partials: Sequence[_Partial], last: int, first: int = 0
) -> Iterator[tuple[int, int, list[_Partial]]]:
    """Runs of rows between which the set of parts that cover them changes, with the parts."""
    if all(partial.start == first and partial.stop == last for partial in partials):
        yield first, last, list(partials)
        return
    edges = sorted({first, last, *(edge for partial in partials for edge in partial[:2])})
    for start, stop in pairwise(edges):
        covering = [
            partial for partial in partials if partial.start <= start and stop <= partial.stop
        ]
        yield start, stop, [partial.slice_rows(start, stop) for partial in covering]


def _max_deferred(partial: torch.Tensor) -> int:
    """Parts of a row that are kept: in about the memory of the accumulator and another part."""
    return 4 if partial.element_size() == 2 else 2


def _max_overlap(partials: Sequence[_Partial]) -> int:
    """Most parts that cover one row."""
    return max((sum(a.start <= b.start < a.stop for a in partials) for b in partials), default=0)


def _sum_into(out: torch.Tensor, partials: Sequence[torch.Tensor]) -> None:
    """Write a sum of tensors of one shape in one pass, added in fp32 and rounded once; the first
    may be where it goes."""
    if not partials:
        out.zero_()
    elif len(partials) == 1:
        if not out.is_set_to(partials[0]):  # else a kernel has written it there
            dense_copy(out, partials[0])
    elif (triton := _fused_for(out, *partials)) is not None:
        triton.sum_fused(out, partials)
    else:
        acc_dtype = torch.promote_types(out.dtype, torch.float32)
        total = out if out.dtype == acc_dtype else torch.empty_like(out, dtype=acc_dtype)
        total.copy_(partials[0])
        for partial in partials[1:]:
            total += partial
        if total is not out:
            out.copy_(total)


def _merge_into(
    out: torch.Tensor, lse: torch.Tensor, partials: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Write the attention over several sets of keys from that over each; the first may be where the
    result goes."""
    triton = _fused_for(out, lse, *(x for partial in partials for x in partial))
    if len(partials) == 2:
        (merge_rows if triton is None else triton.merge_fused)(out, lse, *partials[0], *partials[1])
    elif triton is not None:
        triton.merge_up_to_4_fused(out, lse, partials)
    else:
        total = torch.empty_like(out, dtype=lse.dtype)
        merge_rows(total, lse, *partials[0], *partials[1])
        for partial in partials[2:]:
            merge_rows(total, lse, total, lse, *partial)
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
    acc_dtype = lse.dtype
    lse_difference = (new_lse - old_lse).masked_fill_(
        new_lse == float("-inf"), float("-inf")
    )  # not NaN
    weight = torch.sigmoid(lse_difference).transpose(1, 2).unsqueeze(-1)
    out.copy_(torch.lerp(old.to(acc_dtype), new.to(acc_dtype), weight))
    lse.copy_(torch.logaddexp(old_lse, new_lse))


def slow_path_notice(device: torch.device) -> str | None:
    """What to tell the user if sums take more passes here than they could; None if not."""
    if device.type != "cuda" or _fused() is not None:
        return None
    return "Triton is not installed: blocks of attention are summed by torch, in more passes"


def _fused() -> ModuleType | None:
    """The Triton kernels; None where Triton is not installed."""
    return fused("ds_usp.kernels.merge_triton")
