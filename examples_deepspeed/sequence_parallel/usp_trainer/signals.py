"""What SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 do: the run saves after its current step and ends with
the exit code ``STOPPED``; a second signal ends it at once.

A rank only notes a signal. All ranks learn of it in the exchange with which every step begins
(``engine.Trainer``), so that they stop at the same step, whichever of them it reached, and when.
What stands in front of the ranks hands signals on to them: a script (:func:`supervise`), or the
process that started them (``launch.py``). Does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from usp_trainer.environment import STOPPED_FILE

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start it again to continue
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One event may arrive twice: from the launcher and from the terminal or SLURM, which signal every
# process of a group or step.
DUPLICATE_S = 0.5
_POLL_S = 0.2  # at which a script looks after its launcher
_END_S = 40.0  # for ranks that a launcher left behind: launchers give theirs 30 seconds
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_REPORT_S = 3.0  # for a rank to report that it lost contact, where another one has ended


class StopRequested(Exception):  # noqa: N818 - it is no error
    """Raised on every rank at the same step, before any of its work."""


class StopSignals:
    """Notes the signals of this rank from its construction until the end of its ``with`` block.

    Args:
        siblings: process ids of the ranks of this machine. A launcher whose rank has failed ends
            the others by SIGTERM: where one of these is gone, no step will come that could stop.
    """

    # A handler in Python runs in the main thread between two bytecodes, which a rank that waits for
    # the others never reaches: the interpreter's own handler writes the numbers to a socket, which
    # a thread reads.

    def __init__(self, siblings: Iterable[int] = ()) -> None:
        self.siblings = tuple(siblings)
        self._noted: dict[int, float] = {}
        self._previous = {
            number: signal.signal(number, lambda *_: None)
            for number in ASKING
            if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
        }
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._read, name="stop signals", daemon=True).start()

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The run is over: the launcher that ends the other ranks, because this one has ended, must
        # not change their exit code.
        stopped = bool(self._noted) and error is None
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # ends the thread

    def flags(self) -> list[bool]:
        """For each signal of ``ASKING``, whether it has come."""
        return [number in self._noted for number in ASKING]

    def _read(self) -> None:
        while numbers := self._reader.recv(64):
            for number in filter(self._previous.__contains__, numbers):
                now = time.monotonic()
                if not self._noted:
                    threading.Thread(target=self._end_with_siblings, daemon=True).start()
                elif now - min(self._noted.values()) > DUPLICATE_S:
                    os._exit(128 + number)
                self._noted.setdefault(number, now)
        self._reader.close()

    def _end_with_siblings(self) -> None:
        if not all(map(_is_alive, self.siblings)):
            time.sleep(_REPORT_S)
            os._exit(128 + signal.SIGTERM)


def stop_text(counts: Sequence[float], ranks: int) -> str:
    """``SIGTERM on 1 of 4 ranks``: what the ranks' flags add up to; empty if none is set."""
    return ", ".join(
        f"{number.name} on {count:.0f} of {ranks} ranks"
        for number, count in zip(ASKING, counts, strict=True)
        if count
    )


def machine() -> str:
    """Ranks with the same text can see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        # The name of the program is in brackets and may contain any; the state follows it.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # without /proc, or a moment too late
        return True


def processes_below(process: int) -> tuple[list[int], list[int]]:
    """The launchers below a process, and the ranks, which a launcher gives the variable RANK; not
    what these start. Without Linux's /proc both are empty."""
    launchers: list[int] = []
    ranks: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(word) for word in file.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            try:
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(variable.startswith(b"RANK=") for variable in variables):
                ranks.append(child)
            else:
                launchers.append(child)
                for below, found in zip(processes_below(child), (launchers, ranks), strict=True):
                    found.extend(below)
    return launchers, ranks


