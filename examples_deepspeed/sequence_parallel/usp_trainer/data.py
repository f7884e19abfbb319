"""The training data: a text file or Megatron's ``.bin/.idx``, as one long row of tokens, cut into
sequences whose order depends on the seed alone.

A sample is ``seq_length + 1`` neighbouring tokens, the last of which begins the next sample, so an
epoch predicts every token once. Sample ``i`` of a run is the same for any number of replicas, so
that a run goes on with other degrees where it ended.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import torch

from ds_usp import DataError
from ds_usp.training import IGNORE_INDEX, DataParallelRanks, document_borders
from usp_trainer.arguments import is_text

TEXT_VOCAB_SIZE = 257  # the bytes, and the end of a document
_HEADER = struct.Struct("<9sQBQQ")  # of an .idx file: magic, version, dtype, sequences, documents
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})


@dataclass(frozen=True)
class Tokens:
    """All token ids of the data; the last one of the vocabulary ends a document.

    Attributes:
        name: the file, for messages.
        ids: of a text in memory, else mapped from the file.
    """

    name: str
    ids: numpy.ndarray
    vocab_size: int


def read_tokens(path: str | None, vocab_size: int | None) -> Tokens:
    """The tokens of ``--data-path``; None: the documentation that every CPython has.

    Raises:
        DataError: no such file, or one that is cut off or damaged.
    """
    if path and not is_text(path):
        return Tokens(path, _encoded_ids(path), int(vocab_size or 0))
    if path:
        documents = [Path(path).read_bytes()]
    else:
        from pydoc_data.topics import topics

        documents = [text.encode() for _, text in sorted(topics.items())]
    end = numpy.array([TEXT_VOCAB_SIZE - 1], dtype=numpy.uint16)
    parts = [part for text in documents for part in (numpy.frombuffer(text, numpy.uint8), end)]
    return Tokens(path or "CPython's documentation", numpy.concatenate(parts), TEXT_VOCAB_SIZE)


def _encoded_ids(prefix: str) -> numpy.ndarray:
    """The token ids of a ``.bin/.idx`` pair in the order of the file, after the index is checked
    against it: a pair that was copied in part would train on other tokens."""
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    again = "Copy both files again, or encode them again"
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    magic, version, code, sequences, documents = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise DataError(f"{index} does not begin as an index of version 1. {again}")
    # Lengths, places in the .bin, documents; with one more byte a sequence of images and text.
    needed = _HEADER.size + 12 * sequences + 8 * documents
    if index.stat().st_size not in (needed, needed + sequences):
        raise DataError(
            f"{index} has {index.stat().st_size} bytes, and needs {needed} for the {sequences} "
            f"sequences of its header. {again}"
        )
    entries = numpy.memmap(index, mode="r", offset=_HEADER.size)
    lengths, places = entries[: 4 * sequences], entries[4 * sequences : 12 * sequences]
    dtype = numpy.dtype(_DTYPES[code])
    ends = lengths.view("<i4").cumsum(dtype=numpy.int64) * dtype.itemsize
    total = int(ends[-1]) if sequences else 0
    if total != tokens.stat().st_size or total == 0:
        raise DataError(
            f"{tokens} has {tokens.stat().st_size} bytes, its index is of {total}. {again}"
        )
    starts = numpy.concatenate(([0], ends[:-1]))
    if not numpy.array_equal(places.view("<i8"), starts):
        raise DataError(f"{index}: a sequence does not begin where the one before it ends. {again}")
    return numpy.memmap(tokens, mode="r", dtype=dtype)


class Samples:
    """Samples of a part of the data, without end: epoch after epoch.

    Args:
        part: the first and the last fraction of the tokens.
        seed: shuffles each epoch anew; None: in the order of the file.
        mask_ends: no loss where the input is the end of a document.
        documents: attention and positions begin anew in each document.

    Raises:
        DataError: the part has fewer tokens than one sample.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_length: int,
        part: tuple[float, float],
        *,
        seed: int | None = None,
        mask_ends: bool = False,
        documents: bool = False,
    ) -> None:
        start, stop = (round(fraction * len(tokens.ids)) for fraction in part)
        self._tokens, self._ids = tokens, tokens.ids[start:stop]
        self._seq_length, self._seed = seq_length, seed
        self._mask_ends, self._documents = mask_ends, documents
        self._epoch, self._order = -1, numpy.arange(0)
        self.num_samples = (len(self._ids) - 1) // seq_length
        if self.num_samples < 1:
            raise DataError(
                f"{tokens.name} has {len(tokens.ids)} tokens, of which --split gives {stop - start}"
                f" here: a sequence takes {seq_length + 1}. Use more data, another --split or a "
                "shorter --seq-length"
            )

    def _place(self, index: int) -> int:
        """Which sequence of the part sample ``index`` is."""
        epoch, offset = divmod(index, self.num_samples)
        if self._seed is None:
            return offset
        if epoch != self._epoch:
            shuffle = numpy.random.RandomState((self._seed + epoch) % 2**32)
            self._epoch, self._order = epoch, shuffle.permutation(self.num_samples)
        return int(self._order[offset])

    def batch(self, first: int, size: int) -> dict[str, Any]:
        """Samples ``first`` and following, as ``SequenceParallelDataLoader`` reads them.

        Raises:
            DataError: a token id beyond the vocabulary.
        """
        starts = [self._place(index) * self._seq_length for index in range(first, first + size)]
        rows = [self._ids[start : start + self._seq_length + 1].astype("i8") for start in starts]
        ids = torch.from_numpy(numpy.stack(rows))
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._tokens.vocab_size:
            raise DataError(
                f"{self._tokens.name} has token ids from {int(ids.min())} to {int(ids.max())}, and "
                f"--vocab-size is {self._tokens.vocab_size}"
            )
        tokens, labels, end = ids[:, :-1], ids[:, 1:].clone(), self._tokens.vocab_size - 1
        if self._mask_ends:
            labels[tokens == end] = IGNORE_INDEX
        batch = {"input_ids": tokens, "shift_labels": labels}
        if self._documents:
            batch["cu_seqlens"] = document_borders(tokens, end)
        return batch


class MicroBatches:
    """The micro batches of one data-parallel replica: in each pass every replica takes the next.

    Args:
        size: samples of a micro batch.
        first: sample of the run with which they begin.
        num: how many; None: without end.
    """

    def __init__(
        self,
        samples: Samples,
        size: int,
        replica: DataParallelRanks,
        first: int = 0,
        num: int | None = None,
    ) -> None:
        self._samples, self._size, self._num = samples, size, num
        self._starts = first + replica.rank * size, replica.size * size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in islice(count(*self._starts), self._num):
            yield self._samples.batch(start, self._size)


def split_samples(tokens: Tokens, args: Any) -> tuple[Samples, Samples | None]:
    """Samples of training, and of validation where ``--eval-interval`` asks for some."""
    train, valid = (ratio / sum(args.split) for ratio in args.split[:2])
    options = {"mask_ends": args.eod_mask_loss, "documents": args.reset_attention_mask}
    training = Samples(tokens, args.seq_length, (0.0, train), seed=args.seed, **options)
    if not args.eval_interval:
        return training, None
    return training, Samples(tokens, args.seq_length, (train, train + valid), **options)
