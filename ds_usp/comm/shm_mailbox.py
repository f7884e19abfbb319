"""What the ranks of one host say to each other, in memory that all of them see.

A rank writes what it says and reads what the others said, and wakes nobody: that takes a few
microseconds, where a collective over sockets takes 130 of each host to begin (16 cores, 2 ranks).
"""

from __future__ import annotations

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

from ds_usp.comm.gather import all_gather_bytes, transport_device
from ds_usp.errors import MeshError

MAX_IN_FLIGHT = 4  # notes of its own that a rank may write before it has read the others' first
MAX_MESSAGE_BYTES = 2048  # of a note
_SLOTS = 2 * MAX_IN_FLIGHT  # notes of a rank that are not written over
_HEADER = struct.Struct("<QII")  # number of the note, its length, a checksum
_RECORD = _HEADER.size + MAX_MESSAGE_BYTES
_SHARED_MEMORY = Path("/dev/shm")
_PATH_BYTES = 256
_MIN_POLL_S, _MAX_POLL_S = 2e-5, 2e-3
_LIVENESS_CHECK_S = 1.0  # whether a rank is still there


class ShmMailbox:
    """Numbered notes of every rank, of which the last few stay.

    Whoever writes note n has read note ``n - MOST_AHEAD`` of every other rank, as has whoever wrote
    that one: no note is written over that somebody has still to read. A rank that gives up waiting
    leaves a mark that stays, so that those it waited for do not go on without it.

    Args:
        path: a file of :meth:`size` zeros.
        rank, ranks: whose notes these are.
        timeout_s: how long a rank may say nothing.

    Raises:
        OSError: the file cannot be opened, mapped or locked.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = rank, ranks, timeout_s
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 # the lock lives as long as it
        # The system takes the lock of a process that ends, however it ends.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._memory = mmap.mmap(self._file.fileno(), self.size(ranks))
        self._abort_flags = ranks * _SLOTS * _RECORD
        self._own = [b""] * _SLOTS  # this rank's last notes, as they stand in memory
        self._others = [
            [self._record(slot, other) for other in range(ranks) if other != rank]
            for slot in range(_SLOTS)
        ]

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the file: the notes, and a mark of each rank."""
        return ranks * (_SLOTS * _RECORD + 1)

    def post(self, seq: int, data: bytes) -> None:
        """Write this rank's note of a number of 1 or more, the one after its last one."""
        at = self._record(seq, self.rank)
        start = at + _HEADER.size
        self._memory[start : start + len(data)] = data
        header = _HEADER.pack(seq, len(data), _checksum(seq, data))
        self._memory[at:start] = header
        self._own[seq % _SLOTS] = header + data

    def all_equal(self, seq: int) -> bool:
        """Whether every rank's note of this number is there and says what this rank's own does,
        and no rank has given up; costs a microsecond. False says nothing; see :meth:`everyone`."""
        slot, memory = seq % _SLOTS, self._memory
        own = self._own[slot]
        size = len(own)
        # Header and checksum are part of what is compared: a note half written differs.
        for start in self._others[slot]:
            if memory[start : start + size] != own:
                return False
        return not any(memory[self._abort_flags : self._abort_flags + self.ranks])

    def read(self, seq: int, rank: int) -> bytes | None:
        """A rank's note; None: it is not there yet, or not whole."""
        at = self._record(seq, rank)
        found, length, checksum = _HEADER.unpack_from(self._memory, at)
        if found != seq or length > MAX_MESSAGE_BYTES:
            return None
        start = at + _HEADER.size
        data = self._memory[start : start + length]
        return data if _checksum(seq, data) == checksum else None

    def gather(self, seq: int, timeout_s: float | None = None) -> list[bytes]:
        """The note of every rank, when all are there.

        Args:
            timeout_s: how long a rank may say nothing, for a process that ends: it leaves no mark.
                None: as long as is usual on this board.

        Raises:
            MeshError: a rank has ended, has said nothing for too long, or has given up itself.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            said = [self._wait_for(seq, rank, limit) for rank in range(self.ranks)]
            self._check_abort_flags()
        except MeshError:
            if timeout_s is None:
                self._memory[self._abort_flags + self.rank] = 1
            raise
        return said

    def _wait_for(self, seq: int, rank: int, timeout_s: float) -> bytes:
        begin = time.monotonic()
        look = begin + min(_LIVENESS_CHECK_S, timeout_s)
        while (data := self.read(seq, rank)) is None:
            now = time.monotonic()
            if now > look:
                look = now + _LIVENESS_CHECK_S
                gone = self._owner_is_dead(rank) and self.read(seq, rank) is None
                if gone or now - begin > timeout_s:
                    raise MeshError(
                        f"rank {rank} of the sequence-parallel group "
                        f"{'has ended' if gone else 'has made no call'}, while rank {self.rank} "
                        f"waited for it for {now - begin:.1f} s"
                    )
                self._check_abort_flags()
            # A tenth of what it has taken: neither late nor busy.
            time.sleep(min(max(0.1 * (now - begin), _MIN_POLL_S), _MAX_POLL_S))
        return data

    def _check_abort_flags(self) -> None:
        marks = self._memory[self._abort_flags : self._abort_flags + self.ranks]
        if any(marks):
            gone = [rank for rank, mark in enumerate(marks) if mark]
            raise MeshError(
                f"ranks {gone} of the sequence-parallel group have given up: a rank had ended, or "
                "made no call in time"
            )

    def _owner_is_dead(self, rank: int) -> bool:
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def _record(self, seq: int, rank: int) -> int:
        return (rank * _SLOTS + seq % _SLOTS) * _RECORD


def open_mailbox(group: dist.ProcessGroup | None, hosts: Sequence[bytes]) -> ShmMailbox | None:
    """A board for the ranks of a group on these hosts; None where they share no memory.

    Collective over the group.
    """
    if group is None or len(set(hosts)) > 1 or fcntl is None:
        return None
    rank, ranks = dist.get_rank(group), len(hosts)
    path = _new_file(ShmMailbox.size(ranks)) if rank == 0 else ""
    said = all_gather_bytes(path.encode().ljust(_PATH_BYTES, b"\0"), group)
    path = said[0].rstrip(b"\0").decode()
    timeout = group._get_backend(transport_device(group)).options._timeout
    try:
        mailbox = ShmMailbox(path, rank, ranks, timeout.total_seconds())
    except OSError:
        mailbox = None
    everyone = all_gather_bytes(bytes([mailbox is not None]), group)
    if rank == 0 and path:
        os.unlink(path)  # it lives as long as somebody has it open
    return mailbox if all(each == b"\1" for each in everyone) else None


def _new_file(size: int) -> str:
    """The path of a file of zeros; "" where none can be made."""
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        handle, path = tempfile.mkstemp(prefix="ds_usp_", dir=folder)
    except OSError:
        return ""
    try:
        if len(path.encode()) > _PATH_BYTES:
            raise OSError(f"{path} is too long to be told")
        os.write(handle, bytes(size))  # a full disk is found out here, not by a signal later
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(handle)
    return path


def _checksum(seq: int, data: bytes) -> int:
    return zlib.crc32(data, seq & 0xFFFFFFFF)
