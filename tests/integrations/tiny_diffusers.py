"""Tiny random diffusion transformers of every class with a plan, and their arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import further_diffusers
import torch
from torch import Tensor

from ds_usp.integrations.diffusers import PLANS

diffusers.utils.logging.set_verbosity_error()

_WAN = {
    **further_diffusers.WAN,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "FluxTransformer2DModel": {"joint_attention_dim": 32, "pooled_projection_dim": 32},
    "Flux2Transformer2DModel": {
        **dict.fromkeys(("joint_attention_dim", "timestep_guidance_channels"), 32),
        "axes_dims_rope": [4, 4, 4, 4],
    },
    "WanTransformer3DModel": _WAN,
    "QwenImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": 2,
        "axes_dims_rope": (8, 4, 4),
    },
    "LTXVideoTransformer3DModel": {"attention_head_dim": 8, "num_layers": 2},
    "HunyuanVideoTransformer3DModel": {
        "attention_head_dim": 10,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    },
    "CogVideoXTransformer3DModel": {
        "attention_head_dim": 8,
        "time_embed_dim": 8,
        "num_layers": 2,
        "patch_size": 2,
        "sample_width": 10,
        "sample_height": 6,
        "sample_frames": 9,
        "max_text_seq_length": 9,
        "temporal_compression_ratio": 4,
        "use_rotary_positional_embeddings": True,
    },
    "SD3Transformer2DModel": {
        "sample_size": 16,
        "num_layers": 2,
        "attention_head_dim": 8,
        "joint_attention_dim": 32,
        **dict.fromkeys(("caption_projection_dim", "pooled_projection_dim"), 64),
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    },
    "PixArtTransformer2DModel": {
        "attention_head_dim": 8,
        "out_channels": 8,
        "num_layers": 2,
        "sample_size": 16,
        "patch_size": 2,
        "use_additional_conditions": False,
        "norm_type": "ada_norm_single",
    },
    "WanVACETransformer3DModel": {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 6},
}
# What every class is made of, with `heads` as the number of heads.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{name: further_diffusers.config(name, own) for name, own in _OWN.items()},
    **further_diffusers.CONFIGS,
}
CLASSES = [name for name in PLANS if name in CONFIGS]  # others: newest_diffusers.py
HEADS = 8
# Variants of a class that have tokens where it has none by default.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Wan 2.2, a timestep for each token": ("WanTransformer3DModel", {}),
    "LTX, a timestep for each token": ("LTXVideoTransformer3DModel", {}),
    "Qwen edit, tokens of a second image": ("QwenImageTransformer2DModel", {"zero_cond_t": True}),
    "Flux 3, a reference image": ("Flux3Transformer2DModel", {}),
    "Flux, 6 heads": ("FluxTransformer2DModel", {"num_attention_heads": 6}),
    "Wan, 6 heads": ("WanTransformer3DModel", {"num_attention_heads": 6}),
}
TEXT_DIM = {
    "FluxTransformer2DModel": 32,
    "Flux2Transformer2DModel": 32,
    "SD3Transformer2DModel": 32,
}
MASKS = {
    "QwenImageTransformer2DModel": "encoder_hidden_states_mask",
    "LTXVideoTransformer3DModel": "encoder_attention_mask",
    "HunyuanVideoTransformer3DModel": "encoder_attention_mask",
    "PixArtTransformer2DModel": "encoder_attention_mask",
    **further_diffusers.MASKS,
}
ALWAYS_MASKED = (
    *("LTXVideoTransformer3DModel", "HunyuanVideoTransformer3DModel"),
    *further_diffusers.ALWAYS_MASKED,
)


def build(name: str, **changes: Any) -> Any:
    """A transformer with the same weights in every process, none of them zero, in training."""
    name, variant = VARIANTS.get(name, (name, {}))
    torch.manual_seed(0)
    heads = {} if "n_heads" in CONFIGS[name] else {"num_attention_heads": HEADS}
    config = {**heads, **CONFIGS[name], **variant, **changes}
    return further_diffusers.with_noise(getattr(diffusers, name)(**config)).float().train()


def output_of(transformer: Any, given: Mapping[str, Any]) -> Tensor:
    """The output of a forward pass; of several (audio, a list of samples) all numbers."""
    outputs = transformer(**given, return_dict=False)
    if len(outputs) == 1 and isinstance(outputs[0], Tensor):
        return outputs[0]
    return torch.cat([x.flatten() for x in (outputs if len(outputs) > 1 else outputs[0])])


def arguments(
    name: str, odd: bool = True, padded: bool = False, seed: int = 1, text: int = 0
) -> dict[str, Any]:
    """The arguments of a forward pass of two samples.

    Args:
        odd: numbers of tokens that 4 ranks share unevenly.
        padded: the first sample's text is 3 tokens shorter, or 2 of a short one, if the class knows
            of padding.
        text: tokens, if not as many as are shared unevenly.
    """
    variant = name
    name = VARIANTS.get(name, (name, {}))[0]
    torch.manual_seed(seed)
    text = text or (7 if odd else 8)
    rows, columns = (5, 7) if odd else (4, 8)
    if name in further_diffusers.CONFIGS:
        frames, rows = (3, 3) if odd else (2, 4)
        sizes = further_diffusers.Sizes(frames, rows, columns, text, 3 if padded else 0)
        given = further_diffusers.arguments(name, sizes)
        if "reference image" in variant:
            given["image_cond_hidden_states"] = torch.randn(2, 10, 4)
            given["image_cond_ids"] = torch.randint(0, 9, (10, 4)).float()
    else:
        given = _arguments(name, variant, rows, columns, text, odd)
    if name in MASKS and MASKS[name] not in given and (padded or name in ALWAYS_MASKED):
        real = torch.tensor([[max(1, text - 3) if padded else text], [text]])
        given[MASKS[name]] = torch.arange(text) < real
    return given


def _arguments(
    name: str, variant: str, rows: int, columns: int, text: int, odd: bool
) -> dict[str, Any]:
    """All but a mask."""
    given = _latents(name, rows, columns, odd)
    given["encoder_hidden_states"] = torch.randn(2, text, TEXT_DIM.get(name, 16))
    given["timestep"] = torch.tensor([3.0, 11.0])
    if name.startswith("Flux"):
        given |= _flux_arguments(name, rows, columns, text)
    elif name == "HunyuanVideoTransformer3DModel":
        given |= {"pooled_projections": torch.randn(2, 8), "guidance": torch.full((2,), 6.0)}
    elif name == "SD3Transformer2DModel":
        given["pooled_projections"] = torch.randn(2, 64)
    elif name == "PixArtTransformer2DModel":
        given["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    tokens = given.pop("tokens")
    if "timestep for each token" in variant:
        given["timestep"] = torch.randint(0, 20, (2, tokens)).float()
    if "second image" in variant:
        given["img_shapes"] = [[(1, rows - 2, columns), (1, 2, columns)]] * 2
    return given


def _latents(name: str, rows: int, columns: int, odd: bool) -> dict[str, Any]:
    """Latents, what says their shape, and how many tokens they are."""
    frames = 3 if odd else 2
    if name.startswith("Flux"):
        return {"hidden_states": torch.randn(2, rows * columns, 4), "tokens": rows * columns}
    if name == "QwenImageTransformer2DModel":
        shapes = {"img_shapes": [[(1, rows, columns)]] * 2, "tokens": rows * columns}
        return {"hidden_states": torch.randn(2, rows * columns, 16), **shapes}
    if name == "LTXVideoTransformer3DModel":
        tokens = frames * rows * columns
        shape = {"num_frames": frames, "height": rows, "width": columns}
        return {"hidden_states": torch.randn(2, tokens, 4), "tokens": tokens, **shape}
    if name == "HunyuanVideoTransformer3DModel":
        return {"hidden_states": torch.randn(2, 4, frames, rows, columns), "tokens": 0}
    if name == "SD3Transformer2DModel":
        return {"hidden_states": torch.randn(2, 4, rows, columns), "tokens": 0}
    if name == "PixArtTransformer2DModel":
        return {"hidden_states": torch.randn(2, 4, 2 * rows, 2 * columns), "tokens": 0}
    rows, columns = (3, 5) if odd else (2, 4)
    tokens = frames * rows * columns
    if name.startswith("Wan"):
        size = frames, 2 * rows, 2 * columns
        given = {"hidden_states": torch.randn(2, 4, *size), "tokens": tokens}
        control = {"control_hidden_states": torch.randn(2, 6, *size)}
        return given | (control if "VACE" in name else {})
    angles = torch.randn(tokens, 8)
    return {
        "hidden_states": torch.randn(2, frames, 4, 2 * rows, 2 * columns),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "tokens": tokens,
    }


def _flux_arguments(name: str, rows: int, columns: int, text: int) -> dict[str, Tensor]:
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
    if name == "FluxTransformer2DModel":
        return {
            "pooled_projections": torch.randn(2, 32),
            "timestep": torch.tensor([0.15, 0.55]),
            "img_ids": torch.nn.functional.pad(grid, (1, 0)),
            "txt_ids": torch.zeros(text, 3),
        }
    text_ids = torch.nn.functional.pad(torch.arange(text).float()[:, None], (3, 0))
    return {
        "timestep": torch.tensor([0.15, 0.55]),
        "img_ids": torch.nn.functional.pad(grid, (1, 1)).expand(2, -1, -1),
        "txt_ids": text_ids.expand(2, -1, -1),
        "guidance": torch.ones(2),
    }


# ------------------------------------------------------------------ pipelines

Sample = Callable[..., Tensor]
_NUMBERS = ("", "_2", "_3")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _image_vae(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(4,),
        latent_channels=channels,
        norm_num_groups=1,
        shift_factor=0.0,
        scaling_factor=1.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _sampler(output: str, given: dict[str, Any], **sizes: int) -> Sample:
    def sample(pipeline: Any, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        options = {**given, **sizes, "output_type": "latent", **options}
        made = pipeline(**options, generator=generator)
        latents: Tensor = getattr(made, output)
        return latents

    return sample


def sd3_pipeline() -> tuple[Any, Sample]:
    """SD3 without text encoders, and what it samples in 3 steps, both branches in one batch."""
    pipeline = diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_image_vae(4),
        transformer=build("SD3Transformer2DModel").eval(),
        **dict.fromkeys(f"{kind}{i}" for kind in ("text_encoder", "tokenizer") for i in _NUMBERS),
    )
    pipeline.set_progress_bar_config(disable=True)
    texts = _random(2, 7, 32).split(1)
    pooled = _random(2, 64).split(1)
    given = {"prompt_embeds": texts[0], "negative_prompt_embeds": texts[1]}
    given |= {"pooled_prompt_embeds": pooled[0], "negative_pooled_prompt_embeds": pooled[1]}
    return pipeline, _sampler("images", given, height=6, width=10, num_inference_steps=3)


def flux_pipeline() -> tuple[Any, Sample]:
    """Flux without text encoders, and what it samples in 3 steps."""
    vae = _image_vae(1)
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        transformer=build("FluxTransformer2DModel").eval(),
        **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    )
    pipeline.set_progress_bar_config(disable=True)
    given = {"prompt_embeds": _random(1, 7, 32), "pooled_prompt_embeds": _random(1, 32)}
    return pipeline, _sampler("images", given, height=20, width=28, num_inference_steps=3)


def wan_pipeline() -> tuple[Any, Sample]:
    """Wan 2.2 with two transformers and guidance, and what it samples in 4 steps."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    pipeline = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=build("WanTransformer3DModel", num_layers=1).eval(),
        transformer_2=build("WanTransformer3DModel").eval(),
        boundary_ratio=0.875,
    )
    pipeline.set_progress_bar_config(disable=True)
    given = {"prompt_embeds": _random(1, 7, 16), "negative_prompt_embeds": _random(1, 9, 16)}
    given |= {"num_frames": 9, "guidance_scale": 4.0}
    return pipeline, _sampler("frames", given, height=48, width=80, num_inference_steps=4)


