"""``usp`` as an attention backend under diffusers' own context parallelism, on 4 ranks."""

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from harness import RankContext
from model_runs import BOUND, relative
from tiny_diffusers import arguments, build

import ds_usp
from ds_usp.integrations.diffusers import register_backend

WORLD = 4
SERVED = (
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"),
    *("QwenImageTransformer2DModel", "Flux, 6 heads"),
)
DEGREES = ((4, 1), (2, 2), (1, 4))


def parallel(name: str, ulysses: int, ring: int, **options: Any) -> Any:
    """A transformer of diffusers' context parallelism with the backend."""
    register_backend()
    transformer = build(name).eval()
    before = _AttentionBackendRegistry.get_active_backend()[0]
    transformer.set_attention_backend("usp")
    _AttentionBackendRegistry.set_active_backend(before)  # it is that of the whole process too
    config = ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 1)  # diffusers divides by it
        transformer.enable_parallelism(config=config)
    return transformer


def errors_of_classes(ctx: RankContext) -> dict[str, float]:
    errors = {}
    for name in SERVED:
        given = arguments(name, odd=False)
        with torch.no_grad():
            want = build(name).eval()(**given).sample
            for ulysses, ring in DEGREES:
                have = parallel(name, ulysses, ring)(**given, return_dict=False)[0]
                errors[f"{name}, {ulysses} x {ring}"] = relative(have, want)
    return errors


def test_outputs_under_enable_parallelism_are_exact(pool):
    for errors in pool.run(errors_of_classes, WORLD):
        assert len(errors) == len(SERVED) * len(DEGREES)
        assert all(error <= BOUND for error in errors.values()), errors


def refusals(ctx: RankContext) -> list[str]:
    messages = []
    for name, options, given in (
        ("FluxTransformer2DModel", {}, {"odd": False}),
        ("FluxTransformer2DModel", {"ulysses_anything": True}, {}),
        ("QwenImageTransformer2DModel", {}, {"odd": False, "padded": True}),
    ):
        transformer = parallel(name, 4, 1, **options)
        with torch.set_grad_enabled(not messages), pytest.raises(ds_usp.USPError) as error:
            transformer(**arguments(name, **given), return_dict=False)
        messages.append(str(error.value))
    return messages


def test_what_the_hooks_do_not_tell_is_refused(pool):
    for messages in pool.run(refusals, WORLD):
        for message, text in zip(messages, ("gradients", "uneven", "a mask"), strict=True):
            assert text in message and "enable(transformer, mesh)" in message


def test_the_backend_is_native_without_parallelism():
    register_backend()
    register_backend()
    name = "WanTransformer3DModel"
    transformer, given = build(name), arguments(name)
    want = transformer(**given).sample
    for module in transformer.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "usp"
    assert torch.equal(transformer(**given).sample, want)
