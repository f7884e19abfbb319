"""Accumulators over kernel calls: outputs merged by their log-sum-exp, gradients summed, in fp32
(fp64 for fp64).

Partial results are kept as the kernel returned them until too many of them overlap in some row,
and merged in one pass that reads them and writes the result. Beyond that they are summed into an
accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch

from ds_usp.strided_copy import strided_copy
from ds_usp.triton_launch import load_triton_module

_NO_LSE = torch.empty(0, 0, 0)


class _Partial(NamedTuple):
    """Partial result for the rows ``start : stop`` of a shard: values ``[B, rows, H, D]`` and, of
    an output, the log-sum-exp ``[B, H, rows]``."""

    start: int
    stop: int
    value: torch.Tensor
    lse: torch.Tensor = _NO_LSE

    def slice_rows(self, start: int, stop: int) -> _Partial:
        """The rows ``start : stop`` of the shard, as far as it has them."""
        start, stop = max(self.start, start), min(self.stop, stop)
        if (start, stop) == (self.start, self.stop):
            return self
        rows = slice(start - self.start, stop - self.start)
        return _Partial(start, stop, self.value[:, rows], self.lse[:, :, rows])


class OutputAccumulator:
    """The attention output of a query shard, merged over key blocks (online softmax).

    Rows that no block covers have out 0 and lse -inf. A single partial result that covers the
    shard is returned as it is, so one kernel call costs no merge.

    Args:
        q: the query shard ``[B, S, H, .]``, for shape, dtype and device.
        dim: head dim of the output; the queries' if None.
    """

    def __init__(self, q: torch.Tensor, dim: int | None = None) -> None:
        self._q = q
        self._shape = (*q.shape[:3], dim or q.shape[3])
        self._partials: list[_Partial] = []
        self._accumulators: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, span: tuple[int, int]) -> None:
        """Add a kernel call's output and take ownership of it: it may be written. Rows that see
        none of the call's keys have lse ``-inf`` and add nothing.

        Args:
            span: the shard's rows (start, stop) that they are for.

        Shapes:
            out ``[B, rows, H, D]``, lse ``[B, H, rows]``.
        """
        self._partials.append(_Partial(*span, out, lse))
        if self._accumulators is not None or _max_overlap(self._partials) > _max_deferred(out):
            self._flush()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [B, S, H, D]`` in the queries' dtype and ``lse [B, H, S]``; must be called once.

        Where the first partial result covers the shard, the others are merged into it: rows that
        only it covers are not touched. Unless it is a view of larger storage, which would stay
        allocated.
        """
        if self._accumulators is not None:
            out, lse = self._accumulators
            return out.to(self._q.dtype), lse
        first = self._partials[0] if self._partials else None
        if first is not None and first.value.shape[1] == self._q.shape[1]:
            out, lse = first.value, first.lse
            if len(self._partials) == 1:
                return out.to(self._q.dtype), lse
            reusable = out.is_contiguous() and lse.is_contiguous()
            if (
                reusable
                and out.dtype == self._q.dtype
                and _owns_storage(out)
                and _owns_storage(lse)
            ):
                self._write_result(out, lse)
                return out, lse
        out, lse = self._q.new_empty(self._shape), self._new_lse()
        self._write_result(out, lse)
        return out, lse

    def _new_lse(self) -> torch.Tensor:
        batch, tokens, heads, _ = self._q.shape
        dtype = _acc_dtype(self._q)
        return self._q.new_full((batch, heads, tokens), float("-inf"), dtype=dtype)

    def _write_result(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the merged partial results; ``out`` may be the first one's values."""
        for start, stop, partials in _coverage_runs(self._partials, self._q.shape[1]):
            run_out, run_lse = out[:, start:stop], lse[:, :, start:stop]
            if not partials:
                run_out.zero_()
            elif len(partials) > 1:
                _merge_into(run_out, run_lse, [(p.value, p.lse) for p in partials])
            elif out is not self._partials[0].value:
                strided_copy(run_out, partials[0].value)
                run_lse.copy_(partials[0].lse)

    def _flush(self) -> None:
        """Merge the partial results into the accumulators."""
        if self._accumulators is None:
            out = self._q.new_zeros(self._shape, dtype=_acc_dtype(self._q))
            self._accumulators = out, self._new_lse()
        out, lse = self._accumulators
        for start, stop, value, partial_lse in self._partials:
            rows = out[:, start:stop], lse[:, :, start:stop]
            _merge_into(*rows, [rows, (value, partial_lse)])
        self._partials = []


class GradAccumulator:
    """The gradient of a shard, summed over the calls that touch it, in fp32 (fp64 for fp64).

    A single partial gradient that covers the shard is returned as it is, so one kernel call costs
    no sum; unless it is a view of larger storage, as of a staging buffer, which is reused.

    Args:
        like: the shard ``[B, tokens, heads, D]``, for shape, dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._partials: list[_Partial] = []
        self._accumulator: torch.Tensor | None = None

    def add(
        self,
        grad: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        *,
        sum_now: bool = False,
        defer: bool = False,
    ) -> None:
        """Add the partial gradients of these token spans, concatenated in ``grad``.

        Args:
            sum_now: the caller reuses the memory of ``grad``, so it is summed before the return.
            defer: the memory stays valid until the sum is read, so summing may wait.
        """
        offset = 0
        for start, stop in spans:
            self._partials.append(_Partial(start, stop, grad[:, offset : offset + stop - start]))
            offset += stop - start
        full = self._accumulator is not None or _max_overlap(self._partials) > _max_deferred(grad)
        if sum_now or (not defer and full):
            self._flush()

    def result(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum in a dtype, the shard's if None; zeros where nothing was added."""
        dtype = dtype or self._like.dtype
        only = self._only()
        if only is not None and _owns_storage(only):
            return only.to(dtype)
        if self._accumulator is not None and not self._partials:
            return self._accumulator.to(dtype)
        total = _dense_like(self._like, dtype)
        self.write(total)
        return total

    def as_tensor_if_single(self) -> torch.Tensor | None:
        """The sum in the shard's dtype if it is one tensor already; else None."""
        only = self._only()
        return only if only is not None and only.dtype == self._like.dtype else None

    def _only(self) -> torch.Tensor | None:
        """The one partial gradient, if there is no other and it covers the shard."""
        if self._accumulator is not None or len(self._partials) != 1:
            return None
        value = self._partials[0].value
        return value if value.shape == self._like.shape else None

    def write(self, out: torch.Tensor, first: int = 0) -> None:
        """Write the sum of the tokens from ``first`` on into ``out``, as many as it has."""
        last = first + out.shape[1]
        partials = [
            p.slice_rows(first, last) for p in self._all() if p.start < last and first < p.stop
        ]
        for start, stop, covering in _coverage_runs(partials, last, first):
            full = start == first and stop == last
            run_out = out if full else out[:, start - first : stop - first]
            _sum_into(run_out, [p.value for p in covering])

    def transfer_to(self, start: int, target: GradAccumulator) -> None:
        """Add the tokens from ``start`` on to another accumulator, as its first tokens."""
        for partial in self._all():
            if partial.stop > start:
                rest = partial.slice_rows(start, partial.stop)
                target.add(rest.value, [(rest.start - start, rest.stop - start)], defer=True)

    def _all(self) -> list[_Partial]:
        if self._accumulator is None:
            return self._partials
        return [_Partial(0, self._like.shape[1], self._accumulator), *self._partials]

    def _flush(self) -> None:
        """Sum the partial gradients into the accumulator."""
        if self._accumulator is None:
            total = _dense_like(self._like, _acc_dtype(self._like))
            self.write(total)
            self._accumulator = total
        else:
            for start, stop, value, _ in self._partials:
                self._accumulator[:, start:stop] += value
        self._partials = []


def _acc_dtype(x: torch.Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def _owns_storage(x: torch.Tensor) -> bool:
    """The tensor is all of its storage."""
    return bool(x.untyped_storage().nbytes() == x.numel() * x.element_size())


def _dense_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fused_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, if they can read these tensors: on a GPU, the last dim contiguous."""
    if not tensors[0].is_cuda or any(x.stride(-1) != 1 for x in tensors):
        return None
    return _fused()


def _coverage_runs(
    partials: Sequence[_Partial], last: int, first: int = 0
) -> Iterator[tuple[int, int, list[_Partial]]]:
    """Runs of rows ``first : last`` that the same partial results cover, with their slices."""
    if all(p.start == first and p.stop == last for p in partials):
        yield first, last, list(partials)
        return
    edges = sorted({first, last, *(edge for p in partials for edge in p[:2])})
    for start, stop in pairwise(edges):
        covering = [p for p in partials if p.start <= start and stop <= p.stop]
        yield start, stop, [p.slice_rows(start, stop) for p in covering]


def _max_deferred(partial: torch.Tensor) -> int:
    """Partial results of a row that are kept: about the memory of the accumulator and one more."""
    return 4 if partial.element_size() == 2 else 2


def _max_overlap(partials: Sequence[_Partial]) -> int:
    """The largest number of partial results that cover one row."""
    return max((sum(a.start <= b.start < a.stop for a in partials) for b in partials), default=0)


def _sum_into(out: torch.Tensor, partials: Sequence[torch.Tensor]) -> None:
    """Write a sum of tensors of one shape in one pass, added in fp32 and rounded once; the first
    may be ``out``."""
    if not partials:
        out.zero_()
    elif len(partials) == 1:
        if not out.is_set_to(partials[0]):  # else a kernel has written it there
            strided_copy(out, partials[0])
    elif (triton := _fused_for(out, *partials)) is not None:
        triton.sum_fused(out, partials)
    else:
        dtype = _acc_dtype(out)
        total = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
        total.copy_(partials[0])
        for partial in partials[1:]:
            total += partial
        if total is not out:
            out.copy_(total)


def _merge_into(
    out: torch.Tensor, lse: torch.Tensor, partials: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Write the attention over several sets of keys from the output and lse over each; the first
    may be ``out`` and ``lse``."""
    triton = _fused_for(out, lse, *(x for partial in partials for x in partial))
    if len(partials) == 2:
        merge = merge_rows if triton is None else triton.merge_fused
        merge(out, lse, *partials[0], *partials[1])
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
    """Write the attention over two sets of keys from that over each, with torch's operations.

    The output moves from the old one towards the new one by the weight
    ``sigmoid(new_lse - old_lse)``, which is ``exp(new_lse - log(exp(old_lse) + exp(new_lse)))``
    without overflow (online softmax, arXiv 1805.02867). ``out`` and ``lse`` may be ``old`` and
    ``old_lse``.

    Shapes:
        out, old, new ``[B, S, H, D]``, lse, old_lse, new_lse ``[B, H, S]``.
    """
    dtype = lse.dtype
    difference = (new_lse - old_lse).masked_fill_(new_lse == float("-inf"), float("-inf"))  # no NaN
    weight = torch.sigmoid(difference).transpose(1, 2).unsqueeze(-1)
    out.copy_(torch.lerp(old.to(dtype), new.to(dtype), weight))
    lse.copy_(torch.logaddexp(old_lse, new_lse))


def slow_path_notice(device: torch.device) -> str | None:
    """The warning that merging takes more passes than it could here; None if it does not."""
    if device.type != "cuda" or _fused() is not None:
        return None
    return "Triton is not installed: blocks of attention are summed by torch, in more passes"


def _fused() -> ModuleType | None:
    """The Triton kernels; None where Triton is not installed."""
    return load_triton_module("ds_usp.kernels.merge_triton")
