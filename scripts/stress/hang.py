"""Why ranks hang: what their threads and sockets wait for, and whether a signal frees them.

A thread that a signal interrupts looks again at what it waits for. Ranks that go on after one had
missed a wake-up, in the C library or the kernel; the others still miss a message. Linux only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

GRACE_S = 5.0  # for ranks that a signal may have freed
_GDB_S = 60
_SAMPLES = 10


def diagnose(
    pids: Sequence[int], stacks: Sequence[Path], progress: Callable[[], object]
) -> tuple[str, str]:
    """A verdict in one line, and a report.

    Args:
        pids: of the ranks, which write their Python stacks to ``stacks`` at SIGUSR1.
        progress: a value that changes when a rank goes on.
    """
    report = []
    for rank, pid in enumerate(pids):
        report += [f"-- rank {rank} (pid {pid}): threads, as they waited", *_threads(pid)]
    unread = {rank: _queued_bytes(pid) for rank, pid in enumerate(pids)}
    report.append("-- bytes in sockets of rank: (unread, unsent): " + str(unread))
    before = progress()
    _send(pids, signal.SIGUSR1)
    time.sleep(GRACE_S)
    for rank, path in enumerate(stacks):
        report += [f"-- rank {rank}: Python stacks", path.read_text() if path.exists() else ""]
    if progress() != before:
        return "freed by a signal to the main threads: they had missed a wake-up", "\n".join(report)
    _send(pids, signal.SIGSTOP)
    _send(pids, signal.SIGCONT)
    time.sleep(GRACE_S)
    if progress() != before:
        return "freed by a signal to all threads: one had missed a wake-up", "\n".join(report)
    report += [f"-- rank {rank}: native stacks\n{_gdb(pid)}" for rank, pid in enumerate(pids)]
    if any(received for received, _ in unread.values()):
        return "a message lies unread in a socket: its rank's gloo thread is stuck", "\n".join(
            report
        )
    return "no message is in flight: a rank has not sent what others wait for", "\n".join(report)


def is_working(pids: Sequence[int]) -> bool:
    """Whether the main thread of a rank computes, or waits for a core to do so."""
    counts = dict.fromkeys(pids, 0)
    for _ in range(_SAMPLES):
        for pid in pids:
            counts[pid] += _state(Path(f"/proc/{pid}/task/{pid}")) in ("R", "D")
        time.sleep(0.02)
    return max(counts.values()) > _SAMPLES // 2


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has ended
            continue


def _threads(pid: int) -> list[str]:
    """Name, state and kernel function of each thread."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        try:
            name, function = (task / "comm").read_text().strip(), (task / "wchan").read_text()
            lines.append(f"   {name:16} {_state(task)} {function}")
        except OSError:  # it has ended, or this user may not look
            continue
    return lines


def _state(task: Path) -> str:
    """One letter, as of ps; "" if the thread has ended."""
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _queued_bytes(pid: int) -> tuple[int, int]:
    """Bytes that a process has not read from, and not sent by, its TCP sockets."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    unread = unsent = 0
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            columns = line.split()
            if columns[9] in inodes and columns[3] != "0A":  # a listening socket queues connections
                sending, receiving = columns[4].split(":")
                unread, unsent = unread + int(receiving, 16), unsent + int(sending, 16)
    return unread, unsent


def _gdb(pid: int) -> str:
    if shutil.which("gdb") is None:
        return "   (gdb is not installed)"
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GDB_S)
    except subprocess.TimeoutExpired:
        return "   (gdb did not answer)"
    return result.stdout
