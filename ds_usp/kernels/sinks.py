"""Attention sinks: a learned or fixed logit a query head beside the scores in the softmax.

``attention/passes.py`` calls these at the end of a head chunk, with the sinks of its heads.
Letters of the shapes: B batch, S query rows, H query heads, D head dim.
"""

from __future__ import annotations

import torch

_BLOCK_ELEMENTS = 1 << 24  # that are converted to fp32 at a time


# A sink is one more key whose value is 0: it takes weight and adds nothing (gpt-oss, OpenAI 2025;
# "off-by-one" softmax is a sink of 0). So it is merged like a block whose output is 0, on any
# kernel. Once, after the last block: as part of each block's softmax it would be counted once a
# ring rank.


def apply_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys and the sinks, from that over the keys: ``out``, changed in
    place, and a new log-sum-exp. Rows that attend to no key get out 0 and the sink as log-sum-exp.

    Shapes:
        out ``[B, S, H, D]``, lse ``[B, H, S]``, sinks ``[H]``: those of the heads of out.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    weight = torch.exp(lse - total).transpose(1, 2).unsqueeze(-1)
    return out.mul_(weight), total  # computed in the weight's dtype, rounded once


def sink_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sinks ``[H]`` from these tokens, in the log-sum-exp's dtype: one summand
    of the gradient, whose others are other ranks'.

    Shapes:
        dout, out ``[B, S, H, D]``, lse ``[B, H, S]``, both of keys and sinks together.
    """
    # The sink's weight is p = exp(sink - lse) and its value 0, so its score's gradient, which is
    # p * (dout . value - dout . out), is -p * (dout . out).
    acc_dtype = lse.dtype
    total = torch.zeros_like(sinks, dtype=acc_dtype)
    rows = max(1, _BLOCK_ELEMENTS // out[:, :1].numel())
    for start in range(0, out.shape[1], rows):
        block = slice(start, start + rows)
        dots = (dout[:, block].to(acc_dtype) * out[:, block].to(acc_dtype)).sum(-1).transpose(1, 2)
        total -= (torch.exp(sinks.to(acc_dtype)[:, None] - lse[:, :, block]) * dots).sum((0, 2))
    return total
