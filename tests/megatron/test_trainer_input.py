"""Bad input is an error at once, on every rank, that names what would work."""

from pathlib import Path

import pytest
from trainer_runs import PLAIN_SGD, degrees, errors

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty, "is empty (0 bytes)"),
        (latin1, "is not UTF-8 text: byte 3 is 0xe9"),
        (short, "fewer than the 65 training tokens"),
        (missing, "No such file or directory"),
        (no_bin, "half.bin is missing or empty"),
        (garbage_index, "megatron-core cannot read"),
        (no_vocab_size, "Give --vocab-size N"),
    ],
)
def test_bad_data_is_refused_on_every_rank(make, message, tmp_path):
    for error in errors(2, f"{SP2} --data-path {make(tmp_path)}", tmp_path):
        assert isinstance(error, DataError)
        assert message in str(error), error


def test_token_ids_beyond_the_vocabulary_are_refused_on_every_rank(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some plain text " * 2000)
    assert errors(2, f"{SP2} --data-path {text}", tmp_path) == [None, None]
    prefix = next((tmp_path / "data").glob("text-*.idx")).with_suffix("")
    for error in errors(2, f"{SP2} --data-path {prefix} --vocab-size 100", tmp_path):
        assert isinstance(error, DataError)
        assert "--vocab-size 100" in str(error)


@pytest.mark.parametrize(
    ("flags", "error_class", "message"),
    [
        (degrees(sp=2, pp=2, zero=2), ConfigError, "Use --zero-stage 1"),
        (degrees(sp=4, u=2) + " --seq-length 3", LayoutError, "at least 8 tokens"),
        (degrees(sp=3), ConfigError, "Use a multiple of 3 ranks"),
        (degrees(sp=4, u=2) + " --usp-kernel flash4", USPError, "flash4: "),
    ],
)
def test_flags_that_do_not_fit_are_refused_on_every_rank(flags, error_class, message, tmp_path):
    for error in errors(4, flags + PLAIN_SGD, tmp_path):
        assert isinstance(error, error_class)
        assert message in str(error), error
