"""Forward passes of an enabled transformer that do not end, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
from model_runs import relative
from tiny_diffusers import arguments, build

import ds_usp
from ds_usp.integrations.diffusers import enable

FLUX = "FluxTransformer2DModel"
MESH = ds_usp.SequenceMesh.single()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_pass_leaves_nothing_behind() -> None:
    """torch calls no hook after Ctrl-C."""
    transformer, given = build(FLUX), arguments(FLUX)
    transformer.enable_gradient_checkpointing()
    checkpoint, want = transformer._gradient_checkpointing_func, transformer(**given).sample
    with enable(transformer, MESH):
        handle = transformer.norm_out.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            transformer(**given)
        handle.remove()
        assert relative(transformer(**given).sample, want) < 1e-6
        assert transformer._gradient_checkpointing_func is checkpoint
        handle = transformer.norm_out.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            transformer(**given)
        handle.remove()
    assert transformer._gradient_checkpointing_func is checkpoint
    assert relative(transformer(**given).sample, want) < 1e-6


def test_a_transformer_is_not_disabled_within_its_forward_pass() -> None:
    """It would return a shard."""
    transformer, given = build(FLUX), arguments(FLUX)
    want = transformer(**given).sample
    enabled = enable(transformer, MESH)
    handle = transformer.norm_out.register_forward_hook(lambda *_: enabled.disable())
    with pytest.raises(ds_usp.ConfigError, match="within a forward pass of FluxTransformer2DModel"):
        transformer(**given)
    handle.remove()
    assert enabled.transformers == (transformer,)
    assert relative(transformer(**given).sample, want) < 1e-6
    enabled.disable()
