"""Training data: text or Megatron ``.bin/.idx`` files, read by megatron-core's GPTDataset."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.indexed_dataset import (
    _INDEX_HEADER,
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from ds_usp import DataError, TokenLayout
from ds_usp.training import SequenceBatch, document_borders, local_document_positions, shard_batch
from usp_trainer.launch import broadcast_from_rank0
from usp_trainer.run_files import CACHE, TEXT_VOCAB_SIZE, data_files, not_written, parse_blend

EOD = TEXT_VOCAB_SIZE - 1  # end of document; the ids below it are the 256 bytes
DOCUMENT_BYTES = 1 << 14  # a text becomes documents of this size, so that some can be held out

_FIRST_INDEX = 4096  # initial length of the index of a blend; it doubles when it is used up
_HEADER = struct.Struct("<9sQBQQ")  # of an .idx file: magic, version, dtype, sequences, documents
_ENTRIES = 1 << 22  # of an .idx file, checked at once
_AGAIN = "Copy both files again from an intact copy, or encode the data again"


@dataclass(frozen=True)
class TokenIds:
    """The tokenizer interface that GPTDataset needs. No id pads: sequences are always full."""

    vocab_size: int
    pad: int = -1

    @property
    def eod(self) -> int:
        return self.vocab_size - 1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}


@dataclass(frozen=True)
class TrainingBatch:
    """One rank's local tokens of a micro batch, and the documents packed in it.

    Args:
        local: tokens, labels and loss mask, each ``[b, s_local]``.
        positions: ``[b, s_local]``, restarting at 0 in each document; None: positions count from
            the first token of the sequence.
        documents: cumulative document lengths of each sample, in tokens of the full sequence;
            None: no document mask.
    """

    local: SequenceBatch
    positions: torch.Tensor | None = None
    documents: list[list[int]] | None = None


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
    """Samples of several streams in proportion to their weights, which need not sum to 1."""

    def __init__(self, streams: Sequence[Samples], weights: Sequence[float]) -> None:
        # Each sample is of the stream that is furthest below its fraction so far, so the order does
        # not depend on how many follow: a run can be resumed with more steps, which would reorder a
        # blend of fixed size.
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


class TokenData:
    """The batches of one data-parallel replica, in an order that no parallel degree changes.

    Sample ``i`` of training is the ``i``-th of an endless stream of shuffled epochs; step ``t``
    takes samples ``t * global_batch_size`` and following for any number of replicas, so that a run
    can be resumed under other degrees.
    """

    def __init__(self, args: Namespace, layout: TokenLayout, sp_rank: int, dp_rank: int) -> None:
        self._args, self._layout, self._sp_rank, self._dp_rank = args, layout, sp_rank, dp_rank
        prefixes, self.vocab_size = broadcast_from_rank0(partial(_encoded_data, args))
        sizes: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(sizes, _sizes(prefixes))  # the same files, not copies of them
        other = [rank for rank, seen in enumerate(sizes) if seen != sizes[0]]
        if other:
            raise DataError(
                f"ranks {other} do not see {', '.join(prefixes)} as rank 0 does (bytes "
                f"{sizes[other[0]]}, {sizes[0]} there; -1: no file). Put the data and "
                "--data-cache-path on storage that all nodes share"
            )
        self._train, self._valid = _samples(args, prefixes, self.vocab_size)
        if args.eval_interval and self._valid is None:
            raise DataError(
                f"--eval-interval {args.eval_interval}: --split {args.split} leaves fewer than the "
                f"{args.seq_length + 1} tokens of one sequence to validate on. Give more"
            )

    def training_batches(self, first_sample: int) -> list[TrainingBatch]:
        return self._batches(self._train, first_sample)

    def validation_batches(self, index: int) -> list[TrainingBatch]:
        return self._batches(self._valid, index * self._args.global_batch_size)

    def _batches(self, samples: Samples, first: int) -> list[TrainingBatch]:
        # Replicas take consecutive micro batches of a step, in each pass one.
        size, replicas = self._args.micro_batch_size, self._args.data_parallel_size
        passes = range(self._args.accumulation_steps)
        starts = [first + (n * replicas + self._dp_rank) * size for n in passes]
        return [self._batch(samples, range(start, start + size)) for start in starts]

    def _batch(self, samples: Samples, indices: Iterable[int]) -> TrainingBatch:
        # One sample at a time is whole in memory.
        args, rank = self._args, self._sp_rank
        shards, borders = [], []
        names = ("tokens", "labels", "loss_mask")
        for index in indices:
            sample = samples[index]
            whole = [sample[name][None] for name in names]
            shards.append(shard_batch(*whole, layout=self._layout, rank=rank))
            borders += document_borders(whole[0], TokenIds(self.vocab_size).eod)
        local = {name: torch.cat([getattr(shard, name) for shard in shards]) for name in names}
        positions = None
        if args.reset_position_ids:
            positions = local_document_positions(self._layout, rank, borders)
        documents = borders if args.reset_attention_mask else None
        return TrainingBatch(SequenceBatch(**local), positions, documents)


def _samples(
    args: Namespace, prefixes: list[str], vocab_size: int
) -> tuple[Samples, Samples | None]:
    """Training and validation samples; validation is None if one of the datasets is too small."""
    # Without weights all files form one dataset, with weights each is a dataset of its own.
    _, weights = parse_blend(args.data_path or ())
    parts = [prefixes] if weights is None else [[prefix] for prefix in prefixes]
    built = [_build(args, part, vocab_size) for part in parts]
    train = [ShuffledEpochs(part, args.seed + 1000 * n) for n, (part, _) in enumerate(built)]
    valid = [InOrder(part) for _, part in built if part is not None]
    if weights is None:
        return train[0], valid[0] if valid else None
    return Blend(train, weights), Blend(valid, weights) if len(valid) == len(built) else None


def _build(
    args: Namespace, prefixes: list[str], vocab_size: int
) -> tuple[GPTDataset, GPTDataset | None]:
    """megatron-core's data sets for training and, or None, validation, one epoch each."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, None),
        split=args.split,
        path_to_cache=str(_index_dir(args)),
        tokenizer=TokenIds(vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    sizes = [None, None, None]  # one epoch each; TokenData repeats them
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
    try:
        train, valid, _ = builder.build()
    except OSError as error:
        raise not_written(_index_dir(args), error) from error
    except (AssertionError, ValueError, IndexError) as error:
        raise DataError(f"megatron-core cannot read {', '.join(prefixes)}: {error}") from error
    if train is None or len(train) == 0:
        raise DataError(
            f"{', '.join(prefixes)} with --split {args.split} holds fewer than the "
            f"{args.seq_length + 1} training tokens of one sequence. Use more text or a "
            "shorter --seq-length"
        )
    return train, valid if valid is not None and len(valid) else None


def _cache_dir(args: Namespace) -> Path:
    return Path(args.data_cache_path or Path(args.output_dir) / CACHE)


def _index_dir(args: Namespace) -> Path:
    return _cache_dir(args) / "index"


def _check_cached_indexes(folder: Path) -> None:
    """Refuse (DataError) what megatron-core must neither read nor write in its cache of indexes."""
    # It writes through a link, and unpickles a file that is no array: which then runs any code.
    for path in sorted(folder.glob("*.npy")):
        try:
            if path.is_symlink():
                raise ValueError("it is a symbolic link")
            numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path} is no whole index: {error}. Remove it: it is made again"
            ) from error


