"""Shared-memory mailbox: records that the ranks of one node exchange without a collective.

A rank writes its record and polls for the others', and wakes nobody: that takes a few microseconds,
where a collective over sockets takes 130 of each CPU to start (16 cores, 2 ranks). In each
comparison ``ConsistencyChecker`` posts and gathers a record on every rank, by this or by its
``GroupTransport``, which has the same methods.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ds_usp.comm.call_record import RECORD_BYTES, name_ranks
from ds_usp.comm.process_groups import all_gather_bytes, timeout_of
from ds_usp.errors import MeshError

MAX_IN_FLIGHT = 4  # records that a rank may post before it has read the others' first
WARN_AFTER_S = 30.0  # of one wait, with the ranks that have not come
_SLOTS = 2 * (MAX_IN_FLIGHT + 1)  # records of a rank that are not overwritten
_HEADER = struct.Struct("<QII")  # sequence number, length of the data, checksum
_SLOT_BYTES = _HEADER.size + RECORD_BYTES
_SHARED_MEMORY = Path("/dev/shm")
_PATH_BYTES = 256  # of the file's path, which rank 0 sends: an all-gather has one length
_MIN_POLL_S, _MAX_POLL_S = 2e-5, 2e-3  # bounds of the pause between two looks for a record
_LOOK_S = 1.0  # between two looks at who is late, has ended or has aborted


def warn_of_late_ranks(late: Sequence[int], waited_s: float, timeout_s: float) -> None:
    """Log for people which ranks a comparison waits for."""
    logging.getLogger("ds_usp").warning(
        "a call has waited %.0f s for %s of the sequence-parallel group; it raises after %.0f s. "
        "All make the same calls in one order: validation too runs on every rank or on none",
        waited_s,
        name_ranks(late),
        timeout_s,
    )


# The file that the ranks of a node map, for 2 ranks:
#
#     rank 0: slot 0 .. slot 9 | rank 1: slot 0 .. slot 9 | abort flags
#     a slot: sequence number, length, checksum | data
#
# Record n lies in slot n % 10. There is no lock: each slot has one writer, who writes the data
# before the header, and a reader takes a record only if number, length and checksum all fit. So a
# record that is half written reads as "not there yet".
#
# No record is overwritten that a rank has still to read. A rank has at most four records in flight,
# and one more where it declares that it has left: so it posts record n after it has read record
# n - 5 of every other rank, and who posted that one had read record n - 10, in whose slot n is
# written. A rank whose wait fails sets an abort flag that stays, so that no other continues without
# it.
class ShmMailbox:
    """Numbered records of every rank, of which the last ten stay readable.

    Args:
        path: a file of :meth:`size` zeros.
        timeout_s: how long to wait for a rank's record.

    Raises:
        OSError: the file cannot be opened, mapped or locked.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = rank, ranks, timeout_s
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 # the lock lives as long as it
        # Death is noticed by a lock, not by a heartbeat: a rank that computes for minutes without
        # a call is alive, one that was killed is not, and the lock shows which at once.
        # The operating system releases the lock of a process that ends, however it ends.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._memory = mmap.mmap(self._file.fileno(), self.size(ranks))
        self._abort_flags = ranks * _SLOTS * _SLOT_BYTES
        self._seq = 0  # of this rank's last record
        self._posted = [b""] * _SLOTS  # this rank's last records, as they stand in memory
        self._offsets = [
            [(peer * _SLOTS + slot) * _SLOT_BYTES for peer in range(ranks)]
            for slot in range(_SLOTS)
        ]

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the file: the slots and an abort flag of each rank."""
        return ranks * (_SLOTS * _SLOT_BYTES + 1)

    def post(self, data: bytes) -> int:
        """Write this rank's next record, of at most RECORD_BYTES; its sequence number, from 1."""
        self._seq = seq = self._seq + 1
        header_at = self._offsets[seq % _SLOTS][self.rank]
        data_at = header_at + _HEADER.size
        header = _HEADER.pack(seq, len(data), zlib.crc32(data, seq & 0xFFFFFFFF))
        self._memory[data_at : data_at + len(data)] = data
        self._memory[header_at:data_at] = header
        self._posted[seq % _SLOTS] = header + data
        return seq

    def read(self, seq: int, rank: int) -> bytes | None:
        """A rank's record, without waiting; None: not yet written in full, or overwritten."""
        offset = self._offsets[seq % _SLOTS][rank]
        written, length, checksum = _HEADER.unpack_from(self._memory, offset)
        if written != seq or length > RECORD_BYTES:
            return None
        data = self._memory[offset + _HEADER.size : offset + _HEADER.size + length]
        return data if zlib.crc32(data, seq & 0xFFFFFFFF) == checksum else None

    def gather(self, seq: int) -> list[bytes]:
        """The record of every rank, once all are written; this rank has posted its own.

        Raises:
            MeshError: a rank has ended, has posted nothing in time, or has aborted itself.
        """
        memory, own_record, records = self._memory, self._posted[seq % _SLOTS], list[bytes]()
        start = next_look = warn_at = 0.0
        for rank, offset in enumerate(self._offsets[seq % _SLOTS]):
            # Ranks mostly agree, and equal bytes need no parsing. Header and checksum are compared
            # too: a record that is half written differs. It is parsed if it was there before the
            # comparison: one that comes after it is compared first.
            written = 0
            while memory[offset : offset + len(own_record)] != own_record:
                if written == seq and (data := self.read(seq, rank)) is not None:
                    records.append(data)
                    break
                now = time.monotonic()
                if not start:
                    start, next_look = now, now + min(_LOOK_S, self.timeout_s)
                    warn_at = now + WARN_AFTER_S
                if now > next_look:
                    next_look = now + _LOOK_S
                    late = self._late_ranks(seq, now - start)
                    if now > warn_at:
                        warn_at = math.inf
                        warn_of_late_ranks(late, now - start, self.timeout_s)
                # A tenth of the time waited so far: neither late nor busy.
                time.sleep(min(max(0.1 * (now - start), _MIN_POLL_S), _MAX_POLL_S))
                written = _HEADER.unpack(memory[offset : offset + _HEADER.size])[0]
            else:
                records.append(own_record[_HEADER.size :])
        if any(memory[self._abort_flags : self._abort_flags + self.ranks]):
            self._check_abort_flags()
        return records

    def _late_ranks(self, seq: int, waited_s: float) -> list[int]:
        """The ranks that have not posted this record; MeshError where it is no use to wait longer
        for them."""
        # Any of them: the one that this rank waits for first may wait for a dead one elsewhere.
        late = [rank for rank in range(self.ranks) if self.read(seq, rank) is None]
        # A rank that has ended may have posted it as the last that it did.
        dead = [x for x in late if self._owner_is_dead(x) and self.read(seq, x) is None]
        if dead or (late and waited_s > self.timeout_s):
            failure = "has ended" if dead else "has made no call"
            raise MeshError(
                f"{name_ranks(dead or late)} of the sequence-parallel group {failure}, while rank "
                f"{self.rank} waited for it for {waited_s:.1f} s"
            )
        self._check_abort_flags()
        return late

    def _check_abort_flags(self) -> None:
        flags = self._memory[self._abort_flags : self._abort_flags + self.ranks]
        if any(flags):
            ranks = name_ranks([rank for rank, flag in enumerate(flags) if flag])
            why = "a rank had ended, or made no call in time"
            raise MeshError(f"{ranks} of the sequence-parallel group have aborted: {why}")

    def _owner_is_dead(self, rank: int) -> bool:
        """Return whether a rank's process has ended; a living one locks its byte of the file."""
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def abort(self) -> None:
        """Let every wait of every rank fail from here on."""
        self._memory[self._abort_flags + self.rank] = 1


