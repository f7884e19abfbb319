"""Buffers of ring attention: prefetching remote KV, returning KV gradients to their owners.

Letters of the shapes: B batch, T tokens of this rank's keys and values, N tokens of a block, G
key/value heads, D head dim of keys, E of values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ds_usp.comm.channel import (
    Channel,
    P2PChannel,
    RecvSpec,
    SendSlice,
    StagingBuffer,
    split_features,
)
from ds_usp.comm.ledger import CommLedger
from ds_usp.geometry.double_ring import OuterStep, TokenRange
from ds_usp.geometry.ring_schedule import RingStep
from ds_usp.geometry.segments import Runs
from ds_usp.kernels.merge import GradAccumulator
from ds_usp.strided_copy import strided_copy

Transfer = RingStep | OuterStep


class KVPrefetcher:
    """Receives KV blocks one after the other into two buffers: one in use, one being filled.

    Args:
        transfers: all that will be received.
    """

    def __init__(
        self, channel: Channel, transfers: Sequence[Transfer], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._channel = channel
        sizes = [
            max((transfer.num_kv_tokens for transfer in transfers[i::2]), default=0)
            for i in range(2)
        ]
        self._buffers = [k.new_empty(_packed_shape(k, v, size)) for size in sizes if transfers]
        self._queue: deque[Transfer] = deque()
        self._packed = self._receiving = k[:0]

    def start(self, transfers: Sequence[Transfer], packed: torch.Tensor) -> None:
        """Post the first of these; other ranks receive their blocks from ``packed``."""
        self._queue.extend(transfers)
        self._packed = packed
        self._post()

    def wait_next(self) -> torch.Tensor:
        """The next received block; posts the one after it."""
        self._channel.wait()
        block = self._receiving
        self._post()
        return block

    def close(self) -> None:
        """Wait for all in flight."""
        self._channel.drain()

    def _post(self) -> None:
        """Post sends and receives of the next transfer, if there is one; swaps the two buffers."""
        if not self._queue:
            return
        transfer = self._queue.popleft()
        self._buffers.reverse()
        self._receiving = self._buffers[1][: transfer.num_kv_tokens]
        token_stride = self._packed.stride(0)  # it is dense
        recvs = [
            RecvSpec(token_range.rank, out_buffer, token_range.start * token_stride)
            for token_range, out_buffer in _split_by_range(self._receiving, transfer.recv_ranges)
        ]
        sends = [
            SendSlice(token_range.rank, token_range.start, token_range.stop)
            for token_range in transfer.send_ranges
        ]
        self._channel.post(self._packed, sends, recvs)


class GradReturn:
    """Sends KV gradients to the owners of the KV and sums the received ones; one in flight.

    Attributes:
        one_buffer_per_exchange: there are so few exchanges that each has a receive buffer of its
            own, and all are summed in one kernel. Else one buffer serves them all.
    """

    def __init__(
        self,
        channel: Channel,
        transfers: Sequence[Transfer],
        rank: int,
        dtype: torch.dtype,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        self._channel, self._rank, self._dtype, self._like = channel, rank, dtype, (k, v)
        self.one_buffer_per_exchange = len(transfers) <= 2
        max_sent = max((transfer.num_sent_tokens for transfer in transfers), default=0)
        self._buffer = (
            self._new_recv_buffer(0 if self.one_buffer_per_exchange else max_sent)
            if transfers
            else k[:0]
        )
        self._receiving: list[tuple[TokenRange, torch.Tensor]] = []
        self._accumulators: Sequence[GradAccumulator] = ()
        self._staged: StagingBuffer | None = None  # acquired already

    def staging_views(self, transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the staging buffer for a step's KV gradients, which are sent from it: of all of
        the step's tokens, this rank's own last, which stay there until they are summed."""
        self._staged = self._staging_for(transfer.num_kv_tokens)
        return self._views_of(self._staged)

    def send(
        self,
        transfer: Transfer,
        gradients: Sequence[GradAccumulator],
        accumulators: Sequence[GradAccumulator],
    ) -> None:
        """Send the gradients of KV received in a step or outer step, and receive those of KV sent.

        Args:
            accumulators: of this rank's KV, for the received gradients and its own.
        """
        self.wait_and_accumulate()
        if self.one_buffer_per_exchange:
            self._buffer = self._new_recv_buffer(transfer.num_sent_tokens)
        remote_ranges = [
            token_range for token_range in transfer.recv_ranges if token_range.rank != self._rank
        ]
        num_remote_tokens = sum(token_range.length for token_range in remote_ranges)
        staging, self._staged = self._staged or self._staging_for(num_remote_tokens), None
        for accumulator, out_buffer, local_accumulator in zip(
            gradients, self._views_of(staging), accumulators, strict=True
        ):
            accumulator.write(out_buffer[:, :num_remote_tokens])
            if num_remote_tokens < transfer.num_kv_tokens:  # this rank's own keys come last
                accumulator.transfer_to(num_remote_tokens, local_accumulator)
        token_stride = staging.tensor.stride(0)  # it is dense
        self._receiving, self._accumulators = (
            _split_by_range(self._buffer[: transfer.num_sent_tokens], transfer.send_ranges),
            accumulators,
        )
        self._channel.post(
            staging.tensor,
            _send_rows(remote_ranges),
            [
                RecvSpec(token_range.rank, view, offset * token_stride)
                for (token_range, view), offset in zip(
                    self._receiving, transfer.peer_offsets, strict=True
                )
            ],
        )

    def wait_and_accumulate(self) -> None:
        """Wait for the exchange in flight, if there is one, and add what it received."""
        if not self._channel.in_flight:
            return
        self._channel.wait()
        received, self._receiving = self._receiving, []
        accumulators, self._accumulators = (
            self._accumulators,
            (),
        )  # an outer step's are freed with it
        for token_range, view in received:
            for accumulator, gradient in zip(
                accumulators, unpack_kv(view, *self._like), strict=True
            ):
                span = [(token_range.start, token_range.stop)]
                accumulator.add(
                    gradient,
                    span,
                    sum_now=not self.one_buffer_per_exchange,
                    defer=self.one_buffer_per_exchange,
                )

    def close(self) -> None:
        """Wait for all in flight."""
        self._channel.drain()

    def _staging_for(self, tokens: int) -> StagingBuffer:
        """A staging buffer for so many tokens to send."""
        shape = _packed_shape(*self._like, tokens)
        return self._channel.acquire_staging(shape, self._buffer, self._dtype)

    def _views_of(self, staging: StagingBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        dk, dv = staging.views(_shapes(*self._like), tokens_first=True)
        return dk, dv

    def _new_recv_buffer(self, tokens: int) -> torch.Tensor:
        k, v = self._like
        return k.new_empty(_packed_shape(k, v, tokens), dtype=self._dtype)


_EMPTY = torch.empty(0, 0, 0, 0)
_NULL_CHANNEL = P2PChannel(None, CommLedger(), "nothing")
# Of a ring of one, or for a rank that receives nothing.
NULL_PREFETCHER = KVPrefetcher(_NULL_CHANNEL, (), _EMPTY, _EMPTY)
NULL_GRAD_RETURN = GradReturn(_NULL_CHANNEL, (), 0, torch.float32, _EMPTY, _EMPTY)

# Keys and values are sent as one tensor [N, B, G D + G E], tokens first, so that any run of tokens
# is one contiguous message.


def _packed_shape(k: torch.Tensor, v: torch.Tensor, tokens: int) -> tuple[int, int, int]:
    """The shape of so many packed tokens, of keys ``[B, ., G, D]`` and values ``[B, ., G, E]``."""
    return tokens, k.shape[0], k.shape[2:].numel() + v.shape[2:].numel()


def pack_kv(channel: Channel, k: torch.Tensor, v: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Pack keys ``[B, T, G, D]`` and values ``[B, T, G, E]`` into a staging buffer to send from.

    Args:
        runs: of tokens that any rank receives; the others are left out.
    """
    staging = channel.acquire_staging(_packed_shape(k, v, k.shape[1]), k, k.dtype)
    for out_buffer, x in zip(staging.views(_shapes(k, v), tokens_first=True), (k, v), strict=True):
        for start, stop in runs:
            strided_copy(out_buffer[:, start:stop], x[:, start:stop])
    return staging.tensor


def unpack_kv(
    packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of packed keys ``[B, N, G, D]`` and values ``[B, N, G, E]``, like these two."""
    keys, values = split_features(packed, _shapes(k, v), tokens_first=True)
    return keys, values


def _shapes(k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and head dim of keys and of values."""
    _, _, heads, dim = k.shape
    return (heads, dim), (heads, v.shape[3])


def _send_rows(token_ranges: Sequence[TokenRange]) -> list[SendSlice]:
    """For token ranges packed one after the other: the receiving rank, first and end row."""
    rows, offset = [], 0
    for token_range in token_ranges:
        rows.append(SendSlice(token_range.rank, offset, offset + token_range.length))
        offset += token_range.length
    return rows


def _split_by_range(
    packed: torch.Tensor, token_ranges: Sequence[TokenRange]
) -> list[tuple[TokenRange, torch.Tensor]]:
    """Each token range with its view of a tensor in which they are packed one after the other."""
    if len(token_ranges) == 1:
        return [(token_ranges[0], packed)]
    views = (
        packed.split([token_range.length for token_range in token_ranges]) if token_ranges else ()
    )
    return list(zip(token_ranges, views, strict=True))
