"""Gloo ranks for tests, forked from one clean server process that has paid for the imports once.

The pytest process may own threads (autograd, OpenMP), so nothing is ever forked from it: ranks come
from multiprocessing's fork server. Rendezvous is a file, never a port. Everything runs on the CPU,
on machines with GPUs too.

    pool.run(fn, world, **kwargs)      ranks that stay alive between cases, one team a world size
    pool.errors(fn, world, **kwargs)   the exception of every rank, None where there was none
    fork_world(fn, world, **kwargs)    the same, on fresh ranks that nobody uses afterwards

`fn` is a module-level function `fn(ctx, **kwargs)`; its results come back as a list, by rank.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TIMEOUT_S = 180.0  # of one case, on a machine that does three other things
START_TIMEOUT_S = 180.0  # of a team; the first one waits for the server's imports
GRACE_S = 5.0  # for the other ranks, once one has raised
MAX_WORLD = 8
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What ranks need, imported by the server before it forks; what is not installed is skipped by it.
# A rank that imports a test module would import pytest, and the modules of tests, alone.
PRELOAD = (
    "without_garbage",
    "harness",
    "pytest",
    "cases",
    "sample_attentions",
    "deepspeed",
    "probed_operators",
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "ds_usp.attention.module",
    "ds_usp.kernels.varlen",
    "ds_usp.training",
    "megatron_patches.megatron_core.core_attention",
)


@dataclass(frozen=True)
class RankContext:
    """What a case knows about where it runs; `group` is the default group, of `world` ranks."""

    rank: int
    world: int
    group: dist.ProcessGroup


class RankError(RuntimeError):
    """A rank raised or died; the text is the first failing rank's traceback."""


class RankTimeoutError(RankError):
    """A case did not end in time; the text holds the stack of every rank."""


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended: a value, or an error with its traceback; `when` orders ranks."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    when: float = 0.0


class _PlainPickler(pickle.Pickler):
    """Sends tensors as detached CPU copies: bytes, no file descriptors, no more than the view."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def set_seeds() -> None:
    """Start from the same random state. Without a GPU ``torch.manual_seed`` takes 2 ms: it keeps a
    stack trace for each kind of device that may start later."""
    random.seed(0)
    (torch.manual_seed if _has_gpu() else torch.default_generator.manual_seed)(0)


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


# ------------------------------------------------------------------ in a rank's process


@contextlib.contextmanager
def logged_lines() -> Iterator[list[str]]:
    """What ds_usp logs on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_usp").addHandler(handler)
    yield lines
    logging.getLogger("ds_usp").removeHandler(handler)


def end_with_the_server() -> None:
    """A rank that rests would not see that the tests have been killed. Their end ends the server,
    if no rank holds the pipe by which it sees that, and the server's end its ranks."""
    if sys.platform == "linux":
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
            raise OSError("this rank could outlive the tests: prctl(PR_SET_PDEATHSIG) is refused")
        os.close(forkserver._forkserver._forkserver_alive_fd)
        forkserver._forkserver._forkserver_alive_fd = None
        os.setpgid(0, 0)  # a shell that ends would hang up on a group of which some have stopped


class _GlooOfOneThread(c10d.ProcessGroupGloo):
    """All groups of a rank on one device: each has a thread that wakes a hundred times a second,
    and a trainer makes twenty groups."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:  # of torch 2.14 on: enable_reconfigure, False for groups of torch.distributed's own
        options = c10d.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device() -> Any:
    return c10d.ProcessGroupGloo.create_default_device()


def take_one_gloo_thread() -> None:
    """From here on, for every group of this rank."""
    c10d.ProcessGroupGloo = _GlooOfOneThread


def _portable(error: BaseException) -> BaseException:
    """Return the error itself where it survives pickling, else one that names it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _call(ctx: RankContext, task: bytes) -> bytes:
    try:
        path, call = pickle.loads(task)
        sys.path[:] = path
        fn, kwargs = pickle.loads(call)
        set_seeds()
        # DeepSpeed keeps `mpu` of an earlier test for engines that are given none, and its groups
        # have ended: steps then change nothing.
        if "deepspeed.utils.groups" in sys.modules:
            sys.modules["deepspeed.utils.groups"].mpu = None  # type: ignore[attr-defined]
        return _dumps(Outcome(value=fn(ctx, **kwargs), when=time.monotonic()))
    except BaseException as error:
        when, text = time.monotonic(), traceback.format_exc()
        return _dumps(Outcome(error=_portable(error), traceback=text, when=when))


