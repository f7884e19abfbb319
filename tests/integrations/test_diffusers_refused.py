"""What every rank refuses where one rank's transformer, options or arguments cannot be served."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, relative
from peft import LoraConfig
from tiny_diffusers import arguments, build, output_of

import ds_usp
from ds_usp import LayoutError, MeshError, USPError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations import model_comparison
from ds_usp.integrations.diffusers import PLANS, enable
from ds_usp.integrations.digests import ArgumentsDigest

PIXART, FLUX = "PixArtTransformer2DModel", "FluxTransformer2DModel"
ZIMAGE, HUNYUAN = "ZImageTransformer2DModel", "HunyuanVideo15Transformer3DModel"
WORLD = 4


def other_options(ctx: RankContext) -> list[str]:
    """The error of every rank where one rank differs."""
    last = ctx.rank == 3
    cached = build("FluxTransformer2DModel")
    if last:
        cached.enable_cache(diffusers.FirstBlockCacheConfig())
    messages = []
    for transformer, options in (
        (build(PIXART), {"gradients": "sum" if last else "mean"}),
        (cached, {}),
    ):
        with pytest.raises(USPError) as error:
            enable(transformer, mesh_of(2), **options)
        messages.append(str(error.value))
    return messages


def test_ranks_that_differ_are_refused(pool):
    for options, cache in pool.run(other_options, WORLD):
        assert "gradients='sum'" in options
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


def numbered(rank: int) -> tuple[str, dict[str, Any]]:
    given = arguments("ChromaTransformer2DModel", padded=True)
    given["attention_mask"] = 2 * given["attention_mask"].long()
    return "ChromaTransformer2DModel", given


def few_tokens(rank: int) -> tuple[str, dict[str, Any]]:
    """Of text that attends to itself alone."""
    given = arguments("Flux3Transformer2DModel")
    text = {name: given[name].narrow(-2, 0, 3) for name in ("encoder_hidden_states", "txt_ids")}
    return "Flux3Transformer2DModel", given | text


REFUSED: tuple[tuple[Callable[[int], tuple[str, dict[str, Any]]], type[USPError], str], ...] = (
    (other_noise, MeshError, "noise from generators of one seed"),
    (one_controlnet, MeshError, "controlnet_block_samples"),
    (of_another_image, LayoutError, "32 image tokens"),
    (numbered, Unsupported, "other numbers than 1"),
    (few_tokens, LayoutError, "text: 3 tokens"),
)


def refused(ctx: RankContext) -> None:
    """Each transformer then serves a right call."""
    for make, kind, word in REFUSED:
        name, given = make(ctx.rank)
        transformer = build(name)
        want = transformer(**arguments(name), return_dict=False)[0]
        with enable(transformer, mesh_of(2)):
            with pytest.raises(kind, match=word):
                transformer(**given)
            have = transformer(**arguments(name), return_dict=False)[0]
        assert relative(have, want) <= BOUND


def test_every_rank_refuses(pool):
    pool.run(refused, WORLD)


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


# ------------------------------------------------------------------ guidance and caches


def whole(transformer: Any, **changes: Any) -> torch.Tensor:
    """A pass of a batch with both branches."""
    name = type(transformer).__name__
    return output_of(transformer, {**arguments(name, padded=True), **changes})


def one_sample() -> dict[str, Any]:
    return {k: x if k.endswith("ids") else x[:1] for k, x in arguments(FLUX).items()}


def step(
    transformer: Any, between: Callable[[Any], Any] = id, context: bool = True, last: bool = True
) -> None:
    """Both branches of the guidance, each by its call, in diffusers' cache contexts or not.

    Args:
        last: guidance is on; else the second call does not come.
    """
    given, calls = one_sample(), []
    for name in ("cond", "uncond")[: 1 + last]:
        with transformer.cache_context(name) if context else nullcontext():
            calls.append(transformer(**given, return_dict=False)[0])
        between(calls[0] if between is read_on_rank_0 else transformer)
    sum(calls).sum()


def read_on_rank_0(first: torch.Tensor) -> None:
    if mesh_of(2).rank == 0:
        first.norm()


def guidance_ends(transformer: Any) -> None:
    step(transformer)
    step(transformer, last=False)


def of_each(transformer: Any) -> None:
    """Of other dtypes on some ranks, which the comparison of models would have refused before."""
    dtype = torch.bfloat16 if mesh_of(2).rank < 2 else torch.float16
    with torch.autocast("cpu", dtype), patch.object(model_comparison, "_torch_modes", dict):
        whole(transformer)


def some_without_image(transformer: Any) -> None:
    embeds = arguments(HUNYUAN)["image_embeds"].clone()
    embeds[0] = 0
    whole(transformer, image_embeds=embeds)


def read_late(transformer: Any) -> None:
    """Reads a first output after the transformer was disabled."""
    with enable(transformer, mesh_of(2), cfg_degree=2):
        first = transformer(**one_sample(), return_dict=False)[0]
    assert not {"_compiled_call_impl", "cache_context"} & vars(transformer).keys()
    first.sum()


def scaled(transformer: Any) -> None:
    transformer.proj_out.weight.data.mul_(2)
    transformer.proj_out.weight.add_(0)


def layers_skipped(transformer: Any) -> None:
    config = diffusers.LayerSkipConfig(indices=[0], fqn="transformer_blocks")
    diffusers.hooks.apply_layer_skip(transformer, config)


def compiled_anew(transformer: Any) -> None:
    transformer.compile(backend="eager")


def block_skipped(transformer: Any) -> None:
    """As caches that others copy into a model: from the second pass on, without a block."""
    block, calls = transformer.single_transformer_blocks[-1], []
    forward = block.forward

    def cached(hidden_states: Any, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return encoder_hidden_states, hidden_states
        return forward(hidden_states, encoder_hidden_states, *args, **kwargs)

    block.forward = cached


def cached_by(kind: str, **options: Any) -> Callable[[Any], None]:
    """Enables a cache of diffusers; ``threshold``: of rank 0, the others have 0.1."""

    def change(transformer: Any) -> None:
        given = dict(options)
        if mesh_of(2).rank and "threshold" in given:
            given["threshold"] = 0.1
        transformer.enable_cache(getattr(diffusers, f"{kind}Config")(**given))

    return change


def marked(transformer: Any) -> None:
    transformer._is_cached = True  # as cache-dit does


def twice(transformer: Any) -> None:
    whole(transformer)
    whole(transformer)


def of(
    call: Callable[[Any], Any] = step,
    *,
    name: str = FLUX,
    before: Callable[[Any], Any] = id,
    after: Callable[[Any], Any] = id,
    ulysses: int = 2,
    degree: int = 2,
    gradients: bool = False,
    **options: Any,
) -> Callable[[], None]:
    """A call of a transformer that was changed before or after ``enable``."""

    def act() -> None:
        transformer = build(name, **options).eval()
        before(transformer)
        grad_mode = torch.set_grad_enabled(gradients)
        with grad_mode, enable(transformer, mesh_of(ulysses), cfg_degree=degree):
            after(transformer)
            call(transformer)

    return act


def disabled(call: Callable[[Any], Any]) -> Callable[[], None]:
    """A call of a transformer that is not enabled."""

    @torch.no_grad()
    def act() -> None:
        call(build(FLUX).eval())

    return act


ONE_TEXT = {"cap_feats": arguments(ZIMAGE)["cap_feats"][:1]}
FIRST_BLOCK = cached_by("FirstBlockCache", threshold=0.1)
OTHER_FIRST_BLOCK = cached_by("FirstBlockCache", threshold=0.2)
MAG = cached_by("MagCache", mag_ratios=[1.0] * 4, num_inference_steps=4)
CALIBRATED = cached_by("MagCache", calibrate=True, num_inference_steps=2)
PYRAMID = cached_by(
    "PyramidAttentionBroadcast",
    spatial_attention_block_skip_range=2,
    current_timestep_callback=lambda: 500,
)
PLAIN, BATCH, WITH_MAG = of(), of(whole), of(before=MAG)
# What the refusal says, what is refused, what it says to do.
GUIDANCE: tuple[tuple[str, Callable[[], None], Callable[[], None]], ...] = (
    (
        "divides neither the ring degree 1 nor the Ulysses degree 4",
        of(ulysses=4, degree=3),
        of(ulysses=4),
    ),
    ("cfg_degree=0 must be", of(degree=0), of(degree=1)),
    ("under torch.no_grad()", of(whole, gradients=True), BATCH),
    (
        "timestep [3] has 3 samples, where the batch has 2",
        of(partial(whole, timestep=torch.zeros(3)), name=PIXART),
        of(partial(whole, timestep=torch.zeros(2)), name=PIXART),
    ),
    (
        "cap_feats has 1 samples, where the batch has 2",
        of(partial(whole, **ONE_TEXT), name=ZIMAGE),
        of(whole, name=ZIMAGE),
    ),
    (
        "2 heads, fewer than the Ulysses degree 4 of the whole mesh, which computes a batch of 1 "
        "with cfg_degree=2",
        of(partial(step, last=False), ulysses=4, num_attention_heads=2),
        of(partial(step, last=False), num_attention_heads=2),
    ),
    (
        "image_embeds is zero for some samples and not for others",
        of(some_without_image, name=HUNYUAN),
        of(some_without_image, name=HUNYUAN, degree=1),
    ),
    ("outputs of a part", of(of_each, name="WanTransformer3DModel"), BATCH),
    ("branch 0.hidden_states", of(partial(step, between=read_on_rank_0)), PLAIN),
    (
        "weights or settings were changed between two branches of a step",
        of(partial(step, between=scaled)),
        of(after=scaled),
    ),
    ("layer_skip", of(partial(step, between=layers_skipped)), PLAIN),
    # compile_repeated_blocks(): test_compiled_blocks_compute_a_branch_each.
    ("compile() after enable takes the place", of(partial(step, between=compiled_anew)), PLAIN),
    (
        "torch.compile of a FluxTransformer2DModel with cfg_degree=2",
        of(lambda x: whole_of(torch.compile(x, backend="eager"))),
        PLAIN,
    ),
    (
        "was disabled before the output of a call with cfg_degree was read",
        disabled(read_late),
        PLAIN,
    ),
    ("threshold", of(before=OTHER_FIRST_BLOCK), of(before=FIRST_BLOCK)),
    ("threshold", of(after=OTHER_FIRST_BLOCK), of(after=FIRST_BLOCK)),
    ("sea_cache", of(before=cached_by("SeaCache")), of(before=FIRST_BLOCK)),
    ("something skips blocks", of(twice, before=block_skipped, degree=1), of(twice, degree=1)),
    ("calibrate on one process", of(whole, before=CALIBRATED, degree=1), WITH_MAG),
    (
        "mag_cache_leader_block_hook counts the calls of both branches",
        of(partial(step, context=False), before=MAG),
        WITH_MAG,
    ),
    (
        "pyramid_attention_broadcast counts the calls of both branches",
        of(before=PYRAMID),
        of(before=PYRAMID, degree=1),
    ),
    ("cache-dit counts the calls of both branches", of(before=marked), of(before=marked, degree=1)),
    (
        "guidance is on in some steps and off in others",
        of(guidance_ends, before=MAG),
        of(guidance_ends, before=MAG, degree=1),
    ),
)


def whole_of(compiled: Any) -> None:
    compiled(**one_sample(), return_dict=False)[0].sum()


def of_guidance(ctx: RankContext) -> None:
    for text, refused, _ in GUIDANCE:
        with pytest.raises(USPError) as error:
            refused()
        assert text in str(error.value), (text, str(error.value))
    for remedy in dict.fromkeys(remedy for *_, remedy in GUIDANCE):
        remedy()


def test_what_refusals_of_guidance_and_caches_advise_works(pool):
    """On every rank, each by itself and one after the other."""
    pool.run(of_guidance, WORLD)


MESH = ds_usp.SequenceMesh.single()


@torch.no_grad()
def test_blocks_may_be_skipped_for_all_ranks_and_wrapped():
    """The cache that ``GUIDANCE`` refuses, where its user vouches for it; a block whose ``forward``
    has other names for its arguments, which diffusers gives by position."""
    transformer, wan = build(FLUX).eval(), build("WanTransformer3DModel").eval()
    given = arguments("WanTransformer3DModel")
    want = whole(transformer), output_of(wan, given)
    block_skipped(transformer)
    with enable(transformer, MESH, step_cache=True):
        assert relative(whole(transformer), want[0]) < 1e-6 < relative(whole(transformer), want[0])
    block = wan.blocks[0]
    block.forward = partial(
        lambda run, x, text, time, rope: run(x, text, time, rope), block.forward
    )
    with enable(wan, MESH):
        assert relative(output_of(wan, given), want[1]) < 1e-6


# ------------------------------------------------------------------ a pass that ends early


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
