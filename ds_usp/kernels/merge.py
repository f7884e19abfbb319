"""Accumulators over kernel calls: outputs merged by their log-sum-exp, gradients summed, in fp32
(fp64 for fp64).

``attention/passes.py`` makes them, for one head chunk and pass on one rank, on the current stream.
Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import ModuleType

import torch

from ds_usp.geometry.segments import Span, coverage_runs, max_overlap
from ds_usp.lowlevel import load_triton_module, strided_copy

# Partial results of a row that are kept, of 2-byte elements and of larger ones: about the memory
# of the accumulator and one more.
_MAX_DEFERRED_2_BYTES, _MAX_DEFERRED = 4, 2
# A sum of so few elements takes longer to launch than to compute. torch's add_ takes the host less
# than half the time of a Triton kernel (8.9 and 21 us beside an H200), dense tensors or not.
_FEW_ELEMENTS = 2**22


# Softmax over keys that arrive in blocks. Each block's call returns its normalized output and the
# logarithm of its sum of exponentials (lse). Over both blocks
#
#     lse = log(exp(lse1) + exp(lse2)),   out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2
#
# is exact, in any order and any grouping. In fp32, and rounded once: a rounding to bf16 after each
# of a ring's blocks would add up beyond the error of the kernel itself. Partial results are kept as
# the kernel returned them until too many overlap in some row, since a merge of four reads each
# once, and three merges of two read the running result twice more. A single one that covers the
# shard is the result, so one kernel call costs no merge.
class OutputAccumulator:
    """The attention output of a query shard, merged over key blocks. Rows that no block covers have
    out 0 and lse -inf.

    Args:
        q: the query shard ``[B, S, H, .]``, for shape, dtype and device.
        dim: head dim of the output; the queries' if None.
    """

    def __init__(self, q: torch.Tensor, dim: int | None = None) -> None:
        self._q = q
        self._shape = (*q.shape[:3], dim or q.shape[3])
        # The rows that each partial result (out, lse) is for, and the result.
        self._spans: list[Span] = []
        self._partials: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._accumulators: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, span: Span) -> None:
        """Add a kernel call's output ``[B, rows, H, D]`` and lse ``[B, H, rows]``, of the shard's
        rows ``span`` (start, stop), and take ownership: they may be written. Rows that see none of
        the call's keys have lse ``-inf`` and add nothing."""
        self._spans.append(span)
        self._partials.append((out, lse))
        limit = _MAX_DEFERRED_2_BYTES if out.element_size() == 2 else _MAX_DEFERRED
        many = len(self._spans) > limit and max_overlap(tuple(self._spans)) > limit
        if many or self._accumulators is not None:
            self._flush()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out [B, S, H, D]`` in the queries' dtype, for the caller to write to, and
        ``lse [B, H, S]``; must be called once."""
        if self._accumulators is not None:
            out, lse = self._accumulators
            return out.to(self._q.dtype), lse
        # Where the first partial result covers the shard, the others are merged into it: rows that
        # only it covers are not touched. Unless it is a view of larger storage, as of a staging
        # buffer, which would stay allocated.
        if self._partials and self._partials[0][0].shape[1] == self._q.shape[1]:
            out, lse = self._partials[0]
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
        batch, tokens, heads, _ = self._shape
        out = self._q.new_empty(self._shape)
        lse = self._q.new_empty((batch, heads, tokens), dtype=_acc_dtype(self._q))
        self._write_result(out, lse)
        return out, lse

    def _write_result(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write what :meth:`result` returns, of partial results that are not merged yet. ``out``
        and ``lse`` may be the first of them, which covers all rows then."""
        in_place = out is self._partials[0][0] if self._partials else False
        for rows, spans in coverage_runs(tuple(self._spans), 0, self._q.shape[1]):
            if in_place and len(spans) == 1:  # it has these rows
                continue
            run_out, run_lse = (out, lse) if rows is None else (out[:, rows], lse[:, :, rows])
            partials = []
            for index, inside in spans:
                value, sums = self._partials[index]
                if in_place and index == 0:
                    value, sums = run_out, run_lse
                elif inside is not None:
                    value, sums = value[:, inside], sums[:, :, inside]
                partials.append((value, sums))
            if not partials:
                run_out.zero_()
                run_lse.fill_(float("-inf"))
            elif len(partials) > 1:
                _merge_into(run_out, run_lse, partials)
            else:
                strided_copy(run_out, partials[0][0])
                run_lse.copy_(partials[0][1])

    def _flush(self) -> None:
        """Merge the partial results into the accumulators, which the first flush makes."""
        if self._accumulators is None:
            batch, tokens, heads, _ = self._shape
            dtype = _acc_dtype(self._q)
            out = self._q.new_zeros(self._shape, dtype=dtype)
            lse = self._q.new_full((batch, heads, tokens), float("-inf"), dtype=dtype)
            self._accumulators = out, lse
        out, lse = self._accumulators
        for (start, stop), partial in zip(self._spans, self._partials, strict=True):
            rows = out[:, start:stop], lse[:, :, start:stop]
            _merge_into(*rows, [rows, partial])
        self._spans, self._partials = [], []


