"""Notes in shared memory: whole, in their place, and never those of another call."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_usp.comm import shm_mailbox as boards
from ds_usp.comm.shm_mailbox import ShmMailbox


@pytest.fixture
def two(tmp_path: Path) -> tuple[ShmMailbox, ShmMailbox]:
    """Two ranks' views of one board."""
    path = tmp_path / "board"
    path.write_bytes(bytes(ShmMailbox.size(2)))
    first, second = (ShmMailbox(str(path), rank, 2, timeout_s=0.2) for rank in range(2))
    return first, second


def test_a_note_is_read_as_it_was_written(two: tuple[ShmMailbox, ShmMailbox]) -> None:
    first, second = two
    for number in range(1, 40):
        notes = [f"rank {rank}, call {number}".encode() * (number % 5) for rank in range(2)]
        first.post(number, notes[0])
        assert second.read(number, 1) is None
        second.post(number, notes[1])
        assert first.gather(number) == second.gather(number) == notes


def test_the_last_eight_stay_and_no_other_is_taken_for_one(
    two: tuple[ShmMailbox, ShmMailbox],
) -> None:
    first, second = two
    for number in range(1, 21):
        first.post(number, b"%d" % number)
    for number in range(1, 30):
        want = b"%d" % number if 13 <= number <= 20 else None
        assert second.read(number, 0) == want


@pytest.mark.parametrize("at", [0, 8, 12, 16, 20])
def test_a_note_that_is_not_whole_is_not_there(two: tuple[ShmMailbox, ShmMailbox], at: int) -> None:
    first, second = two
    first.post(9, b"a call")
    assert second.read(9, 0) == b"a call"
    first._memory[boards._RECORD + at] ^= 1  # note 9 is in the second of eight places
    assert second.read(9, 0) is None


def test_the_longest_note_fills_its_place_only(two: tuple[ShmMailbox, ShmMailbox]) -> None:
    first, second = two
    for number in range(1, 9):
        second.post(number, b"%d" % number)
    for number in range(1, 9):
        first.post(number, b"x" * boards.MAX_MESSAGE_BYTES)
    for number in range(1, 9):
        assert first.read(number, 1) == b"%d" % number
        assert second.read(number, 0) == b"x" * boards.MAX_MESSAGE_BYTES
