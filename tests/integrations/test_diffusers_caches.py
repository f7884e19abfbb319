"""Caches that skip blocks: a mesh skips those of one process, and its latents are one process's.

That of cache-dit needs the package:

    scripts/with_versions.sh cache-dit-1.5 python -m pytest tests/integrations -k cache_dit
"""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, relative
from tiny_diffusers import guided_pipeline

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
        blocks[-1].attn.to_q.register_forward_hook(lambda *_: passes.__setitem__(-1, True)),
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


def of_cache_dit(ctx: RankContext, first: bool) -> tuple[float, list[bool], list[bool]]:
    """A cache of cache-dit, which all-reduces its decisions itself.

    Args:
        first: it is there before ``enable``.
    """
    import cache_dit

    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=1,
        residual_diff_threshold=0.8,
        enable_separate_cfg=True,
    )
    pipeline, sample = guided_pipeline(FLUX)
    cache_dit.enable_cache(pipeline, cache_config=config)
    want, alone = passes_of(pipeline, sample)
    cache_dit.disable_cache(pipeline)
    pipeline, sample = guided_pipeline(FLUX)
    if first:
        cache_dit.enable_cache(pipeline, cache_config=config)
    with enable(pipeline, mesh_of(2)):
        if not first:
            cache_dit.enable_cache(pipeline, cache_config=config)
        have, passes = passes_of(pipeline, sample)
        cache_dit.disable_cache(pipeline)
    return relative(have, want), passes, alone


@pytest.mark.parametrize("first", [True, False])
def test_cache_dit_skips_what_it_skips_on_one_process(pool, first):
    pytest.importorskip("cache_dit")
    for error, passes, alone in pool.run(of_cache_dit, WORLD, first=first):
        assert passes == alone and True in alone and False in alone, (passes, alone)
        assert error <= BOUND


def test_every_cache_of_diffusers_is_known():
    """What a release adds is refused until someone has looked at how it decides."""
    modules = [x for name, x in vars(diffusers.hooks).items() if "cache" in name or "broad" in name]
    names = {(module, name) for module in modules for name in dir(module) if name.endswith("_HOOK")}
    hooks = {getattr(module, name) for module, name in names}
    assert hooks - {*caches.CACHES} - caches.FOLLOWERS == {
        *("sea_cache_root", "sea_cache_leader_block", "sea_cache_block", "sea_cache_post_norm"),
        *("text_kv_cache_transformer", "text_kv_cache_block"),
    }
