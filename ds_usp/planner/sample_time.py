"""Seconds that a sample of a step adds to the ranks it is dealt to: attention, linear layers and
exchanges (:mod:`ds_usp.geometry.dealing` deals by them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ds_usp.geometry.dealing import ulysses_of
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.step_time import micro_batch_time

_MOST_PACKED = 64  # samples of one length in the row that is priced
_FIRST, _RATIO = 64, 2**0.5  # lengths at which rows are priced; between them it is a line


def sample_cost(
    cluster: Cluster, model: ModelShape, max_tokens: int, *, recompute: str = "none"
) -> SampleTime:
    """The cost by which ``DealtBatches`` deals: ``cost(tokens, ranks)``.

    Args:
        max_tokens: that a rank can hold: a sample is priced in a row of as many of its length.
        recompute: as of :class:`ParallelConfig`.
    """
    return SampleTime(cluster, model, max_tokens, recompute)


@dataclass(frozen=True)
class SampleTime:
    """See :func:`sample_cost`."""

    cluster: Cluster
    model: ModelShape
    max_tokens: int
    recompute: str = "none"
    _rows: dict[tuple[int, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, tokens: int, ranks: int) -> float:
        start = self._seconds(ranks, 1, ranks)
        if not tokens:
            return start
        low = _FIRST
        while low * _RATIO <= tokens:
            low = int(low * _RATIO)
        points = [0, low, int(low * _RATIO)] if low > tokens else [low, int(low * _RATIO)]
        (a, b) = next((a, b) for a, b in pairwise(points) if tokens <= b)
        added = [0.0 if not x else self._added(x, ranks) for x in (a, b)]
        return start + added[0] + (added[1] - added[0]) * (tokens - a) / (b - a)

    def _added(self, tokens: int, ranks: int) -> float:
        """To a row that is full of such samples: kernels and exchanges are as long as they are in
        one, and what a micro batch takes at least is shared by all of them."""
        count = max(1, min(_MOST_PACKED, ranks * self.max_tokens // tokens))
        start = self._seconds(ranks, 1, ranks)
        return (self._seconds(tokens, count, ranks) - start) / count

    def _seconds(self, tokens: int, count: int, ranks: int) -> float:
        """Of a row of so many samples, forward and backward."""
        key = tokens, count, ranks
        if key not in self._rows:
            heads = self.model.heads, self.model.kv_heads
            ulysses = ulysses_of(ranks, heads, self.cluster.gpus_per_node)
            config = ParallelConfig(
                ulysses=ulysses, ring=ranks // ulysses, recompute=self.recompute
            )
            documents = (tokens,) * count if count > 1 else ()
            work = Workload(self.model, tokens * count, 1, documents)
            time = micro_batch_time(self.cluster, work, config)
            self._rows[key] = self.model.layers * time.layer_s + time.head.device_s
        return self._rows[key]
