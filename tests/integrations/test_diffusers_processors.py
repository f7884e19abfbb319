"""How attention processors come to attention over the mesh, and what they may not ask of it."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.transformers import transformer_flux
from model_runs import relative
from tiny_diffusers import arguments, build, output_of

import ds_usp
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.diffusers import PLANS, enable, processor
from ds_usp.integrations.diffusers.plans import modules_at
from ds_usp.integrations.diffusers.processor import MeshAttention, ReplacedAttention, run_with

FLUX, SD3 = "FluxTransformer2DModel", "SD3Transformer2DModel"
MESH = ds_usp.SequenceMesh.single()


def processor_class(name: str) -> type[Any]:
    transformer = build(name)
    return next(
        type(module.processor)
        for path in PLANS[name].tokens
        for module in modules_at(transformer, path)
    )


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
def test_a_processor_of_the_user_is_served_by_a_mode(name, make):
    transformer, given = build(name), arguments(name)
    want = output_of(transformer, given)
    own = make(processor_class(name))
    assert ReplacedAttention.of(type(own).__call__) is None
    transformer.transformer_blocks[0].attn.processor = own
    with enable(transformer, MESH):
        assert relative(output_of(transformer, given), want) < 1e-6


def test_who_is_not_served_without_a_mode():
    cls = processor_class(FLUX)
    assert ReplacedAttention.of(cls.__call__) is not None

    def calls_super(self: Any) -> Any:
        return super(cls, self).__call__(dispatch_attention_fn)

    def calls_no_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(x)

    def is_of_a_user(x: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(x, x, x)

    for function in (calls_super, calls_no_attention):
        function.__module__ = "diffusers.models"
    for other in (calls_super, calls_no_attention, is_of_a_user, partial(is_of_a_user)):
        assert ReplacedAttention.of(other) is None


@pytest.mark.parametrize(
    ("model", "module", "name"),
    [
        (FLUX, transformer_flux, "apply_rotary_emb"),
        (FLUX, transformer_flux, "dispatch_attention_fn"),
        (SD3, torch.nn.functional, "scaled_dot_product_attention"),
    ],
)
def test_a_function_that_is_patched_later_is_called(model, module, name):
    """As fused rotary embeddings and records of attention are put in."""
    transformer, given, calls = build(model), arguments(model), []
    original = getattr(module, name)

    def patched(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(1.5 * x, *args, **kwargs)

    with enable(transformer, MESH):
        output_of(transformer, given)
        with mock.patch.object(module, name, patched):
            have, sharded_calls = output_of(transformer, given), len(calls)
    with mock.patch.object(module, name, patched):
        want = output_of(transformer, given)
    assert relative(have, want) < 1e-6
    assert len(calls) == 2 * sharded_calls > 0


def test_the_scale_reaches_attention_and_nothing_is_left_behind():
    state, tokens, seen = mock.Mock(), mock.Mock(), []
    state.attend.side_effect = lambda q, k, v, _, scale: seen.append(scale) or q
    x = torch.zeros(1, 4, 2, 8)
    attention = MeshAttention("Processor", state, tokens)
    attention.heads_first(x, x, x, None, 0.0, False, 0.25)
    attention.tokens_first(x, x, x, scale=0.5)

    assert seen == [0.25, 0.5] and len(attention.calls) == 2
    assert processor._CURRENT.get(None) is None
    run_with(attention, lambda: processor._CURRENT.get().tokens_first(x, x, x))
    assert processor._CURRENT.get(None) is None and len(attention.calls) == 3


@pytest.mark.parametrize("backend", ["_native_math", "flex"])
def test_a_backend_of_the_whole_process_is_refused_not_ignored(backend):
    transformer, given = build(FLUX), arguments(FLUX)
    want = output_of(transformer, given)
    with enable(transformer, MESH):
        with attention_backend(backend), pytest.raises(Unsupported, match=f"backend '{backend}'"):
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
def test_what_a_processor_may_not_ask_for(option, message):
    state: Any = None
    attention, x = MeshAttention("Processor", state, state), torch.zeros(1, 4, 2, 8)
    with pytest.raises(Unsupported, match=f"Processor .*{message}"):
        attention.tokens_first(x, x, x, **option)


def test_diffusers_own_function_is_as_it_was():
    """Outside of a processor of an enabled transformer, within its pass too."""
    transformer, given = build(FLUX), arguments(FLUX)
    x, seen = torch.rand(1, 4, 2, 8), []
    module = transformer.transformer_blocks[0]
    module.register_forward_pre_hook(lambda *_: seen.append(dispatch_attention_fn(x, x, x)))
    with enable(transformer, MESH):
        output_of(transformer, given)
    assert torch.equal(seen[0], dispatch_attention_fn(x, x, x))
