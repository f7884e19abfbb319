"""The plain torch examples train as one process does, also after they load a checkpoint."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from golden_curves import STEPS
from harness import RankContext
from programs import torchrun

from ds_usp import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples_deepspeed" / "plain_torch"
EXAMPLES = ("ddp", "fsdp2", "deepspeed_zero")
WORLD = 4
ULYSSES, RING = "--ulysses 2 --ring 1", "--ulysses 1 --ring 2 --seq-len 67"  # and 2 replicas
CASES = [
    ("ddp", ULYSSES, ""),
    ("ddp", RING, ""),
    ("ddp", "--ulysses 2 --ring 2", ""),
    ("fsdp2", ULYSSES, ""),
    ("fsdp2", RING, ""),
    *(
        ("deepspeed_zero", (ULYSSES, RING)[stage % 2], f"--zero-stage {stage}")
        for stage in range(4)
    ),
]


def run_example(ctx: RankContext, *, name: str, commands: list[str]) -> list[tuple[int, str]]:
    """The exit code and the output of each command on this rank."""
    sys.path.insert(0, str(FOLDER))
    from importlib import import_module

    module, outcomes = import_module(name), []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = module.main(command.split())
        outcomes.append((code, out.getvalue()))
    return outcomes


@pytest.mark.parametrize(("name", "degrees", "more"), CASES)
def test_an_example_trains_as_one_process_and_goes_on_from_its_checkpoint(
    name, degrees, more, pool, tmp_path
):
    check, saved = f"{degrees} {more} --check", tmp_path / "checkpoint"
    commands = [f"{check} --steps 1 --save {saved}", f"{check} --steps 2 --load {saved}"]
    ranks: list[list[tuple[int, str]]] = pool.run(run_example, WORLD, name=name, commands=commands)
    for command, (code, text) in zip(commands, ranks[0], strict=True):
        assert code == 0, f"{command}\n{text}"
        loads = "--load" in command
        assert ("step 0: loss" in text, "step 1: loss" in text) == (not loads, loads)
        assert "limit 1e-05: ok" in text
    assert all(code == 0 for rank in ranks for code, _ in rank)


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), one", text, re.M)]


RECORDED = "plain torch, DDP, 1x2, SGD"


def test_twenty_steps_are_the_recorded_ones(golden, pool):
    command = f"--ulysses 1 --ring 2 --check --steps {STEPS}"
    ((_, text),), _ = pool.run(run_example, 2, name="ddp", commands=[command])
    golden.check(RECORDED, losses_of(text))


def steps_that_are_none(ctx: RankContext, *, saved: str) -> Any:
    """How more steps than data end, and a check after the last step."""
    sys.path.insert(0, str(FOLDER))
    import ddp

    with pytest.raises(ConfigError, match="--steps 17: 2 replicas have data for 1 to 16"):
        ddp.main(["--steps", "17"])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        ddp.main(["--steps", "1", "--save", saved])
        ctx.group.barrier().wait()  # rank 0 has written it
        code = ddp.main(["--check", "--steps", "1", "--load", saved])
    return code, out.getvalue()


def test_steps_without_data_are_refused(pool, tmp_path):
    code, text = pool.run(steps_that_are_none, WORLD, saved=str(tmp_path / "saved"))[0]
    assert code == 1 and "nothing is left to compare" in text


def shifted_in_the_shard(ctx: RankContext) -> Any:
    """The first example, but for its labels, which are shifted as a model that knows no shards
    does."""
    sys.path.insert(0, str(FOLDER))
    import ddp
    import torch

    original = ddp.F.cross_entropy

    def wrong(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return original(logits[:-1], labels[1:], **kwargs)

    ddp.F.cross_entropy = wrong
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = ddp.main(["--check", "--steps", "1"])
    finally:
        ddp.F.cross_entropy = original
    return code, out.getvalue()


def test_the_check_finds_an_error(pool):
    code, text = pool.run(shifted_in_the_shard, WORLD)[0]
    assert code == 1
    assert "FAILED" in text


def test_an_example_starts_under_torchrun():
    done = torchrun(2, FOLDER / "ddp.py", "--check", "--steps", "1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "limit 1e-05: ok" in done.stdout


def run_own_kernel(ctx: RankContext) -> tuple[int, int]:
    """The exit code, and that of a backward pass which forgets the softmax scale."""
    sys.path.insert(0, str(FOLDER))
    import own_kernel

    code, right = own_kernel.main(), own_kernel.OwnKernel.tile_backward
    own_kernel.OwnKernel.tile_backward = lambda self, saved, tile, scale: right(
        self, saved, tile, 2 * scale
    )
    try:
        return code, own_kernel.main()
    finally:
        own_kernel.OwnKernel.tile_backward = right


def test_a_kernel_from_outside_of_the_package_is_called(pool):
    assert pool.run(run_own_kernel, WORLD) == [(0, 1)] * WORLD
