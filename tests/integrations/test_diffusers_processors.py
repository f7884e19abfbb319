"""How attention processors come to attention over the mesh, and what they may not ask of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from model_runs import relative
from tiny_diffusers import arguments, build, output_of

import ds_usp
from ds_usp.integrations.diffusers import PLANS, attention_calls, enable
from ds_usp.integrations.diffusers.attention_calls import MeshAttention, with_mesh_attention
from ds_usp.integrations.diffusers.plan import modules_at

FLUX, SD3 = "FluxTransformer2DModel", "SD3Transformer2DModel"
MESH = ds_usp.SequenceMesh.single()


def processor_class(name: str) -> type[Any]:
    transformer = build(name)
    return next(
        type(module.processor)
        for path in PLANS[name].tokens
        for module in modules_at(transformer, path)
    )


@pytest.mark.parametrize("name", PLANS)
def test_no_processor_of_diffusers_needs_a_mode(name: str) -> None:
    """Which costs microseconds for every function of torch; compiled models alone take it."""
    transformer, given = build(name), arguments(name, padded=True)
    want = output_of(transformer, given)
    with (
        enable(transformer, MESH),
        mock.patch.object(attention_calls.AttentionMode, "__enter__", side_effect=AssertionError),
    ):
        assert relative(output_of(transformer, given), want) < 1e-6


def by_super(cls: Any) -> Any:
    class Own(cls):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    return Own()


def by_another_function(cls: Any) -> Any:
    processor = cls()

    class Own:
        _attention_backend = None

        def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return processor(attn, hidden_states, *args, **kwargs)

    return Own()


@pytest.mark.parametrize("make", [by_super, by_another_function])
@pytest.mark.parametrize("name", [FLUX, SD3])
def test_a_processor_of_the_user_is_served_by_a_mode(name: str, make: Any) -> None:
    transformer, given = build(name), arguments(name)
    want = output_of(transformer, given)
    own = make(processor_class(name))
    assert with_mesh_attention(type(own).__call__) is None
    transformer.transformer_blocks[0].attn.processor = own
    with enable(transformer, MESH):
        assert relative(output_of(transformer, given), want) < 1e-6


@pytest.mark.parametrize("backend", ["_native_math", "flex"])
def test_a_backend_of_the_whole_process_is_refused_not_ignored(backend: str) -> None:
    transformer, given = build(FLUX), arguments(FLUX)
    want = output_of(transformer, given)
    with enable(transformer, MESH):
        with (
            attention_backend(backend),
            pytest.raises(ds_usp.UnsupportedAttentionError, match=f"backend '{backend}'"),
        ):
            output_of(transformer, given)
        assert relative(output_of(transformer, given), want) < 1e-6


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"attn_mask": torch.ones(1, 1, 4, 4)}, r"a mask \[1, 1, 4, 4\]"),
        ({"is_causal": True}, "is_causal"),
        ({"dropout_p": 0.1}, "dropout 0.1"),
        ({"attention_kwargs": {"window": 3}}, "window"),
        ({"parallel_config": object()}, "a parallel_config"),
        ({"backend": "flash"}, "'flash'"),
    ],
)
def test_what_a_processor_may_not_ask_for(option: Any, message: str) -> None:
    state: Any = None
    attention, x = MeshAttention("Processor", state, state), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ds_usp.UnsupportedAttentionError, match=f"Processor .*{message}"):
        attention.tokens_first(x, x, x, **option)


def test_diffusers_own_function_is_as_it_was() -> None:
    """Outside of a processor of an enabled transformer, within its pass too."""
    transformer, given = build(FLUX), arguments(FLUX)
    x, seen = torch.rand(1, 4, 2, 8), []
    module = transformer.transformer_blocks[0]
    module.register_forward_pre_hook(lambda *_: seen.append(dispatch_attention_fn(x, x, x)))
    with enable(transformer, MESH):
        output_of(transformer, given)
    assert torch.equal(seen[0], dispatch_attention_fn(x, x, x))
