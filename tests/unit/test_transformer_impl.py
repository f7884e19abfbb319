"""The trainer's --transformer-impl and --usp-tp-shard-tokens: defaults, and what is refused."""

import importlib.metadata
import importlib.util
from argparse import Namespace
from typing import Any

import pytest
from usp_trainer import transformer_impl
from usp_trainer.arguments import parse
from usp_trainer.auto_args import planned_run
from usp_trainer.engine import deepspeed_config
from usp_trainer.validate_args import check_start, validate_and_derive

from ds_usp import ConfigError
from megatron_patches import transformer_engine

GPU = {
    "device": "cuda",
    "bf16": True,
    "zero_stage": 1,
    "transformer_impl": None,
}
INSTALLED = "2.20.2"
# Installed version, other values, and the refusal of TransformerEngine's layers.
OBSTACLES = {
    "no GPU": (INSTALLED, {"device": "cpu"}, "needs GPUs, and this is --device cpu"),
    "not installed": (None, {}, "2.9.0a0 or newer, which is not installed. Install it, or use"),
    "too old": ("2.8.1", {}, "TransformerEngine 2.9.0a0 or newer, which is 2.8.1"),
    "no version": ("", {}, "a folder without an installed version"),
    "fp32": (INSTALLED, {"bf16": False}, "Add --bf16, or use --transformer-impl local"),
    "ZeRO-3": (INSTALLED, {"zero_stage": 3}, "Use --zero-stage 2"),
}


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """A TransformerEngine of that version; None: none, "": one without metadata."""

    def version_of(name: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if version is None else 1)
    monkeypatch.setattr(importlib.metadata, "version", version_of)


def run_with(**values: Any) -> Namespace:
    return Namespace(**{**GPU, **values})


@pytest.mark.parametrize("name", OBSTACLES)
def test_the_default_is_local_and_the_flag_is_refused(monkeypatch, name):
    version, values, message = OBSTACLES[name]
    install(monkeypatch, version)
    assert transformer_impl.chosen(run_with(**values)) == "local"
    transformer_impl.check(run_with(**values))
    transformer_impl.check(run_with(**values, transformer_impl="local"))
    with pytest.raises(ConfigError) as refusal:
        transformer_impl.check(run_with(**values, transformer_impl="transformer_engine"))
    assert str(refusal.value).startswith("--transformer-impl transformer_engine ")
    assert message in str(refusal.value)
    assert "--transformer-impl local" in str(refusal.value)


@pytest.mark.parametrize("version", ["2.9.0", INSTALLED, "2.9.0+abc"])
def test_the_default_is_transformer_engines_where_it_can(monkeypatch, version):
    install(monkeypatch, version)
    assert transformer_engine.what_is_missing() == ""
    assert transformer_impl.chosen(run_with()) == "transformer_engine"
    assert transformer_impl.chosen(run_with(transformer_impl="local")) == "local"
    transformer_impl.check(run_with(transformer_impl="transformer_engine"))


def test_it_is_refused_before_anything_starts():
    args = parse(["--transformer-impl", "transformer_engine", "--device", "cpu", "--bf16"])
    with pytest.raises(ConfigError, match="needs GPUs"):
        check_start(args)


REFUSED = {
    "": "needs --tensor-model-parallel-size 2 or more, which is 1: raise it, or --usp-tp-shard-",
    "--tensor-model-parallel-size 4 --seq-length 1026": (
        "shards the 1026 tokens of a sequence-parallel rank over --tensor-model-parallel-size 4, "
        "which does not divide them. Use --seq-length 1028, or --usp-tp-shard-tokens off"
    ),
    "--tensor-model-parallel-size 4 --seq-length 64 --usp-mlp-chunks 17": (
        "leaves 16 tokens of a sequence to a tensor-parallel rank: use --usp-mlp-chunks of 0 to"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_on_is_refused_with_the_numbers_and_the_fix(flags):
    with pytest.raises(ConfigError) as refused:
        validate_and_derive(parse(["--usp-tp-shard-tokens", "on", *flags.split()]), 8)
    assert str(refused.value).startswith("--usp-tp-shard-tokens on ")
    assert REFUSED[flags] in str(refused.value)
    validate_and_derive(parse(flags.split()), 8)


def test_the_planner_knows_the_shards_and_a_pipeline_sends_them_whole():
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --usp-tp-shard-tokens"
    for choice, sharded in (("on", True), ("off", False)):
        args = validate_and_derive(parse([*flags.split(), choice]), 4)
        assert planned_run(args).parallel_config().tp_sequence is sharded
        assert ("pipeline" in deepspeed_config(args)) is sharded
