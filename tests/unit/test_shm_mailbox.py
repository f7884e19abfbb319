"""Records in shared memory: complete, in their slot, and never those of another call."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_usp.comm import shm_mailbox
from ds_usp.comm.call_record import RECORD_BYTES, CallRecord, Kind, Signature
from ds_usp.comm.shm_mailbox import ShmMailbox

Pair = tuple[ShmMailbox, ShmMailbox]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Two ranks' views of one mailbox."""
    path = tmp_path / "mailbox"
    path.write_bytes(bytes(ShmMailbox.size(2)))
    first, second = (ShmMailbox(str(path), rank, 2, timeout_s=0.2) for rank in range(2))
    return first, second


def test_a_record_is_read_as_it_was_posted(pair: Pair) -> None:
    first, second = pair
    for seq in range(1, 40):
        records = [f"rank {rank}, call {seq}".encode() * (seq % 5) for rank in range(2)]
        assert first.post(records[0]) == seq
        assert second.read(seq, 1) is None
        assert second.post(records[1]) == seq
        assert first.gather(seq) == second.gather(seq) == records
        assert first.all_equal(seq) == (seq % 5 == 0)


def test_the_last_eight_stay_and_no_other_is_taken_for_one(pair: Pair) -> None:
    first, second = pair
    for seq in range(1, 21):
        first.post(b"%d" % seq)
    for seq in range(1, 30):
        assert second.read(seq, 0) == (b"%d" % seq if 13 <= seq <= 20 else None)


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 20])
def test_an_incomplete_record_is_not_read(pair: Pair, byte: int) -> None:
    first, second = pair
    for _ in range(9):
        first.post(b"a call")
    assert second.read(9, 0) == b"a call"
    first._memory[shm_mailbox._SLOT_BYTES + byte] ^= 1  # record 9 is in the second of eight slots
    assert second.read(9, 0) is None


def test_the_longest_record_fills_its_slot_only(pair: Pair) -> None:
    first, second = pair
    for seq in range(1, 9):
        second.post(b"%d" % seq)
        first.post(b"x" * RECORD_BYTES)
    for seq in range(1, 9):
        assert first.read(seq, 1) == b"%d" % seq
        assert second.read(seq, 0) == b"x" * RECORD_BYTES


@pytest.mark.parametrize("text", ["", "q [2, 16, 4, 8], causal", "ü" * 5000])
def test_a_call_record_survives_its_encoding(text: str) -> None:
    signature = Signature((text, "causal"), (("zigzag", 2**40), ("striped", 16)))
    record = CallRecord(signature, Kind.BACKWARD, aborted_passes=3, exchanges=2**40)
    data = record.encode()
    decoded = CallRecord.decode(data.ljust(RECORD_BYTES, b"\0"))
    assert len(data) <= RECORD_BYTES and decoded[1:] == record[1:]
    assert decoded.signature == signature or "sha256" in str(decoded.signature)
    assert decoded.signature.layouts == signature.layouts
    for other in (
        Signature((f"{text}.", "causal"), signature.layouts),
        Signature((text, "causal "), signature.layouts),
        Signature((f"{text}, causal",), signature.layouts),
        Signature(signature.fields, signature.layouts[:1]),
    ):
        assert data != CallRecord(other, *record[1:]).encode()
