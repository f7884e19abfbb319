"""Failures of ranks: they end together and with their parent, and an error is printed once."""

import contextlib
import io
import json
import os
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness import RankContext, fork_world
from programs import forked
from test_trainer_start import PYTHONPATH
from trainer_runs import ADAM, TRAINER, arguments, degrees, relative_difference, rows, train

import megatron_patches
from ds_usp import ConfigError

assert TRAINER.is_dir()  # trainer_runs has put it on the path

IMPORTS = """
from ds_usp.training import prepare_deepspeed
from usp_trainer import launch

prepare_deepspeed()
"""


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """The programs of this file, with their folders."""
    texts = (DIE, ASKED, TEARDOWN, PARENT_ENDS, LAUNCHER_ENDS, STARTED_AGAIN)
    programs = {tmp_path_factory.mktemp("program"): text for text in texts}
    done = forked(IMPORTS, programs, PYTHONPATH=PYTHONPATH)
    return {programs[folder]: (folder, each) for folder, each in done.items()}


DIE = """
import os, signal, sys
from argparse import Namespace

import torch.distributed as dist
from ds_usp import ConfigError
from usp_trainer import launch

def main(args):
    if args.mode in ("refused", "full"):
        raise ConfigError("on every rank")
    if dist.get_rank() == 1:
        if args.mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("a defect")
    dist.barrier()

given = {"device": launch.select_device("cpu"), "distributed_timeout_minutes": None}
for mode in ("killed", "raises", "refused", "full"):
    os.makedirs(f"{mode}/step_7")
    open(f"{mode}/latest", "w").write("step_7")
    open(f"{mode}/step_7/usp_metadata.json", "w").write('{"progress": {"step": 7}}')
    # torchrun's agent names it; a full disk takes nothing.
    os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/full" if mode == "full" else f"{mode}.json"
    args = Namespace(mode=mode, output_dir=mode, save=mode, **given)
    print(mode, launch.spawn_ranks(main, args, 3), file=sys.stderr)
"""


def test_failed_ranks_are_named_once_with_the_checkpoint_to_continue_from(ended):
    folder, done = ended[DIE]
    killed, rest = done.stderr.split("killed 1\n")
    raised, refused = rest.split("raises 1\n")
    refused, full = refused.split("refused 1\n")
    assert "[rank 1] ended with exit code -9 (SIGKILL: killed, by the system if" in killed
    assert "[rank 1] KeyError: 'a defect'" in raised
    assert refused == "[on all 3 ranks] ConfigError: on every rank\n"
    assert full == f"{refused}full 1\n"
    for text in (killed, raised):
        assert "[ranks 0, 2] lost contact with another rank" in text
        assert "the last checkpoint is of step 7: continue with --load" in text
        assert "Traceback (" not in text and "GLHF" not in text
    error = json.loads((folder / "refused.json").read_text())["message"]
    assert error["message"] == "ConfigError: on every rank"
    for log in ("killed/errors/rank_0.log", "raises/errors/rank_1.log"):
        assert (folder / log).read_text().startswith("Traceback (")


ASKED = """
import multiprocessing, os, signal, sys, time
from argparse import Namespace

import torch.distributed as dist
from usp_trainer import launch, signals

def main(args):
    with signals.StopSignals() as noted:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getppid(), args.number)
        if args.stuck:
            # In a collective, where no Python runs: as a rank that waits for others.
            if dist.get_rank() == 0:
                time.sleep(0.7)
                os.kill(os.getppid(), args.number)
                time.sleep(60)
            dist.barrier()
        while not any(noted.flags()):
            time.sleep(0.01)
        print(signals.stop_text(noted.flags(), 1), flush=True)
        return signals.STOPPED

given = {"device": launch.select_device("cpu"), "distributed_timeout_minutes": None}
other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
other.start()
nothing = launch.spawn_ranks(lambda args: None, Namespace(**given), 2)
print(nothing, other.is_alive(), flush=True)
for number in (signal.SIGINT, signal.SIGUSR1):
    args = Namespace(number=number, stuck=False, **given)
    print(launch.spawn_ranks(main, args, 2), flush=True)
start = time.monotonic()
try:
    launch.spawn_ranks(main, Namespace(number=signal.SIGTERM, stuck=True, **given), 2)
except SystemExit as end:
    print(end.code, time.monotonic() - start < 20)
"""


