"""The batch of classifier-free guidance split over ranks, beside their tokens; CUDA graphs."""

import copy
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, relative
from tiny_diffusers import arguments, build, output_of, sd3_pipeline

import ds_usp
from ds_usp.integrations.diffusers import enable

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


def sampled(ctx: RankContext) -> tuple[float, torch.Tensor]:
    pipeline, sample = sd3_pipeline()
    want = sample(pipeline)
    with enable(pipeline, mesh_of(4), cfg_degree=2):
        have = sample(pipeline)
    return relative(have, want), have


def test_a_pipeline_s_guidance_is_one_rank_s(pool):
    by_rank = pool.run(sampled, WORLD)
    assert max(error for error, _ in by_rank) <= BOUND
    assert all(torch.equal(have, by_rank[0][1]) for _, have in by_rank)


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
            one = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            refused(transformer, **one)
            refused(transformer, **given | {"timestep": torch.zeros(3)})
            want = copy.deepcopy(transformer)(**given).sample  # which is enabled too
            assert torch.equal(transformer(**given).sample, want)
    transformer, given = build("ZImageTransformer2DModel"), arguments("ZImageTransformer2DModel")
    with enable(transformer, mesh_of(4), cfg_degree=2), torch.no_grad():
        refused(transformer, **given | {"cap_feats": given["cap_feats"][:1]})
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
                "does not divide a batch of 1",
                "timestep [3] has 3 samples, where the batch has 2",
                "cap_feats has 1 samples, where the batch has 2",
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
