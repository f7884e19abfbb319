"""Every flag of the trainer has a range and one default, and a bad one is refused without torch."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_usp.kernels.registry import AUTO, KERNELS
from ds_usp.memory import RECOMPUTE

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer import arg_types, arguments  # noqa: E402
from usp_trainer.arguments import build_parser, parse  # noqa: E402
from usp_trainer.suggestions import closest_name, edit_distance  # noqa: E402

PARSER = build_parser()
ACTIONS = {a.option_strings[0]: a for a in PARSER._actions if a.nargs != 0}
NUMBERS = (arg_types.Integer, arg_types.Number, arg_types.KeywordOr)
# Flags for which 0 means something, and what; every other number starts above it.
ZERO = {
    "--attention-dropout": "none",
    "--hidden-dropout": "none",
    "--adam-beta1": "no momentum",
    "--adam-beta2": "the last gradient alone",
    "--clip-grad": "no clipping",
    "--local_rank": "the first rank of a node",
    "--lr": "weights stay as they are",
    "--lr-warmup-iters": "no warm-up",
    "--min-lr": "decay to nothing",
    "--seed": "a seed like another",
    "--sgd-momentum": "none",
    "--usp-loss-chunks": "all logits at once",
    "--usp-offload-ratio": "nothing on the host",
    "--weight-decay": "none",
}
NEGATIVE = {"--local_rank"}  # -1: DeepSpeed's word for no launcher


def takes(flag: str, value: str) -> bool:
    try:
        parse([f"{flag}={value}"])
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("flag", ACTIONS)
def test_every_flag_has_a_range(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    action = ACTIONS[flag]
    if action.choices is None and not isinstance(action.type, (*NUMBERS, arg_types.Text)):
        assert isinstance(action.type, arg_types.Ratios), f"{flag} takes anything"
    assert not takes(flag, ""), flag
    if isinstance(action.type, arg_types.Text):
        return
    for value in ("nan", "inf", "-inf", "1e999", "-0.5", "word", "nan,1,1", "1,inf,0"):
        assert not takes(flag, value), (flag, value)
        assert flag in capsys.readouterr().err
    assert takes(flag, "-1") is (flag in NEGATIVE)
    if isinstance(action.type, NUMBERS):
        assert takes(flag, "0") is (flag in ZERO), flag
    if flag in ZERO:
        assert action.type is not None


def test_the_upper_ends_are_refused() -> None:
    for value in ("1", "1.5"):
        for flag in ("--adam-beta1", "--adam-beta2", "--sgd-momentum", "--hidden-dropout"):
            assert not takes(flag, value)
    assert takes("--usp-offload-ratio", "1") and not takes("--usp-offload-ratio", "1.01")
    assert takes("--seed", str(2**32 - 1)) and not takes("--seed", str(2**32))
    assert not takes("--rotary-base", "1")
    for split in ("0,1,1", "1,-1,1", "1,1", "a,b,c"):
        assert not takes("--split", split)


def test_the_refusal_says_what_was_found_and_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "--lr=nan": "--lr: 'nan' is not a finite number of 0 or more",
        "--seq-length=32k": "--seq-length: '32k' is not a whole number of 1 or more",
        "--adam-beta1=1.5": "--adam-beta1: '1.5' is not a number of 0 or more and below 1",
        "--ulysses-degree=0": "'0' is not a whole number of 1 or more, and not 'auto'",
        "--save=": "--save: '' is empty; give a path",
    }
    for flag, text in said.items():
        assert not takes(*flag.split("="))
        assert text in capsys.readouterr().err


def test_names_come_from_one_place() -> None:
    assert (AUTO, *(row.name for row in KERNELS)) == arguments.KERNELS
    assert tuple(ACTIONS["--usp-recompute"].choices or ()) == RECOMPUTE


def test_a_help_text_states_one_default() -> None:
    formatter = PARSER._get_formatter()
    for action in PARSER._actions:
        if action.help != argparse.SUPPRESS:
            text = formatter._expand_help(action)
            assert text.count("default") <= 1, text
            assert "None" not in text and "False" not in text, text


MISSPELT = {
    "--seq-lenght": "--seq-length",
    "--seq-len": "--seq-length",
    "--seq_length": "--seq-length",
    "--ulysses-degre": "--ulysses-degree",
    "--usp_layout": "--usp-layout",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--fp16": None,
}


@pytest.mark.parametrize("flag", MISSPELT)
def test_the_nearest_flag(flag: str) -> None:
    known = [name for action in PARSER._actions for name in action.option_strings]
    assert closest_name(flag, known) == MISSPELT[flag]


def test_edits() -> None:
    for a, b, count in (("", "ab", 2), ("abc", "acb", 1), ("kitten", "sitting", 3), ("a", "a", 0)):
        assert edit_distance(a, b) == edit_distance(b, a) == count


def without_torch(*argv: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The trainer where an import of torch fails."""
    (folder / "no").mkdir(exist_ok=True)
    (folder / "no" / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(folder / "no"), str(ROOT)])
    return subprocess.run(
        [sys.executable, str(TRAINER / "pretrain_gpt_usp.py"), *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


REFUSED_EARLY = {
    "--seq-lenght 64": (2, "there is no flag --seq-lenght; did you mean --seq-length?"),
    "--lr nan": (2, "--lr: 'nan' is not"),
    "--ds-sequence-parallel-size 4 --ulysses-degree 3": (1, "Possible: 4 (ring 1), 2 (ring 2)"),
    "--data-path none.txt": (1, "--data-path none.txt: No such file or directory, and no"),
    "--load nowhere": (1, "--load nowhere holds no finished checkpoint"),
    f"--vocab-size 5 --data-path {__file__}": (1, "text is read as bytes and has 257 token ids"),
    "--usp-cluster h200": (1, "is for --ulysses-degree auto"),
}


@pytest.mark.parametrize("flags", REFUSED_EARLY)
def test_bad_flags_are_refused_before_torch_is_imported(flags: str, tmp_path: Path) -> None:
    code, text = REFUSED_EARLY[flags]
    done = without_torch(*flags.split(), folder=tmp_path)
    assert done.returncode == code and done.stdout == ""
    assert text in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["no"]


def test_only_rank_0_of_a_launcher_speaks(tmp_path: Path) -> None:
    for flags, code in (("--seq-lenght 64", 2), ("--num-attention-heads 7", 1)):
        for rank in (0, 3):
            ranks = {"RANK": str(rank), "WORLD_SIZE": "4"}
            done = without_torch(*flags.split(), folder=tmp_path, **ranks)
            assert done.returncode == code
            assert done.stderr.count("\n") == (rank == 0), done.stderr


def test_a_launchers_ranks_are_checked_without_torch(tmp_path: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "6"}
    done = without_torch("--ds-sequence-parallel-size", "4", folder=tmp_path, **ranks)
    assert "6 ranks cannot hold tensor 1 x sequence 4" in done.stderr
    assert (
        "leave it out under one"
        in without_torch("--num-processes", "2", folder=tmp_path, **ranks).stderr
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT='' must be a whole number"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_a_launchers_variables_are_checked(
    variables: dict[str, str], text: str, tmp_path: Path
) -> None:
    done = without_torch("--ds-sequence-parallel-size", "2", folder=tmp_path, **variables)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert text in done.stderr


def test_check_only_ends_after_the_checks(tmp_path: Path) -> None:
    flags = ["--check-only", "--ds-sequence-parallel-size", "4", "--num-processes"]
    done = without_torch(*flags, "8", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "6 ranks cannot hold" in without_torch(*flags, "6", folder=tmp_path).stderr


def test_help_needs_no_torch(tmp_path: Path) -> None:
    done = without_torch("--help", folder=tmp_path)
    assert done.returncode == 0 and "--usp-kernel" in done.stdout
