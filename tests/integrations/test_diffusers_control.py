"""ControlNets and IP-Adapters of enabled transformers, on 4 ranks, against one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from cases import mesh_of
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from harness import RankContext
from model_runs import BOUND, Result, mean_gradients, relative
from test_diffusers import WORLD, alone, forward_and_backward
from tiny_diffusers import arguments, build
from torch import Tensor

from ds_usp import SequenceMesh, UnsupportedAttentionError
from ds_usp.integrations.diffusers import Plan, enable

FLUX, TOKENS = "FluxTransformer2DModel", 35  # of the image, of odd arguments
# By class: its arguments of a ControlNet, and how many tensors of residuals each gets.
RESIDUALS: Mapping[str, Mapping[str, int]] = {
    FLUX: {"controlnet_block_samples": 1, "controlnet_single_block_samples": 1},
    "ChromaTransformer2DModel": {
        "controlnet_block_samples": 1,
        "controlnet_single_block_samples": 1,
    },
    "BriaTransformer2DModel": {"controlnet_block_samples": 1},
    "QwenImageTransformer2DModel": {"controlnet_block_samples": 1},
    "SD3Transformer2DModel": {"block_controlnet_hidden_states": 1},
    "CosmosTransformer3DModel": {"block_controlnet_hidden_states": 1},
}


def with_residuals(ctx: RankContext) -> dict[str, float]:
    """Errors of outputs and gradients, those of the residuals too; each rank has the truth of some
    classes."""
    errors = {}
    for index, (name, residuals) in enumerate(RESIDUALS.items()):
        transformer, given = build(name), arguments(name)
        latents, draw = given["hidden_states"], torch.Generator().manual_seed(7)
        tokens = latents.shape[1] if latents.ndim == 3 else latents[0, 0].numel()
        config = transformer.config
        size = 2, tokens, config.num_attention_heads * config.attention_head_dim
        leaves = {
            f"{argument}.{i}": torch.randn(size, generator=draw).requires_grad_()
            for argument, count in residuals.items()
            for i in range(count)
        }
        given |= {
            argument: [leaves[f"{argument}.{i}"] for i in range(count)]
            for argument, count in residuals.items()
        }

        def taken(leaves: dict[str, Tensor] = leaves) -> dict[str, Tensor]:
            gradients = {key: x.grad.clone() for key, x in leaves.items() if x.grad is not None}
            for x in leaves.values():
                x.grad = None
            return gradients

        with enable(transformer, mesh_of(2)):
            loss, output = forward_and_backward(transformer, given)
            have = Result(loss, output, mean_gradients(transformer))
        of_residuals = taken()
        for gradient in of_residuals.values():
            dist.all_reduce(gradient)
            gradient /= ctx.world
        if index % ctx.world == ctx.rank:
            want = alone(transformer, given)
            error = have.error(want)
            wanted = taken()
            assert wanted.keys() == of_residuals.keys() == leaves.keys()
            errors[name] = max(error, *(relative(of_residuals[k], wanted[k]) for k in wanted))
            without = {k: x for k, x in given.items() if k not in residuals}
            assert relative(alone(transformer, without).logits, want.logits) > 1e-2
    return errors


def test_residuals_are_sharded_as_tokens_are(pool):
    errors = {name: x for rank in pool.run(with_residuals, WORLD) for name, x in rank.items()}
    assert errors.keys() == RESIDUALS.keys() and max(errors.values()) <= BOUND, errors


# ------------------------------------------------------------------ a ControlNet in training


def controlnet() -> Any:
    torch.manual_seed(3)
    config = {**build(FLUX).config, "num_layers": 1, "num_single_layers": 1}
    taken = ("in_channels", "num_layers", "num_single_layers", "attention_head_dim")
    taken += ("num_attention_heads", "joint_attention_dim", "pooled_projection_dim")
    sizes = {name: config[name] for name in taken}
    net = diffusers.FluxControlNetModel(**sizes, axes_dims_rope=config["axes_dims_rope"])
    with torch.no_grad():
        for parameter in net.parameters():  # some of which diffusers sets to zero
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return net


def plan_of_controlnet() -> Plan:
    """The one that the page shows."""
    page = Path(__file__).parents[2] / "docs" / "usage" / "diffusers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    source = next(x for x in blocks if "plan_of_controlnet = " in x).partition("sizes = ")[0]
    names: dict[str, Any] = {}
    exec(compile(source, str(page), "exec"), names)
    plan: Plan = names["plan_of_controlnet"]
    return plan


class Controlled(torch.nn.Module):
    """A transformer and the ControlNet that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.net = build(FLUX).requires_grad_(False), controlnet()

    def forward(self, controlnet_cond: Tensor, return_dict: bool, **given: Any) -> Any:
        control = {"controlnet_cond": controlnet_cond, "conditioning_scale": 0.7}
        blocks, single = self.net(**given, **control, return_dict=False)
        residuals = {"controlnet_block_samples": blocks, "controlnet_single_block_samples": single}
        return self.transformer(**given, **residuals, return_dict=return_dict)


