"""What every rank refuses where one rank's transformer, options or arguments cannot be served."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import mesh_of
from diffusers import FirstBlockCacheConfig
from harness import RankContext
from model_runs import BOUND, relative
from peft import LoraConfig
from tiny_diffusers import arguments, build

import ds_usp
from ds_usp import MeshError, USPError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.diffusers import PLANS, enable
from ds_usp.integrations.model_comparison import ArgumentsDigest

PIXART = "PixArtTransformer2DModel"
WORLD = 4


def other_options(ctx: RankContext) -> list[str]:
    """The error of every rank where one rank differs."""
    last = ctx.rank == 3
    cached = build("FluxTransformer2DModel")
    if last:
        cached.enable_cache(FirstBlockCacheConfig())
    messages = []
    for transformer, options in (
        (build(PIXART), {"gradients": "sum" if last else "mean"}),
        (build(PIXART, num_layers=1 + last), {}),
        (cached, {}),
    ):
        with pytest.raises(USPError) as error:
            enable(transformer, mesh_of(2), **options)
        messages.append(str(error.value))
    return messages


def test_ranks_that_differ_are_refused(pool):
    for options, layers, cache in pool.run(other_options, WORLD):
        assert "gradients='sum'" in options
        assert "configuration" in layers
        assert "fbc_leader_block_hook" in cache


def other_noise(rank: int) -> tuple[str, dict[str, Any]]:
    return "FluxTransformer2DModel", arguments("FluxTransformer2DModel", seed=1 + (rank == 2))


def one_controlnet(rank: int) -> tuple[str, dict[str, Any]]:
    residuals = [torch.zeros(2, 35, 128)] if rank == 1 else None
    given = arguments("FluxTransformer2DModel")
    return "FluxTransformer2DModel", given | {"controlnet_block_samples": residuals}


def of_another_image(_: int) -> tuple[str, dict[str, Any]]:
    given = arguments("FluxTransformer2DModel")
    return "FluxTransformer2DModel", given | {"controlnet_block_samples": [torch.zeros(2, 32, 128)]}


def holes(rank: int) -> tuple[str, dict[str, Any]]:
    given = arguments("QwenImageTransformer2DModel", padded=True)
    given["encoder_hidden_states_mask"][:, 1] = False
    return "QwenImageTransformer2DModel", given


def few_tokens(rank: int) -> tuple[str, dict[str, Any]]:
    given = arguments("FluxTransformer2DModel")
    text = {name: given[name].narrow(-2, 0, 3) for name in ("encoder_hidden_states", "txt_ids")}
    return "FluxTransformer2DModel", given | text


def refused(ctx: RankContext, make: Callable[[int], tuple[str, dict[str, Any]]]) -> Any:
    """The error's type and text; the transformer then serves a right call."""
    name, given = make(ctx.rank)
    transformer = build(name)
    want = transformer(**arguments(name), return_dict=False)[0]
    with enable(transformer, mesh_of(2)):
        with pytest.raises(USPError) as error:
            transformer(**given)
        have = transformer(**arguments(name), return_dict=False)[0]
    assert relative(have, want) <= BOUND
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (other_noise, "MeshError", "noise from generators of one seed"),
        (one_controlnet, "MeshError", "controlnet_block_samples"),
        (of_another_image, "LayoutError", "a tensor of 32 image tokens"),
        (holes, "UnsupportedAttentionError", "ones and then zeros"),
        (few_tokens, "LayoutError", "FluxTransformer2DModel, text: 3 tokens"),
    ],
)
def test_every_rank_refuses(pool, make, kind, text):
    for have, message in pool.run(refused, WORLD, make=make):
        assert kind in ("", have), (have, message)
        assert text in message


def reference_first(ctx: RankContext) -> str:
    """Of a plan whose shards' lengths do not add up to those of one sequence."""
    name = "Flux 3, a reference image"
    plan, given = PLANS["Flux3Transformer2DModel"], arguments(name)
    given |= {"image_cond_hidden_states": torch.zeros(2, 11, 4)}
    given |= {"image_cond_ids": torch.zeros(11, 4), "txt_ids": torch.zeros(8, 4)}
    given |= {"encoder_hidden_states": torch.zeros(2, 8, 16)}
    first = {"image_cond_hidden_states": plan.inputs[""]["image_cond_hidden_states"]}
    transformer = build(name)
    with enable(transformer, mesh_of(2)):
        transformer(**given)
    with (
        enable(transformer, mesh_of(2), plan=replace(plan, inputs={"": first | plan.inputs[""]})),
        pytest.raises(Unsupported) as error,
    ):
        transformer(**given)
    return str(error.value)


def test_reference_tokens_before_the_image_are_refused(pool):
    assert all("after image and text" in text for text in pool.run(reference_first, WORLD))


def gradients_of_adapters(transformer: Any, scale: float) -> list[torch.Tensor]:
    given = arguments("WanTransformer3DModel")
    transformer.zero_grad()
    out = transformer(**given, attention_kwargs={"scale": scale}, return_dict=False)[0]
    out.square().mean().backward()
    return [p.grad for n, p in transformer.named_parameters() if "lora" in n]


def test_a_lora_scale_is_refused_where_backward_computes_blocks_without_it():
    """As diffusers does alone: if it no longer does, this fails, and the scale can be served."""
    transformer = build("WanTransformer3DModel")
    transformer.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]))
    whole = gradients_of_adapters(transformer, 0.5)
    transformer.enable_gradient_checkpointing()
    again = gradients_of_adapters(transformer, 0.5)
    assert max(map(relative, again, whole)) > 0.1
    with enable(transformer, ds_usp.SequenceMesh.single()):
        with pytest.raises(Unsupported, match=r"LoRA's scale 0\.5 with"):
            gradients_of_adapters(transformer, 0.5)
        with torch.no_grad():  # nothing is computed again
            transformer(**arguments("WanTransformer3DModel"), attention_kwargs={"scale": 0.5})
        assert all(map(torch.any, gradients_of_adapters(transformer, 1.0)))
        transformer.disable_gradient_checkpointing()
        assert max(map(relative, gradients_of_adapters(transformer, 0.5), whole)) < BOUND


def compared_at_the_end(ctx: RankContext) -> tuple[str, int, str]:
    """As on GPUs, whose values are compared when the pass has been launched: the error, how many
    attentions ran before it, and the error of other shapes, before any ran."""
    name, given = other_noise(ctx.rank)
    transformer, calls = build(name), []
    transformer.x_embedder.register_forward_hook(lambda *_: calls.append(1))
    with enable(transformer, mesh_of(2)), patch.object(ArgumentsDigest, "is_known", False):
        with pytest.raises(MeshError) as error:
            transformer(**given)
        launched = len(calls)
        with pytest.raises(MeshError) as other:
            transformer(**arguments(name, odd=ctx.rank == 1))
        assert len(calls) == launched
        transformer(**arguments(name))  # the ranks can go on
    return str(error.value), launched, str(other.value)


def test_values_on_gpus_are_compared_at_the_end_of_a_pass(pool):
    for values, launched, shapes in pool.run(compared_at_the_end, WORLD):
        assert launched == 1 and "noise from generators of one seed" in values
        assert "hidden_states (2, 32, 4)" in shapes and "hidden_states (2, 35, 4)" in shapes


FLUX = "FluxTransformer2DModel"
MESH = ds_usp.SequenceMesh.single()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_pass_leaves_nothing_behind():
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


def test_a_transformer_is_not_disabled_within_its_forward_pass():
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