# Backward needs no such weights: given the final out and lse, a block's probabilities are
# exp(score - lse), whatever the other blocks are. So gradients of blocks just add, in fp32. Packing
# takes it as a DeferredSum (comm/packing.py), with as_tensor_if_single, result and write.
class GradAccumulator:
    """The gradient of a shard ``[B, tokens, heads, D]``, summed over the calls that touch it.

    Args:
        like: the shard, for shape, dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        # The tokens that each partial gradient is for, and the gradient. Once there is a sum, the
        # first is that one.
        self._spans: list[Span] = []
        self._partials: list[torch.Tensor] = []
        self._first_is_sum = False

    def add(
        self,
        grad: torch.Tensor,
        spans: Sequence[Span],
        *,
        sum_now: bool = False,
        defer: bool = False,
    ) -> None:
        """Add the partial gradients of these token spans (start, stop), which lie one after the
        other in dim 1 of ``grad``; the sum may be written into it.

        Args:
            sum_now: the caller reuses the memory of ``grad``, so it is summed before the return.
            defer: the memory stays valid until the sum is read, so summing may wait.
        """
        if len(spans) == 1:
            self._partials.append(grad)
        else:
            self._partials += grad.split([stop - start for start, stop in spans], 1)
        self._spans += spans
        limit = _MAX_DEFERRED_2_BYTES if grad.element_size() == 2 else _MAX_DEFERRED
        many = len(self._spans) > limit and max_overlap(tuple(self._spans)) > limit
        if sum_now or (not defer and (many or self._first_is_sum)):
            self._flush()

    def result(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum in a dtype, the shard's if None; zeros where nothing was added. Called once: a
        partial gradient's memory may hold it."""
        dtype = dtype or self._dtype
        if self._is_single() and (self._first_is_sum or _owns_storage(self._partials[0])):
            return self._partials[0].to(dtype)
        if self._first_can_be_sum(dtype):
            total = self._partials[0]
        else:
            total = torch.empty(self._shape, dtype=dtype, device=self._device)
        self.write(total)
        return total

    def _first_can_be_sum(self, dtype: torch.dtype) -> bool:
        """The first partial gradient has memory of its own for the whole shard, in this dtype."""
        if not self._partials or self._partials[0].shape != self._shape:
            return False
        first = self._partials[0]
        return first.dtype == dtype and first.stride(-1) == 1 and _owns_storage(first)

    def as_tensor_if_single(self) -> torch.Tensor | None:
        """The one partial gradient that was added, if it covers the shard and has its dtype; else
        None. It may be a view."""
        if self._first_is_sum or not self._is_single():
            return None
        return self._partials[0] if self._partials[0].dtype == self._dtype else None

    def _is_single(self) -> bool:
        """There is one tensor, and it covers the shard."""
        return len(self._partials) == 1 and self._partials[0].shape == self._shape

    def write(self, out: torch.Tensor, first: int = 0) -> None:
        """Write the sum of the tokens from ``first`` on into ``out`` ``[B, tokens, heads, D]``, as
        many as that has, rounded to its dtype. It may be the first partial gradient, or a view of
        the same memory, as of a send buffer into which a kernel wrote it: it is not copied then."""
        # Such a view is another tensor: _sum_into finds by ``is_set_to`` that it is there already.
        in_place = out is self._partials[0] if self._partials else False
        for rows, spans in coverage_runs(tuple(self._spans), first, first + out.shape[1]):
            if in_place and len(spans) == 1:  # it has these tokens
                continue
            run_out = out if rows is None else out[:, rows]
            partials = []
            for index, inside in spans:
                partial = run_out if in_place and index == 0 else self._partials[index]
                whole = inside is None or partial is run_out
                partials.append(partial if whole else partial[:, inside])
            _sum_into(run_out, partials)

    def transfer_to(self, start: int, target: GradAccumulator) -> None:
        """Add the gradients of the tokens from ``start`` on to another accumulator, as those of its
        first tokens. The target may sum into their memory: the caller reads this one no more."""
        for (first, last), partial in zip(self._spans, self._partials, strict=True):
            if last > start:
                rest = partial if first >= start else partial[:, start - first :]
                target.add(rest, [(max(first, start) - start, last - start)], defer=True)

    def _flush(self) -> None:
        """Replace the partial gradients by their sum, in fp32 (fp64 for fp64)."""
        if self._first_is_sum:
            total, *partials = self._partials
            for (start, stop), partial in zip(self._spans[1:], partials, strict=True):
                total[:, start:stop] += partial
        else:
            dtype = torch.promote_types(self._dtype, torch.float32)
            total = torch.empty(self._shape, dtype=dtype, device=self._device)
            self.write(total)
        self._spans, self._partials = [(0, self._shape[1])], [total]
        self._first_is_sum = True


