"""Starts the ranks (joins a launcher's world, runs torchrun, or forks) and says why they failed:
equal errors once, tracebacks in log files.

The only file of the trainer that writes environment variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

from ds_usp import ConfigError, USPError, allocator_variables
from ds_usp.settings import keeps_host_memory
from ds_usp.training import prepare_deepspeed
from usp_trainer import environment
from usp_trainer.run_files import replace_file, saved_step

Main = Callable[[Namespace], None]

USER_ERRORS = (USPError, OSError)  # the message has the fix; other errors get a traceback
LOGS = "errors"  # folder of tracebacks in the output folder
REPORT_TIMEOUT_S = 5.0  # time for the other ranks to report their error to a launcher's rank
SHUTDOWN_TIMEOUT_S = 10.0  # time for forked ranks to fail and report after the first failure
ON_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOST_CONTACT = ("gloo", "NCCL", "ncclSystemError", "Connection closed by peer", "Connection reset")


def select_device(device: str) -> str:
    """``cuda`` or ``cpu``, also set for DeepSpeed; must be called before DeepSpeed is imported."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    # megatron-core warns of optional packages, DeepSpeed calls deprecated functions of torch.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return device


def set_allocator_options(args: Namespace) -> None:
    """Let torch pin host memory faster and use GPU memory in growing segments, if the flags keep
    activations or optimizer states in host memory; must be called before the first use of a GPU.

    A variable of the user's keeps what it names."""
    if args.device == "cuda" and keeps_host_memory(args):
        os.environ.update(allocator_variables(os.environ, expandable_segments=True))


def run_rank(main: Main, args: Namespace) -> int:
    """Run ``main`` as one rank of a launcher's world; 0, or 1 if it failed."""
    if environment.launcher_is_parent():
        end_with_parent(os.getppid())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, *_ = next(dist.rendezvous("env://", rank, world))
    failure = _train(main, args, store)
    if failure:
        report(dist.PrefixStore("failures", store), rank, world, failure, args)
    return int(failure is not None)


def run_on_gpus(script: str, argv: list[str], processes: int | None) -> int:
    """Start one process per GPU through torchrun, which runs ``script`` in each."""
    from torch.distributed.run import main as torchrun

    processes = processes or torch.cuda.device_count()
    try:
        torchrun(["--standalone", f"--nproc-per-node={processes}", script, *argv])
    except ChildFailedError as error:  # ranks that were not killed have printed their error
        cause, failed = error.get_first_failure()
        if failed.exitcode < 0:
            print(f"[rank {cause}] {exit_failure(failed.exitcode).text}", file=sys.stderr)
        return 1
    return 0


def spawn_ranks(main: Main, args: Namespace, processes: int) -> int:
    """Fork the ranks from this process, so that they share its imports; 0, or 1 if one failed.

    After the first failure the others have ``SHUTDOWN_TIMEOUT_S`` to fail and report. What they
    report is printed on stderr, equal errors once. They end when this process ends for any reason.
    SystemExit on SIGTERM, SIGHUP or SIGQUIT, with the exit code of a shell.
    """
    prepare_deepspeed()
    previous, others = {}, multiprocessing.active_children()
    with tempfile.TemporaryDirectory(prefix="usp_ranks_") as folder:
        store = f"{folder}/store"
        try:
            for number in _TERMINATION_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    previous[number] = signal.signal(number, _exit_by_signal)
            arguments = main, args, processes, store, os.getpid()
            context = multiprocessing.start_processes(
                _forked_rank, arguments, processes, join=False, start_method="fork"
            )
            # A signal that arrives just before the call that waits is handled after it.
            while not context.join(_POLL_S, SHUTDOWN_TIMEOUT_S):
                pass
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException):
            codes = {rank: process.exitcode for rank, process in enumerate(context.processes)}
            # One that still waits at the end of that time was terminated and has no report.
            failed = {r: exit_failure(c) for r, c in codes.items() if c not in (0, -signal.SIGTERM)}
            failures = failed | _posted_failures(dist.FileStore(store), processes)
            print(*summary(failures, processes, args), sep="\n", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            # A signal may have come between a fork and the return of start_processes.
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
                    process.join()
            for number, handler in previous.items():
                signal.signal(number, handler)
    return 0


def _exit_by_signal(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _forked_rank(
    rank: int, main: Main, args: Namespace, processes: int, store: str, parent: int
) -> NoReturn:
    for number in _TERMINATION_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent kills the ranks
    end_with_parent(parent)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    failure = _train(main, args, dist.FileStore(store))
    if failure:
        _post_failure(dist.FileStore(store), rank, failure)
    sys.exit(failure is not None)


def end_with_parent(parent: int) -> None:
    """Have this process end when its parent ends for any reason: by the kernel on Linux, elsewhere
    by a thread that polls. ``parent`` is its process id, read while it was certainly alive."""

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    if not ON_LINUX:
        threading.Thread(target=poll, daemon=True).start()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def _train(main: Main, args: Namespace, store: dist.Store) -> Failure | None:
    """Initialize the default process group (NCCL on GPUs, gloo on CPU), train, and end the group;
    the failure of this rank, if it failed. Collective."""
    rank, on_gpu = int(os.environ["RANK"]), args.device == "cuda"
    prepare_deepspeed()
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("ranks", store),
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        if not on_gpu:  # else a rank that fails at once would end while others connect to it
            dist.barrier()
        main(args)
        dist.destroy_process_group()
    except Exception as error:
        with contextlib.suppress(OSError):  # of a full disk, which may be why this rank fails
            get_error_handler().record_exception(error)
        return describe(error, args, rank)
    return None


def broadcast_from_rank0(compute: Callable[[], Any]) -> Any:
    """Run ``compute`` on rank 0 and broadcast its result, or raise its error on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Args:
        lost_contact: it lost contact with another rank, whose failure is the cause.
        is_user_error: the message has the fix.
    """

    text: str
    lost_contact: bool = False
    is_user_error: bool = False


def describe(error: Exception, args: Namespace, rank: int) -> Failure:
    """This rank's failure; the traceback of an error that is not a user error is written to
    ``errors/rank_N.log`` in the output folder, or else is part of the message."""
    name = type(error).__name__
    if isinstance(error, USER_ERRORS):
        return Failure(f"{name}: {error}", is_user_error=True)
    lost = isinstance(error, RuntimeError) and any(c in str(error) for c in _LOST_CONTACT)
    text = f"lost contact with another rank ({name})"
    if not lost:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).splitlines() or [""])[0]
        text = f"{name}: {first} ({Path(frame.filename).name}:{frame.lineno})"
    trace, folder = "".join(traceback.format_exception(error)), getattr(args, "output_dir", None)
    where = f"\n{trace}"
    if folder and Path(folder).is_dir():
        with contextlib.suppress(OSError):
            logs = Path(folder, LOGS)
            logs.mkdir(exist_ok=True)
            if logs.is_symlink():
                raise NotADirectoryError(logs)
            replace_file(logs / f"rank_{rank}.log", trace)
            where = f". Traceback: {logs}/rank_N.log"  # the same on every rank: printed once
    return Failure(text + where, lost_contact=lost)


