"""Starts the ranks (joins a launcher's world, runs torchrun, or forks) and says why they failed:
equal errors once, tracebacks in log files.

The only file of the trainer that writes environment variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import platform
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
from torch.distributed.launcher.api import LaunchConfig

from ds_usp import ConfigError, USPError, allocator_variables
from ds_usp.settings import keeps_host_memory
from ds_usp.training import prepare_deepspeed
from usp_trainer import environment
from usp_trainer.run_files import replace_file, saved_step
from usp_trainer.signals import ASKING, DUPLICATE_S, STOPPED, processes_below, send

Main = Callable[[Namespace], int | None]  # its exit code; None: 0

USER_ERRORS = (USPError, OSError)  # the message has the fix; other errors get a traceback
LOGS = "errors"  # folder of tracebacks in the output folder
REPORT_TIMEOUT_S = 5.0  # time for the other ranks to report their error to a launcher's rank
SHUTDOWN_TIMEOUT_S = 10.0  # time for forked ranks to fail and report after the first failure
ON_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5
_AT_ONCE = (signal.SIGHUP, signal.SIGQUIT)  # signals that end a run; the others ask it to stop
_TERMINATED = tuple(code for number in ASKING for code in (-number, 128 + number))
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
    """Run ``main`` as one rank of a launcher's world; its exit code, or 1 if it failed."""
    if environment.launcher_is_parent():
        end_with_parent(os.getppid())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, *_ = next(dist.rendezvous("env://", rank, world))
    outcome = _train(main, args, store)
    if isinstance(outcome, Failure):
        report(dist.PrefixStore("failures", store), rank, world, outcome, args)
        return 1
    if outcome == STOPPED:
        environment.note_stop()
    return outcome


def run_on_gpus(script: str, argv: list[str], processes: int | None) -> int:
    """Start one process per GPU through torchrun, which runs ``script`` in each."""
    from torch.distributed.run import main as torchrun

    processes = processes or torch.cuda.device_count()
    flags = ["--standalone", f"--nproc-per-node={processes}"]
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        # torchrun kills ranks 30 s after it has passed a signal on: a checkpoint may take longer.
        flags.append(f"--signals-to-handle={','.join(number.name for number in _AT_ONCE)}")
        for number in ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _pass_on)
    try:
        torchrun([*flags, script, *argv])
    except ChildFailedError as error:  # ranks that were not killed have printed their error
        cause, failed = error.get_first_failure()
        if failed.exitcode == STOPPED:
            return STOPPED
        if failed.exitcode < 0:
            print(f"[rank {cause}] {exit_failure(failed.exitcode).text}", file=sys.stderr)
        return 1
    return 0


def _pass_on(number: int, _: object) -> None:
    """Hand a signal on to torchrun's ranks; SystemExit where there are none yet."""
    _, ranks = processes_below(os.getpid())
    if not ranks:
        raise SystemExit(128 + number)
    send(number, ranks)


def spawn_ranks(main: Main, args: Namespace, processes: int) -> int:
    """Fork the ranks from this process, so that they share its imports.

    After the first failure the others have ``SHUTDOWN_TIMEOUT_S`` to fail and report. What they
    report is printed on stderr, equal errors once. They end when this process ends for any reason.
    The first of SIGTERM, SIGINT and SIGUSR1 is passed on to the ranks. SystemExit on a second, on
    one that finds them not training yet, and on SIGHUP and SIGQUIT, with the exit code of a shell.

    Returns:
        0, ``STOPPED`` if a signal stopped the ranks, or 1 if one failed.
    """
    prepare_deepspeed()
    previous, others = {}, multiprocessing.active_children()
    asked: list[tuple[int, float]] = []  # signals, and when they came

    def stop(number: int, _: object) -> None:
        asked.append((number, time.monotonic()))
        if number in _AT_ONCE or asked[-1][1] - asked[0][1] > DUPLICATE_S:
            raise SystemExit(128 + number)

    with tempfile.TemporaryDirectory(prefix="usp_ranks_") as folder:
        store = f"{folder}/store"
        try:
            for number in (*_AT_ONCE, *ASKING):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    previous[number] = signal.signal(number, stop)
            arguments = main, args, processes, store, os.getpid()
            context = multiprocessing.start_processes(
                _forked_rank, arguments, processes, join=False, start_method="fork"
            )
            _join(context, asked)
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException):
            codes = {rank: process.exitcode for rank, process in enumerate(context.processes)}
            if set(codes.values()) == {STOPPED}:
                return STOPPED
            if asked and set(codes.values()) <= {0, *_TERMINATED}:  # before the first step
                raise SystemExit(128 + asked[0][0]) from None
            print(*summary(_failures(codes, store), processes, args), sep="\n", file=sys.stderr)
            return 1
        finally:
            # A signal may have come between a fork and the return of start_processes.
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
                    process.join()
            for number, handler in previous.items():
                signal.signal(number, handler)
    return 0