def _serve(rank: int, world: int, channel: connection.Connection, directory: str) -> None:
    """Join the group, then answer tasks until the parent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_the_server()
    # A collection that visits what the server has imported copies the pages it shares with ranks.
    gc.freeze()
    gc.enable()
    stacks = open(Path(directory, f"stack{rank}"), "w")  # noqa: SIM115 - open for the whole life
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world)
    )
    take_one_gloo_thread()
    store = dist.FileStore(str(Path(directory, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ctx = RankContext(rank, world, dist.group.WORLD)
    channel.send_bytes(_dumps(Outcome()))
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.send_bytes(_call(ctx, channel.recv_bytes()))
    os._exit(0)  # leaving a group politely needs the peers, and they may be gone


# ------------------------------------------------------------------ in the pytest process


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _kill_all() -> None:
    for process in multiprocessing.active_children():
        process.kill()


@functools.cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Start the fork server; it lives as long as this process."""
    here = Path(__file__).resolve().parent
    folders = [each for each in sys.path if each.startswith(f"{here}{os.sep}")]  # of test modules
    path = [str(here.parent), str(here), *folders, os.environ.get("PYTHONPATH", "")]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONWARNINGS": "ignore",  # what the preloaded packages say about absent extras
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"  # works without a resolvable host name
    with _environment(**settings):
        forkserver.ensure_running()
    # Before multiprocessing ends its daemons politely, which those that rest do not hear.
    atexit.register(_kill_all)
    return context


