"""The trainer's --transformer-impl and --usp-tp-shard-tokens: defaults, and what is refused."""

import importlib.metadata
import importlib.util
from argparse import Namespace
from typing import Any

import pytest
from usp_trainer import transformer_impl
from usp_trainer.arguments import parse
from usp_trainer.validate_args import check_start

from ds_usp import ConfigError
from megatron_patches import transformer_engine

GPU = {"device": "cuda", "bf16": True, "zero_stage": 1, "transformer_impl": None}
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
