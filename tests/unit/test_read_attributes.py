"""A ring follows every attribute of a local attention from which its detector reads what it
computes: one that is missing from ``read_attributes`` could change without a word."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sample_attentions import (
    core_attention,
    flash_attn,
    flash_self_attention,
    megatron_core,
    triton,
)

from ds_usp.attention.local_attention import _DETECTORS, read_attributes

# Together they lead every detector through each of its branches.
SAMPLES = {
    "flash": flash_self_attention,
    "triton": triton,
    "flash_attn": lambda: flash_attn(window=(4, 0)),
    "core": lambda: core_attention(layer=2, scaling=True),
    "megatron_core": lambda: megatron_core(window_size=(4, 0)),
}


class Recorder:
    """Stands for a module, and notes the dotted name of each plain value that is read from it."""

    def __init__(self, module: Any, names: set[str], prefix: str = "") -> None:
        self._module, self._names, self._prefix = module, names, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, torch.nn.Module):
            return Recorder(value, self._names, f"{self._prefix}{name}.")
        self._names.add(self._prefix + name)
        return value


def detector_of(module: Any) -> Any:
    keys = [(cls.__module__.split(".")[0], cls.__name__) for cls in type(module).__mro__]
    return next(_DETECTORS[key] for key in keys if key in _DETECTORS)


@pytest.mark.fast
@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_detector_reads_is_followed(name: str) -> None:
    if name == "megatron_core":
        pytest.importorskip("megatron.core")
    module, names = SAMPLES[name](), set[str]()
    detector_of(module)(Recorder(module, names))
    assert names
    before = read_attributes(module)
    for attribute in names:
        *path, last = attribute.split(".")
        owner = module.get_submodule(".".join(path))
        value = getattr(owner, last)
        setattr(owner, last, SimpleNamespace(name="another"))
        assert read_attributes(module) != before, f"{attribute} may change without a word"
        setattr(owner, last, value)


def test_every_detector_has_a_sample() -> None:
    sampled = {detector_of(make()) for key, make in SAMPLES.items() if key != "megatron_core"}
    assert len(set(_DETECTORS.values()) - sampled) == 1  # megatron-core's own
