"""One row a setting: the programs' flags, defaults and checks are the rows'."""

from __future__ import annotations

import inspect
import sys
from argparse import Action, ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest

import ds_usp
from ds_usp import settings
from ds_usp.planner import ParallelConfig
from ds_usp.planner.commands import PlanCommand
from ds_usp.settings import SETTINGS
from megatron_patches.megatron_deepspeed.arguments import add_flags as megatron_deepspeed
from megatron_patches.megatron_lm.arguments import add_flags as megatron_lm
from megatron_patches.settings import MeshSettings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples_deepspeed" / "sequence_parallel"))

from usp_trainer.arguments import build_parser  # noqa: E402


def actions(program: str) -> dict[str, Action]:
    """The flags of a program's parser that the rows could have made."""
    if program == "trainer":
        parser = build_parser()
    else:
        parser = ArgumentParser()
        parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
        {"megatron-deepspeed": megatron_deepspeed, "megatron-lm": megatron_lm}[program](
            parser, MeshSettings(layout="zigzag")
        )
    flags = {action.option_strings[0]: action for action in parser._actions}
    return {
        flag: action for flag, action in flags.items() if flag.startswith(("--usp-", "--ulysses"))
    }


@pytest.mark.parametrize("program", settings.MEGATRON)
def test_the_flags_of_a_program_are_its_rows(program):
    rows, made = list(settings.settings_of(program)), actions(program)
    assert {row.flag for row in rows} == set(made)
    for row in rows:
        action, kind = made[row.flag], row.kind_in(program)
        assert (action.dest, action.default) == (row.dest, row.default)
        assert action.help == row.help_in(program) and "{" not in action.help
        choices = kind.values if isinstance(kind, settings.Choices) else None
        assert action.choices == choices
        assert row.default is None or kind.accepts(row.default)


def test_a_row_is_whole():
    assert len({row.name for row in SETTINGS}) == len(SETTINGS)
    for row in SETTINGS:
        assert row.help and row.programs and set(row.programs) <= set(settings.PROGRAMS)
        assert {*row.kinds, *row.defaults} <= set(row.programs)
        assert row.purpose in ("parallelism", "attention", "memory", "report")
        assert bool(row.words) == bool(row.length_rank)
        assert not row.off or not row.is_used(row.default)
        assert f"`{row.flag}`" in settings.table()


def test_the_planner_and_enable_take_what_the_rows_say():
    config = ParallelConfig()
    for row in settings.settings_of("planner"):
        assert getattr(config, row.name) == row.default
        made = {f.name: f for f in fields(PlanCommand)}[row.name]
        assert made.default == row.default and row.help in made.metadata["help"]
    names = [row.name for row in settings.LENGTH_SETTINGS]
    assert names == ["mlp_chunks", "states_on_host", "checkpoint_layers"]
    enable = pytest.importorskip("ds_usp.integrations.transformers").enable
    parameters = inspect.signature(enable).parameters
    for row in settings.settings_of("transformers"):
        assert parameters[row.name].default == row.default_in("transformers")


def test_a_value_that_a_function_does_not_take():
    row = settings.setting("loss_chunks")
    for value in (-1, True, 1.5, None, "2"):
        with pytest.raises(ds_usp.ConfigError, match=r"whole number of 0 .not in chunks. or more"):
            row.check(value, "transformers")
    row.check(0, "transformers")
    with pytest.raises(ds_usp.ConfigError, match=r"one of none, attention, full .gemm-last needs"):
        settings.setting("recompute").check("gemm-last", "transformers")
    with pytest.raises(
        ds_usp.ConfigError, match="offload_ratio='auto' must be a number from 0 to 1"
    ):
        settings.setting("offload_ratio").check("auto", "transformers")
