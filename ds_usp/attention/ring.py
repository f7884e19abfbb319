"""The forward loop and the backward loop of ring attention: the only two in the package.

Both walk a printed plan of integers and know no layout, mask or library by name. Two key/value
buffers and, backwards, two gradient buffers serve any number of steps. Online softmax over blocks
as in Ring Attention (arXiv 2310.01889); backward from the final log-sum-exp, which makes every
block independent (FlashAttention-2, arXiv 2307.08691).

Letters of the shapes: B batch, S query tokens, T tokens of a key/value block, H query heads, G
key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.ring import RingChannel
from ds_usp.geometry.schedule import RingSchedule, RingStep
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.merge import OutputSum, add_columns, add_rows


@dataclass(frozen=True)
class RingCall:
    """Everything that a ring attention needs besides its tensors."""

    mesh: SequenceMesh
    schedule: RingSchedule
    kernel: AttentionKernel
    scale: float


def ring_forward(
    call: RingCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this ring rank's queries with the keys and values of the whole ring.

    Shapes:
        q ``[B, S, H, D]``, k and v ``[B, T, G, D]`` -> out ``[B, S, H, D]``, lse ``[B, H, S]``.
    """
    total = OutputSum(q)
    for step, _, k_block, v_block in _walk(call, k, v):
        for tiles in step.calls:
            part, lse = call.kernel.forward(q, k_block, v_block, tiles, scale=call.scale)
            total.add(part, lse, tiles)
    return total.result()


def ring_backward(
    call: RingCall,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients ``dq``, ``dk``, ``dv`` in the dtype and shape of ``q``, ``k`` and ``v``.

    A block's gradients are summed in fp32 while they travel one step behind the block, and are
    sent home after its last stop. What a rank adds to its own block never leaves it.
    """
    blocks = _Blocks(k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.zeros_like(q, dtype=wide)
    own = k.new_zeros(blocks.numel(k.shape[1]), dtype=wide)
    channel = _channel(call, "ring_dkv", blocks, own)
    for step, following, k_block, v_block in _walk(call, k, v):
        parts = []
        for tiles in step.calls:
            dq_part, dk_part, dv_part = call.kernel.backward(
                dout, q, k_block, v_block, out, lse, tiles, scale=call.scale
            )
            add_rows(dq, dq_part, tiles)
            parts.append((tiles, dk_part, dv_part))
        if not step.offset:
            sums = own
        elif channel.busy:
            sums = channel.take()
        else:
            sums = channel.here(blocks.numel(step.kv_length)).zero_()
        dk, dv = blocks.split(sums)
        for tiles, dk_part, dv_part in parts:
            add_columns(dk, dk_part, tiles)
            add_columns(dv, dv_part, tiles)
        if step.offset:
            stop = following or call.schedule.steps[0]
            shift = stop.offset - step.offset
            channel.post(sums.numel(), blocks.numel(stop.kv_length), shift)
    if channel.busy:
        own += channel.take()
    dk, dv = blocks.split(own)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Blocks:
    """Keys and values of one ring rank as one flat buffer, so that they travel in one message."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._k, self._v = k, v
        self._per_token = (k[:, :1].numel(), v[:, :1].numel())

    def numel(self, tokens: int) -> int:
        """Elements of a block of that many tokens."""
        return tokens * sum(self._per_token)

    def split(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``k [B, T, G, D]`` and ``v`` inside a flat block."""
        tokens = block.numel() // sum(self._per_token)
        parts = block.split([tokens * each for each in self._per_token])
        k, v = (
            part.view(like.shape[0], tokens, *like.shape[2:])
            for part, like in zip(parts, (self._k, self._v), strict=True)
        )
        return k, v


def _walk(
    call: RingCall, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[RingStep, RingStep | None, torch.Tensor, torch.Tensor]]:
    """The steps in order, each with the next one and the keys and values that are here.

    The next block is on its way while the caller computes with this one.
    """
    blocks = _Blocks(k, v)
    channel = _channel(call, "ring_kv", blocks, k)
    for step, following in call.schedule.hops():
        if following is not None:
            if not step.offset:
                for here, mine in zip(
                    blocks.split(channel.here(blocks.numel(k.shape[1]))), (k, v), strict=True
                ):
                    here.copy_(mine)
            shift = following.offset - step.offset
            channel.post(blocks.numel(step.kv_length), blocks.numel(following.kv_length), shift)
        yield step, following, k, v
        if following is not None:
            k, v = blocks.split(channel.take())


def _channel(call: RingCall, kind: str, blocks: _Blocks, like: torch.Tensor) -> RingChannel:
    """A way around the ring for blocks of the dtype of ``like``."""
    mesh, schedule = call.mesh, call.schedule
    return RingChannel(
        mesh.kv_group if kind == "ring_kv" else mesh.dkv_group,
        mesh.ledger,
        kind,
        capacity=blocks.numel(schedule.longest) if len(schedule.steps) > 1 else 0,
        like=like,
    )