class Team:
    """`world` ranks with one default group; unusable once a case has failed on it."""

    def __init__(self, world: int) -> None:
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world={world}: the harness runs 1 to {MAX_WORLD} ranks")
        self.world = world
        self._directory = tempfile.TemporaryDirectory(prefix="usp-ranks-")
        context = _server()
        self._channels: list[connection.Connection] = []
        self._processes = []
        for rank in range(world):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world, child_end, self._directory.name), daemon=True
            )
            process.start()
            child_end.close()
            self._channels.append(parent_end)
            self._processes.append(process)
        self._started = False

    def call(
        self, fn: Callable[..., Any], kwargs: dict[str, Any], timeout: float, grace: float
    ) -> list[Outcome]:
        """Run one case on every rank; stuck ranks are RankTimeoutError with all stacks."""
        if not self._started:
            _values(self._collect(START_TIMEOUT_S, GRACE_S, "the start of the ranks"))
            self._started = True
        self._signal(signal.SIGCONT)
        task = pickle.dumps((sys.path, _dumps((fn, kwargs))))
        for channel in self._channels:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by _collect
                channel.send_bytes(task)
        return self._collect(timeout, grace, getattr(fn, "__qualname__", repr(fn)))

    def rest(self) -> None:
        """Hold the ranks until the next call: gloo wakes a hundred times a second for each group
        of each rank, and ranks that wait would take a tenth of both cores from those that work."""
        if sys.platform == "linux":  # where they end with the tests even so
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)

    def _collect(self, timeout: float, grace: float, what: str) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.world:
            waiting = [c for rank, c in enumerate(self._channels) if rank not in outcomes]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._stuck(outcomes, timeout, what)
            for channel in ready:
                rank = self._channels.index(channel)
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._channels[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_S)
            died = RuntimeError(f"the process died, exit code {self._processes[rank].exitcode}")
            return Outcome(error=died, traceback=f"{died}\n", when=time.monotonic())

    def _stuck(self, outcomes: dict[int, Outcome], timeout: float, what: str) -> RankError:
        stacks = self._stacks()
        missing = [rank for rank in range(self.world) if rank not in outcomes]
        lines = [f"{what}: no answer from ranks {missing} of {self.world}"]
        for rank in range(self.world):
            lines.append(f"---- rank {rank} ({_ending(outcomes.get(rank))}) ----")
            lines.append(stacks[rank] if rank in missing else outcomes[rank].traceback)
        failed = _first_failure(list(outcomes.items()))
        if failed is None:
            lines[0] += f" within {timeout:g} s"
            return RankTimeoutError("\n".join(lines))
        lines[0] += f" after rank {failed[0]} raised:\n{failed[1].traceback}"
        return RankTimeoutError("\n".join(lines))

    def _stacks(self) -> list[str]:
        self._signal(signal.SIGUSR1)
        time.sleep(0.5)  # the handler writes at once, even in a blocked C call
        files = [Path(self._directory.name, f"stack{rank}") for rank in range(self.world)]
        return [f.read_text() if f.exists() else "(not started)\n" for f in files]

    def close(self) -> None:
        """End the ranks at once, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for channel in self._channels:
            channel.close()
        self._directory.cleanup()


def _ending(outcome: Outcome | None) -> str:
    if outcome is None:
        return "stuck"
    return "returned" if outcome.error is None else f"raised {type(outcome.error).__name__}"


def _first_failure(outcomes: list[tuple[int, Outcome]]) -> tuple[int, Outcome] | None:
    failed = [(rank, outcome) for rank, outcome in outcomes if outcome.error is not None]
    return min(failed, key=lambda item: item[1].when, default=None)


def _values(outcomes: list[Outcome]) -> list[Any]:
    """Return every rank's value, or raise what the first failing rank said."""
    failed = _first_failure(list(enumerate(outcomes)))
    if failed is None:
        return [outcome.value for outcome in outcomes]
    rank, first = failed
    endings = ", ".join(f"rank {r} {_ending(o)}" for r, o in enumerate(outcomes))
    raise RankError(f"rank {rank} of {len(outcomes)} raised\n{first.traceback}({endings})")


def no_work(ctx: RankContext) -> None:
    """A case that only waits until a rank is there."""


class WorkerPool:
    """Teams of ranks, one a world size, kept alive until a case fails on them."""

    def __init__(self) -> None:
        self._teams: dict[int, Team] = {}

    def run(
        self, fn: Callable[..., Any], world: int, *, timeout: float = TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Return `fn(ctx, **kwargs)` of every rank; raises RankError as soon as one fails."""
        return _values(self._call(fn, world, kwargs, timeout, GRACE_S))

    def errors(
        self, fn: Callable[..., Any], world: int, *, timeout: float = TIMEOUT_S, **kwargs: Any
    ) -> list[BaseException | None]:
        """Return what every rank raised, or None; a stuck rank is RankTimeoutError."""
        return [o.error for o in self._call(fn, world, kwargs, timeout, timeout)]

    def _call(
        self,
        fn: Callable[..., Any],
        world: int,
        kwargs: dict[str, Any],
        timeout: float,
        grace: float,
    ) -> list[Outcome]:
        team = self._teams.pop(world, None) or Team(world)
        try:
            outcomes = team.call(fn, kwargs, timeout, grace)
            failed = any(outcome.error is not None for outcome in outcomes)
            if not failed:
                team.rest()
        except BaseException:
            team.close()
            raise
        if failed:
            team.close()  # messages of the broken case may still be in flight in its groups
        else:
            self._teams[world] = team
        return outcomes

    def close(self) -> None:
        while self._teams:
            self._teams.popitem()[1].close()


def fork_world(
    fn: Callable[..., Any], world: int, *, timeout: float = TIMEOUT_S, **kwargs: Any
) -> list[Any]:
    """Return `fn(ctx, **kwargs)` of every rank of a fresh world that ends with the call."""
    team = Team(world)
    try:
        return _values(team.call(fn, kwargs, timeout, GRACE_S))
    finally:
        team.close()
