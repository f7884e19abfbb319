"""The scripts of examples_deepspeed/diffusion: commands, refusals, and what the tiny ones run.

The tiny scripts' programs run on ranks of the pool, with the flags that DRY_RUN=1 prints.
"""

import contextlib
import io
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from golden_curves import STEPS
from harness import RankContext, WorkerPool
from programs import ROOT, run_script

FOLDER = ROOT / "examples_deepspeed" / "diffusion"
WORLD = 4
GENERATE, TRAIN = "generate_tiny_usp_cpu", "train_tiny_usp_cpu"


def bash(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_script(FOLDER / f"{name}.sh", *arguments, timeout=60, **settings)


def printed(name: str, *arguments: str, **settings: str) -> list[str]:
    """The command that a script would run."""
    done = bash(name, *arguments, DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.replace("\\\n", " "))


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("generate_flux_usp", "2"), ("generate_wan_usp", "8"), ("train_flux_lora_usp", "4")],
)
def test_scripts_take_the_number_of_gpus(name, gpus):
    command = printed(name, "--seed", "7", NUM_GPUS=gpus, ULYSSES_DEGREE="2")
    assert command[:2] == ["torchrun", "--standalone"]
    assert value(command, "--nproc-per-node") == gpus
    assert value(command, "--ulysses-degree") == "2" and command[-2:] == ["--seed", "7"]
    if name.startswith("generate"):
        assert value(command, "--prompt").startswith("a red fox")
    else:
        assert value(command, "--deepspeed") == '{"zero_optimization": {"stage": 2}}'
        assert value(command, "--sequence-parallel-size") == gpus


REFUSED = [
    (GENERATE, {"SP_SIZE": "2"}, "SP_SIZE=2: all 4 ranks share a sample"),
    (GENERATE, {"ULYSES_DEGREE": "2"}, "ULYSES_DEGREE is no setting; did you mean ULYSSES_DEGREE?"),
    (TRAIN, {"ULYSSES_DEGREE": "3"}, "ULYSSES_DEGREE=3 must divide SP_SIZE=4"),
    (TRAIN, {"PROGRAM": "sft.py"}, "PROGRAM='sft.py' must be generate.py or"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_bad_settings_are_refused(name, settings, message):
    done = bash(name, **settings)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr


def run_programs(ctx: RankContext, commands: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and the output of programs on this rank, each with its flags."""
    sys.path.insert(0, str(FOLDER))
    outcomes = []
    for program, *flags in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = import_module(Path(program).stem).main(flags)
        outcomes.append((code, out.getvalue()))
    return outcomes


def run(pool: WorkerPool, *commands: list[str]) -> list[str]:
    """What rank 0 prints; all ranks end without an error."""
    starts = [command.index(value(command, "--nproc-per-node")) + 1 for command in commands]
    programs = [command[at:] for command, at in zip(commands, starts, strict=True)]
    ranks = pool.run(run_programs, WORLD, commands=programs)
    assert all(code == 0 for rank in ranks for code, _ in rank), ranks[0]
    return [text for _, text in ranks[0]]


def test_the_tiny_script_generates_as_one_rank_does(pool, tmp_path):
    models = {"tiny-flux": ("image.png",), "tiny-wan": ("video.gif", "video.mp4")}
    commands = [printed(GENERATE, MODEL=model, OUTPUT=str(tmp_path / model)) for model in models]
    commands[1] += ["--cfg-degree", "2"]
    for (model, files), text in zip(models.items(), run(pool, *commands), strict=True):
        assert "6 steps on ulysses 2 x ring 2" in text and "limit 1.0e-05: ok" in text, text
        assert (tmp_path / model / "latents.safetensors").exists()
        assert any((tmp_path / model / name).exists() for name in files)


def test_the_tiny_script_trains_as_one_rank_does_and_as_it_did(golden, pool, tmp_path):
    all_weights = printed(TRAIN, OUTPUT=str(tmp_path / "wan"), STEPS=str(STEPS))
    # Two replicas, ZeRO-3, low-rank matrices.
    settings = {"MODEL": "tiny-flux", "SIZE": "10 14", "LR": "0.02", "STEPS": "3", "LORA": "4"}
    settings |= {"SP_SIZE": "2", "ZERO_STAGE": "3", "OUTPUT": str(tmp_path / "flux")}
    for text in (texts := run(pool, all_weights, printed(TRAIN, **settings))):
        assert "limit 1e-05: ok" in text, text
    losses = [float(line.split()[3]) for line in texts[0].splitlines()[:STEPS]]
    golden.check("diffusion program, tiny Wan, 2x2, ZeRO-2, SGD", losses)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    assert (tmp_path / "wan" / "diffusion_pytorch_model.safetensors").exists()
    assert (tmp_path / "flux" / "pytorch_lora_weights.safetensors").exists()