def test_a_signal_stops_the_ranks_and_a_second_one_ends_them(ended):
    """And no other child of the process: of ranks that end by themselves neither."""
    _, done = ended[ASKED]
    ctrl_c, warning = ([f"{name} on 1 of 1 ranks"] * 2 for name in ("SIGTERM", "SIGUSR1"))
    expected = ["0 True", *ctrl_c, "75", *warning, "75", "143 True"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.stderr == ""


TEARDOWN = """
import os, signal, sys, time
from usp_trainer import signals

signals._REPORT_S = 0.1
gone = os.fork()
if not gone:
    os._exit(0)
os.waitid(os.P_PID, gone, os.WEXITED | os.WNOWAIT)  # it has ended before a rank looks
for siblings in ([gone], []):
    if not (rank := os.fork()):
        with signals.StopSignals(siblings) as noted:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20 if siblings else 0.5)
            os._exit(9 if any(noted.flags()) else 8)
    print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
"""


def test_a_rank_whose_neighbour_has_ended_does_not_wait_for_a_step(ended):
    """Launchers end the ranks beside one that failed by SIGTERM, and some wait 30 s for each."""
    _, done = ended[TEARDOWN]
    assert done.stdout.split() == ["143", "9"], done.stderr


def steps_until_signals(
    ctx: RankContext, *, flags: str, output_dir: str, runs: list[dict[int, tuple[int, int]]]
) -> list[tuple[int, str]]:
    """Exit code and last lines of runs, in each of which the ranks signal themselves.

    Args:
        runs: of each run, rank -> the step before which it gets a signal, and the signal.
    """
    from megatron.core import parallel_state
    from usp_trainer import loop

    from ds_usp.training import prepare_deepspeed

    ended = []
    for number, signals in enumerate(runs):
        prepare_deepspeed()
        parallel_state.destroy_model_parallel()
        megatron_patches.restore()
        step_of = loop.TrainingLoop.step
        for received in (signal.SIGTERM, signal.SIGUSR1):  # which a rank that has stopped ignores
            signal.signal(received, signal.SIG_DFL)

        def step(self: loop.TrainingLoop, signals=signals, step_of=step_of) -> dict[str, Any]:
            before, signal_number = signals.get(ctx.rank, (0, 0))
            if before == self.progress.step + 1:
                os.kill(os.getpid(), signal_number)
                time.sleep(0.1)  # for the thread that reads it
            return step_of(self)

        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            mock.patch.object(loop.TrainingLoop, "step", step),
        ):
            args = arguments(flags + (f" --load {output_dir}/saved" if number else ""), output_dir)
            args.quiet = False
            code = loop.pretrain(args)
        ended.append((code, printed.getvalue()))
    return ended


def test_ranks_stop_at_one_step_whichever_of_them_a_signal_reaches(tmp_path):
    """And a resumed run goes on as if it had not been stopped."""
    flags = ADAM + degrees(tp=2, sp=2) + f" --train-iters 5 --save {tmp_path}/saved"
    term, user = signal.SIGTERM, signal.SIGUSR1
    runs = [
        {3: (3, user)},  # one rank only, that holds other weights than rank 0
        {0: (4, term), 1: (4, term), 2: (5, user)},  # a later one finds no step to stop
        {1: (4, term)},  # before the first step of this start: there is nothing new to save
        {},
    ]
    ranks = fork_world(
        steps_until_signals, 4, flags=flags, output_dir=str(tmp_path), runs=runs, timeout=240
    )
    assert all([code for code, _ in rank] == [75, 75, 75, 0] for rank in ranks), ranks
    first, second, third, last = (text for _, text in ranks[0])
    assert "stopped  at step 2 of 5: SIGUSR1 on 1 of 4 ranks\n" in first
    assert "saved/step_2\n" in first and "trained  2 steps" in first
    assert "stopped  at step 3 of 5: SIGTERM on 2 of 4 ranks\n" in second
    assert "saved/step_3\n" in second
    assert "stopped  at step 3 of 5: SIGTERM on 1 of 4 ranks\n" in third
    assert "saved    " not in third
    assert "saved/step_5\n" in last and "stopped" not in last
    steps = rows(tmp_path)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    (expected,) = train(1, ADAM + degrees(), output_dir=tmp_path / "one", steps=5)
    assert relative_difference([(r["loss"], r["grad_norm"]) for r in steps], expected) < 1e-5


