"""The batch of classifier-free guidance split over ranks, beside their tokens; CUDA graphs."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, relative
from tiny_diffusers import arguments, build, output_of, sd3_pipeline

import ds_usp
from ds_usp.integrations.diffusers import enable, pass_state

WORLD = 4
SPLIT = (
    *("Flux2Transformer2DModel", "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel"),
    *("HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel", "SD3Transformer2DModel"),
    *("PixArtTransformer2DModel", "WanVACETransformer3DModel", "ZImageTransformer2DModel"),
)


def errors_of_classes(ctx: RankContext, names: tuple[str, ...]) -> dict[str, float]:
    """Branches of 2 x 1, of 1 x 2 and, of four samples on as many ranks, of one rank."""
    errors = {}
    for name in names:
        transformer, given = build(name).eval(), arguments(name, padded=True)
        with torch.no_grad():
            want = output_of(transformer, given)
            for ulysses in (2, 1):
                with enable(transformer, mesh_of(ulysses), cfg_degree=2) as enabled:
                    have = output_of(transformer, given)
                errors[f"{name}, ulysses {ulysses}"] = relative(have, want)
                assert enabled.mesh.sp_degree == WORLD
    return errors


def test_every_class_may_split_its_batch(pool):
    for errors in pool.run(errors_of_classes, WORLD, names=SPLIT):
        assert len(errors) == 2 * len(SPLIT)
        assert all(error <= BOUND for error in errors.values()), errors


def other_dtypes(ctx: RankContext) -> None:
    transformer, given = build("WanTransformer3DModel").eval(), arguments("WanTransformer3DModel")
    dtype = torch.bfloat16 if ctx.rank < 2 else torch.float16
    with (
        torch.no_grad(),
        enable(transformer, mesh_of(2), cfg_degree=2),
        torch.autocast("cpu", dtype),
    ):
        transformer(**given)


def test_parts_with_other_dtypes_are_refused(pool):
    for error in pool.errors(other_dtypes, WORLD):
        assert "outputs of a part" in str(error) and "float16" in str(error)


def end_guidance(pipeline: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """After the first step, as diffusers' documentation of dynamic guidance has it."""
    if step:
        return {}
    pipeline._guidance_scale = 0.0
    return {name: x.chunk(2)[-1] for name, x in tensors.items()}


TEXTS = ["prompt_embeds", "pooled_prompt_embeds"]
REQUESTS: dict[str, dict[str, Any]] = {
    "both branches": {},
    "guidance ends": {
        "callback_on_step_end": end_guidance,
        "callback_on_step_end_tensor_inputs": TEXTS,
    },
    "no guidance": {"guidance_scale": 1.0},
    "a branch without a layer": {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 1.0},
}


def sampled(ctx: RankContext) -> dict[str, tuple[float, torch.Tensor]]:
    pipeline, sample = sd3_pipeline()
    wants = {what: sample(pipeline, **options) for what, options in REQUESTS.items()}
    with enable(pipeline, mesh_of(4), cfg_degree=2):
        haves = {what: sample(pipeline, **options) for what, options in REQUESTS.items()}
    return {what: (relative(haves[what], want), haves[what]) for what, want in wants.items()}


def test_a_pipeline_s_guidance_is_one_rank_s(pool):
    """Also where a pass has one branch, which all ranks compute then."""
    by_rank = pool.run(sampled, WORLD)
    for what in REQUESTS:
        assert max(results[what][0] for results in by_rank) <= BOUND, what
        have = by_rank[0][what][1]
        assert all(torch.equal(results[what][1], have) for results in by_rank), what


def of_other_batches(ctx: RankContext) -> dict[str, tuple[float, int]]:
    """By class and samples: the error, and the ranks that compute a sample."""
    results, attention = {}, mock.Mock(wraps=pass_state.usp_attention)
    for name in ("WanTransformer3DModel", "ZImageTransformer2DModel"):
        transformer, given = build(name).eval(), arguments(name)
        with (
            torch.no_grad(),
            enable(transformer, mesh_of(2), cfg_degree=2),
            mock.patch.object(pass_state, "usp_attention", attention),
        ):
            for batch in (2, 3, 1):
                batched = {key: repeated(value, batch) for key, value in given.items()}
                have = output_of(transformer, batched)
                want = output_of(build(name).eval(), batched)
                ranks = attention.call_args.kwargs["mesh"].sp_degree
                results[f"{name}, {batch}"] = relative(have, want), ranks
    return results


def repeated(value: Any, batch: int) -> Any:
    """So many samples, the two that are given in turns."""
    if isinstance(value, list):
        return [value[i % 2] for i in range(batch)]
    return value[[i % 2 for i in range(batch)]] if isinstance(value, torch.Tensor) else value


def test_all_ranks_compute_a_batch_that_the_parts_cannot_share(pool):
    for results in pool.run(of_other_batches, WORLD):
        assert max(error for error, _ in results.values()) <= BOUND, results
        assert [ranks for _, ranks in results.values()] == 2 * [2, WORLD, WORLD], results


def refusals(ctx: RankContext) -> list[str]:
    name = "PixArtTransformer2DModel"
    transformer, given = build(name), arguments(name)
    messages = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ds_usp.USPError) as error:
            call(*args, **kwargs)
        messages.append(str(error.value))

    refused(enable, transformer, mesh_of(4), cfg_degree=3)
    refused(enable, transformer, mesh_of(4), cfg_degree=0)
    with enable(transformer, mesh_of(4), cfg_degree=2):
        refused(transformer, **given)  # under autograd
        with torch.no_grad():
            refused(transformer, **given | {"timestep": torch.zeros(3)})
            want = copy.deepcopy(transformer)(**given).sample  # which is enabled too
            assert torch.equal(transformer(**given).sample, want)
    transformer, given = build("ZImageTransformer2DModel"), arguments("ZImageTransformer2DModel")
    with enable(transformer, mesh_of(4), cfg_degree=2), torch.no_grad():
        refused(transformer, **given | {"cap_feats": given["cap_feats"][:1]})
    name = "FluxTransformer2DModel"
    transformer, given = build(name, num_attention_heads=2), arguments(name)
    with enable(transformer, mesh_of(4), cfg_degree=2), torch.no_grad():
        one = {k: v if k.endswith("ids") else v[:1] for k, v in given.items()}
        refused(transformer, **one)
    name = "HunyuanVideo15Transformer3DModel"
    transformer, given = build(name), arguments(name)
    given["image_embeds"] = given["image_embeds"].clone()
    given["image_embeds"][0] = 0
    with enable(transformer, mesh_of(4), cfg_degree=2), torch.no_grad():
        refused(transformer, **given)
    return messages


def test_what_cannot_be_split_is_refused_on_every_rank(pool):
    for messages in pool.run(refusals, WORLD):
        for message, text in zip(
            messages,
            [
                "divides neither the ring degree 1 nor the Ulysses degree 4",
                "cfg_degree=0 must be",
                "under torch.no_grad()",
                "timestep [3] has 3 samples, where the batch has 2",
                "cap_feats has 1 samples, where the batch has 2",
                "2 heads, fewer than the Ulysses degree 4 of the whole mesh, which computes a "
                "batch of 1 with cfg_degree=2",
                "image_embeds is zero for some samples and not for others",
            ],
            strict=True,
        ):
            assert text in message


def test_a_cuda_graph_is_refused(monkeypatch):
    name = "FluxTransformer2DModel"
    transformer, given = build(name), arguments(name)
    enable(transformer, ds_usp.SequenceMesh.single())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ds_usp.UnsupportedAttentionError, match="CUDA graph captures"):
        transformer(**given)
