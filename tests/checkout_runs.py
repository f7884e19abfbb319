"""Runs of an unedited framework's script on gloo ranks, from a checkout that is named to tests.

Megatron-DeepSpeed and Megatron-LM have an adapter each, ``mds_adapter.py`` and ``lm_adapter.py``:
how its server starts, what a rank records, and which weights and flags a tiny run has. Everything
else is here. Arguments and groups of a framework are module globals, so each of its runs needs
processes of its own; importing takes seconds, so they are forked from a server that has imported
it once (:func:`serve`). A line of its standard input is a request (the path of a pickle), a line of
its standard output the answer.
"""

import contextlib
import hashlib
import importlib
import itertools
import multiprocessing
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from ds_usp.errors import USPError
from megatron_patches import Patch, PatchSet

TESTS = Path(__file__).resolve().parent
START_S, RUN_S = 180.0, 150.0
TEXT_BYTES = 60_000
END_OF_DOCUMENT = 256


@dataclass(frozen=True)
class Request:
    """One run of a framework's script.

    Args:
        world: ranks.
        script: path of the script.
        flags: its arguments.
        folder: where the ranks meet, and where results go.
        patched: with the patches, or as it is.
        own_weights: keep the framework's initial weights.
        extra: more patches, as (target, module-level function) pairs; kind wrap.
        options: of the adapter.
    """

    world: int
    script: str
    flags: tuple[str, ...]
    folder: Path
    patched: bool = True
    own_weights: bool = False
    extra: tuple[tuple[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def fixtures(adapter: str, variable: str, folder: str) -> tuple[Any, Any, Any]:
    """The path of the checkout, the server that forks its ranks, and a hook of pytest: tests of the
    folder are skipped where the environment names no checkout, slow ones unless ``-m slow`` asks
    for them."""

    @pytest.fixture(scope="session")
    def checkout() -> Path:
        path = os.environ.get(variable)
        if not path:
            pytest.skip(f"{variable} is not set")
        return Path(path)

    @pytest.fixture(scope="session")
    def server(checkout: Path) -> Iterator[Server]:
        server = importlib.import_module(adapter).TrainingServer(checkout)
        yield server
        server.close()

    def skip_full_matrix(config: pytest.Config, items: list[pytest.Item]) -> None:
        skip = pytest.mark.skip(reason="run the full matrix with -m slow")
        for item in items if "slow" not in config.option.markexpr else ():
            if "slow" in item.keywords and item.path.parent.name == folder:
                item.add_marker(skip)

    return checkout, server, skip_full_matrix


class Server(ABC):
    """The server process of a checkout, and the folders of its runs."""

    ADAPTER: ClassVar[str]  # the name of the module, beside which it lies
    ENVIRONMENT: ClassVar[dict[str, str]] = {}
    SCRIPT = "pretrain_gpt.py"

    def __init__(self, checkout: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="usp-ranks-")
        self.folder = Path(self._folder.name)
        self.checkout = checkout
        self._names = itertools.count()
        self._errors = open(self.folder / "errors", "w+")  # noqa: SIM115 - as long as the server
        self._start()

    def _start(self) -> None:
        adapter = Path(str(sys.modules[self.ADAPTER].__file__))
        path = [adapter.parent, TESTS, TESTS.parent, os.environ.get("PYTHONPATH", "")]
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, path))),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            **self.ENVIRONMENT,
        }
        arguments = (self.ADAPTER, str(self.checkout), str(self.folder))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import checkout_runs; checkout_runs.serve()", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **settings},
            text=True,
            start_new_session=True,  # to end it with its ranks
        )
        self._wait("ready", START_S)

    @abstractmethod
    def arguments(self, text: str, folder: Path) -> tuple[str, ...]:
        """The script's arguments, of those that a test gives."""

    def run(self, world: int, text: str, **options: Any) -> list[dict[str, Any]]:
        """Train; each rank's record. A rank that raises fails the test with its traceback."""
        ranks = self.attempt(world, text, **options)
        for seen in ranks:
            if "traceback" in seen or "refused" in seen:
                raise AssertionError(seen.get("traceback") or repr(seen["refused"]))
        return ranks

    def attempt(
        self,
        world: int,
        text: str,
        *,
        script: str = "",
        patched: bool = True,
        own_weights: bool = False,
        extra: tuple[tuple[str, Any], ...] = (),
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Train; each rank's record, with its error.

        Args:
            script: "": the one of the class.
            options: of the adapter; the others are those of :class:`Request`.
        """
        if self._process.poll() is not None:  # a case before this one ran out of time
            self._start()
        folder = self.folder / f"run{next(self._names)}"
        folder.mkdir()
        flags = self.arguments(text.replace("{folder}", str(folder)), folder)
        path = str(self.checkout / (script or self.SCRIPT))
        request = Request(world, path, flags, folder, patched, own_weights, extra, options)
        (folder / "request").write_bytes(pickle.dumps(request))
        print(folder / "request", file=self._process.stdin, flush=True)
        self._wait("done", RUN_S, folder)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]

    def _wait(self, answer: str, seconds: float, folder: Path | None = None) -> None:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline().strip() if ready else ""
        if line != answer:
            self.close()
            logs = sorted(folder.glob("log*")) if folder else [self.folder / "errors"]
            tails = "".join(f"---- {log.name}\n{log.read_text()[-2000:]}\n" for log in logs)
            raise AssertionError(f"{answer!r} expected within {seconds:g} s, got {line!r}\n{tails}")

    def close(self) -> None:
        """End the server and the ranks that it forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def degrees_of(grid: str) -> dict[str, int]:
    """What the name of a grid says, such as ``u2r2-tp2``: the degrees of Ulysses, ring, tensor,
    pipeline and data parallelism that are not 1."""
    return {axis: int(size) for axis, size in re.findall(r"(u|r|tp|pp|dp)(\d)", grid)}


def losses_of(ranks: list[dict[str, Any]]) -> list[float]:
    """Losses and evaluations, after checking that every rank that has losses saw the same."""
    losses = [seen["losses"] for seen in ranks if seen["losses"]]
    assert losses and all(values == losses[0] for values in losses), losses
    return losses[0] + ranks[-1]["evaluations"]


def relative_difference(values: list[float], expected: list[float]) -> float:
    """The maximum over all values."""
    assert len(values) == len(expected), (values, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


Numbers = tuple[list[float], list[float]]


def numbers_of(ranks: list[dict[str, Any]]) -> Numbers:
    """Losses and evaluations, and gradient norms."""
    return losses_of(ranks), ranks[0]["norms"]


def check_close(actual: Numbers, expected: Numbers, limit: float) -> None:
    for values, wanted in zip(actual, expected, strict=True):
        assert relative_difference(values, wanted) < limit


# ------------------------------------------------------------------ in the server and its ranks


class Recorder(ABC):
    """Runs a request as one rank, and keeps its losses, norms and evaluations.

    Attributes:
        TRAINING: the framework's module of the training loop.
        NORM: the gradient norm, of the arguments of ``training_log`` behind the losses.
    """

    TRAINING: ClassVar[str]

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [], "norms": [], "evaluations": []}

    @abstractmethod
    def run(self, request: Request) -> None:
        """Train."""

    @abstractmethod
    def loss_and_norm(self, losses: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """The loss and the gradient norm of a step, None for one that there is not.

        Args:
            losses, args: what ``training_log`` is called with.
        """

    def watch(self, request: Request, *more: tuple[str, Any]) -> None:
        """Record what the training loop reports, and set the weights."""
        wraps = [(f"{self.TRAINING}:training_log", self._log), *more]
        wraps.append((f"{self.TRAINING}:evaluate", self._evaluate))
        PatchSet("recorder", (Patch(*row, "wrap") for row in (*wraps, *request.extra))).apply()

    def _log(self, original: Any, losses: Any, *args: Any, **kwargs: Any) -> Any:
        loss, norm = self.loss_and_norm(losses, args)
        if loss is not None:
            self.seen["losses"].append(float(loss))
        self.seen["norms"].append(None if norm is None else float(norm))
        return original(losses, *args, **kwargs)

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if "lm loss" in result[0]:
            self.seen["evaluations"].append(float(result[0]["lm loss"]))
        return result


def drawn_by_name(name: str, shape: list[int], std: float = 0.1) -> torch.Tensor:
    """A whole weight that its name alone decides, whatever its sharding."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def serve() -> None:
    """Answer requests until the input ends: the program of a server, of the adapter's name, the
    checkout and a folder for what ranks read."""
    name, checkout, folder = sys.argv[1:]
    adapter = importlib.import_module(name)
    adapter.start(Path(checkout), Path(folder))
    answer("ready")
    for line in sys.stdin:
        request = pickle.loads(Path(line.strip()).read_bytes())
        for child in [fork(rank, request, adapter) for rank in range(request.world)]:
            os.waitpid(child, 0)
        answer("done")


def answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fork(rank: int, request: Request, adapter: ModuleType) -> int:
    child = os.fork()
    if child == 0:
        try:
            rank_main(rank, request, adapter.Recorder())
        finally:
            # os._exit() runs no finalizers: Megatron-LM's manager of checkpoint queues would stay.
            for process in multiprocessing.active_children():
                process.terminate()
            os._exit(0)
    return child


def rank_main(rank: int, request: Request, recorder: Recorder) -> None:
    """Run the script as one rank, and leave what it saw in a file."""
    log = open(request.folder / f"log{rank}", "w")  # noqa: SIM115 - open for the whole life
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    world = str(request.world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_SIZE=world)
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    try:
        store = dist.FileStore(str(request.folder / "store"), request.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world)
        with contextlib.redirect_stdout(log):
            recorder.run(request)
    except SystemExit as end:
        recorder.seen["exit"] = end.code
    except USPError as error:
        recorder.seen["refused"] = error
        recorder.seen["groups"] = parallel_state.model_parallel_is_initialized()
    except BaseException:
        recorder.seen["traceback"] = traceback.format_exc()
    (request.folder / f"result{rank}").write_bytes(pickle.dumps(recorder.seen))


def write_corpus(builder: Any, index: Path) -> None:
    """A corpus whose next byte can be guessed, with documents of several lengths, in the files of a
    framework's builder."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (TEXT_BYTES,), generator=generator)
    text = (steps.cumsum(0) * 7 % 97).tolist()
    offset = 0
    while offset < len(text):
        length = 150 + 37 * (offset % 11)
        builder.add_item(torch.tensor([*text[offset : offset + length], END_OF_DOCUMENT]))
        builder.end_document()
        offset += length
    builder.finalize(str(index))
