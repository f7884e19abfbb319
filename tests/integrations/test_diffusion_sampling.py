"""Eight steps of a sampler end to end on 4 ranks, and the page of classes and samplers in docs.

    scripts/test.sh tests/integrations/test_diffusion_sampling.py --write-support-table

measures every class anew, by the cases of ``test_diffusers.py``, and writes the page.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import newest_diffusers
import pytest
import torch
from cases import mesh_of
from harness import RankContext, WorkerPool
from model_runs import BOUND, relative
from test_diffusers import ULYSSES, WORLD, every_case
from test_diffusers_classes import SPLITS, errors_of
from test_diffusers_classes import WORLD as NEWEST_WORLD
from tiny_diffusers import CLASSES, VARIANTS, build, flux_pipeline, wan_pipeline
from torch import Tensor

from ds_usp.integrations.diffusers import PLANS, enable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "diffusers-models.md"
STEPS = 8


def flux() -> tuple[Any, dict[str, Any]]:
    """Flux by flow matching, whose schedule depends on the number of tokens."""
    pipeline = flux_pipeline()[0]
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    prompt = {"prompt_embeds": normal(1, 7, 32), "pooled_prompt_embeds": normal(1, 32)}
    return pipeline, {**prompt, "height": 20, "width": 28}


def wan() -> tuple[Any, dict[str, Any]]:
    """Wan 2.2 with guidance by its multistep sampler, which keeps outputs of earlier steps."""
    pipeline = wan_pipeline()[0]
    pipeline.scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    prompt = {"prompt_embeds": normal(1, 7, 16), "negative_prompt_embeds": normal(1, 9, 16)}
    return pipeline, {**prompt, "height": 48, "width": 80, "num_frames": 9, "guidance_scale": 4.0}


def cogvideox(scheduler: str) -> tuple[Any, dict[str, Any]]:
    """CogVideoX with guidance, both branches in one batch."""
    blocks = {
        f"{way}_block_types": (f"CogVideoX{way.title()}Block3D",) * 4 for way in ("down", "up")
    }
    sizes = {"block_out_channels": (8,) * 4, "norm_num_groups": 2, "layers_per_block": 1}
    transformer = build("CogVideoXTransformer3DModel", attention_head_dim=16, num_attention_heads=4)
    pipeline = diffusers.CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLCogVideoX(latent_channels=4, **blocks, **sizes),
        transformer=transformer.eval(),
        scheduler=getattr(diffusers, scheduler)(),
    )
    pipeline.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": normal(1, 9, 16), "negative_prompt_embeds": normal(1, 9, 16)}
    return pipeline, {**prompt, "height": 48, "width": 80, "num_frames": 9, "guidance_scale": 4.0}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


# CogVideoXDPMScheduler adds noise in every step.
SAMPLERS = {
    "FlowMatchEulerDiscreteScheduler": ("FluxPipeline", flux),
    "UniPCMultistepScheduler": ("WanPipeline", wan),
    "CogVideoXDDIMScheduler": ("CogVideoXPipeline", lambda: cogvideox("CogVideoXDDIMScheduler")),
    "CogVideoXDPMScheduler": ("CogVideoXPipeline", lambda: cogvideox("CogVideoXDPMScheduler")),
}


def sampled(ctx: RankContext) -> dict[str, tuple[Tensor, float, float]]:
    """By sampler: latents on the mesh; on one of the ranks, how far they are off those of it
    alone, and how far those of other noise are."""
    results = {}
    for index, (name, (_, make)) in enumerate(SAMPLERS.items()):
        pipeline, given = make()

        def latents(seed: int, pipeline: Any = pipeline, given: Any = given) -> Tensor:
            draw = torch.Generator().manual_seed(seed)
            options = {"num_inference_steps": STEPS, "output_type": "latent", "generator": draw}
            return pipeline(**given, **options)[0]

        with enable(pipeline, mesh_of(2)):
            have = latents(5)
        errors = (math.nan, math.nan)
        if index % ctx.world == ctx.rank:
            errors = relative(have, latents(5)), relative(have, latents(6))
        results[name] = (have, *errors)
    return results


@pytest.fixture(scope="module")
def sampler_errors(pool: WorkerPool) -> Mapping[str, float]:
    """The error of every sampler, after whose steps all ranks have the same latents."""
    ranks = pool.run(sampled, WORLD)
    errors = {}
    for index, name in enumerate(SAMPLERS):
        have, errors[name], of_other_noise = ranks[index % WORLD][name]
        assert of_other_noise > 0.1
        assert all(torch.equal(rank[name][0], have) for rank in ranks), name
    return errors


def test_eight_steps_give_one_rank_s_latents(sampler_errors):
    assert all(error <= BOUND for error in sampler_errors.values()), sampler_errors


# ------------------------------------------------------------------ the page


def test_the_page_lists_classes_and_samplers(pool, sampler_errors, pytestconfig):
    if pytestconfig.getoption("--write-support-table"):
        of_ranks = {name: pool.run(every_case, WORLD, name=name) for name in (*CLASSES, *VARIANTS)}
        errors = {name: by_mesh(ranks) for name, ranks in of_ranks.items()}
        further = {
            name: pool.run(errors_of, NEWEST_WORLD, name=name) for name in newest_diffusers.CONFIGS
        }
        newest = {
            name: [
                max(e for errors in ranks for c, e in errors.items() if c.endswith(split))
                for split in SPLITS
            ]
            for name, ranks in further.items()
        }
        PAGE.write_text(page(errors, newest, sampler_errors), encoding="utf-8")
    shown = PAGE.read_text(encoding="utf-8")
    orders = [float(x) for x in re.findall(r"\| (1e-\d+) ", shown)]
    count = len(ULYSSES) * (len(CLASSES) + len(VARIANTS)) + len(SAMPLERS)
    assert len(orders) == count + len(SPLITS) * len(newest_diffusers.CONFIGS)
    assert max(orders) <= BOUND
    measured = iter(orders)
    errors = {name: [next(measured) for _ in ULYSSES] for name in (*CLASSES, *VARIANTS)}
    newest = {name: [next(measured) for _ in SPLITS] for name in newest_diffusers.CONFIGS}
    of_samplers = {name: next(measured) for name in SAMPLERS}
    version = re.search(r"diffusers (\d[\w.]*)", shown)
    assert version is not None
    text = page(errors, newest, of_samplers).replace(
        f"diffusers {diffusers.__version__}", version[0]
    )
    assert shown == text, (
        "docs/reference/diffusers-models.md is out of date; write it anew with scripts/test.sh "
        "tests/integrations/test_diffusion_sampling.py --write-support-table"
    )


def by_mesh(ranks: list[dict[str, float]]) -> list[float]:
    """The largest error of every mesh, over all cases."""
    errors = {case: error for rank in ranks for case, error in rank.items()}
    return [max(e for case, e in errors.items() if case.endswith(f"ulysses {u}")) for u in ULYSSES]


def page(
    errors: Mapping[str, list[float]],
    newest: Mapping[str, list[float]],
    of_samplers: Mapping[str, float],
) -> str:
    """The page: errors of classes on every mesh, and of samplers, as powers of ten."""
    meshes = [f"{u} x {WORLD // u}" for u in ULYSSES]
    lines = [
        "# Diffusion transformers of diffusers",
        "",
        "What `enable` of `ds_usp.integrations.diffusers` gives with diffusers "
        f"{diffusers.__version__}: written by `tests/integrations/test_diffusion_sampling.py`. "
        f"Tiny random models, fp32, {WORLD} CPU ranks, errors relative to one rank, rounded up to "
        f"a power of ten. Tests check that none is above {BOUND:g}.",
        "",
        "## Classes",
        "",
        "The largest error of output, loss and every parameter's gradient, of numbers of tokens "
        "that the ranks share evenly and unevenly, and of padded text where a class takes its "
        "mask, by Ulysses x ring:",
        "",
        f"| class | {' | '.join(meshes)} |",
        f"|---|{'---|' * len(meshes)}",
        *(f"| {row(name)} | {' | '.join(map(order, errors[name]))} |" for name in errors),
        "",
        f"Further classes on {NEWEST_WORLD} ranks (`test_diffusers_classes.py`), "
        "blocks computed again in backward on 1 x 3 and gradients summed on 2 x 3:",
        "",
        f"| class | {' | '.join(SPLITS)} |",
        f"|---|{'---|' * len(SPLITS)}",
        *(f"| {row(name)} | {' | '.join(map(order, newest[name]))} |" for name in newest),
        "",
        "## Samplers",
        "",
        f"Latents after {STEPS} steps of a pipeline on Ulysses 2 x ring 2, the same on every rank:",
        "",
        "| scheduler | pipeline | error |",
        "|---|---|---|",
        *(f"| `{x}` | `{SAMPLERS[x][0]}` | {order(error)} |" for x, error in of_samplers.items()),
    ]
    return "\n".join(lines) + "\n"


def row(name: str) -> str:
    return f"`{name}`" if name in PLANS else name


def order(error: float) -> str:
    """The power of ten at or above an error, at least that of fp32's own rounding."""
    return f"1e{math.ceil(math.log10(max(error, 1e-7)) - 1e-9):+03d}".replace("e-0", "e-")
