"""Settings that were removed: every program that had one refuses it, with the reason and the commit
that has it."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_usp
from ds_usp.planner.__main__ import main as planner
from ds_usp.removed_settings import REMOVED, removal
from megatron_patches.megatron_deepspeed.arguments import add_flags as megatron_deepspeed
from megatron_patches.megatron_lm.arguments import add_flags as megatron_lm
from megatron_patches.settings import MeshSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "examples_deepspeed" / "sequence_parallel"))

from usp_trainer.arguments import parse as trainer


def patched(add_flags: Callable[[ArgumentParser, MeshSettings], None]) -> Callable[..., object]:
    """A framework's parser with the flags of its patches."""
    parser = ArgumentParser()
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])  # Megatron-LM's own
    add_flags(parser, MeshSettings())
    return parser.parse_args


def explain(argv: list[str]) -> None:
    sys.exit(planner(["explain", "--seq-len", "1K", "--heads", "8", *argv]))


PROGRAMS: dict[str, list[Callable[..., object]]] = {
    "--usp-tp-shard-tokens": [trainer, patched(megatron_deepspeed)],
    "--tp-shard-tokens": [explain],
    "--projections": [explain],
    "--usp-projection-overlap": [trainer, patched(megatron_deepspeed), patched(megatron_lm)],
}


@pytest.mark.parametrize(("setting", "value"), [key for key in REMOVED if key[0] in PROGRAMS])
def test_a_program_refuses_what_it_had(setting, value, capsys):
    text = removal(setting, value)
    assert text is not None and "The last commit that has it is" in text
    for program in PROGRAMS[setting]:
        for argv in ([setting], [setting, "on"]) if value is None else ([setting, value],):
            with pytest.raises(SystemExit) as exit:
                program(argv)
            assert exit.value.code == 2
            printed = capsys.readouterr()
            assert text in printed.err, printed


def test_the_module_refuses_what_it_had():
    linear, mesh = torch.nn.Linear(8, 8), ds_usp.SequenceMesh.single()
    options: dict[str, Any] = {"mesh": mesh, "layout": "contiguous", "mask": ds_usp.MaskSpec.full()}
    of_module = {key for key in REMOVED if not key[0].startswith("-")}
    assert of_module == {("overlap", "auto"), ("keep", "arrivals")}
    for name, value in of_module:
        with pytest.raises(ds_usp.ConfigError, match=f"{name}='{value}' was removed"):
            ds_usp.USPSelfAttention(linear, linear, 1, 1, **options, **{str(name): value})


def test_nothing_else_is_refused_and_nothing_removed_is_suggested(capsys):
    assert removal("--usp-projection-overlap", "off") is None and removal("--usp-kernel") is None
    for program, near in ((trainer, "--usp-tp-shard-token"), (explain, "--tp-shart-tokens")):
        with pytest.raises(SystemExit):
            program([near, "on"])
        assert "did you mean" not in capsys.readouterr().err
