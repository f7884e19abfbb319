"""What a profile measured, as rows, and how a time between the rows is read off them.

Rows of a layer are those of the host that ran it: what its norms, activation functions and
exchanges of tensor parallelism cost is in them, and needs no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import TypeVar

from ds_usp.planner.models import ModelShape

Row = TypeVar("Row")


@dataclass(frozen=True)
class MeasuredLayer:
    """Seconds of one transformer layer but for its attention core, on one rank.

    Args:
        hidden, ffn, q_width, kv_width, gated: the whole layer's (:class:`ModelShape`).
        tp: ranks that share it; their exchanges are part of the time.
        tokens: that a rank holds.
        forward_s, backward_s: of the device, each direction.
        forward_host_s, backward_host_s: of the host to launch it; 0: not known.
    """

    hidden: int
    ffn: int
    q_width: int
    kv_width: int
    gated: bool
    tp: int
    tokens: int
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0


@dataclass(frozen=True)
class MeasuredAttention:
    """Seconds of one call of attention, causal zigzag, exchanges included.

    Args:
        seq_len: tokens of the whole sequence, one sequence.
        heads, kv_heads, head_dim: of a tensor-parallel rank, before Ulysses shares them.
        forward_s, backward_s, forward_host_s, backward_host_s: as of a layer.
    """

    ulysses: int
    ring: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0


@dataclass(frozen=True)
class MeasuredEmbeddingHead:
    """Seconds of all but the layers, both directions: embedding, last norm, output head, loss.

    Args:
        seconds: of the device.
        host_s: of the host to launch it; 0: not known.
    """

    hidden: int
    vocab: int
    tp: int
    tokens: int
    seconds: float
    host_s: float = 0.0


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds from the last backward to the next forward: gradients' exchange and optimizer.

    Args:
        elements: parameters of a rank, before ZeRO shares them.
        zero, zero_ranks: ZeRO's stage, and the ranks of dp x sp.
    """

    elements: int
    zero: int
    zero_ranks: int
    seconds: float


@dataclass(frozen=True)
class MeasuredExchange:
    """Seconds of one exchange inside a node, all groups of its size at once.

    Args:
        collective: all_to_all | all_gather | reduce_scatter | all_reduce | p2p.
        ranks: of each group, next to each other.
        sent_bytes: by every rank.
    """

    collective: str
    ranks: int
    sent_bytes: int
    seconds: float


def layer_rows(rows: Iterable[MeasuredLayer], model: ModelShape, tp: int) -> list[MeasuredLayer]:
    """Those of a model's layers, by their tokens."""
    wanted = model.hidden, model.ffn, model.q_width, model.kv_width, model.gated, tp
    return sorted(
        (r for r in rows if wanted == (r.hidden, r.ffn, r.q_width, r.kv_width, r.gated, r.tp)),
        key=lambda row: row.tokens,
    )


def nearest_tp(
    rows: Iterable[MeasuredLayer] | Iterable[MeasuredEmbeddingHead], model: ModelShape, tp: int
) -> int | None:
    """The tensor-parallel degree nearest to this one for which a model has rows."""
    measured = set()
    for row in rows:
        if isinstance(row, MeasuredLayer):
            mine = layer_rows([row], model, row.tp)
        else:
            mine = embedding_head_rows([row], model, row.tp)  # type: ignore[assignment]
        measured |= {found.tp for found in mine}
    return min(measured, key=lambda other: abs(log(other / tp)), default=None)


def nearest_step(
    rows: Iterable[MeasuredStep], zero: int, zero_ranks: int
) -> tuple[int, int] | None:
    """The stage of ZeRO and its ranks that were measured, nearest to these."""
    measured = {(row.zero, row.zero_ranks) for row in rows}
    return min(
        measured,
        key=lambda other: (abs(other[0] - zero), abs(log(other[1] / zero_ranks))),
        default=None,
    )


def embedding_head_rows(
    rows: Iterable[MeasuredEmbeddingHead], model: ModelShape, tp: int
) -> list[MeasuredEmbeddingHead]:
    """Those of a model's embedding and head, by their tokens."""
    wanted = model.hidden, model.vocab, tp
    return sorted(
        (row for row in rows if wanted == (row.hidden, row.vocab, row.tp)),
        key=lambda row: row.tokens,
    )


def step_rows(rows: Iterable[MeasuredStep], zero: int, zero_ranks: int) -> list[MeasuredStep]:
    """Those of a stage of ZeRO over so many ranks, by their elements."""
    return sorted(
        (row for row in rows if (row.zero, row.zero_ranks) == (zero, zero_ranks)),
        key=lambda row: row.elements,
    )


def exchange_rows(
    rows: Iterable[MeasuredExchange], collective: str, ranks: int
) -> tuple[MeasuredExchange, ...]:
    """Those of a collective over groups of a size, by their bytes."""
    found = (row for row in rows if (row.collective, row.ranks) == (collective, ranks))
    return tuple(sorted(found, key=lambda row: row.sent_bytes))


def seconds_at(
    rows: Sequence[Row],
    size: Callable[[Row], float],
    seconds: Callable[[Row], float],
    size_wanted: float,
) -> float:
    """Time for a size: on the straight line through the two rows around it, or nearest to it.

    A time has a part that grows with the size and one that does not, which a line through two
    points tells apart, also beyond them. Below the first row it shrinks in proportion at most, and
    beyond the last one it does not shrink.
    """
    first = rows[0]
    in_proportion = seconds(first) * (
        size_wanted / size(first)
    )  # a measured size has its time, exactly
    if len(rows) == 1:
        return in_proportion
    upper = next((i for i, row in enumerate(rows) if i and size(row) >= size_wanted), len(rows) - 1)
    low, high = rows[upper - 1], rows[upper]
    slope = (seconds(high) - seconds(low)) / (size(high) - size(low))
    if size_wanted > size(high):
        return seconds(high) + max(slope, 0.0) * (size_wanted - size(high))
    found = seconds(low) + slope * (size_wanted - size(low))
    return max(found, in_proportion) if size_wanted < size(first) else found


def launch_seconds(points: Sequence[tuple[float, float]], size_wanted: float) -> float:
    """What the host takes, between (size, seconds) points; 0, if one of them is not known."""
    return interpolate(points, size_wanted) if all(seconds > 0 for _, seconds in points) else 0.0


def interpolate(points: Sequence[tuple[float, float]], size_wanted: float) -> float:
    """A value between (size, value) points in order, linear in logarithms; the last one beyond."""
    if size_wanted <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if size_wanted <= high:
            share = log(size_wanted / low) / log(high / low)
            return exp(log(first) + (log(last) - log(first)) * share)
    return points[-1][1]
