"""The order of samples: an endless stream that no degree and no number of steps changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy
from megatron.core.datasets.helpers import build_blending_indices

_FIRST_INDEX = 4096  # initial length of the index of a blend; it doubles when it is used up


class Samples(Protocol):
    """Sample ``i`` of an endless stream, as megatron-core's GPTDataset gives it."""

    def __getitem__(self, index: int) -> Any: ...


class ShuffledEpochs:
    """A dataset repeated endlessly, shuffled anew in each epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._epoch, self._order = -1, numpy.arange(0)

    def __getitem__(self, index: int) -> Any:
        epoch, offset = divmod(index, len(self._dataset))
        if epoch != self._epoch:
            shuffle = numpy.random.RandomState((self._seed + epoch) % 2**32)
            self._epoch, self._order = epoch, shuffle.permutation(len(self._dataset))
        return self._dataset[int(self._order[offset])]


class InOrder:
    """A dataset repeated endlessly in its own order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index % len(self._dataset)]


class Blend:
    """Samples of several streams in proportion to their weights.

    Each sample is of the stream that is furthest below its fraction so far (megatron-core's
    ``build_blending_indices``), so the order does not depend on how many samples follow: a run can
    be resumed with more steps, which would reorder a blend of fixed size.

    Args:
        weights: above 0; they need not sum to 1.
    """

    def __init__(self, streams: Sequence[Samples], weights: Sequence[float]) -> None:
        self._streams = streams
        self._weights = numpy.array(weights, dtype=numpy.float64) / sum(weights)
        self._grow(_FIRST_INDEX)

    def _grow(self, size: int) -> None:
        self._stream = numpy.zeros(size, dtype=numpy.int16)
        self._sample = numpy.zeros(size, dtype=numpy.int64)
        build_blending_indices(
            self._stream, self._sample, self._weights, len(self._streams), size, False
        )

    def __getitem__(self, index: int) -> Any:
        if index >= len(self._stream):
            self._grow(2 ** int(index).bit_length())
        return self._streams[int(self._stream[index])][int(self._sample[index])]
