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
