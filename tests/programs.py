"""Programs that tests start as processes of their own: Python, torchrun, the scripts, frameworks.

    python("-m", "ds_usp", "verify")          a program of the project
    forked("import torch", {folder: text})    several that share their imports
    torchrun(2, "bench_attention.py")         the same, as ranks
    bash("tiny", DRY_RUN="1")                 a script of the examples; start(): in this process
    FrameworkServer(checkout).run(4, flags)   a framework's script on ranks of its own

Ranks that call functions of the tests come from ``harness.py``.

Arguments and groups of a framework are module globals, so each of its runs needs processes of its
own; importing takes seconds, so they are forked from a server that has imported it once
(:func:`serve`). A line of its standard input is a request (the path of a pickle), a line of its
standard output the answer.
"""

import contextlib
import csv
import itertools
import multiprocessing
import os
import pickle
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
import torch
import torch.distributed as dist

from ds_usp.errors import USPError

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def python(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = 300, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the project on its path and one thread; its exit code is not judged.

    Args:
        settings: of the environment, beside those of the tests.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **settings,
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def torchrun(
    ranks: int, *arguments: str | Path, **options: Any
) -> subprocess.CompletedProcess[str]:
    """:func:`python` by torchrun, on ranks of this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return python(*launcher, *arguments, **options)


_FORK = """
import os, sys
folders = {}
for folder in sys.argv[1:]:
    if child := os.fork():
        folders[child] = folder
        continue
    os.chdir(folder)
    os.closerange(3, 256)  # an import keeps one of the tests' pipes open, as long as any rank lives
    for stream in (1, 2):
        os.dup2(os.open(f"printed{stream}", os.O_CREAT | os.O_WRONLY), stream)
    sys.path.insert(0, folder)
    exec(open("program.py").read())
    sys.exit()
while folders:
    child, status = os.wait()
    with open(f"{folders.pop(child)}/code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
"""


def forked(
    imports: str, programs: Mapping[Path, str], **settings: str
) -> dict[Path, subprocess.CompletedProcess[str]]:
    """:func:`python` of programs beside each other, each in its folder, with its modules first.

    They are forked from one process that has done the imports, which take longer than most.
    """
    for folder, program in programs.items():
        (folder / "program.py").write_text(program)
    done = python("-c", imports + _FORK, *programs, **settings)
    assert done.returncode == 0, done.stderr
    ended = {}
    for folder, program in programs.items():
        code, *printed = ((folder / x).read_text() for x in ("code", "printed1", "printed2"))
        ended[folder] = subprocess.CompletedProcess(program, int(code), *printed)
    return ended


# ------------------------------------------------------------------ scripts of the examples

FOLDER = ROOT / "examples_deepspeed" / "sequence_parallel"
CHECKOUT = ROOT / "tests/examples/checkout"  # has a pretrain_gpt.py
SCRIPTS = {
    "1.3B": "ds_pretrain_gpt_1.3B_usp_32k.sh",
    "30B": "ds_pretrain_gpt_30B_usp_32k.sh",
    "6.7B": "ds_pretrain_gpt_6.7B_usp_128k.sh",
    "tiny": "ds_pretrain_gpt_tiny_usp_cpu.sh",
}
GPUS = {"1.3B": "4", "30B": "16", "6.7B": "8", "tiny": "4"}
MEGATRON_LM_FOLDER = ROOT / "examples_deepspeed" / "megatron_lm"
MEGATRON_LM_SCRIPTS = {
    "lm-1.3B": "pretrain_gpt_1.3B_usp_32k.sh",
    "lm-llama3": "llama3_8B_usp_128k.sh",
    "lm-tiny": "pretrain_gpt_tiny_usp_cpu.sh",
}
PATHS = {size: FOLDER / name for size, name in SCRIPTS.items()}
PATHS |= {size: MEGATRON_LM_FOLDER / name for size, name in MEGATRON_LM_SCRIPTS.items()}
# The program that is started -> the environment that selects it.
PROGRAMS = {"trainer": {}, "megatron_deepspeed": {"MEGATRON_DEEPSPEED_PATH": str(CHECKOUT)}}


def environment(**settings: str) -> dict[str, str]:
    """What a script needs of the environment, and settings."""
    kept = ("HOME", "LANG", "TMPDIR", "USP_NO_INSTALL")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**env, **settings}


def bash(
    size: str, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    return run_script(PATHS[size], *arguments, cwd=cwd, timeout=timeout, **settings)


def run_script(
    path: Path, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(path), *arguments],
        cwd=cwd or ROOT,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def variables(size: str) -> list[str]:
    """The variables of a script as ``launch.sh`` passes them on."""
    lines = PATHS[size].read_text().splitlines()
    return [shlex.split(line)[0] for line in lines if re.match(r"[a-z_]+=", line)]


def start(size: str, *arguments: str, **settings: str) -> int:
    """What ``launch.sh`` starts, in this process; the exit code."""
    from launch_job import main

    return main([*variables(size), "--", *arguments], environment(**settings))


CheckRefused = Callable[[str, str, dict[str, str]], None]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# ------------------------------------------------------------------ a framework, from the tests

START_S, RUN_S = 180.0, 150.0
TEXT_BYTES = 60_000
END_OF_DOCUMENT = 256


def checkout_named_by(variable: str) -> Path:
    """The framework's checkout; skips the test where the environment names none."""
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} is not set")
    return Path(path)


def skip_full_matrix(config: pytest.Config, items: list[pytest.Item], folder: str) -> None:
    """Skip a folder's slow tests, unless -m slow asks for them."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if "slow" in item.keywords and item.path.parent.name == folder:
                item.add_marker(pytest.mark.skip(reason="run the full matrix with -m slow"))


@dataclass(frozen=True)
class RankRequest:
    """One run of a framework's script.

    Args:
        world: ranks.
        script: path of the script.
        flags: its arguments.
        folder: where the ranks meet, and where results go.
        patched: with the patches, or as it is.
        own_weights: keep the framework's initial weights.
        extra: more patches, as (target, module-level function) pairs; kind wrap.
    """

    world: int
    script: str
    flags: tuple[str, ...]
    folder: Path
    patched: bool = True
    own_weights: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


class FrameworkServer(ABC):
    """The server process of a checkout, and the folders of its runs."""

    SERVER: ClassVar[Path]  # the program, started with the checkout and a folder
    REQUEST: ClassVar[type[RankRequest]]
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
        path = [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")]
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            **self.ENVIRONMENT,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(self.SERVER), str(self.checkout), str(self.folder)],
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
        self, world: int, text: str, *, script: str = "", **options: Any
    ) -> list[dict[str, Any]]:
        """Train; each rank's record, with its error.

        Args:
            script: "": the one of the class.
        """
        if self._process.poll() is not None:  # a case before this one ran out of time
            self._start()
        folder = self.folder / f"run{next(self._names)}"
        folder.mkdir()
        request = self.REQUEST(
            world,
            str(self.checkout / (script or self.SCRIPT)),
            self.arguments(text.replace("{folder}", str(folder)), folder),
            folder,
            **options,
        )
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


def reported_kinds(folder: Path, ranks: int) -> set[str]:
    """The kinds of communication that a run's report has of every rank, beside small ones."""
    lines = (folder / "usp_communication" / "communication.csv").read_text().splitlines()
    rows = {(int(row["rank"]), row["kind"]) for row in csv.DictReader(lines[1:])}
    kinds = {kind for _, kind in rows} - {"other collectives"}
    return {kind for kind in kinds if all((rank, kind) in rows for rank in range(ranks))}


# ------------------------------------------------------------------ a framework, in its server


class Recorder(Protocol):
    """Runs a request as one rank, and keeps what it saw."""

    seen: dict[str, Any]

    def run(self, request: Any) -> None:
        """Train."""


def serve(make_recorder: Callable[[], Recorder]) -> None:
    """Answer requests until the input ends; what the ranks need is imported by now."""
    answer("ready")
    for line in sys.stdin:
        request = pickle.loads(Path(line.strip()).read_bytes())
        for child in [fork(rank, request, make_recorder) for rank in range(request.world)]:
            os.waitpid(child, 0)
        answer("done")


def answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fork(rank: int, request: RankRequest, make_recorder: Callable[[], Recorder]) -> int:
    child = os.fork()
    if child == 0:
        try:
            rank_main(rank, request, make_recorder())
        finally:
            # os._exit() runs no finalizers: Megatron-LM's manager of checkpoint queues would stay.
            for process in multiprocessing.active_children():
                process.terminate()
            os._exit(0)
    return child


def rank_main(rank: int, request: RankRequest, recorder: Recorder) -> None:
    """Run the script as one rank, and leave what it saw in a file."""
    log = open(request.folder / f"log{rank}", "w")  # noqa: SIM115 - open for the whole life
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request.world),
        LOCAL_SIZE=str(request.world),
    )
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


def documents() -> Iterator[torch.Tensor]:
    """A corpus whose next byte can be guessed, with documents of several lengths."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (TEXT_BYTES,), generator=generator)
    text = (steps.cumsum(0) * 7 % 97).tolist()
    offset = 0
    while offset < len(text):
        length = 150 + 37 * (offset % 11)
        yield torch.tensor([*text[offset : offset + length], END_OF_DOCUMENT])
        offset += length
