"""The forward loop and the backward loop of ring attention: the only two in the package.

Both walk a printed plan of integers and know no layout, mask or library by name. While a rank
computes with one block of keys and values, the next one comes straight from its owner; gradients
go straight home and are summed there in fp32. Two block buffers, the gradients that leave and one
buffer for those that come serve any number of steps.

Online softmax over blocks as in Ring Attention (arXiv 2310.01889); backward from the final
log-sum-exp, which makes every block independent (FlashAttention-2, arXiv 2307.08691).

Letters of the shapes: B batch, S query tokens, T tokens of this rank's keys and values, H query
heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.ring import RingChannel
from ds_usp.geometry.schedule import RingSchedule, RingStep, Span
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.merge import GradientSum, OutputSum


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
    with closing(_walk(call, call.schedule.steps, k, v)) as walk:
        for step, k_block, v_block in walk:
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

    A step's share of ``dk`` and ``dv`` travels in the dtype in which the kernel returns it.
    """
    dq, dk, dv = GradientSum(q), GradientSum(k), GradientSum(v)
    walk = _walk(call, call.schedule.backward_steps, k, v)
    with closing(walk), closing(_Returns(call, k, v, dk, dv)) as returns:
        for step, k_block, v_block in walk:
            sums = (GradientSum(k_block), GradientSum(v_block)) if step.offset else (dk, dv)
            for tiles in step.calls:
                dq_part, *parts = call.kernel.backward(
                    dout, q, k_block, v_block, out, lse, tiles, scale=call.scale
                )
                dq.add(dq_part, [(tile.q_start, tile.q_stop) for tile in tiles])
                for total, part in zip(sums, parts, strict=True):
                    total.add(part, [(tile.k_start, tile.k_stop) for tile in tiles])
            if step.offset:
                returns.send(step, sums)
        returns.settle()
    return dq.result(), dk.result(), dv.result()


def _walk(
    call: RingCall, steps: Sequence[RingStep], k: torch.Tensor, v: torch.Tensor
) -> Generator[tuple[RingStep, torch.Tensor, torch.Tensor], None, None]:
    """The steps in order, each with the keys and values that it uses.

    The next block is on its way while the caller computes with this one. The first step uses the
    rank's own.
    """
    channel = RingChannel(call.mesh.kv_group, call.mesh.ledger, "ring_kv")
    buffers = [_Buffer((k, v), call.schedule.longest) for _ in range(2)]
    here = k, v
    with closing(channel):
        for index, step in enumerate(steps):
            following = steps[index + 1] if index + 1 < len(steps) else None
            if following is not None and following.offset:
                coming = buffers[index % 2].views(following.columns.length)
                channel.post(_tokens((k, v), following.sends), coming, following.offset)
            yield step, *here
            here = k, v
            if channel.busy:
                channel.take()
                here = coming


class _Returns:
    """Gradients on their way home: those that this rank sends, and those that come to it."""

    def __init__(
        self,
        call: RingCall,
        k: torch.Tensor,
        v: torch.Tensor,
        dk: GradientSum,
        dv: GradientSum,
    ) -> None:
        self._channel = RingChannel(call.mesh.dkv_group, call.mesh.ledger, "ring_dkv")
        wide = torch.promote_types(k.dtype, torch.float32)
        self._dtype = wide if call.kernel.caps.wide_gradients else k.dtype
        self._buffer = _Buffer((k, v), call.schedule.longest, self._dtype)
        self._sums = dk, dv
        self._coming: tuple[tuple[torch.Tensor, torch.Tensor], Span] | None = None

    def send(self, step: RingStep, gradients: Sequence[GradientSum]) -> None:
        """Send a step's gradients to the block's owner and expect one's own from its user."""
        self.settle()
        coming = self._buffer.views(step.sends.length)
        leaving = [total.result(self._dtype) for total in gradients]
        self._channel.post(leaving, coming, -step.offset)
        self._coming = coming, step.sends

    def close(self) -> None:
        """After an error: nothing may stay under way, or the next call would take it."""
        self._channel.close()

    def settle(self) -> None:
        """Add what has come."""
        if self._coming is None:
            return
        self._channel.take()
        parts, span = self._coming
        self._coming = None
        if span.length:
            for total, part in zip(self._sums, parts, strict=True):
                total.add(part, [span], borrowed=True)


class _Buffer:
    """Room for keys and values (or their gradients) of up to ``tokens`` tokens."""

    def __init__(
        self,
        like: tuple[torch.Tensor, torch.Tensor],
        tokens: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._like = like
        self._flat = [x.new_empty(x[:, :1].numel() * tokens, dtype=dtype) for x in like]

    def views(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous ``[B, tokens, G, D]`` for each of the two."""
        k, v = (
            flat[: x[:, :1].numel() * tokens].view(x.shape[0], tokens, *x.shape[2:])
            for flat, x in zip(self._flat, self._like, strict=True)
        )
        return k, v


def _tokens(tensors: Sequence[torch.Tensor], span: Span) -> list[torch.Tensor]:
    return [x[:, span.start : span.stop] for x in tensors]