def _join(context: multiprocessing.ProcessContext, asked: list[tuple[int, float]]) -> None:
    passed_on = False
    # A signal that arrives just before the call that waits is handled after it.
    while not context.join(_POLL_S, SHUTDOWN_TIMEOUT_S):
        if asked and not passed_on:
            number = asked[0][0]  # ranks ignore SIGINT: Ctrl-C would reach them twice
            send(signal.SIGTERM if number == signal.SIGINT else number, context.pids())
            passed_on = True


def _failures(codes: Mapping[int, int], store: str) -> dict[int, Failure]:
    # One that still waits when the others have ended is terminated, and has no report.
    failed = {r: c for r, c in codes.items() if c not in (0, *_TERMINATED)} or codes
    ended = {rank: exit_failure(code) for rank, code in failed.items() if code}
    return ended | _posted_failures(dist.FileStore(store), len(codes))


def _forked_rank(
    rank: int, main: Main, args: Namespace, processes: int, store: str, parent: int
) -> NoReturn:
    for number in (*_AT_ONCE, *ASKING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent tells the ranks
    end_with_parent(parent)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    outcome = _train(main, args, dist.FileStore(store))
    if isinstance(outcome, Failure):
        _post_failure(dist.FileStore(store), rank, outcome)
        sys.exit(1)
    sys.exit(outcome)


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


def _train(main: Main, args: Namespace, store: dist.Store) -> Failure | int:
    """Initialize the default process group (NCCL on GPUs, gloo on CPU), train, and end the group;
    the exit code of ``main``, or the failure of this rank. Collective."""
    rank, on_gpu = int(os.environ["RANK"]), args.device == "cuda"
    minutes = args.distributed_timeout_minutes
    prepare_deepspeed()
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)  # the ranks share the cores
        # torch lets the second one in, and all wait for the rank that nobody started. But under
        # torchrun's --max-restarts a rank is started again, on the same store.
        once = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
        if once and store.add(f"started_{rank}", 1) > 1:
            raise ConfigError(
                f"rank {rank} of {os.environ['WORLD_SIZE']} was started a second time, on "
                f"{platform.node()}. Give every node a NODE_RANK of its own, and every process a "
                "RANK of its own"
            )
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("ranks", store),
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(minutes=minutes) if minutes else None,
        )
        if not on_gpu:  # else a rank that fails at once would end while others connect to it
            dist.barrier()
        code = main(args) or 0
        dist.destroy_process_group()
    except Exception as error:
        with contextlib.suppress(OSError):  # of a full disk, which may be why this rank fails
            get_error_handler().record_exception(error)
        return describe(error, args, rank)
    return code


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
    fail within ``REPORT_TIMEOUT_S``. No rank waits longer than four times that, dead ranks or not,
    whether it reaches the store or not.
    """
    reported: list[bool] = []
    # A request to a host that cannot be reached ends when TCP gives up, after a quarter of an hour.
    thread = threading.Thread(
        target=lambda: reported.append(_report(store, rank, world, failure, args)), daemon=True
    )
    thread.start()
    thread.join(4 * REPORT_TIMEOUT_S)
    if not any(reported):
        print(*summary({rank: failure}, world, args), sep="\n", file=sys.stderr, flush=True)


def _report(store: dist.Store, rank: int, world: int, failure: Failure, args: Namespace) -> bool:
    """:func:`report` by the job's store: whether what this rank reports was printed."""
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
        return False
    return is_reported


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
