"""Caches that skip blocks: a mesh skips those of one process, and its latents are one process's."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, relative
from tiny_diffusers import GUIDED, arguments, build, guided_pipeline

import ds_usp
from ds_usp.integrations.diffusers import caches, enable

WORLD, STEPS = 4, 8
FLUX, QWEN = "FluxPipeline", "QwenImagePipeline"


def first_block(pipeline: Any) -> Any:
    of_flux = isinstance(pipeline, diffusers.FluxPipeline)
    return diffusers.FirstBlockCacheConfig(threshold=0.8 if of_flux else 0.875)


def mag(_: Any) -> Any:
    ratios = torch.linspace(1.02, 0.98, STEPS)
    return diffusers.MagCacheConfig(mag_ratios=ratios, num_inference_steps=STEPS)


def taylor(_: Any) -> Any:
    return diffusers.TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    )


def now(pipeline: Any) -> Callable[[], float]:
    return lambda: float(pipeline.current_timestep)


def pyramid(pipeline: Any) -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 1100),
        current_timestep_callback=now(pipeline),
    )


def faster(pipeline: Any) -> Any:
    return diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 900),
        current_timestep_callback=now(pipeline),
        is_guidance_distilled=True,
    )


def passes_of(pipeline: Any, sample: Any) -> tuple[torch.Tensor, list[bool]]:
    """Latents, and of each pass of this rank whether its last attention ran."""
    passes: list[bool] = []
    transformer = pipeline.transformer
    embed = transformer.x_embedder if hasattr(transformer, "x_embedder") else transformer.img_in
    blocks = getattr(transformer, "single_transformer_blocks", transformer.transformer_blocks)
    handles = [
        embed.register_forward_hook(lambda *_: passes.append(False)),
        blocks[-1].attn.to_q.register_forward_hook(
            lambda *_: passes.__setitem__(-1, True)
        ),
    ]
    latents = sample(pipeline, num_inference_steps=STEPS)
    for handle in handles:
        handle.remove()
    return latents, passes


CASES = [
    *((cache, FLUX, 1) for cache in (first_block, mag, taylor, pyramid, faster)),
    *((cache, QWEN, 2) for cache in (first_block, mag, taylor)),
]
Result = tuple[str, float, list[bool], list[bool]]


def cached(ctx: RankContext) -> list[Result]:
    """By case: the error, and the passes of this rank and of one process."""
    results = []
    for cache, name, degree in CASES:
        pipeline, sample = guided_pipeline(name)
        transformer = pipeline.transformer
        transformer.enable_cache(cache(pipeline))
        want, alone = passes_of(pipeline, sample)
        with enable(pipeline, mesh_of(2), cfg_degree=degree):
            have, passes = passes_of(pipeline, sample)
        branch = (ctx.rank >= WORLD // 2) if degree > 1 else 0
        each = alone[branch::degree]
        results.append((f"{cache.__name__} {name} {degree}", relative(have, want), passes, each))
    return results


def test_a_mesh_skips_what_one_process_skips(pool):
    for results in pool.run(cached, WORLD):
        for case, error, passes, alone in results:
            assert passes == alone, (case, passes, alone)
            assert True in alone and False in alone, (case, alone)
            assert error <= BOUND, (case, error)


# ------------------------------------------------------------------ what is refused


def skipping(transformer: Any) -> None:
    """As caches that others copy into a model: from the second pass on, without a block."""
    block, calls = transformer.single_transformer_blocks[-1], []
    forward = block.forward

    def cached(hidden_states: Any, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return encoder_hidden_states, hidden_states
        return forward(hidden_states, encoder_hidden_states, *args, **kwargs)

    block.forward = cached


def uncached(ctx: RankContext) -> list[str]:
    """Errors of every rank."""
    messages = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(ds_usp.USPError) as error:
            call()
        messages.append(str(error.value))

    def built(change: Callable[[Any], Any]) -> Any:
        transformer = build("FluxTransformer2DModel").eval()
        change(transformer)
        return transformer

    given = arguments("FluxTransformer2DModel")
    one = {key: x if key.endswith("ids") else x[:1] for key, x in given.items()}
    thresholds = 0.1 if ctx.rank else 0.2

    def on_one_rank(transformer: Any) -> None:
        transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=thresholds))

    def sea(transformer: Any) -> None:
        transformer.enable_cache(diffusers.SeaCacheConfig())

    refused(lambda: enable(built(on_one_rank), mesh_of(2)))
    refused(lambda: enable(built(sea), mesh_of(2)))
    with torch.no_grad():
        transformer = build("FluxTransformer2DModel").eval()
        with enable(transformer, mesh_of(2)):
            on_one_rank(transformer)
            refused(lambda: transformer(**given))
        transformer = built(skipping)
        with enable(transformer, mesh_of(2)):
            transformer(**given)
            refused(lambda: transformer(**given))

        def step(transformer: Any, contexts: bool = True) -> None:
            calls = []
            for name in ("cond", "uncond"):
                if contexts:
                    with transformer.cache_context(name):
                        calls.append(transformer(**one, return_dict=False)[0])
                else:
                    calls.append(transformer(**one, return_dict=False)[0])
            (calls[0] + calls[1]).sum()

        def calibrated(transformer: Any) -> None:
            config = diffusers.MagCacheConfig(calibrate=True, num_inference_steps=2)
            transformer.enable_cache(config)

        def constant(transformer: Any) -> None:
            config = diffusers.MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4)
            transformer.enable_cache(config)

        def pyramid_of(transformer: Any) -> None:
            config = diffusers.PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
            )
            transformer.enable_cache(config)

        def of_cache_dit(transformer: Any) -> None:
            transformer._is_cached = True

        with enable(built(calibrated), mesh_of(2)) as enabled:
            refused(lambda: enabled.transformers[0](**given))
        for change, contexts in ((constant, False), (pyramid_of, True), (of_cache_dit, True)):
            with enable(built(change), mesh_of(2), cfg_degree=2) as enabled:
                refused(lambda t=enabled.transformers[0], c=contexts: step(t, c))
        with enable(built(constant), mesh_of(2), cfg_degree=2) as enabled:
            transformer = enabled.transformers[0]
            step(transformer)
            with transformer.cache_context("cond"):
                call = transformer(**one, return_dict=False)[0]
            refused(call.sum)
            step(transformer)  # the ranks can go on
    return messages


def test_caches_that_decide_otherwise_are_refused(pool):
    texts = (
        "threshold",
        "sea_cache",
        "threshold",
        "something skips blocks",
        "calibrate on one process",
        "mag_cache_leader_block_hook counts the calls of both branches",
        "pyramid_attention_broadcast counts the calls of both branches",
        "cache-dit counts the calls of both branches",
        "guidance is on in some steps and off in others",
    )
    for messages in pool.run(uncached, WORLD):
        for message, text in zip(messages, texts, strict=True):
            assert text in message, (text, message)


def test_every_cache_of_diffusers_is_known():
    """What a release adds is refused until someone has looked at how it decides."""
    hooks = {
        getattr(module, name)
        for module in vars(diffusers.hooks).values()
        if hasattr(module, "__name__") and "cache" in module.__name__ or "broadcast" in repr(module)
        for name in vars(module)
        if name.endswith("_HOOK")
    }
    assert hooks - {*caches.CACHES} - caches.FOLLOWERS == {
        *("sea_cache_root", "sea_cache_leader_block", "sea_cache_block", "sea_cache_post_norm"),
        *("text_kv_cache_transformer", "text_kv_cache_block"),
    }