PARENT_ENDS = """
import os, signal, time
from argparse import Namespace
from usp_trainer import launch

def main(args):
    os.write(writing, b".")
    time.sleep(600)

given = {"device": launch.select_device("cpu"), "distributed_timeout_minutes": None}

signal.alarm(100)
for ignored in (signal.SIGHUP, signal.SIGQUIT):  # as under nohup, or in a shell's background
    signal.signal(ignored, signal.SIG_DFL)
for number, on_linux in (
    (signal.SIGKILL, True),
    (signal.SIGKILL, False),
    (signal.SIGHUP, True),
    (signal.SIGQUIT, True),
    (signal.SIGTERM, True),
):
    reading, writing = os.pipe()
    if not (parent := os.fork()):
        if not on_linux:
            launch.ON_LINUX = False
        launch.spawn_ranks(main, Namespace(**given), 2)
    os.close(writing)
    started = b""
    while len(started) < 2:
        started += os.read(reading, 2)
    os.kill(parent, number)
    os.waitpid(parent, 0)
    print(number, os.read(reading, 1))  # ends when no rank is left that could write
    os.close(reading)
"""


def test_ranks_end_with_their_parent(ended):
    _, done = ended[PARENT_ENDS]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{n} b''" for n in (9, 9, 1, 3, 15)], done.stdout


LAUNCHER_ENDS = """
import os, signal, time
from argparse import Namespace
from usp_trainer import launch

signal.alarm(100)
for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"):
    reading, writing = os.pipe()
    if not (launcher := os.fork()):
        os.environ.update({name: "0", "RANK": "0", "WORLD_SIZE": "2"})
        if not os.fork():
            launch.dist.rendezvous = lambda *_: os.write(writing, b".") and time.sleep(600)
            launch.run_rank(None, Namespace())
        time.sleep(600)
    os.close(writing)
    os.read(reading, 1)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    print(name, os.read(reading, 1))  # ends when no rank is left that could write
"""


def test_ranks_of_a_launcher_end_with_it(ended):
    _, done = ended[LAUNCHER_ENDS]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["TORCHELASTIC_RUN_ID b''", "CROSS_RANK b''"]


STARTED_AGAIN = """
import os
from argparse import Namespace

import torch.distributed as dist
from usp_trainer import launch

args = Namespace(device="cpu", distributed_timeout_minutes=None, output_dir=".")
for restarts in "10":
    os.environ.update(RANK="0", WORLD_SIZE="1", TORCHELASTIC_MAX_RESTARTS=restarts)
    store = dist.FileStore(f"store_{restarts}", 1)
    for attempt in range(2):
        outcome = launch._train(lambda _: 0, args, store)
        print(outcome if outcome == 0 else outcome.text)
"""


def test_only_a_launcher_that_restarts_starts_a_rank_again(ended):
    _, done = ended[STARTED_AGAIN]
    first, again, once, twice = done.stdout.splitlines()
    assert (first, again, once) == ("0", "0", "0"), done
    assert "rank 0 of 1 was started a second time" in twice


def reports_of_rank(ctx: RankContext, *, folder: str, errors: list[str | None]) -> str:
    """What each rank prints under a launcher; None: the rank is dead."""
    from usp_trainer import launch

    if None in errors:
        launch.REPORT_TIMEOUT_S = 1.0
    text = errors[ctx.rank]
    if text is None:
        return ""
    store = dist.FileStore(f"{folder}/{errors}"[:200].replace(" ", ""), ctx.world)
    error = RuntimeError("gloo: gone") if text == "contact" else ConfigError(text)
    args, printed = Namespace(output_dir=folder), io.StringIO()
    with contextlib.redirect_stderr(printed):
        failure = launch.describe(error, args, ctx.rank)
        launch.report(store, ctx.rank, ctx.world, failure, args)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (["a", "a", "a"], ["[on all 3 ranks] ConfigError: a"]),
        (["a", "b", "a"], ["[ranks 0, 2] ConfigError: a", "[rank 1] ConfigError: b"]),
        (
            ["contact", "contact", None],
            ["[ranks 0, 1] lost contact", "[rank 2] no report: killed, or still waiting"],
        ),
    ],
)
def test_ranks_of_a_launcher_report_an_error_once(errors, expected, pool, tmp_path):
    printed = pool.run(reports_of_rank, 3, folder=str(tmp_path), errors=errors)
    lines = sorted("".join(printed).splitlines())
    assert len(lines) == len(expected), lines
    for line, start in zip(lines, sorted(expected), strict=True):
        assert line.startswith(start)


def test_torchruns_own_traceback_is_one_line(monkeypatch, capsys):
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from usp_trainer import launch

    def fail(argv: list[str]) -> None:
        codes = {0: -15, 1: -9}
        failures = {r: ProcessFailure(r, 100 + r, code, "") for r, code in codes.items()}
        failures[0].timestamp = failures[1].timestamp + 1
        raise ChildFailedError("script", failures)

    monkeypatch.setattr(torch.distributed.run, "main", fail)
    assert launch.run_on_gpus("script", [], 2) == 1
    assert capsys.readouterr().err.startswith("[rank 1] ended with exit code -9 (SIGKILL")
