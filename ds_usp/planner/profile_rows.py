"""Rows of a profile: what was measured, and how a time between the rows is read off them.

A layer's rows are measured in the framework that runs it: its norms, activation functions and
tensor-parallel collectives are part of the time, and need no formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from operator import attrgetter
from typing import Any, TypeVar

from ds_usp.planner.field_checks import Collective, Count, LaunchSeconds, Positive, ZeroStage
from ds_usp.planner.models import ModelShape

Row = TypeVar("Row")


@dataclass(frozen=True)
class MeasuredLayer:
    """Seconds of one transformer layer without its attention core, on one rank.

    Args:
        hidden, ffn, q_width, kv_width, gated: of the unsharded layer (:class:`ModelShape`).
        tp: ranks that share it; their collectives are part of the time.
        tokens: of one rank.
        forward_s, backward_s: of the GPU, each direction.
        forward_host_s, backward_host_s: of the CPU to launch it; 0: not known.
    """

    hidden: Count
    ffn: Count
    q_width: Count
    kv_width: Count
    gated: bool
    tp: Count
    tokens: Count
    forward_s: Positive
    backward_s: Positive
    forward_host_s: LaunchSeconds = 0.0
    backward_host_s: LaunchSeconds = 0.0


@dataclass(frozen=True)
class MeasuredAttention:
    """Seconds of one attention call, causal zigzag, its exchanges included.

    Args:
        seq_len: tokens of the global sequence; one sequence.
        heads, kv_heads, head_dim: of a tensor-parallel rank, before the Ulysses all-to-all.
        forward_s, backward_s, forward_host_s, backward_host_s: as of a layer.
    """

    ulysses: Count
    ring: Count
    seq_len: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    forward_s: Positive
    backward_s: Positive
    forward_host_s: LaunchSeconds = 0.0
    backward_host_s: LaunchSeconds = 0.0


@dataclass(frozen=True)
class MeasuredEmbeddingHead:
    """Seconds of embedding, last norm, output head and loss, forward and backward together.

    Args:
        seconds: of the GPU.
        host_s: of the CPU to launch it; 0: not known.
    """

    hidden: Count
    vocab: Count
    tp: Count
    tokens: Count
    seconds: Positive
    host_s: LaunchSeconds = 0.0


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds from the last backward to the next forward: gradient reduction and optimizer.

    Args:
        elements: parameters of a rank, before ZeRO shards them.
        zero, zero_ranks: ZeRO stage, and the ranks of dp x sp.
    """

    elements: Count
    zero: ZeroStage
    zero_ranks: Count
    seconds: Positive


@dataclass(frozen=True)
class MeasuredExchange:
    """Seconds of one collective inside a node, all groups of its size at once.

    Args:
        ranks: of each group, contiguous.
        sent_bytes: by every rank.
    """

    collective: Collective
    ranks: Count
    sent_bytes: Count
    seconds: Positive


def select_rows(rows: Iterable[Row], by: str, **wanted: object) -> list[Row]:
    """The rows whose fields have these values, ascending by the field ``by``."""
    items = wanted.items()
    matching = (row for row in rows if all(getattr(row, name) == v for name, v in items))
    return sorted(matching, key=attrgetter(by))


def layer_rows(
    rows: Iterable[MeasuredLayer], model: ModelShape, tp: int | None = None
) -> list[MeasuredLayer]:
    """The rows of a model's layers by tokens; ``tp`` None: of every tensor-parallel degree."""
    shape = {name: getattr(model, name) for name in ("hidden", "ffn", "q_width", "kv_width")}
    degree = {} if tp is None else {"tp": tp}
    return select_rows(rows, "tokens", gated=model.gated, **shape, **degree)


def embedding_head_rows(
    rows: Iterable[MeasuredEmbeddingHead], model: ModelShape, tp: int | None = None
) -> list[MeasuredEmbeddingHead]:
    """The rows of a model's embedding and head by tokens; ``tp`` None: of every degree."""
    degree = {} if tp is None else {"tp": tp}
    return select_rows(rows, "tokens", hidden=model.hidden, vocab=model.vocab, **degree)


def nearest_tp(rows: Iterable[Any], tp: int) -> int | None:
    """The tensor-parallel degree of the rows that is nearest to one; None without rows."""
    return min({row.tp for row in rows}, key=lambda other: abs(log(other / tp)), default=None)


def nearest_step(
    rows: Iterable[MeasuredStep], zero: int, zero_ranks: int
) -> tuple[int, int] | None:
    """The measured ZeRO stage and number of ranks nearest to these; None without rows."""
    return min(
        {(row.zero, row.zero_ranks) for row in rows},
        key=lambda other: (abs(other[0] - zero), abs(log(other[1] / zero_ranks))),
        default=None,
    )


def seconds_at(rows: Sequence[Any], by: str, seconds: str, size: float) -> float:
    """Seconds for a size: on the line through the two rows around it, or nearest to it.

    A time has a part that grows with the size and one that does not; the line through two points
    separates them, also beyond the points. Below the first row the time shrinks in proportion at
    most, and beyond the last row it does not shrink.

    Args:
        by, seconds: names of the rows' fields; the rows ascend by ``by``.
    """
    points = [(getattr(row, by), getattr(row, seconds)) for row in rows]
    first_size, first_s = points[0]
    in_proportion: float = first_s * (size / first_size)  # exact at a measured size
    if len(points) == 1:
        return in_proportion
    upper = next((i for i, (x, _) in enumerate(points) if i and x >= size), len(points) - 1)
    (low, low_s), (high, high_s) = points[upper - 1], points[upper]
    slope = (high_s - low_s) / (high - low)
    if size > high:
        return float(high_s + max(slope, 0.0) * (size - high))
    on_line = float(low_s + slope * (size - low))
    return max(on_line, in_proportion) if size < first_size else on_line


def launch_seconds(points: Sequence[tuple[float, float]], size: float) -> float:
    """CPU launch time between (size, seconds) points; 0 (not known) if one of them is 0."""
    return interpolate(points, size) if all(seconds > 0 for _, seconds in points) else 0.0


def interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """A value between ascending (size, value) points, log-log linear; constant outside of them."""
    if points[0][0] < size < points[-1][0]:
        return exp(interpolate_curve([(x, log(y)) for x, y in points], size))
    return points[0][1] if size <= points[0][0] else points[-1][1]


def interpolate_curve(points: Sequence[tuple[float, float]], size: float) -> float:
    """The curve's value at a size, linear in the size's logarithm and constant beyond both ends."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if size <= high:
            return first + (last - first) * log(size / low) / log(high / low)
    return points[-1][1]
