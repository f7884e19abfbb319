"""What diffusers' pipelines give their transformers, against the plans."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import diffusers
import newest_diffusers
import pytest
import torch.distributed as dist
from diffusers.models import transformers
from harness import RankContext
from tiny_diffusers import MASKS

from ds_usp.integrations.diffusers import PLANS
from ds_usp.integrations.diffusers.pass_state import ATTENTION_KWARGS
from ds_usp.integrations.diffusers.plans import WITHOUT_PLAN

# Folders of pipelines by their transformer, and what of their arguments is refused by name.
PIPELINES = {
    "flux": "FluxTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "wan": "WanTransformer3DModel",
    "qwenimage": "QwenImageTransformer2DModel",
    "ltx": "LTXVideoTransformer3DModel",
    "hunyuan_video": "HunyuanVideoTransformer3DModel",
    "cogvideo": "CogVideoXTransformer3DModel",
    "stable_diffusion_3": "SD3Transformer2DModel",
    "pixart_alpha": "PixArtTransformer2DModel",
    "chroma": "ChromaTransformer2DModel",
    "hunyuan_image": "HunyuanImageTransformer2DModel",
    "cogview4": "CogView4Transformer2DModel",
    "cosmos": "CosmosTransformer3DModel",
    "skyreels_v2": "SkyReelsV2Transformer3DModel",
    "chronoedit": "ChronoEditTransformer3DModel",
    "aura_flow": "AuraFlowTransformer2DModel",
    "longcat_image": "LongCatImageTransformer2DModel",
    "ovis_image": "OvisImageTransformer2DModel",
    "bria": "BriaTransformer2DModel",
    "z_image": "ZImageTransformer2DModel",
    "lumina2": "Lumina2Transformer2DModel",
    "ltx2": "LTX2VideoTransformer3DModel",
    "hunyuan_video1_5": "HunyuanVideo15Transformer3DModel",
}
REFUSED_ARGUMENTS = (
    *("controlnet_", "block_controlnet_", "kv_cache", "num_ref_tokens"),
    *("enable_diffusion_forcing", "siglip_feats", "image_noise_mask"),
    *("spatio_temporal_guidance_blocks", "perturbation_mask", "video_self_attention_mask"),
)
OTHER_TRANSFORMERS = (
    *("pipeline_wan_animate", "pipeline_wan_vace", "hunyuan_video_framepack"),
    "pipeline_cosmos3_omni",
)


def arguments_of_pipelines(folder: str) -> Iterator[tuple[str, str]]:
    """File and name of every argument that pipelines give their transformer. Those in a mapping
    (``**cond_kwargs``, of texts and masks) are not seen."""
    forward = getattr(diffusers, PIPELINES[folder]).forward
    names = list(inspect.signature(forward).parameters)[1:]
    for file in sorted((Path(diffusers.__file__).parent / "pipelines" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            callee = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and callee in ("self.transformer", "current_model"):
                yield from ((file.stem, name) for _, name in zip(node.args, names, strict=False))
                yield from ((file.stem, keyword.arg) for keyword in node.keywords if keyword.arg)


@pytest.mark.parametrize("folder", PIPELINES)
def test_plans_know_what_pipelines_give(folder):
    known = PLANS[PIPELINES[folder]].arguments | ATTENTION_KWARGS | {"return_dict"}
    given = list(arguments_of_pipelines(folder))
    assert len(given) > 4
    for file, argument in (pair for pair in given if pair[1] not in known):
        refused = argument.startswith(REFUSED_ARGUMENTS)
        assert refused or any(name in file for name in OTHER_TRANSFORMERS), (file, argument)


PAGE = Path(__file__).parents[2] / "docs" / "usage" / "diffusers.md"


def test_the_page_lists_the_classes():
    table = PAGE.read_text(encoding="utf-8").partition("## Table of classes\n\n")[2]
    rows = []
    known = MASKS | newest_diffusers.MASKS
    for name, plan in PLANS.items():
        kinds = {kind for order in plan.attention.values() for kind in order}
        kinds = {"image", "text"} if "joint" in kinds else kinds - {"reference"}
        mask = f" `{known[name]}`" if name in known else ""
        rows.append(f"| `{name}` | {' and '.join(sorted(kinds))} |{mask} |")
    assert table.partition("\n\n")[0].splitlines()[2:] == rows
    # Z-Image makes its mask itself, of the lengths of a list of samples, and Lumina one of ones.
    masked = {name for name, plan in PLANS.items() if plan.masks}
    assert masked - {*known} == {"ZImageTransformer2DModel"}


def test_the_page_says_of_every_class_without_a_plan_why():
    classes = {
        name
        for name, cls in vars(transformers).items()
        if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)
    }
    assert classes == {*PLANS, *WITHOUT_PLAN} and PLANS.keys().isdisjoint(WITHOUT_PLAN)
    rows = [f"| `{name}` | {why} |" for name, why in WITHOUT_PLAN.items()]
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition("| class | why |\n|---|---|\n")[2].strip().splitlines() == rows


def first_program(ctx: RankContext) -> bool:
    """With no names but its own."""
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, object] = {}
    with (  # the ranks have met, and stay together for other tests
        mock.patch.object(dist, "init_process_group") as begin,
        mock.patch.object(dist, "destroy_process_group") as end,
    ):
        exec(compile(program, str(PAGE), "exec"), names)
    assert begin.call_count == end.call_count == 1
    return bool(names["difference"] < 1e-5)  # type: ignore[operator]


def test_the_first_program_is_complete(pool):
    assert pool.run(first_program, 4) == [True] * 4
