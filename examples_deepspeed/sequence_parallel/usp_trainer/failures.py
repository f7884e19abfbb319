"""How a rank's error reaches the user: said once for all ranks that have it, traceback in a log."""

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

EXPLAINED = (USPError, OSError)  # errors that say all by themselves; others get a traceback
LOGS = "errors"  # folder of tracebacks in the output folder
WAIT_S = 5.0  # for the other ranks to report an error too
_CONTACT = ("gloo", "NCCL", "ncclSystemError", "Connection closed by peer", "Connection reset")


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Args:
        text: what the user reads.
        of_another: it lost contact with another rank, whose end is the cause.
        explained: the text says what to do.
    """

    text: str
    of_another: bool = False
    explained: bool = False


def describe(error: Exception, args: Namespace, rank: int) -> Failure:
    """What this rank reports; the traceback of an error that does not explain itself is written to
    ``errors/rank_N.log`` in the output folder, where there is one."""
    name = type(error).__name__
    if isinstance(error, EXPLAINED):
        return Failure(f"{name}: {error}", explained=True)
    full = "".join(traceback.format_exception(error))
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, (dist.DistError, RuntimeError)) and any(c in str(error) for c in _CONTACT):
        text = f"lost contact with another rank ({name})"
        return Failure(text + _logged(full, args, rank), of_another=True)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({Path(frame.filename).name}:{frame.lineno})"
    return Failure(f"{name}: {first}{where}" + _logged(full, args, rank))


def _logged(full: str, args: Namespace, rank: int) -> str:
    folder = Path(getattr(args, "output_dir", ""))
    if not getattr(args, "output_dir", None) or not folder.is_dir():
        return f"\n{full}"
    try:
        (folder / LOGS).mkdir(exist_ok=True)
        (folder / LOGS / f"rank_{rank}.log").write_text(full)
    except OSError:
        return f"\n{full}"
    return f". Traceback: {folder / LOGS}/rank_N.log"  # the same on every rank: said once


def ended(exit_code: int) -> Failure:
    """Of a rank that ended without a word."""
    if exit_code >= 0:
        return Failure(f"ended with exit code {exit_code}")
    name = signal.Signals(-exit_code).name
    cause = ": killed, by the system if memory ran out" if name == "SIGKILL" else ""
    return Failure(f"ended with exit code {exit_code} ({name}{cause})")


def summary(failures: Mapping[int, Failure], world: int, args: Namespace) -> list[str]:
    """The lines for the user: causes first, equal ones once with the ranks that report them."""
    causes = {rank: f for rank, f in failures.items() if not f.of_another}
    lines = []
    for part in (causes, {rank: f for rank, f in failures.items() if f.of_another}):
        for text in dict.fromkeys(failure.text for failure in part.values()):
            ranks = sorted(rank for rank, failure in part.items() if failure.text == text)
            lines.append(f"[{_named(ranks, world)}] {text}")
    silent = sorted(set(range(world)) - set(failures))
    if silent and not causes:
        lines.append(f"[{_named(silent, world)}] said nothing: killed, or still waiting")
    step = None
    if getattr(args, "save", None) and not any(failure.explained for failure in causes.values()):
        with contextlib.suppress(USPError):  # it cannot be read: the next start says so
            step = saved_step(args.save)
    if step is not None:
        lines.append(f"the last checkpoint is of step {step}: go on with --load {args.save}")
    return lines


def _named(ranks: list[int], world: int) -> str:
    if len(ranks) == world:
        return f"on all {world} ranks" if world > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def report(store: dist.Store, rank: int, world: int, failure: Failure, args: Namespace) -> None:
    """Say under a launcher why this rank ends: the first rank that fails speaks for all that do
    within ``WAIT_S``. No rank waits longer than three times that, whichever others are dead."""
    try:
        store.set(f"failure_{rank}", json.dumps(asdict(failure)))
        if store.add("speaker", 1) == 1:
            failures = _gathered(store, world)
            print(*summary(failures, world, args), sep="\n", file=sys.stderr, flush=True)
            store.set("spoken", ",".join(map(str, failures)))
            said = True
        else:
            said = _wait_for(store, ["spoken"], 2 * WAIT_S)
            if said and not failure.of_another:  # its cause has been said
                said = str(rank) in store.get("spoken").decode().split(",")
        store.set(f"leaves_{rank}", "")
        if rank == 0:  # which may hold the store that the others still read
            failed = [r for r in range(world) if store.check([f"failure_{r}"])]
            _wait_for(store, [f"leaves_{r}" for r in failed], WAIT_S)
    except (dist.DistError, RuntimeError):  # the store is gone with the rank that held it
        said = False
    if not said:
        print(*summary({rank: failure}, world, args), sep="\n", file=sys.stderr, flush=True)


def _gathered(store: dist.Store, world: int) -> dict[int, Failure]:
    keys = {rank: f"failure_{rank}" for rank in range(world)}
    _wait_for(store, list(keys.values()), WAIT_S)
    there = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
    return {rank: Failure(**json.loads(text)) for rank, text in there.items()}


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
