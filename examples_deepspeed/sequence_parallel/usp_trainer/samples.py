"""The order of samples: endless, and the same whatever the degrees and the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy
from megatron.core.datasets.helpers import build_blending_indices

_FIRST_INDEX = 4096  # samples that the index of a blend has at first; it doubles as they are used


class Samples(Protocol):
    """Sample ``i`` of an endless stream, as megatron-core's GPTDataset gives it."""

    def __getitem__(self, index: int) -> Any: ...


class ShuffledEpochs:
    """A dataset again and again, each time in another order."""

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
    """A dataset again and again in its own order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index % len(self._dataset)]


class Blend:
    """Samples of several streams, as many of each as its weight says.

    Each sample is of the stream that is furthest behind its share so far (megatron-core's
    ``build_blending_indices``), so the first samples do not depend on how many follow: a run may be
    resumed with more steps, which a blend of a fixed size would train in another order.

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
