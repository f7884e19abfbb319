"""Bad input is an error at once, on every rank, that names what would work."""

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from trainer_runs import PLAIN_SGD, degrees, errors, errors_of_runs

from ds_usp import ConfigError, DataError, LayoutError, USPError

SP2 = degrees(sp=2) + PLAIN_SGD


def empty(folder: Path) -> str:
    (folder / "empty.txt").touch()
    return str(folder / "empty.txt")


def latin1(folder: Path) -> str:
    (folder / "latin1.txt").write_bytes("caf\xe9 ".encode("latin-1") * 500)
    return str(folder / "latin1.txt")


def short(folder: Path) -> str:
    (folder / "short.txt").write_text("too short")
    return str(folder / "short.txt")


def missing(folder: Path) -> str:
    return str(folder / "nothing.txt")


def no_bin(folder: Path) -> str:
    (folder / "half.idx").write_bytes(b"MMIDIDX\x00\x00")
    return str(folder / "half") + " --vocab-size 257"


def garbage_index(folder: Path) -> str:
    (folder / "garbage.idx").write_bytes(b"not an index, but long enough to be read as one")
    (folder / "garbage.bin").write_bytes(b"0123456789")
    return str(folder / "garbage") + " --vocab-size 257"


def no_vocab_size(folder: Path) -> str:
    (folder / "half.bin").write_bytes(b"0123456789")
    return no_bin(folder).split()[0]


def pair(folder: Path) -> str:
    """20 documents of 100 tokens of 2 bytes."""
    prefix = str(folder / "pair")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(20):
        builder.add_item(torch.arange(100))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def half_copied(folder: Path) -> str:
    prefix = pair(folder)
    os.truncate(f"{prefix}.bin", 2000)
    return f"{prefix} --vocab-size 257"


BAD_DATA = {
    half_copied: "pair.bin has 2000 bytes, its index",
    empty: "is empty (0 bytes)",
    latin1: "is not UTF-8 text: byte 3 is 0xe9",
    short: "fewer than the 65 training tokens",
    missing: "No such file or directory",
    no_bin: "half.bin is missing or empty",
    garbage_index: "megatron-core cannot read",
    no_vocab_size: "Give --vocab-size N",
}


def test_bad_data_is_refused_on_every_rank(tmp_path):
    runs = []
    for make in BAD_DATA:
        (folder := tmp_path / make.__name__).mkdir()
        runs.append(f"{SP2} --data-path {make(folder)}")
    errors = errors_of_runs(2, runs, tmp_path)
    for message, of_run in zip(BAD_DATA.values(), errors, strict=True):
        for error in of_run:
            assert isinstance(error, DataError) and message in str(error), (message, error)


def entry(offset: int, form: str, number: int) -> Callable[[bytes], bytes]:
    """A damage of an index: another number at an offset."""

    def damaged(index: bytes) -> bytes:
        data = bytearray(index)
        struct.pack_into(form, data, offset, number)
        return bytes(data)

    return damaged


# Of a pair's 20 sequences: lengths from byte 34, pointers from 114, document borders from 274.
DAMAGED = {
    "cut in the header": (lambda index: index[:20], "which does not begin as an index"),
    "version": (entry(9, "<Q", 2), "which does not begin as an index"),
    "dtype": (entry(17, "<B", 99), "unknown dtype 99"),
    "another dtype": (entry(17, "<B", 4), "has 4000 bytes, its index .* is of 8000"),
    "2^40 sequences": (entry(18, "<Q", 2**40), "are needed for the 1099511627776 sequences"),
    "documents": (entry(26, "<Q", 22), "has 442 bytes, 450 are needed"),
    "cut": (lambda index: index[:300], "has 300 bytes, 442 are needed"),
    "longer": (lambda index: index + b"12345678", "has 450 bytes, 442 are needed"),
    "negative length": (entry(34 + 4 * 3, "<i", -5), "length 3 is -5, and must be 0 or more"),
    "length": (entry(34, "<i", 101), "has 4000 bytes, its index .* is of 4002"),
    "wild pointer": (entry(114 + 8 * 7, "<q", 2**40), "pointer 7 is 1099511627776"),
    "pointer into the file": (entry(114 + 8 * 7, "<q", 1401), "pointer 7 is 1401"),
    "document border": (entry(274 + 8 * 5, "<q", 3), "document border 5 is 3"),
    "wild document": (entry(274 + 8 * 20, "<q", 99), "documents lead from 0 to 99, not from 0"),
    "first document": (entry(274, "<q", 1), "documents lead from 1 to 20"),
}