def _acc_dtype(x: torch.Tensor) -> torch.dtype:  # fp32, fp64 for fp64
    return torch.promote_types(x.dtype, torch.float32)


def _owns_storage(x: torch.Tensor) -> bool:
    # No view of a larger buffer, as of a staging buffer that is used again.
    return bool(x.untyped_storage().nbytes() == x.numel() * x.element_size())


def _torch_adds(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether torch is to add ``x`` to ``out``: in one dtype, it adds in fp32 and rounds once, as
    the Triton kernel does. The bits are the same."""
    dense = x.is_contiguous() or x.numel() <= _FEW_ELEMENTS
    return dense and out.dtype == x.dtype and out.is_contiguous()


def _fused_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, if they can read these tensors of a GPU: the last dim contiguous."""
    for x in tensors:
        if x.stride(-1) != 1:
            return None
    return _fused()


def _sum_into(out: torch.Tensor, partials: Sequence[torch.Tensor]) -> None:
    """Write a sum of tensors of one shape in one pass, added in fp32 and rounded once; no tensors:
    zeros. The first may be ``out``, or a view of the same memory."""
    if not partials:
        out.zero_()
    elif len(partials) == 1:
        if not out.is_set_to(partials[0]):  # else a kernel has written it there
            strided_copy(out, partials[0])
    elif len(partials) == 2 and partials[0] is out and _torch_adds(out, partials[1]):
        out.add_(partials[1])
    elif out.is_cuda and (triton := _fused_for(out, *partials)) is not None:
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
    """Write the attention over two to four sets of keys from the output and lse over each; the
    first may be ``out`` and ``lse``."""
    triton = _fused_for(out, lse, *chain.from_iterable(partials)) if out.is_cuda else None
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
    """Write the attention over two sets of keys from that over each, with torch's operations:
    out, old, new ``[B, S, H, D]``, lse, old_lse, new_lse ``[B, H, S]``. ``out`` and ``lse`` may be
    ``old`` and ``old_lse``.

    Source: online softmax, arXiv 1805.02867.
    """
    # The output moves from the old one towards the new one by sigmoid(new_lse - old_lse), which is
    # exp(new_lse - log(exp(old_lse) + exp(new_lse))) without overflow.
    dtype = lse.dtype
    # -inf - -inf is NaN: a row that neither block shows anything keeps weight 0 and lse -inf.
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
    """None where Triton is not installed."""
    return load_triton_module("ds_usp.kernels.merge_triton")