def _sizes(prefixes: Sequence[str]) -> list[int]:
    """Bytes of the ``.bin`` and the ``.idx`` file of each pair; -1 for one that is not there."""
    paths = [Path(path(prefix)) for prefix in prefixes for path in (get_bin_path, get_idx_path)]
    return [path.stat().st_size if path.is_file() else -1 for path in paths]


def check_pair(prefix: str) -> None:
    """Refuse a ``.bin/.idx`` pair whose index is not of its tokens: cut off or damaged.

    Reads the index once, in pieces, as megatron-core does after it: 12 to 20 bytes a sequence.

    Raises:
        DataError: with the entry, the number found and the number wanted.
    """
    # megatron-core reads at an entry's place when a sample is asked for: what is cut off ends a run
    # after days, and a wrong entry that points into the file trains on other tokens.
    path, (bin_bytes, idx_bytes) = get_idx_path(prefix), _sizes([prefix])
    with Path(path).open("rb") as file:
        header = file.read(_HEADER.size)
    magic, version, code, sequences, documents = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    if len(header) < _HEADER.size or (magic, version) != (_INDEX_HEADER, 1):
        raise DataError(
            f"megatron-core cannot read {path}, which does not begin as an index of version 1. "
            f"{_AGAIN}"
        )
    if code not in {kind.value for kind in DType}:
        raise DataError(f"{path}: unknown dtype {code} of token ids. {_AGAIN}")
    needed = _HEADER.size + 12 * sequences + 8 * documents
    if idx_bytes not in (needed, needed + sequences):  # a byte more for each: of images and text
        raise DataError(
            f"{path} has {idx_bytes} bytes, {needed} are needed for the {sequences} sequences and "
            f"{documents} documents that its header counts. {_AGAIN}"
        )
    ends = _HEADER.size, _HEADER.size + 4 * sequences, _HEADER.size + 12 * sequences, needed
    entries = numpy.memmap(path, mode="r")
    lengths, pointers, borders = (
        entries[first:last].view(dtype)
        for (first, last), dtype in zip(pairwise(ends), ("<i4", "<i8", "<i8"), strict=True)
    )
    token_bytes, total = DType.size(code), 0
    for first in range(0, sequences, _ENTRIES):
        sizes = lengths[first : first + _ENTRIES]
        _refuse(path, "length", sizes, sizes < 0, first, "0 or more")
        total += int(sizes.sum(dtype=numpy.int64)) * token_bytes
    if total != bin_bytes:
        raise DataError(
            f"{get_bin_path(prefix)} has {bin_bytes} bytes, its index {path} is of {total} "
            f"({sequences} sequences, {token_bytes} bytes a token). {_AGAIN}"
        )
    place = 0
    for first in range(0, sequences, _ENTRIES):
        found = pointers[first : first + _ENTRIES]
        stops = lengths[first : first + _ENTRIES].cumsum(dtype=numpy.int64) * token_bytes + place
        wrong = found != numpy.append(place, stops[:-1])
        _refuse(path, "pointer", found, wrong, first, "the bytes of the sequences before it")
        place = int(stops[-1])
    last = 0
    for first in range(0, documents, _ENTRIES):
        found = borders[first : first + _ENTRIES]
        wrong = found < numpy.append(last, found[:-1])
        _refuse(path, "document border", found, wrong, first, "at least the one before it")
        last = int(found[-1])
    if documents == 0 or int(borders[0]) != 0 or last != sequences:
        ends = f"from {int(borders[0])} to {last}" if documents else "nowhere"
        raise DataError(f"{path}: documents lead {ends}, not from 0 to {sequences}. {_AGAIN}")


