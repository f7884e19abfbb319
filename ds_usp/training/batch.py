"""One rank's share of a batch: tokens, labels, loss mask and positions, all through TokenLayout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import TokenLayout


@dataclass(frozen=True)
class SequenceBatch:
    """What one sequence-parallel rank holds of a micro batch.

    Shapes:
        tokens, labels: ``[b, s_local]``, int64.
        loss_mask: ``[b, s_local]``, float32; 0 leaves a token out of the loss.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor


def shard_batch(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, *, layout: TokenLayout, rank: int
) -> SequenceBatch:
    """The tokens, labels and mask that sequence-parallel rank ``rank`` holds, in its order.

    Labels are shifted before the cut, so that the label of a shard's last token is right although
    the next token lives on another rank.

    Shapes:
        tokens, labels, loss_mask: ``[b, seq_len]``, the whole sequence; ``[b, s_local]`` out.

    Raises:
        LayoutError: shapes that differ, or a length other than ``layout.seq_len``.
    """
    shapes = {tuple(x.shape) for x in (tokens, labels, loss_mask)}
    if len(shapes) > 1:
        raise LayoutError(
            f"tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)} and loss mask "
            f"{tuple(loss_mask.shape)} must have one shape [batch, sequence]"
        )
    return SequenceBatch(
        tokens=layout.shard(tokens, dim=1, rank=rank),
        labels=layout.shard(labels, dim=1, rank=rank),
        loss_mask=layout.shard(loss_mask.float(), dim=1, rank=rank),
    )


def document_borders(tokens: Tensor, eod: int) -> list[list[int]]:
    """Where the documents of packed sequences begin, for ``MaskSpec(documents=...)``.

    An end-of-document token is the last one of its document, as in Megatron. Read once a batch,
    from the whole sequences, which all ranks that share them have alike.

    Shapes:
        tokens: ``[b, seq_len]``, before they are cut among ranks; the result has one list of
        cumulative borders for each sample.
    """
    seq_len = tokens.shape[1]
    ends: list[list[int]] = [[] for _ in range(tokens.shape[0])]
    for sample, position in (tokens == eod).nonzero().tolist():
        ends[sample].append(position + 1)
    return [[0, *inside, *([] if inside[-1:] == [seq_len] else [seq_len])] for inside in ends]


def document_positions(
    borders: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> Tensor:
    """Position of every token in its document, for position embeddings that start anew there.

    Shapes:
        borders: cumulative, a list for each sample; result ``[b, seq_len]``, int64.
    """
    rows = [[i for a, b in pairwise(sample) for i in range(b - a)] for sample in borders]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def local_positions(
    layout: TokenLayout, rank: int, device: torch.device | str | None = None
) -> Tensor:
    """Global position of every token that ``rank`` holds, for position embeddings.

    Shapes:
        result: ``[s_local]``, int64.
    """
    return torch.tensor(layout.positions(rank), dtype=torch.int64, device=device)


def rotary_frequencies(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """Angles of rotary position embedding at any set of positions, in fp32.

    Made from positions and not from a range, so that every token layout gets its own.

    Shapes:
        positions: ``[s_local]``; result ``[s_local, 1, 1, dim]``, halves repeated (not
        interleaved), in radians.
    Source: RoFormer (arXiv 2104.09864), equation 15.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = torch.outer(positions.float(), base**-exponent)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
