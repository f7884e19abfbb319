"""Collectives of a tensor-parallel group in pipelines with matrix products.

Between two linear layers each rank holds a shard of the tokens. Matrices here are rows of tokens:
rank r of t holds rows ``[r n/t, (r + 1) n/t)`` of ``[n, h]``.

Fused: torch's symmetric-memory operators. A product is computed in t pieces, each under the copy
that brings the next piece (all-gather) or takes the last one away (reduce-scatter); copies are made
by copy engines, which need no multiprocessor. Two collectives without a dependency on the product
beside them run whole on a stream of their own. Otherwise: the same results by collectives of
``torch.distributed`` before and after whole products; the two without a dependency are still
asynchronous.

Streams order everything: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for, would put the
copies behind the products and is not wanted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.channel import NO_RANGE, exchange_range, profiler_enabled
from ds_usp.comm.copy_engine import copy_engine_unavailable_reason
from ds_usp.comm.process_groups import all_gather_shards, node_ids, reduce_scatter_shards
from ds_usp.config import fused_tp_requested, single_hw_queue, without_multicast
from ds_usp.errors import MeshError, warn_once

_KIND = "tensor parallel"  # of the report of exposed communication
_OPERATORS = (
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
)
# Of all tokens. Up to so many torch takes NVLink multicast for the all-gather, and pieces of a
# product are too small to fill a GPU.
FUSED_ROWS_ABOVE = 2048

Pending = Callable[[], Tensor]  # waits in stream order


class TensorParallelComm:
    """The collectives of a group of tensor-parallel ranks; all methods are collective over it.

    Args:
        group: the ranks that share each weight matrix.
        plain_reason: why the fused operators are not used; empty: they are, for matrices of more
            than ``FUSED_ROWS_ABOVE`` rows on GPUs.
    """

    def __init__(self, group: dist.ProcessGroup, plain_reason: str) -> None:
        self.group, self.plain_reason = group, plain_reason
        self.size, self.rank = group.size(), group.rank()
        self._workspace_bytes = 0

    @classmethod
    def build(cls, group: dist.ProcessGroup, device: torch.device) -> TensorParallelComm:
        """With the fused operators where they exist, can reach all ranks of the group and compute
        what the plain collectives do; the same decision on every rank."""
        reason = fused_unavailable_reason(group, device)
        if not reason:
            reason = _trial(cls(group, ""), device)
        return cls(group, reason)

    def say_if_plain(self) -> None:
        """Log once why the fused operators are not used, if they were asked for."""
        if self.plain_reason and fused_tp_requested():
            warn_once(
                "tensor-parallel linear layers gather and scatter tokens by whole collectives, not "
                f"under their products: {self.plain_reason}",
                rank=dist.get_rank(),
            )

    # ------------------------------------------------------------- with a dependent product

    def gather_matmul(self, shard: Tensor, factor: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
        """All rows, and their product with ``factor``.

        Shapes:
            shard ``[n/t, h]``, factor ``[h, o]``; all rows ``[n, h]``, product ``[n, o]``.

        Args:
            keep: the rows are needed; otherwise the shard may come back in their place.
        """
        if not self._is_fused(shard, self.size * len(shard)):
            rows = self.start_gather(shard)()
            return rows, rows @ factor
        self._reserve(shard.numel() * shard.element_size())
        with self._range(shard.numel() * (self.size - 1), shard):
            rows, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
                shard, [factor], 0, self.group.group_name, return_A=keep
            )
        return (rows if keep else shard), product

    def matmul_scatter(self, rows: Tensor, factor: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of ``rows @ factor``.

        Shapes:
            rows ``[n, i]``, factor ``[i, h]``, result ``[n/t, h]``.
        """
        if not self._is_fused(rows, len(rows)):
            return self.start_scatter(rows @ factor)()
        piece = len(rows) // self.size * factor.shape[1]
        self._reserve(2 * piece * rows.element_size())
        with self._range(piece * (self.size - 1), rows):
            result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                rows, factor, "sum", 0, self.group.group_name
            )
        return result

    # ------------------------------------------------------------------ beside other products

    def start_gather(self, shard: Tensor) -> Pending:
        """Post the all-gather of ``[n/t, h]``; the result waits for ``[n, h]``."""
        shard = shard.contiguous()
        if self._is_fused(shard, self.size * len(shard)):
            self._reserve(shard.numel() * shard.element_size())
            with self._range(shard.numel() * (self.size - 1), shard):
                rows = torch.ops.symm_mem._low_contention_all_gather(shard, self.group.group_name)
            return lambda: _waited_fused(rows, shard)
        rows = shard.new_empty(self.size * len(shard), *shard.shape[1:])
        work = all_gather_shards(rows, shard, self.group, async_op=True)
        return lambda: _waited(work, rows)

    def start_scatter(self, rows: Tensor) -> Pending:
        """Post the reduce-scatter of ``[n, h]``; the result waits for ``[n/t, h]``, the sum."""
        rows = rows.contiguous()
        if self._is_fused(rows, len(rows)):
            self._reserve(rows.numel() * rows.element_size())
            with self._range(rows.numel() // self.size * (self.size - 1), rows):
                shard = torch.ops.symm_mem._low_contention_reduce_scatter(
                    rows, "sum", self.group.group_name
                )
            return lambda: _waited_fused(shard, rows)
        shard = rows.new_empty(len(rows) // self.size, *rows.shape[1:])
        work = reduce_scatter_shards(shard, rows, self.group, async_op=True)
        return lambda: _waited(work, shard, rows)

    # --------------------------------------------------------------------------------- parts

    def _is_fused(self, matrix: Tensor, rows: int) -> bool:
        return not self.plain_reason and matrix.is_cuda and rows > FUSED_ROWS_ABOVE

    def _reserve(self, needed_bytes: int) -> None:
        """Grow torch's symmetric workspace of the group before an operator does it: without
        multicast, and with no copy in flight that still uses the old one."""
        if needed_bytes <= self._workspace_bytes:
            return
        from torch.distributed import _symmetric_memory as symmetric_memory

        torch.cuda.synchronize()
        with without_multicast():
            symmetric_memory.get_symm_mem_workspace(self.group.group_name, min_size=needed_bytes)
        self._workspace_bytes = needed_bytes

    def _range(self, sent_elements: int, like: Tensor) -> AbstractContextManager[object]:
        if not profiler_enabled():
            return NO_RANGE
        return exchange_range(_KIND, sent_elements * like.element_size())


def fused_unavailable_reason(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the fused operators cannot be used in a group; "" if they can. Collective over it."""
    if device.type != "cuda":
        return "the ranks do not compute on GPUs"
    reason = copy_engine_unavailable_reason(group, node_ids(group))
    return reason or _first_reason(_reason_of_this_process(), group)


def _reason_of_this_process() -> str:
    if not fused_tp_requested():
        return (
            "they are not faster: 4 layers of hidden 4096 took 92.7 ms a step with them, 92.9 "
            "without (2 H200). USP_TP_FUSED=1 takes them"
        )
    if single_hw_queue():
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue, in which copies "
            "wait behind products: unset it"
        )
    missing = [name for name in _OPERATORS if not _has_operator(name)]
    return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}" if missing else ""


def _first_reason(reason: str, group: dist.ProcessGroup) -> str:
    """The first rank's reason that has one, on every rank."""
    reasons: list[str] = [""] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")


def _has_operator(name: str) -> bool:
    with contextlib.suppress(ImportError):
        import_module("torch.distributed._symmetric_memory")  # defines the operators
    return hasattr(torch.ops.symm_mem, name)


def _trial(comm: TensorParallelComm, device: torch.device) -> str:
    """Why the fused operators must not be used: they raise, or their results differ from those of
    the plain collectives. Collective; the same answer on every rank."""
    reason = ""
    try:
        _enable_symmetric_memory(comm.group)
        if not _equals_plain(comm, device):
            reason = "the fused operators computed something else than the plain ones here"
    except (RuntimeError, TypeError, AttributeError, MeshError) as error:
        first_line = next(iter(str(error).splitlines()), "")
        reason = f"the fused operators raise {type(error).__name__}: {first_line}"
    return _first_reason(reason, comm.group)


def _enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """What torch before 2.12 needs for a group; later it is deprecated, or done already."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


def _equals_plain(comm: TensorParallelComm, device: torch.device) -> bool:
    """Whether the four operators give what plain collectives give, on small whole numbers: sums of
    those are exact in bf16."""
    shard_rows = FUSED_ROWS_ABOVE // comm.size + 8
    plain = TensorParallelComm(comm.group, "trial")
    generator = torch.Generator(device).manual_seed(1234 + comm.rank)

    def numbers(rows: int, columns: int) -> Tensor:
        values = torch.randint(-1, 2, (rows, columns), generator=generator, device=device)
        return values.to(torch.bfloat16)

    shard, rows, factor = (
        numbers(shard_rows, 64),
        numbers(shard_rows * comm.size, 64),
        numbers(64, 32),
    )
    results = [
        (
            *c.gather_matmul(shard, factor, keep=True),
            c.matmul_scatter(rows, factor),
            c.start_gather(shard)(),
            c.start_scatter(rows)(),
        )
        for c in (comm, plain)
    ]
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _waited_fused(result: Tensor, *kept: Tensor) -> Tensor:
    """The result of a low-contention operator; ``kept``: what its stream reads until then, of which
    torch does not inform the allocator."""
    return cast(Tensor, torch.ops._c10d_functional.wait_tensor(result))


def _waited(work: dist.Work | None, result: Tensor, *kept: Tensor) -> Tensor:
    """The result of a posted collective; ``kept``: what it reads until then."""
    if work is not None:
        work.wait()
    return result