def open_mailbox(group: dist.ProcessGroup, nodes: Sequence[bytes]) -> ShmMailbox | None:
    """A mailbox for the ranks of a group of a CPU backend; None where they share no memory.
    Collective over it.

    Args:
        nodes: each rank's node (:func:`ds_usp.comm.process_groups.node_ids`).
    """
    if len(set(nodes)) > 1 or fcntl is None:
        return None
    rank, ranks = dist.get_rank(group), len(nodes)
    path = _create_file(ShmMailbox.size(ranks)) if rank == 0 else ""
    paths = all_gather_bytes(path.encode().ljust(_PATH_BYTES, b"\0"), group)
    try:
        shared = paths[0].rstrip(b"\0").decode()
        mailbox = ShmMailbox(shared, rank, ranks, timeout_of(group).total_seconds())
    except OSError:
        mailbox = None
    opened = all_gather_bytes(bytes([mailbox is not None]), group)
    if path:
        os.unlink(path)  # the memory lives as long as a rank has it open
    return mailbox if all(flag == b"\1" for flag in opened) else None


def _create_file(size: int) -> str:
    """The path of a new file of zeros, closed, for its process's locks end with any close of it; ""
    where none can be made."""
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else tempfile.gettempdir()
    path = ""
    try:
        handle, path = tempfile.mkstemp(prefix="ds_usp_", dir=folder)
        with open(handle, "wb") as file:
            file.write(bytes(size))  # a full disk is found out here, not by a signal later
        if len(path.encode()) <= _PATH_BYTES:
            return path
    except OSError:
        pass
    if path:
        os.unlink(path)
    return ""
