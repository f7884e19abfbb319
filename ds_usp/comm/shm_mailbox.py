"""Shared-memory mailbox: records that the ranks of one node exchange without a collective.

A rank writes its record and polls for the others', and wakes nobody: that takes a few microseconds,
where a collective over sockets takes 130 of each CPU to start (16 cores, 2 ranks).
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ds_usp.comm.call_record import RECORD_BYTES
from ds_usp.comm.process_groups import all_gather_bytes, timeout_of
from ds_usp.errors import MeshError

MAX_IN_FLIGHT = 4  # records that a rank may post before it has read the others' first
MAX_LEFT = 3  # in whose place a rank declares that it has left
_SLOTS = 2 * (MAX_IN_FLIGHT + MAX_LEFT)  # records of a rank that are not overwritten
_HEADER = struct.Struct("<QII")  # sequence number, length of the data, checksum
_SLOT_BYTES = _HEADER.size + RECORD_BYTES
_STATUS_BYTES = 8192  # with its header; of some 300 process groups
_SHARED_MEMORY = Path("/dev/shm")
_PATH_BYTES = 256
_MIN_POLL_S, _MAX_POLL_S = 2e-5, 2e-3
_LIVENESS_CHECK_S = 1.0


# The file that the ranks of a node map, for 2 ranks:
#
#     rank 0: slot 0 .. slot 13 | rank 1: slot 0 .. slot 13 | status of each rank | abort flags
#     a slot, a status: sequence number, length, checksum | data
#
# Record n lies in slot n % 14. There is no lock: each slot has one writer, who writes the data
# before the header, and a reader takes a record only if number, length and checksum all fit. So a
# record that is half written reads as "not there yet".
#
# No record is overwritten that a rank has still to read: a rank posts record n after it has read
# record n - 7 of every other rank, and who posted that one had read record n - 14, in whose slot n
# is written. A rank whose wait fails sets an abort flag that stays, so that no other continues
# without it.
#
# A status is no record: it is overwritten at any time and nobody waits for it. A rank that waits
# longer than a second writes what the watchdogs of the others must know (watchdog.py).
class ShmMailbox:
    """Numbered records of every rank, of which the last fourteen stay readable.

    Args:
        path: a file of :meth:`size` zeros.
        timeout_s: how long to wait for a rank's record.

    Attributes:
        name: the same on all ranks.
        posted: the number of this rank's last record.
        while_waiting: called every second of a wait with the record's number, the rank that has not
            posted it, and the seconds so far.

    Raises:
        OSError: the file cannot be opened, mapped or locked.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout_s: float) -> None:
        self.name, self.rank, self.ranks, self.timeout_s = path, rank, ranks, timeout_s
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 # the lock lives as long as it
        # Death is noticed by a lock, not by a heartbeat: a rank that computes for minutes without
        # a call is alive, one that was killed is not, and the kernel tells them apart at once.
        # The operating system releases the lock of a process that ends, however it ends.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._memory = mmap.mmap(self._file.fileno(), self.size(ranks))
        self._statuses = ranks * _SLOTS * _SLOT_BYTES
        self._abort_flags = self._statuses + ranks * _STATUS_BYTES
        self.posted = 0
        self.while_waiting: Callable[[int, int, float], None] = lambda *_: None
        self._posted = [b""] * _SLOTS  # this rank's last records, as they stand in memory
        self._offsets = [
            [self._offset(slot, peer) for peer in range(ranks)] for slot in range(_SLOTS)
        ]

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the file: the slots, a status and an abort flag of each rank."""
        return ranks * (_SLOTS * _SLOT_BYTES + _STATUS_BYTES + 1)

    def post(self, data: bytes) -> int:
        """Write this rank's next record; its sequence number, from 1 on."""
        seq = self.posted + 1
        header_at = self._offsets[seq % _SLOTS][self.rank]
        data_at = header_at + _HEADER.size
        header = _HEADER.pack(seq, len(data), zlib.crc32(data, seq & 0xFFFFFFFF))
        self._memory[data_at : data_at + len(data)] = data
        self._memory[header_at:data_at] = header
        self._posted[seq % _SLOTS] = header + data
        self.posted = seq
        return seq

    def all_equal(self, seq: int) -> bool:
        """Whether every rank's record of this number is there and equals this rank's own, and no
        rank has aborted; costs a microsecond. False: unknown."""
        slot, memory = seq % _SLOTS, self._memory
        own = self._posted[slot]
        size = len(own)
        # Header and checksum are compared too: a record half written differs.
        for offset in self._offsets[slot]:
            if memory[offset : offset + size] != own:
                return False
        return not any(memory[self._abort_flags : self._abort_flags + self.ranks])

    def read(self, seq: int, rank: int) -> bytes | None:
        """A rank's record; None: not written yet, not completely, or overwritten.

        Does not wait, and ignores abort flags.
        """
        written, data = self._read(self._offset(seq, rank))
        return data if written == seq else None

    def publish(self, seq: int, data: bytes) -> None:
        if len(data) > _STATUS_BYTES - _HEADER.size:
            return
        header_at = self._statuses + self.rank * _STATUS_BYTES
        data_at = header_at + _HEADER.size
        self._memory[data_at : data_at + len(data)] = data
        header = _HEADER.pack(seq, len(data), zlib.crc32(data, seq & 0xFFFFFFFF))
        self._memory[header_at:data_at] = header

    def status(self, seq: int, rank: int) -> bytes:
        written, data = self._read(self._statuses + rank * _STATUS_BYTES)
        return data if written == seq and data is not None else b""

    def waiting_ranks(self, seq: int) -> list[int]:
        return [
            rank
            for rank, offset in enumerate(self._offsets[seq % _SLOTS])
            if _HEADER.unpack_from(self._memory, offset)[0] == seq
        ]

    def gather(self, seq: int, timeout_s: float | None = None) -> list[bytes]:
        """The record of every rank, once all are written; this rank has posted its own.

        Args:
            timeout_s: how long to wait for a rank, for a process that ends: it sets no abort flag.
                None: the mailbox's.

        Raises:
            MeshError: a rank has ended, has posted nothing in time, or has aborted itself.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        memory, own, records = self._memory, self._posted[seq % _SLOTS], list[bytes]()
        try:
            for rank, offset in enumerate(self._offsets[seq % _SLOTS]):
                start = time.monotonic()
                next_check = start + min(_LIVENESS_CHECK_S, limit)
                # Ranks mostly agree, and equal bytes need no parsing.
                while memory[offset : offset + len(own)] != own:
                    written = _HEADER.unpack_from(memory, offset)[0]
                    if written == seq and (data := self.read(seq, rank)) is not None:
                        records.append(data)
                        break
                    now = time.monotonic()
                    if now > next_check:
                        next_check = now + _LIVENESS_CHECK_S
                        self._check_on(seq, rank, now - start, limit)
                    # A tenth of the time waited so far: neither late nor busy.
                    time.sleep(min(max(0.1 * (now - start), _MIN_POLL_S), _MAX_POLL_S))
                else:
                    records.append(own[_HEADER.size :])
            if any(memory[self._abort_flags : self._abort_flags + self.ranks]):
                self._check_abort_flags()
        except MeshError:
            if timeout_s is None:
                self.abort()
            raise
        return records

    def _check_on(self, seq: int, rank: int, waited_s: float, timeout_s: float) -> None:
        """MeshError where it is no use to wait longer for a rank's record."""
        # Any of them: the one that this rank waits for first may wait for the dead one elsewhere.
        missing = [x for x in range(self.ranks) if self.read(seq, x) is None]
        dead = [x for x in missing if self._owner_is_dead(x) and self.read(seq, x) is None]
        if dead or waited_s > timeout_s:
            raise MeshError(
                f"rank {dead[0] if dead else rank} of the sequence-parallel group "
                f"{'has ended' if dead else 'has made no call'}, while rank {self.rank} waited for "
                f"it for {waited_s:.1f} s"
            )
        self._check_abort_flags()
        self.while_waiting(seq, rank, waited_s)

    def _check_abort_flags(self) -> None:
        flags = self._memory[self._abort_flags : self._abort_flags + self.ranks]
        if any(flags):
            ranks = [rank for rank, flag in enumerate(flags) if flag]
            raise MeshError(
                f"ranks {ranks} of the sequence-parallel group have aborted: a rank had ended, "
                "made no call in time, or was in other collectives"
            )

    def _owner_is_dead(self, rank: int) -> bool:
        """While a process lives it locks its byte of the file."""
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

    def _read(self, offset: int) -> tuple[int, bytes | None]:
        """Number and data; None: not written completely."""
        seq, length, checksum = _HEADER.unpack_from(self._memory, offset)
        if length > _STATUS_BYTES:
            return seq, None
        data = self._memory[offset + _HEADER.size : offset + _HEADER.size + length]
        return seq, data if zlib.crc32(data, seq & 0xFFFFFFFF) == checksum else None

    def _offset(self, seq: int, rank: int) -> int:
        return (rank * _SLOTS + seq % _SLOTS) * _SLOT_BYTES


def open_mailbox(group: dist.ProcessGroup | None, nodes: Sequence[bytes]) -> ShmMailbox | None:
    """A mailbox for the ranks of a group, of these nodes; None where they share no memory.
    Collective over it."""
    if group is None or len(set(nodes)) > 1 or fcntl is None:
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
