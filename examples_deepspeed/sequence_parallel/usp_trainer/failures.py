"""Error reports of ranks: equal errors are printed once, tracebacks go to log files."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from ds_usp import USPError
from usp_trainer.run_folder import saved_step

USER_ERRORS = (USPError, OSError)  # the message has the fix; other errors get a traceback
LOGS = "errors"  # folder of tracebacks in the output folder
REPORT_TIMEOUT_S = 5.0  # time for the other ranks to report their error
_LOST_CONTACT = ("gloo", "NCCL", "ncclSystemError", "Connection closed by peer", "Connection reset")


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Args:
        text: the message for the user.
        lost_contact: it lost contact with another rank, whose failure is the cause.
        is_user_error: the message has the fix.
    """

    text: str
    lost_contact: bool = False
    is_user_error: bool = False


def describe(error: Exception, args: Namespace, rank: int) -> Failure:
    """This rank's failure; the traceback of an error that is not a user error is written to
    ``errors/rank_N.log`` in the output folder, if there is one."""
    name = type(error).__name__
    if isinstance(error, USER_ERRORS):
        return Failure(f"{name}: {error}", is_user_error=True)
    traceback_text = "".join(traceback.format_exception(error))
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, (dist.DistError, RuntimeError)) and any(
        c in str(error) for c in _LOST_CONTACT
    ):
        text = f"lost contact with another rank ({name})"
        return Failure(text + _write_traceback(traceback_text, args, rank), lost_contact=True)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({Path(frame.filename).name}:{frame.lineno})"
    return Failure(f"{name}: {first}{where}" + _write_traceback(traceback_text, args, rank))


def _write_traceback(traceback_text: str, args: Namespace, rank: int) -> str:
    """Write the rank's traceback to its log; return the text that ends the message.

    That text is the log's path, or the traceback itself where no log can be written."""
    folder = Path(getattr(args, "output_dir", ""))
    if not getattr(args, "output_dir", None) or not folder.is_dir():
        return f"\n{traceback_text}"
    try:
        (folder / LOGS).mkdir(exist_ok=True)
        (folder / LOGS / f"rank_{rank}.log").write_text(traceback_text)
    except OSError:
        return f"\n{traceback_text}"
    return f". Traceback: {folder / LOGS}/rank_N.log"  # the same on every rank: printed once


def exit_failure(exit_code: int) -> Failure:
    """The failure of a rank that exited without a report."""
    if exit_code >= 0:
        return Failure(f"ended with exit code {exit_code}")
    name = signal.Signals(-exit_code).name
    cause = ": killed, by the system if memory ran out" if name == "SIGKILL" else ""
    return Failure(f"ended with exit code {exit_code} ({name}{cause})")


def summary(failures: Mapping[int, Failure], world: int, args: Namespace) -> list[str]:
    """The lines for the user: causes first, each text once with the ranks that report it."""
    causes = {rank: f for rank, f in failures.items() if not f.lost_contact}
    lines = []
    for group in (causes, {rank: f for rank, f in failures.items() if f.lost_contact}):
        for text in dict.fromkeys(failure.text for failure in group.values()):
            ranks = sorted(rank for rank, failure in group.items() if failure.text == text)
            lines.append(f"[{_format_ranks(ranks, world)}] {text}")
    unreported = sorted(set(range(world)) - set(failures))
    if unreported and not causes:
        lines.append(f"[{_format_ranks(unreported, world)}] no report: killed, or still waiting")
    step = None
    if getattr(args, "save", None) and not any(
        failure.is_user_error for failure in causes.values()
    ):
        with contextlib.suppress(USPError):  # unreadable: the next start reports it
            step = saved_step(args.save)
    if step is not None:
        lines.append(f"the last checkpoint is of step {step}: continue with --load {args.save}")
    return lines


def _format_ranks(ranks: list[int], world: int) -> str:
    if len(ranks) == world:
        return f"on all {world} ranks" if world > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def report(store: dist.Store, rank: int, world: int, failure: Failure, args: Namespace) -> None:
    """Print under a launcher why this rank fails: the first rank that fails prints for all that
    fail within ``REPORT_TIMEOUT_S``. No rank waits longer than three times that, dead ranks or not.
    """
    try:
        store.set(f"failure_{rank}", json.dumps(asdict(failure)))
        if store.add("reporter", 1) == 1:
            failures = _collect_failures(store, world)
            print(*summary(failures, world, args), sep="\n", file=sys.stderr, flush=True)
            store.set("reported", ",".join(map(str, failures)))
            is_reported = True
        else:
            is_reported = _wait_for(store, ["reported"], 2 * REPORT_TIMEOUT_S)
            if is_reported and not failure.lost_contact:  # its cause was printed
                is_reported = str(rank) in store.get("reported").decode().split(",")
        store.set(f"exiting_{rank}", "")
        if rank == 0:  # it may host the store that the others still read
            failed = [r for r in range(world) if store.check([f"failure_{r}"])]
            _wait_for(store, [f"exiting_{r}" for r in failed], REPORT_TIMEOUT_S)
    except (dist.DistError, RuntimeError):  # the rank that hosted the store is gone
        is_reported = False
    if not is_reported:
        print(*summary({rank: failure}, world, args), sep="\n", file=sys.stderr, flush=True)


def _collect_failures(store: dist.Store, world: int) -> dict[int, Failure]:
    """The failures that ranks posted to the store by the time limit, by rank."""
    keys = {rank: f"failure_{rank}" for rank in range(world)}
    _wait_for(store, list(keys.values()), REPORT_TIMEOUT_S)
    reported = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
    return {rank: Failure(**json.loads(text)) for rank, text in reported.items()}


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Poll the store until it has all keys; False if it has not after so many seconds."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