def _ones(*lengths: int) -> list[Tensor]:
    return [torch.ones(1, length, dtype=torch.bool) for length in lengths]


def _texts(dim: int, lengths: tuple[int, int] = (7, 9), mask: str = "", end: str = "") -> Any:
    """Embeddings of a prompt and of a negative one, with masks without padding."""
    texts = [_random(1, lengths[0], dim), _random(1, lengths[1], dim) + 1]
    given = dict(zip((f"prompt_embeds{end}", f"negative_prompt_embeds{end}"), texts, strict=True))
    masks = zip((mask, f"negative_{mask}"), _ones(*lengths), strict=True)
    return given | (dict(masks) if mask else {})


_POOLED = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
_MASK, _GUIDER = "prompt_attention_mask", {"guidance_scale": 4.0, "stop": 0.7}
_TWO_TEXTS = {
    **_texts(16, mask="prompt_embeds_mask"),
    **_texts(16, (5, 6), "prompt_embeds_mask_2", "_2"),
}
# Pipelines that call their transformer once for each branch; Lumina2's and HunyuanImage's guidance
# ends before the last of 3 steps.
GUIDED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "FluxPipeline": (
        "FluxTransformer2DModel",
        {
            **_texts(32, (7, 7)),
            **dict(zip(_POOLED, _random(2, 32).split(1), strict=True)),
            "true_cfg_scale": 4.0,
            "height": 160,
            "width": 224,
        },
    ),
    "QwenImagePipeline": (
        "QwenImageTransformer2DModel",
        {
            **_texts(16, mask="prompt_embeds_mask"),
            "true_cfg_scale": 4.0,
            "height": 80,
            "width": 112,
        },
    ),
    "HunyuanVideoPipeline": (
        "HunyuanVideoTransformer3DModel",
        {
            **_texts(16, mask=_MASK),
            **dict(zip(_POOLED, _random(2, 8).split(1), strict=True)),
            "true_cfg_scale": 4.0,
            "height": 48,
            "width": 80,
            "num_frames": 9,
        },
    ),
    "SkyReelsV2Pipeline": (
        "SkyReelsV2Transformer3DModel",
        {**_texts(16), "height": 48, "width": 80, "num_frames": 9},
    ),
    "CogView4Pipeline": (
        "CogView4Transformer2DModel",
        {**_texts(16, (16, 16)), "height": 96, "width": 160},
    ),
    "Lumina2Pipeline": (
        "Lumina2Transformer2DModel",
        {**_texts(16, (7, 7), _MASK), "height": 64, "width": 96, "cfg_trunc_ratio": 0.7},
    ),
    "ChromaPipeline": (
        "ChromaTransformer2DModel",
        {**_texts(16, mask=_MASK), "height": 96, "width": 160},
    ),
    "HunyuanImagePipeline": (
        "HunyuanImageTransformer2DModel",
        {**_TWO_TEXTS, "height": 320, "width": 320},
    ),
}


def guided_pipeline(name: str) -> tuple[Any, Sample]:
    """A pipeline of :data:`GUIDED` with nothing but a transformer and a sampler, and what it
    samples in 3 steps."""
    transformer, given = GUIDED[name]
    cls = getattr(diffusers, name)
    parts: dict[str, Any] = dict.fromkeys(list(inspect.signature(cls.__init__).parameters)[1:])
    for guider in (x for x in parts if x.endswith("guider")):
        parts[guider] = diffusers.ClassifierFreeGuidance(**_GUIDER)
    parts["transformer"] = build(transformer).eval()
    pipeline = cls(**parts | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()})
    pipeline.set_progress_bar_config(disable=True)
    output = "frames" if "num_frames" in given else "images"
    return pipeline, _sampler(output, dict(given), num_inference_steps=3)
