"""Point-to-point exchanges among the ranks of a group: post, compute, wait; and what they count.
``attention/kv_exchange.py`` and ``uniform_all_to_all.py`` use them in each forward and backward
pass; what makes views of buffers communicates nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled as profiler_enabled
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d

from ds_usp.errors import MeshError


class CommLedger:
    """Calls and bytes that this rank has sent to other ranks, by kind of exchange.

    Kinds: ``all_to_all``, ``ring_kv``, ``ring_dkv``; of layers that carry a state, ``states`` and
    the tokens before a convolution, ``halo``; the keys of sparse layers, ``kv_gather``. What a
    rank keeps is not counted.

    Attributes:
        between_nodes: the part of the bytes that went to ranks on other nodes.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.between_nodes: Counter[str] = Counter()

    def add(self, kind: str, sent_bytes: int, between_nodes: int = 0) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += sent_bytes
        self.between_nodes[kind] += between_nodes

    def reset(self) -> None:
        for counter in (self.calls, self.bytes, self.between_nodes):
            counter.clear()

    def __str__(self) -> str:
        rows = (f"{kind} {self.calls[kind]} calls {self.bytes[kind]} B" for kind in self.calls)
        return ", ".join(rows) or "nothing sent"


# Ranges of exchanges in a profiler's trace: what a GPU's copies and NCCL kernels belong to.
#
# A range is named ``ds_usp.comm/KIND/BYTES``: the ledger's kind and the bytes sent to other ranks.
# There are ranges only while a profiler records: callers ask :data:`profiler_enabled` first.


PREFIX = "ds_usp.comm/"
NO_RANGE = contextlib.nullcontext()


def exchange_range(kind: str, sent_bytes: int) -> contextlib.AbstractContextManager[object]:
    """The range of one exchange, which `ds-usp report-communication` counts as sent bytes."""
    return record_function(f"{PREFIX}{kind}/{sent_bytes}")


HeadShapes = tuple[tuple[int, int], ...]  # heads and head dim of each tensor
_MAX_VIEWS = 64  # of a buffer


class SendSlice(NamedTuple):
    """Rows ``start:stop`` of the staging buffer, which go to a rank of the group."""

    rank: int
    start: int
    stop: int


class StridedView(NamedTuple):
    """A view of a tensor, counted in elements from its first one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


class RecvSpec(NamedTuple):
    """A tensor that is filled from the staging buffer of a rank of the group.

    Attributes:
        offset: of its first element in that rank's buffer, in elements; P2P's messages need none.
        row_stride: elements from row to row there, for copy engines; 0 if ``out`` is dense there.
        view: the part of ``out`` that is filled instead of all of it. Copy engines need its address
            only, which costs less CPU time than a tensor.
    """

    rank: int
    out: torch.Tensor
    offset: int
    row_stride: int = 0
    view: StridedView | None = None


class StagingBuffer:
    """Dense memory ``[rows, ...]`` to pack sends into. Its views are cached: a copy engine's buffer
    is used again and again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._views: dict[tuple[HeadShapes, bool], tuple[torch.Tensor, ...]] = {}

    def views(self, shapes: HeadShapes, *, tokens_first: bool = False) -> tuple[torch.Tensor, ...]:
        """Views ``[..., h, D]`` of the tensors in a buffer ``[..., features]``, as by
        :func:`split_features`; with ``tokens_first`` ``[B, rows, h, D]``, of all its rows."""
        key = shapes, tokens_first
        views = self._views.get(key)
        if views is None:
            if torch.is_inference_mode_enabled():  # they outlive the call
                with torch.inference_mode(False):
                    return self.views(shapes, tokens_first=tokens_first)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            tensor = self.tensor.flatten(0, -3) if tokens_first else self.tensor
            self._views[key] = views = split_features(tensor, shapes, tokens_first=tokens_first)
        return views


