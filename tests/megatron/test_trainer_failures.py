"""Failures of ranks: they end together and with their parent, and an error is printed once."""

import contextlib
import io
import json
from argparse import Namespace

import pytest
import torch.distributed as dist
from harness import RankContext
from test_trainer_start import command
from trainer_runs import TRAINER

from ds_usp import ConfigError

assert TRAINER.is_dir()  # trainer_runs has put it on the path

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

device = launch.select_device("cpu")
for mode in ("killed", "raises", "refused", "full"):
    os.makedirs(f"{mode}/step_7")
    open(f"{mode}/latest", "w").write("step_7")
    open(f"{mode}/step_7/usp_metadata.json", "w").write('{"progress": {"step": 7}}')
    # torchrun's agent names it; a full disk takes nothing.
    os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/full" if mode == "full" else f"{mode}.json"
    args = Namespace(device=device, mode=mode, output_dir=mode, save=mode)
    print(mode, launch.spawn_ranks(main, args, 3), file=sys.stderr)
"""


def test_failed_ranks_are_named_once_with_the_checkpoint_to_continue_from(tmp_path):
    done = command(["-c", DIE], tmp_path)
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
    error = json.loads((tmp_path / "refused.json").read_text())["message"]
    assert error["message"] == "ConfigError: on every rank"
    for log in ("killed/errors/rank_0.log", "raises/errors/rank_1.log"):
        assert (tmp_path / log).read_text().startswith("Traceback (")


BESIDE = """
import multiprocessing, time
from argparse import Namespace
from usp_trainer import launch

launch.select_device("cpu")
other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
other.start()
print(launch.spawn_ranks(lambda args: None, Namespace(device="cpu"), 2), other.is_alive())
"""


def test_other_children_of_the_process_go_on(tmp_path):
    done = command(["-c", BESIDE], tmp_path)
    assert done.stdout == "0 True\n", done.stderr


PARENT_ENDS = """
import os, signal, time
from argparse import Namespace
from usp_trainer import launch

def main(args):
    os.write(writing, b".")
    time.sleep(600)

launch.select_device("cpu")

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
        launch.spawn_ranks(main, Namespace(device="cpu"), 2)
    os.close(writing)
    started = b""
    while len(started) < 2:
        started += os.read(reading, 2)
    os.kill(parent, number)
    os.waitpid(parent, 0)
    print(number, os.read(reading, 1))  # ends when no rank is left that could write
    os.close(reading)
"""


def test_ranks_end_with_their_parent(tmp_path):
    done = command(["-c", PARENT_ENDS], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{n} b''" for n in (9, 9, 1, 3, 15)], done.stdout


LAUNCHER_ENDS = """
import os, signal, sys, time

if sys.argv[1:]:
    from argparse import Namespace
    from usp_trainer import launch

    launch.dist.rendezvous = lambda *_: os.write(int(sys.argv[1]), b".") and time.sleep(600)
    launch.run_rank(None, Namespace())
signal.alarm(100)
for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"):
    reading, writing = os.pipe()
    if not (launcher := os.fork()):
        os.set_inheritable(writing, True)
        os.environ.update({name: "0", "RANK": "0", "WORLD_SIZE": "2"})
        os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, str(writing)])
    os.close(writing)
    os.read(reading, 1)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    print(name, os.read(reading, 1))  # ends when no rank is left that could write
"""


def test_ranks_of_a_launcher_end_with_it(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER_ENDS)
    done = command([str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["TORCHELASTIC_RUN_ID b''", "CROSS_RANK b''"]


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