def exit_failure(exit_code: int) -> Failure:
    """The failure of a rank that exited without a report."""
    if exit_code >= 0:
        return Failure(f"ended with exit code {exit_code}")
    name = signal.Signals(-exit_code).name
    cause = ": killed, by the system if memory ran out" if name == "SIGKILL" else ""
    return Failure(f"ended with exit code {exit_code} ({name}{cause})")


def summary(failures: Mapping[int, Failure], world: int, args: Namespace) -> list[str]:
    """The lines for the user: causes first, each text once with the ranks that report it."""

    def named(ranks: list[int], text: str) -> str:
        which = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        return f"[{f'on all {world} ranks' if len(ranks) == world > 1 else which}] {text}"

    lines = []
    causes = {rank: f for rank, f in failures.items() if not f.lost_contact}
    for group in (causes, {rank: f for rank, f in failures.items() if f.lost_contact}):
        for text in dict.fromkeys(failure.text for failure in group.values()):
            lines.append(named(sorted(r for r, f in group.items() if f.text == text), text))
    unreported = sorted(set(range(world)) - set(failures))
    if unreported and not causes:
        lines.append(named(unreported, "no report: killed, or still waiting"))
    step = None
    if getattr(args, "save", None) and not any(f.is_user_error for f in causes.values()):
        with contextlib.suppress(USPError):  # unreadable: the next start reports it
            step = saved_step(args.save)
    if step is not None:
        lines.append(f"the last checkpoint is of step {step}: continue with --load {args.save}")
    return lines


def report(store: dist.Store, rank: int, world: int, failure: Failure, args: Namespace) -> None:
    """Print under a launcher why this rank fails: the first rank that fails prints for all that
    fail within ``REPORT_TIMEOUT_S``. No rank waits longer than three times that, dead ranks or not.
    """
    try:
        _post_failure(store, rank, failure)
        if store.add("reporter", 1) == 1:
            _wait_for(store, [f"failure_{r}" for r in range(world)], REPORT_TIMEOUT_S)
            failures = _posted_failures(store, world)
            print(*summary(failures, world, args), sep="\n", file=sys.stderr, flush=True)
            store.set("reported", ",".join(map(str, failures)))
            is_reported = True
        else:
            is_reported = _wait_for(store, ["reported"], 2 * REPORT_TIMEOUT_S)
            if is_reported and not failure.lost_contact:  # its cause was printed
                is_reported = str(rank) in store.get("reported").decode().split(",")
        store.set(f"exiting_{rank}", "")
        if rank == 0:  # it may host the store that the others still read
            failed = _posted_failures(store, world)
            _wait_for(store, [f"exiting_{r}" for r in failed], REPORT_TIMEOUT_S)
    except RuntimeError:  # the rank that hosted the store is gone
        is_reported = False
    if not is_reported:
        print(*summary({rank: failure}, world, args), sep="\n", file=sys.stderr, flush=True)


def _post_failure(store: dist.Store, rank: int, failure: Failure) -> None:
    store.set(f"failure_{rank}", json.dumps(asdict(failure)))


def _posted_failures(store: dist.Store, world: int) -> dict[int, Failure]:
    posted = [rank for rank in range(world) if store.check([f"failure_{rank}"])]
    return {rank: Failure(**json.loads(store.get(f"failure_{rank}"))) for rank in posted}


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
