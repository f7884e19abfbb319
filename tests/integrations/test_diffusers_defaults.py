"""Every pipeline of every class with a plan, called by its defaults: exact, or refused by name."""

import re
from pathlib import Path

import pytest
import torch
from cases import mesh_of
from default_pipelines import CLASSES, NOT_CALLED, made, pipelines
from harness import RankContext
from model_runs import BOUND, relative

from ds_usp import USPError
from ds_usp.integrations.diffusers import PLANS, enable

PAGE = Path(__file__).parents[2] / "docs" / "usage" / "diffusers.md"
# Words of the refusal; what a user can do instead is on the page.
REFUSED = {
    "BriaFiboPipeline": "attention_mask in joint_attention_kwargs",
    "Flux2KleinKVPipeline": "a cache of keys belongs to whole tokens",
    "HunyuanDiTPAGPipeline": "pag_scale=0",
    "LuminaPipeline": "base_sequence_length",
    "PixArtSigmaPAGPipeline": "pag_scale=0",
    "SkyReelsV2DiffusionForcingPipeline": "gives attention a mask [1, 1, 375, 375]",
    "StableDiffusion3PAGPipeline": "pag_scale=0",
    "StableDiffusion3PAGImg2ImgPipeline": "pag_scale=0",
    "StableAudio3InpaintPipeline": "local_add_cond",
    "ZImageOmniPipeline": "siglip_feats",
}


def sampled(ctx: RankContext, kind: str, ulysses: int) -> dict[str, float | str]:
    """The error of each pipeline of a class, with and without ``cfg_degree=2`` if the ranks
    allow it, or the refusal. One rank has the truth of each."""
    results: dict[str, float | str] = {}
    names = [name for name, its in pipelines().items() if its == kind and name not in NOT_CALLED]
    for index, name in enumerate(names):
        pipeline, sample = made(name)
        parts = [type(x).__name__ for x in pipeline.components.values()]
        has_truth = index % ctx.world == ctx.rank
        want = sample() if has_truth or name in REFUSED else None  # which may change settings
        for degree in (1, 2)[: 1 + (ctx.world == 4)]:
            key = f"{name}, cfg_degree {degree}"
            try:
                with enable(pipeline, mesh_of(ulysses), cfg_degree=degree) as enabled:
                    have = sample()
                    # Every transformer of the pipeline was sharded.
                    assert len(enabled._sharded) == sum(x in PLANS for x in parts)
                    assert all(any(x._max_attended.values()) for x in enabled._sharded)
            except USPError as error:
                results[key] = str(error)
            else:
                if want is not None and has_truth:
                    assert torch.isfinite(want).all() and want.std() > 0, key
                    results[key] = relative(have, want)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("ranks", "ulysses"), [(4, 2), (3, 3)])
def test_every_pipeline_is_exact_by_its_defaults_or_refused_by_name(pool, kind, ranks, ulysses):
    results = pool.run(sampled, ranks, kind=kind, ulysses=ulysses, timeout=400)
    for key in {key for rank in results for key in rank}:
        seen = [rank[key] for rank in results if key in rank]
        refused = REFUSED.get(key.partition(",")[0])
        if refused is None:
            assert len(seen) == 1 and not isinstance(seen[0], str), (key, seen)
            assert seen[0] <= BOUND, (key, seen)
        else:
            assert len(seen) == ranks, key
            assert all(refused in str(x) for x in seen), (key, seen)


def test_each_pipeline_is_called_or_has_a_reason():
    """And the page has what to do for those that are refused, at most ten."""
    known = pipelines()
    assert len(known) > 110 and {*REFUSED, *NOT_CALLED} <= known.keys() and len(REFUSED) <= 10
    assert {name for name, kind in known.items() if kind not in CLASSES} <= NOT_CALLED.keys()
    rows = re.findall(r"^\| `(\w+Pipeline)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(REFUSED)