def split_features(
    x: torch.Tensor, shapes: HeadShapes, *, tokens_first: bool = False
) -> tuple[torch.Tensor, ...]:
    """Views ``[..., h, D]`` of the tensors that lie one after the other in ``[..., features]``.

    Args:
        x: dense in its last dim, which has at least the sum of all ``h * D``; neither is checked.
            Callers count it themselves (``buffer_sizes``, ``kv_exchange._head_shapes``).
        shapes: ``h`` and ``D`` of each, in the order of the tensors. That no gap lies between them
            is also in the offsets of ``plan_to_heads``, ``recvs_to_sequence`` and packing_triton.
        tokens_first: ``x`` is ``[tokens, B, ...]``; the views are ``[B, tokens, ...]``.
    """
    first, views = x.storage_offset(), []
    for size, stride, offset in _feature_views(x.shape, x.stride(), shapes, tokens_first):
        views.append(x.as_strided(size, stride, first + offset))
    return tuple(views)


@lru_cache(maxsize=4096)  # CPU time between kernels: a call's tensors have the shapes of the last's
def _feature_views(
    shape: tuple[int, ...], stride: tuple[int, ...], shapes: HeadShapes, tokens_first: bool
) -> tuple[StridedView, ...]:
    """Return the views of :func:`split_features`, whose ``x`` has this shape and stride."""
    sizes, strides, offset = shape[:-1], stride[:-1], 0
    if tokens_first:
        sizes, strides = (sizes[1], sizes[0], *sizes[2:]), (strides[1], strides[0], *strides[2:])
    views = []
    for heads, dim in shapes:
        views.append(StridedView((*sizes, heads, dim), (*strides, dim, 1), offset))
        offset += heads * dim
    return tuple(views)


class Channel(Protocol):
    """Exchanges of tensors between the ranks of a group, one in flight.

    All ranks of the group call ``acquire_staging`` and ``post`` in the same order. ``post`` starts
    an exchange of what was packed into the buffer of the last ``acquire_staging``; one buffer may
    be posted several times without packing again, as a ring posts one KV block for each of its
    exchanges. ``packed`` is that buffer's tensor: P2P sends from it, copy engines read its strides
    alone, for the readers pull from the slot. Until ``wait`` nothing that is sent may be written,
    and nothing that is received read.
    """

    in_flight: bool

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer: ...

    def post(
        self,
        packed: torch.Tensor,
        sends: Sequence[SendSlice],
        recvs: Sequence[RecvSpec],
        *,
        overlapped: bool = True,
    ) -> None: ...

    def wait(self) -> None: ...

    def drain(self) -> None:
        """Wait for what is in flight, if any: after an error, or the next call would receive it."""
        if self.in_flight:
            self.wait()