def trained(ctx: RankContext, by_plan: bool) -> float:
    model, given = Controlled(), arguments(FLUX)
    given["controlnet_cond"] = torch.randn(2, TOKENS, 4, generator=torch.Generator().manual_seed(4))
    want = alone(model, given)
    enable(model.transformer, mesh_of(2))
    if by_plan:
        enable(model.net, mesh_of(2), plan=plan_of_controlnet())
    loss, output = forward_and_backward(model, given)
    gradients = mean_gradients(model.net)
    wanted = {name.removeprefix("net."): x for name, x in want.gradients.items()}
    assert gradients.keys() <= wanted.keys() and len(gradients) > 20
    return Result(loss, output, gradients).error(
        replace(want, gradients={name: wanted[name] for name in gradients})
    )


@pytest.mark.parametrize("by_plan", [False, True], ids=["whole", "by a plan"])
def test_a_controlnet_is_trained_as_on_one_rank(pool, by_plan):
    assert max(pool.run(trained, WORLD, by_plan=by_plan)) <= BOUND


# ------------------------------------------------------------------ IP-Adapters


def adapted() -> tuple[Any, dict[str, Any]]:
    """Flux with an IP-Adapter in each block of two streams, as load_ip_adapter makes it."""
    transformer, given = build(FLUX), arguments(FLUX)
    torch.manual_seed(5)
    for block in transformer.transformer_blocks:
        width = transformer.inner_dim
        block.attn.processor = FluxIPAdapterAttnProcessor(width, 32, num_tokens=(4,), scale=0.6)
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=32, num_image_text_embeds=4)
    transformer.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    return transformer, given


def images() -> dict[str, Any]:  # diffusers takes the embeddings out of what it is given
    embeds = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(6))
    return {"joint_attention_kwargs": {"ip_adapter_image_embeds": [embeds]}}


def with_ip_adapter(ctx: RankContext) -> tuple[float, str, bool]:
    transformer, given = adapted()
    want = alone(transformer, given | images())
    originals = list(transformer.attn_processors.values())
    with enable(transformer, mesh_of(2)):
        loss, output = forward_and_backward(transformer, given | images())
        have = Result(loss, output, mean_gradients(transformer))
        masks = images()
        masks["joint_attention_kwargs"]["ip_adapter_masks"] = torch.ones(1)
        with pytest.raises(UnsupportedAttentionError) as error:
            transformer(**given, **masks)
    same = all(map(lambda x, y: x is y, transformer.attn_processors.values(), originals))
    other = images()
    other["joint_attention_kwargs"]["ip_adapter_image_embeds"][0].mul_(2)
    assert relative(alone(transformer, given | other).logits, want.logits) > 1e-3
    return have.error(want), str(error.value), same


def test_image_prompts_of_flux_stay_whole(pool):
    for error, message, same in pool.run(with_ip_adapter, WORLD):
        assert error <= BOUND and same
        assert "ip_adapter_masks in joint_attention_kwargs: IP-Adapters are served of" in message


def test_residuals_that_diffusers_itself_misplaces_are_refused():
    name = "BriaTransformer2DModel"
    given = arguments(name) | {"controlnet_single_block_samples": [torch.zeros(2, 21, 16)]}
    with pytest.raises(UnsupportedAttentionError, match="residuals of a ControlNet are not served"):
        enable(build(name), SequenceMesh.single()).model(**given)
