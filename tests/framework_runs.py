"""Tiny runs of a framework's training script, on gloo ranks that a server process forks."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rank_server import RankRequest

TESTS = Path(__file__).resolve().parent
START_S, RUN_S = 180.0, 150.0


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
        path = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
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

    def attempt(self, world: int, text: str, **options: Any) -> list[dict[str, Any]]:
        """Train; each rank's record, with its error."""
        if self._process.poll() is not None:  # a case before this one ran out of time
            self._start()
        folder = self.folder / f"run{next(self._names)}"
        folder.mkdir()
        request = self.REQUEST(
            world,
            str(self.checkout / self.SCRIPT),
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
    """Compare losses and gradient norms, at every step."""
    for values, wanted in zip(actual, expected, strict=True):
        assert relative_difference(values, wanted) < limit


def reported_kinds(folder: Path, ranks: int) -> set[str]:
    """The kinds of communication that a run's report has of every rank, beside small ones."""
    lines = (folder / "usp_communication" / "communication.csv").read_text().splitlines()
    rows = {(int(row["rank"]), row["kind"]) for row in csv.DictReader(lines[1:])}
    kinds = {kind for _, kind in rows} - {"other collectives"}
    return {kind for kind in kinds if all((rank, kind) in rows for rank in range(ranks))}