# Why each kind of traffic has a communicator of its own.
#
# NCCL runs the operations of one communicator one after the other, in the order in which they were
# posted. With one for all, the gradients of a KV block would queue behind the KV block that is
# wanted next, although they go the other way over the links:
#
#     one communicator     kv 1 | kv 2 | dkv 1 | kv 3 | dkv 2 ...     dkv 1 waits for kv 2
#     two                  kv 1 | kv 2 | kv 3 ...
#                               dkv 1 | dkv 2 ...
#
# Over one communicator each head chunk has a channel of its own, with one exchange in flight: a
# schedule that posts a second one on a channel before it has waited for the first is wrong on all
# ranks, and is refused here instead of mixing their messages.
class P2PChannel(Channel):
    """Exchanges by send and recv of NCCL or gloo, one in flight.

    Args:
        group: a communicator that nothing else uses; None for a ring of one, which never sends.
        ledger: counts calls and bytes.
        kind: the exchanges' name in the ledger.
        other_nodes: ranks of the group that are not on this rank's node.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ledger: CommLedger,
        kind: str,
        other_nodes: frozenset[int] = frozenset(),
    ) -> None:
        self._group, self._other_nodes = group, other_nodes
        self._rank = -1 if group is None else group.rank()
        self._ledger, self._kind = ledger, kind
        self._works: list[dist.Work] = []
        self._sending: list[tuple[int, torch.Tensor]] = []
        self.in_flight = False

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        """A new buffer of this shape to pack sends into, which nobody else writes."""
        return StagingBuffer(like.new_empty(*shape, dtype=dtype))

    def post(
        self,
        packed: torch.Tensor,
        sends: Sequence[SendSlice],
        recvs: Sequence[RecvSpec],
        *,
        overlapped: bool = True,
    ) -> None:
        """Start an exchange (:class:`Channel`); either side may be empty.

        Args:
            packed: the tensor of the staging buffer, dense.
            sends: what each rank receives of it.
            recvs: dense tensors. Two ranks name the slices between them in the same order, as
                messages have no tags. Those from this rank itself are copied.
            overlapped: work follows before :meth:`wait`. If none does, copy engines pull in the
                current stream, which costs no events.

        Raises:
            MeshError: the exchange before is still in flight, or this is a ring of one.
        """
        if self.in_flight or self._group is None:
            why = "before the last one was waited for" if self.in_flight else "in a ring of one"
            raise MeshError(f"a {self._kind} exchange was posted {why}")
        slices, outs, sent_bytes, between_nodes = [], [], 0, 0
        for peer, start, stop in sends:
            x = packed[start:stop]
            slices.append((peer, x))
            size = x.numel() * x.element_size()
            sent_bytes += size
            between_nodes += size if peer in self._other_nodes else 0
        for recv in recvs:
            source, out, offset, _, view = recv
            out = out if view is None else view.of(out)
            # A copy, not a message to itself.
            if source == self._rank:
                out.copy_(packed.view(-1)[offset : offset + out.numel()].view(out.shape))
            else:
                outs.append((source, out))
        with exchange_range(self._kind, sent_bytes) if profiler_enabled() else NO_RANGE:
            self._works = _exchange(self._group, slices, outs) if slices or outs else []
        self._sending, self.in_flight = slices, True
        if slices:
            self._ledger.add(self._kind, sent_bytes, between_nodes)

    def wait(self) -> None:
        """Wait for what was posted, on GPUs by the current stream; MeshError if nothing was."""
        if not self.in_flight:
            raise MeshError(f"no {self._kind} exchange was posted")
        # What is sent is memory of the current stream's. Dropped before that stream has waited, it
        # could be given to the next kernel while NCCL still reads it; `record_stream` would do too,
        # at the price of memory that is freed late.
        works, sending = self._works, self._sending
        self._works, self._sending, self.in_flight = [], [], False  # also if a wait fails
        for work in works:
            work.wait()
        del sending  # keeps what is being sent alive until here


def _exchange(
    group: dist.ProcessGroup,
    sends: Sequence[tuple[int, torch.Tensor]],
    recvs: Sequence[tuple[int, torch.Tensor]],
) -> list[dist.Work]:
    """``torch.distributed.batch_isend_irecv`` of pairs (rank of the group, dense tensor), without
    its checks, which take longer on the CPU than a small message takes on the links."""
    device = (sends or recvs)[0][1].device
    # Backends of older torch lack the attribute. NCCL must coalesce, or a send waits for another.
    backend = group._get_backend(device)
    if not getattr(backend, "supports_coalescing", device.type == "cuda"):
        return _send_and_recv(group, sends, recvs)
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        _send_and_recv(group, sends, recvs)
    return list(manager.works)


def _send_and_recv(
    group: dist.ProcessGroup,
    sends: Sequence[tuple[int, torch.Tensor]],
    recvs: Sequence[tuple[int, torch.Tensor]],
) -> list[dist.Work]:
    works = []
    for peer, x in sends:
        works.append(group.send([x], peer, 0))
    for source, x in recvs:
        works.append(group.recv([x], source, 0))
    return works


class PendingExchange:
    """An exchange in flight, or one whose result is there already.

    Args:
        unpack: makes the result of what was received.
        work: to wait for; None: nothing is in flight.
    """

    def __init__(
        self,
        unpack: Callable[[], tuple[torch.Tensor, ...]],
        work: Channel | dist.Work | None = None,
    ) -> None:
        self._unpack, self._work = unpack, work
        self._result: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The result, at every call; on GPUs the current stream waits for it, not the CPU."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self._result is None:
            self._result, self._unpack = self._unpack(), tuple  # frees the receive buffer
        return self._result

    def drain(self) -> None:
        """Only wait; after an error, or what is in flight would be written to memory of others."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