def send(number: int, processes: Iterable[int]) -> None:
    """Send a signal to those of the processes that still run."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def supervise(
    name: str,
    command: Sequence[str],
    log: str | None,
    environment: Mapping[str, str],
    on_signal: str = "",
) -> int:
    """Run a launcher with its output in a log too, hand signals on to its ranks, and end those that
    it leaves behind.

    Args:
        name: of the launcher.
        log: the file; None: there is none.
        environment: its variables.
        on_signal: what the ranks do then, for the user.

    Returns:
        ``STOPPED`` if a signal stopped the ranks; else the launcher's exit code, 128 + N if signal
        N ended it, and 1 instead of 0 if it left ranks behind.
    """
    asked: list[int] = []
    for number in (*ASKING, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: asked.append(number))
    if sys.platform == "linux":  # a rank whose launcher has ended becomes a child of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="usp_job_") as folder:
        stopped = Path(folder, "stopped")
        variables = {**environment, STOPPED_FILE: str(stopped)}
        launcher, tee = _launch(command, log, variables)
        launchers, ranks, is_signalled = _watch(launcher, asked, on_signal)
        code, adopted = launcher.returncode, list(filter(_is_adopted, ranks))
        if code or adopted:
            _end(launchers | ranks, is_signalled or bool(asked))
        error = ""
        if code == -signal.SIGKILL:
            error = f"error: {name} was killed (SIGKILL), by the system if memory ran out"
        elif code == 0 and adopted:
            # DeepSpeed's launcher answers 0 where the process that started its ranks was killed.
            code = 1
            error = (
                f"error: {name} left {len(adopted)} ranks behind, which were ended: one of its own "
                "processes was killed, by the system if memory ran out"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):  # of a service that still writes
            tee.wait(_END_S)
        if error:
            print(error, file=sys.stderr)
            with Path(log or os.devnull).open("a") as file:
                print(error, file=file)
        if stopped.exists():
            return STOPPED
    return code if code >= 0 else 128 - code


def _launch(
    command: Sequence[str], log: str | None, variables: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start a launcher, and what copies its output to the log."""
    copying = ["tee", "-a", log] if log else ["true"]
    # In a session of its own: Ctrl-C must not end it before those that write to it.
    tee = subprocess.Popen(copying, stdin=subprocess.PIPE, start_new_session=True)
    pipe = tee.stdin if log else None
    launcher = subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe)
    if tee.stdin:
        tee.stdin.close()
    return launcher, tee


def _watch(
    launcher: subprocess.Popen[bytes], asked: list[int], on_signal: str
) -> tuple[set[int], set[int], bool]:
    """Hand on what is asked until the launcher has ended; the launchers and the ranks that were
    seen below it, and whether they were sent a signal."""
    launchers: set[int] = set()
    ranks: set[int] = set()
    is_signalled = False
    while launcher.poll() is None:
        below = processes_below(launcher.pid)
        launchers.update(below[0])
        ranks.update(below[1])
        while asked:
            _hand_on(asked.pop(0), [launcher.pid, *below[0]], below[1], on_signal)
            is_signalled = True
        time.sleep(_POLL_S)
    return launchers, ranks, is_signalled


def _hand_on(number: int, launchers: Sequence[int], ranks: Sequence[int], on_signal: str) -> None:
    """Send a signal to the ranks. A launcher would give them 30 seconds, which may be less than a
    step and a checkpoint take; it gets the signal where the ranks are not to be seen: not started
    yet, or on other machines."""
    if number not in ASKING:
        send(number, [*ranks, *launchers])
        return
    number = signal.SIGTERM if number == signal.SIGINT else number
    who = f"{len(ranks)} ranks{on_signal}" if ranks else "the launcher"
    print(f"{signal.Signals(number).name}: passed on to {who}", file=sys.stderr, flush=True)
    if ranks:
        send(number, ranks)
    else:
        send(signal.SIGTERM, launchers)


def _is_adopted(process: int) -> bool:
    """Whether it is now a child of this process, because its launcher has ended without waiting for
    it. It is waited for if it has ended."""
    try:
        os.waitpid(process, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _end(processes: Collection[int], is_signalled: bool) -> None:
    """End those of the processes that are left below this one.

    Args:
        is_signalled: they were sent a signal already, as by Ctrl-C, which may end a launcher first;
            a second one would keep ranks from saving.
    """
    for number, seconds in ((signal.SIGTERM, _END_S), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + seconds
        sent = set(processes) if is_signalled and number == signal.SIGTERM else set()
        while time.monotonic() < deadline:
            below = processes_below(os.getpid())
            left = {p for p in (*below[0], *below[1]) if p in processes}
            if not left:
                return
            send(number, left - sent)
            sent |= left
            for process in left:
                _is_adopted(process)  # waits for those that have ended
            time.sleep(_POLL_S)