@pytest.mark.parametrize(("damaged", "message"), DAMAGED.values(), ids=DAMAGED)
def test_an_index_that_is_not_of_its_tokens_is_refused(damaged, message, tmp_path, monkeypatch):
    from usp_trainer import data

    monkeypatch.setattr(data, "_ENTRIES", 6)  # several pieces
    prefix = pair(tmp_path)
    data.check_pair(prefix)
    index = Path(f"{prefix}.idx")
    index.write_bytes(damaged(index.read_bytes()))
    with pytest.raises(DataError, match=f"{message}.*Copy both files again"):
        data.check_pair(prefix)


def test_an_index_with_modes_and_without_sequences_is_read(tmp_path):
    from usp_trainer.data import check_pair

    prefix = pair(tmp_path)
    with Path(f"{prefix}.idx").open("ab") as index:
        index.write(bytes(20))  # one mode a sequence
    check_pair(prefix)
    Path(f"{prefix}.bin").write_bytes(b"")
    IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16).finalize(f"{prefix}.idx")
    check_pair(prefix)


def test_a_damaged_cache_is_made_again_or_refused(tmp_path, monkeypatch):
    from usp_trainer import data

    prefix = data.encode_text(tmp_path, [b"some text"])
    whole = Path(f"{prefix}.bin").read_bytes()
    os.truncate(f"{prefix}.bin", 3)
    assert data.encode_text(tmp_path, [b"some text"]) == prefix
    assert Path(f"{prefix}.bin").read_bytes() == whole
    numpy.save(tmp_path / "index.npy", numpy.arange(9))
    data._check_cached_indexes(tmp_path)
    ran = tmp_path / "ran"
    poisoned = b"cposix\nsystem\n(S'touch " + os.fsencode(ran) + b"'\ntR."
    for content in (b"", poisoned, (tmp_path / "index.npy").read_bytes()[:-8]):
        (tmp_path / "index.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"index.npy is no whole index: .* made again"):
            data._check_cached_indexes(tmp_path)
    (tmp_path / "index.npy").unlink()
    (tmp_path / "index.npy").symlink_to(ran)
    with pytest.raises(DataError, match="it is a symbolic link"):
        data._check_cached_indexes(tmp_path)
    assert not ran.exists()


def test_a_limit_of_file_sizes_is_named_with_the_file(tmp_path):
    from usp_trainer.data import encode_text

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"/text-\w+.bin: File too large .*ulimit -f"):
            encode_text(tmp_path, [b"some text" * 1000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"/text-\w+.bin: Not a directory$"):
        encode_text(tmp_path / "file" / "data", [b"some text"])


def test_token_ids_beyond_the_vocabulary_are_refused_on_every_rank(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some plain text " * 2000)
    assert errors(2, f"{SP2} --data-path {text}", tmp_path) == [None, None]
    prefix = next((tmp_path / "data").glob("text-*.idx")).with_suffix("")
    for error in errors(2, f"{SP2} --data-path {prefix} --vocab-size 100", tmp_path):
        assert isinstance(error, DataError)
        assert "--vocab-size 100" in str(error)


BAD_FLAGS = {
    degrees(sp=2, pp=2, zero=2): (ConfigError, "Use --zero-stage 1"),
    degrees(sp=4, u=2) + " --seq-length 3": (LayoutError, "at least 4 tokens"),
    degrees(sp=3): (ConfigError, "Use a multiple of 3 ranks"),
    degrees(sp=4, u=2) + " --usp-kernel flash4": (USPError, "flash4: "),
}


def test_flags_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    errors = errors_of_runs(4, [flags + PLAIN_SGD for flags in BAD_FLAGS], tmp_path)
    for (kind, message), of_run in zip(BAD_FLAGS.values(), errors, strict=True):
        for error in of_run:
            assert isinstance(error, kind) and message in str(error), (message, error)