def _refuse(
    path: str, what: str, found: numpy.ndarray, wrong: numpy.ndarray, first: int, wanted: str
) -> None:
    """DataError for the first entry that is wrong, if one is."""
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(
            f"{path}: {what} {first + at} is {int(found[at])}, and must be {wanted}. {_AGAIN}"
        )


def _encoded_data(args: Namespace) -> tuple[list[str], int]:
    """Prefixes of ``.bin/.idx`` pairs and the number of token ids; encodes text. Rank 0 only."""
    paths, indexed = data_files(args)
    _check_cached_indexes(_index_dir(args))
    if indexed:
        for path in paths:
            check_pair(path)
        return paths, args.vocab_size
    texts = [[_read(path)] for path in paths]
    if not texts:
        from pydoc_data.topics import topics

        texts = [[text.encode() for _, text in sorted(topics.items())]]
    return [encode_text(_cache_dir(args), documents) for documents in texts], TEXT_VOCAB_SIZE


def encode_text(cache: Path, documents: Sequence[bytes]) -> str:
    """Prefix of the encoded text in ``cache``, written once for each content: byte tokens, each
    document ending in EOD. A document longer than DOCUMENT_BYTES is written as several."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    prefix = str(cache / f"text-{digest.hexdigest()[:16]}")
    if Path(get_idx_path(prefix)).is_file():
        with suppress(DataError):  # damaged: it is encoded again
            check_pair(prefix)
            return prefix
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="encoding-") as folder:
            temporary = str(Path(folder) / "text")
            builder = IndexedDatasetBuilder(get_bin_path(temporary), dtype=numpy.uint16)
            for document in documents:
                ids = numpy.frombuffer(document, dtype=numpy.uint8)
                tokens = numpy.append(ids, numpy.int32(EOD))
                for begin in range(0, len(tokens), DOCUMENT_BYTES):
                    builder.add_item(torch.from_numpy(tokens[begin : begin + DOCUMENT_BYTES]))
                    builder.end_document()
            builder.finalize(get_idx_path(temporary))
            os.replace(get_bin_path(temporary), get_bin_path(prefix))
            # Last: it marks it as complete.
            os.replace(get_idx_path(temporary), get_idx_path(prefix))
    except OSError as error:
        raise not_written(Path(get_bin_path(prefix)), error) from error
    return prefix


def _read(path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"--data-path {path}: {error.strerror}") from error
    if not data.strip():
        raise DataError(f"--data-path {path} is empty ({len(data)} bytes)")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data-path {path} is not UTF-8 text: byte {error.start} is "
            f"0x{data[error.start]:02x} ({error.reason}). Convert it, or give the prefix of a "
            ".bin/.idx pair"
        ) from error
    return data
