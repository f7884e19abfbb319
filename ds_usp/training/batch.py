"""One rank's shard of a batch: tokens, labels, loss mask and positions, all through TokenLayout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_usp.errors import ConfigError, DataError, LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.rotary_positions import inverse_frequencies

IGNORE_INDEX = -100  # the label of a token that does not count, as in torch's cross_entropy


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

    Shapes:
        tokens, labels, loss_mask: ``[b, seq_len]``, the whole sequence; ``[b, s_local]`` out.

    Args:
        labels: of every token the next one (:func:`next_token_labels`). They are shifted before
            they are sharded, because the token after a shard's last one is on another rank.

    Raises:
        LayoutError: shapes that differ, or a length other than ``layout.seq_len``.
        DataError: labels that are the tokens themselves, not shifted.
    """
    shapes = {tuple(x.shape) for x in (tokens, labels, loss_mask)}
    if len(shapes) > 1:
        raise LayoutError(
            f"tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)} and loss mask "
            f"{tuple(loss_mask.shape)} must have one shape [batch, sequence]"
        )
    _check_shifted(tokens, labels, loss_mask)
    return SequenceBatch(
        tokens=layout.shard(tokens, dim=1, rank=rank),
        labels=layout.shard(labels, dim=1, rank=rank),
        loss_mask=layout.shard(loss_mask.float(), dim=1, rank=rank),
    )


def _check_shifted(tokens: Tensor, labels: Tensor, loss_mask: Tensor) -> None:
    """Check that labels are next tokens; synchronizes with the GPU.

    Raises:
        DataError: every label that counts in the loss is the token at its own position. Not raised
            where no token that counts differs from the next one: then both readings agree.
    """
    counts = (loss_mask != 0) & (labels != IGNORE_INDEX)
    changes = tokens[:, 1:] != tokens[:, :-1]
    # No index of a mask: torch makes 8 bytes for each token of it.
    if bool((counts[:, :-1] & changes).any()) and bool(((labels == tokens) | ~counts).all()):
        raise DataError(
            f"all {int(counts.sum())} labels are the tokens at their own positions, so a model "
            "would learn to copy its input: shift them before they are sharded, "
            "labels = ds_usp.training.next_token_labels(labels)"
        )


def next_token_labels(labels: Tensor, documents: Any = ()) -> Tensor:
    """The label of every token: the next token; ``IGNORE_INDEX`` after the last one.

    Shapes:
        labels: ``[b, seq_len]``, each at the index of its own token (the tokens, or Hugging Face's
        ``labels`` with -100 where nothing is learned); the result has the same shape.

    Args:
        documents: borders of packed documents, as of ``MaskSpec``: the last token of one does not
            predict the first of the next.

    Raises:
        ConfigError: documents of another length, or of another number of samples.
    """
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    mask = MaskSpec.causal(documents)
    mask.check_length(labels.shape[1], labels.shape[0])
    for sample, borders in enumerate(mask.documents):
        rows = shifted if mask.samples is None else shifted[sample : sample + 1]
        rows[:, [border - 1 for border in borders[1:]]] = IGNORE_INDEX
    return shifted


def document_borders(tokens: Tensor, eod: int) -> list[list[int]]:
    """Cumulative borders of the documents of packed sequences, for ``MaskSpec(documents=...)``.

    An end-of-document token is the last one of its document, as in Megatron. Read once a batch,
    from the whole sequences, which all ranks that share them have alike.

    Shapes:
        tokens: ``[b, seq_len]``, before they are sharded; the result has one list of
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
    positions = torch.empty(len(borders), borders[0][-1], dtype=torch.int64, device=device)
    for row, sample in zip(positions, borders, strict=True):
        for start, stop in pairwise(sample):
            row[start:stop] = torch.arange(stop - start, device=device)
    return positions


def borders_of_positions(position_ids: Tensor) -> list[list[int]]:
    """Cumulative borders of documents by their position ids, which start anew at 0 in each.

    Shapes:
        position_ids: ``[b, seq_len]``; the result has one list of cumulative borders a sample.

    Raises:
        DataError: positions that neither go on by one nor start anew at 0.
    """
    rows = []
    for sample, positions in enumerate(position_ids.cpu()):
        steps = positions[1:] - positions[:-1]
        starts = (steps != 1).nonzero().flatten() + 1
        bad_starts = starts[positions[starts] != 0].tolist()
        if bad_starts:
            position = bad_starts[0]
            raise DataError(
                f"position ids of sample {sample} go from {int(positions[position - 1])} to "
                f"{int(positions[position])} at token {position}: they must go on by one, or start "
                "anew at 0 where the next packed document begins. Pad on the right"
            )
        rows.append([0, *starts.tolist(), len(positions)])
    return rows


def local_positions(
    layout: TokenLayout, rank: int, device: torch.device | str | None = None
) -> Tensor:
    """Global position of every token that ``rank`` holds, for position embeddings.

    Shapes:
        result: ``[s_local]``, int64.
    """
    segments = [segment.positions for segment in layout.segments(rank)]
    return torch.cat([torch.arange(x.start, x.stop, x.step, device=device) for x in segments])


def local_document_positions(
    layout: TokenLayout,
    rank: int,
    borders: Sequence[Sequence[int]],
    device: torch.device | str | None = None,
) -> Tensor:
    """Position in its document of every token that ``rank`` holds: the rank's shard of
    :func:`document_positions`, which is never made for all tokens.

    Shapes:
        borders: cumulative, a list for each sample; result ``[b, s_local]``, int64.
    """
    positions = local_positions(layout, rank, device)
    rows = []
    for sample in borders:
        starts = torch.tensor(sample[:-1], dtype=torch.int64, device=device)
        rows.append(positions - starts[torch.searchsorted(starts, positions, right=True) - 1])
    return torch.stack(rows)


def rotary_frequencies(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """Angles of rotary position embedding at any set of positions, in fp32.

    Made from positions and not from a range, so that every token layout gets its own.

    Shapes:
        positions: ``[s_local]``; result ``[s_local, 1, 1, dim]``, halves repeated (not
        interleaved), in radians.

    Raises:
        ConfigError: positions of another shape, an odd ``dim``.

    Source: RoFormer (arXiv 2104.09864), equation 15.
    """
    if positions.ndim != 1 or dim < 2 or dim % 2:
        raise ConfigError(
            f"positions {list(positions.shape)} must be [s_local], as one row of batch.positions "
            f"is, and dim={dim} even"
        )
    inverse = inverse_frequencies(dim, base, torch.float32, positions.device)
    angles = torch.outer(positions.float(), inverse)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
