"""Ring exchanges of one head chunk: remote KV into two receive buffers, KV gradients to the owners.

``plan.py`` lists a pass's exchanges once (:func:`kv_transfers`); ``passes.py`` makes the classes
for each chunk and pass, and posts and waits as its schedule says: every rank of the ring posts all
exchanges, in one order. Letters of the shapes: B batch, T tokens of this rank's keys and values, N
tokens of a block, G key/value heads, D head dim of keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from ds_usp.comm.channel import (
    Channel,
    HeadShapes,
    RecvSpec,
    SendSlice,
    StagingBuffer,
    StridedView,
    split_features,
)
from ds_usp.comm.packing import OwnTokens, PackPlan, SendViews
from ds_usp.geometry.pipeline_schedule import MAX_DKV_BUFFERS
from ds_usp.geometry.ring_schedule import RingStep
from ds_usp.geometry.ring_traffic import TokenRange
from ds_usp.geometry.segments import Runs, Span
from ds_usp.kernels.merge import GradAccumulator
from ds_usp.lowlevel import strided_copy

KV = tuple[torch.Tensor, torch.Tensor]
KVGrads = tuple[GradAccumulator, GradAccumulator]


class RecvRows(NamedTuple):
    """Rows ``start : stop`` of a receive buffer; ``offset``: the first one's row in the staging
    buffer of ``rank``, a rank of the ring."""

    rank: int
    start: int
    stop: int
    offset: int


class KVTransfer(NamedTuple):
    """One exchange of KV and the one of its gradients, in rows (tokens) of the buffers."""

    step: int  # index of the ring step
    num_tokens: int  # of the received block
    sends: tuple[SendSlice, ...]
    recvs: tuple[RecvRows, ...]  # the last may be of this rank itself: they are copied
    num_remote_tokens: int  # the tokens before those: gradients of others, which are sent
    grad_sends: tuple[SendSlice, ...]
    grad_recvs: tuple[RecvRows, ...]
    grad_spans: tuple[tuple[int, int], ...]  # of grad_recvs, in tokens of this rank's KV
    num_grad_tokens: int  # of the receive buffer of gradients


def kv_transfers(steps: Sequence[RingStep], rank: int) -> tuple[KVTransfer, ...]:
    """The exchanges of a pass's ring steps on one ring rank: one for each step that is not local,
    equally many on every rank of the ring."""
    transfers = []
    for index, step in enumerate(steps):
        if step.is_local:
            continue
        remote = _rows([x for x in step.kv_ranges if x.rank != rank])
        transfers.append(
            KVTransfer(
                step=index,
                num_tokens=step.num_kv_tokens,
                sends=tuple(SendSlice(x.rank, x.start, x.stop) for x in step.send_ranges),
                recvs=_rows(step.kv_ranges, [x.start for x in step.kv_ranges]),
                num_remote_tokens=remote[-1].stop if remote else 0,
                grad_sends=tuple(SendSlice(x.rank, x.start, x.stop) for x in remote),
                grad_recvs=_rows(step.send_ranges, step.peer_offsets),
                grad_spans=tuple((x.start, x.stop) for x in step.send_ranges),
                num_grad_tokens=step.num_sent_tokens,
            )
        )
    return tuple(transfers)


def _rows(ranges: Sequence[TokenRange], offsets: Sequence[int] = ()) -> tuple[RecvRows, ...]:
    """Token ranges as rows of a buffer in which they lie one after the other; ``offsets``: of each
    in what its rank has packed, empty where nobody reads them."""
    stops = list(accumulate(x.length for x in ranges))
    return tuple(
        RecvRows(x.rank, stop - x.length, stop, offset)
        for x, stop, offset in zip(ranges, stops, offsets or [0] * len(ranges), strict=True)
    )


# Keys and values are sent as one tensor [N, B, G D + G E], tokens first, so that any run of tokens
# is one contiguous message.
class KVExchange:
    """Receives the KV blocks of one chunk in turn into two buffers: one in use, one being filled.

    Args:
        channel: a new one of ``ring_kv``.
        transfers: all exchanges of the pass, in order; one at least.
        k, v: ``[B, T, G, D]``, ``[B, T, G, E]``, for shapes, dtype and device.
    """

    def __init__(
        self, channel: Channel, transfers: Sequence[KVTransfer], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.channel, self._transfers = channel, transfers
        self._shapes, self._row = _head_shapes(k, v)  # a row is [B, G D + G E]
        self._buffers = [
            k.new_empty(max([x.num_tokens for x in transfers[i::2]]), *self._row)
            for i in range(min(2, len(transfers)))
        ]
        self._block = self._buffers[0]  # what the exchange in flight fills

    def pack(self, k: torch.Tensor, v: torch.Tensor, runs: Runs) -> torch.Tensor:
        """Pack keys and values into a staging buffer ``[T, B, G D + G E]``, once for all posts: the
        runs of tokens that any rank receives, and nothing else of it is defined."""
        staging = self.channel.acquire_staging((k.shape[1], *self._row), k, k.dtype)
        if k.is_cuda:
            for run in runs:
                _pack_run(staging.tensor, run, k, v)
            return staging.tensor
        views = staging.views(self._shapes, tokens_first=True)
        for view, x in zip(views, (k, v), strict=True):
            for start, stop in runs:
                strided_copy(view[:, start:stop], x[:, start:stop])
        return staging.tensor

    def post(self, number: int, packed: torch.Tensor, *, overlapped: bool) -> None:
        """Start an exchange: this rank receives its block, and others what ``packed`` has, which
        :meth:`pack` returned."""
        transfer = self._transfers[number]
        self._block = block = self._buffers[number % 2]
        if len(block) > transfer.num_tokens:
            self._block = block = block[: transfer.num_tokens]
        recvs = _recvs(block, packed, transfer.recvs)
        self.channel.post(packed, transfer.sends, recvs, overlapped=overlapped)

    def wait(self) -> KV:
        """Wait for the exchange in flight; returns keys ``[B, N, G, D]`` and values, views that the
        second post from then on overwrites."""
        self.channel.wait()
        k, v = split_features(self._block, self._shapes, tokens_first=True)
        return k, v


# One ring step of two ranks. Rank 0 has the tokens a b, rank 1 has c d; each has computed with the
# other's keys and values, and where KV is gathered with its own too, whose rows come last:
#
#                               rank 0                     rank 1
#     dK, dV of the step        c d | a b                  a b | c d
#     post  sends, staged       c d ------> to rank 1      a b ------> to rank 0
#           receives, buffer    a b <------ from rank 1    c d <------ from rank 0
#           adds to targets     a b, its own               c d, its own
#     wait  adds to targets     a b, from the buffer       c d, from the buffer
#
# With more ranks the buffer has rows from all that have computed with tokens of this rank.
#
# Two exchanges at most have a receive buffer each, so that one kernel sums all that came, reading
# the target once. With more, memory would grow with the ring: they share a buffer, and each is
# summed before the next one is received into it.
class KVGradExchange:
    """Sends gradients of remote KV to the owners and sums those received; one in flight.

    Args:
        channel: a new one of ``ring_dkv``.
        transfers: all exchanges of the pass, in order.
        dtype: of the gradients as the kernel returns them, which is sent.
        k, v: ``[B, T, G, D]``, ``[B, T, G, E]``, for shapes and device.
        targets: the sums of the gradients of this rank's own KV.
    """

    def __init__(
        self,
        channel: Channel,
        transfers: Sequence[KVTransfer],
        dtype: torch.dtype,
        k: torch.Tensor,
        v: torch.Tensor,
        targets: KVGrads,
    ) -> None:
        self.channel, self._transfers, self._dtype = channel, transfers, dtype
        self._shapes, self._row = _head_shapes(k, v)
        self._targets, self._in_flight = targets, 0  # the number of the exchange
        self._buffer_each = len(transfers) <= MAX_DKV_BUFFERS
        self._buffer = k  # until the first exchange, if each has its own
        if not self._buffer_each:
            tokens = max([x.num_grad_tokens for x in transfers])
            self._buffer = k.new_empty(tokens, *self._row, dtype=dtype)
        self._staged: StagingBuffer | None = None  # acquired already

    def staging_views(self, number: int) -> KV:
        """dk ``[B, N, G, D]`` and dv in the staging buffer of the next exchange, for a kernel to
        write the gradients of its whole block: this rank's own come last, and stay there until they
        are summed. :meth:`post` sends this buffer then."""
        self._staged = self._acquire_staging(self._transfers[number].num_tokens)
        dk, dv = self._staged.views(self._shapes, tokens_first=True)
        return dk, dv

    def post(self, number: int, grads: KVGrads, *, overlapped: bool = True) -> None:
        """Send the gradients of a received block, ``grads``, which nobody reads after that, and
        receive those of KV that this rank has sent."""
        transfer, self._in_flight = self._transfers[number], number
        if self._buffer_each:
            tokens = transfer.num_grad_tokens
            self._buffer = self._buffer.new_empty(tokens, *self._row, dtype=self._dtype)
        remote = transfer.num_remote_tokens
        dk = dv = None
        if self._staged is None and self._buffer.is_cuda:
            dk, dv = map(GradAccumulator.as_tensor_if_single, grads)
        staging, self._staged = self._staged or self._acquire_staging(remote), None
        if dk is not None and dv is not None and dk.dtype == dv.dtype == self._dtype:
            _pack_run(staging.tensor, (0, remote), dk, dv)
        else:
            views = staging.views(self._shapes, tokens_first=True)
            for grad, view in zip(grads, views, strict=True):
                grad.write(view[:, :remote])  # no copy, where staging_views had a kernel write it
        if remote < transfer.num_tokens:
            for grad, target in zip(grads, self._targets, strict=True):
                grad.transfer_to(remote, target)
        recvs = _recvs(self._buffer, staging.tensor, transfer.grad_recvs)
        self.channel.post(staging.tensor, transfer.grad_sends, recvs, overlapped=overlapped)

    def wait(self) -> None:
        """Wait for the exchange in flight and add what was received to the targets."""
        self.channel.wait()
        transfer = self._transfers[self._in_flight]
        grads = split_features(self._buffer, self._shapes, tokens_first=True)
        for (_, start, stop, _), span in zip(transfer.grad_recvs, transfer.grad_spans, strict=True):
            for target, grad in zip(self._targets, grads, strict=True):
                target.add(
                    grad if stop - start == grad.shape[1] else grad[:, start:stop],
                    [span],
                    sum_now=not self._buffer_each,
                    defer=self._buffer_each,
                )

    def _acquire_staging(self, tokens: int) -> StagingBuffer:
        return self.channel.acquire_staging((tokens, *self._row), self._buffer, self._dtype)


def _pack_run(staging: torch.Tensor, run: Span, k: torch.Tensor, v: torch.Tensor) -> None:
    """Pack the tokens ``run`` (start, stop) of both into the same rows of ``staging``, by one
    kernel where Triton is installed: its launch costs the host less than two copies with views."""
    plan = _plan_run(run, (k.shape, k.stride()), (v.shape, v.stride()))
    rows = staging if run == (0, staging.shape[0]) else staging[run[0] : run[1]]
    plan.pack(rows, (k, v), (k, v))


@lru_cache(maxsize=1024)
def _plan_run(run: Span, *tensors: tuple[tuple[int, ...], tuple[int, ...]]) -> PackPlan:
    """Plan how a run of tokens of tensors ``[B, T, G, .]`` of these shapes and strides is packed,
    in a buffer of that run alone. All are packed: unlike an all-to-all, none is copied to an output
    of this rank."""
    (start, stop), views = run, []
    for (batch, _, heads, dim), (sample, token, head, feature) in tensors:
        size, stride = (1, stop - start, batch, heads, dim), (0, token, sample, head, feature)
        pieces = StridedView(size, stride, start * token)
        views.append(SendViews(pieces, StridedView(size[1:], stride[1:], 0)))
    features = sum([view.pieces.size[3] * view.pieces.size[4] for view in views])
    shape = 1, stop - start, tensors[0][0][0], features
    return PackPlan(shape, OwnTokens(0, ()), views)


def _recvs(buffer: torch.Tensor, packed: torch.Tensor, rows: Sequence[RecvRows]) -> list[RecvSpec]:
    """Return the receives into rows of a dense buffer, from others' buffers like ``packed``."""
    row, recvs = packed.stride(0), []  # it is dense
    for rank, start, stop, offset in rows:
        view = StridedView(((stop - start) * row,), (1,), start * row)
        recvs.append(RecvSpec(rank, buffer, offset * row, view=view))
    return recvs


def _head_shapes(k: torch.Tensor, v: torch.Tensor) -> tuple[HeadShapes, tuple[int, int]]:
    """Heads and head dims of keys and of values; samples, and elements of a token of both."""
    (batch, _, heads, dim), (_, _, value_heads, value_dim) = k.shape, v.shape
    features = heads * dim + value_heads * value_dim
    return ((heads, dim), (value_heads, value_dim)), (batch, features)
