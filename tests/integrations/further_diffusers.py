"""Tiny random diffusion transformers of further classes, and their arguments."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

# Of every class that takes them and has none of its own.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("in_channels", "out_channels"), 4),
    **dict.fromkeys(("num_layers", "num_single_layers", "num_refiner_layers", "patch_size"), 1),
    **dict.fromkeys(("attention_head_dim", "joint_attention_dim", "text_embed_dim"), 16),
    "caption_channels": 16,
    "cross_attention_dim": 64,
    "axes_dims_rope": [4, 4, 8],
}
WAN = {
    **dict.fromkeys(("freq_dim", "ffn_dim", "rope_max_seq_len"), 32),
    "attention_head_dim": 12,
    "text_dim": 16,
    "patch_size": (1, 2, 2),
}
_HUNYUAN = {"attention_head_dim": 8, "text_embed_2_dim": 16}


def config(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a class is made of; heads aside."""
    taken = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {key: value for key, value in SIZES.items() if key in taken} | dict(own)


def with_noise(net: Any) -> Any:
    """Return a network with noise added to all weights, so that none are zero."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return net


_OWN: Mapping[str, Mapping[str, Any]] = {
    "ChromaTransformer2DModel": {
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    },
    "Flux3Transformer2DModel": {
        "cond_in_channels": 4,
        "timestep_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "HunyuanImageTransformer2DModel": {
        **_HUNYUAN,
        "rope_axes_dim": (4, 4),
        "guidance_embeds": True,
        "patch_size": (1, 1),
    },
    "CogView4Transformer2DModel": {
        "attention_head_dim": 8,
        "time_embed_dim": 16,
        "condition_dim": 4,
        "rope_axes_dim": (16, 16),
    },
    "CosmosTransformer3DModel": {
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "patch_size": (1, 1, 1),
        "concat_padding_mask": False,  # which needs torchvision
        "controlnet_block_every_n": 1,
    },
    "SkyReelsV2Transformer3DModel": WAN,
    "ChronoEditTransformer3DModel": WAN,
    "AuraFlowTransformer2DModel": {
        **dict.fromkeys(("sample_size", "attention_head_dim"), 8),
        **dict.fromkeys(("num_mmdit_layers", "num_single_dit_layers"), 1),
        **dict.fromkeys(("caption_projection_dim", "pos_embed_max_size"), 64),
    },
    "LongCatImageTransformer2DModel": {"pooled_projection_dim": 16},
    "OvisImageTransformer2DModel": {"out_channels": 64},
    "BriaTransformer2DModel": {"guidance_embeds": False},
    "ZImageTransformer2DModel": {
        "dim": 64,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 8,
        "n_kv_heads": 8,
        "cap_feat_dim": 16,
        "axes_dims": [4, 2, 2],
        "axes_lens": [128, 16, 16],
    },
    "Lumina2Transformer2DModel": {
        "hidden_size": 64,
        "num_kv_heads": 4,
        "multiple_of": 16,
        "cap_feat_dim": 16,
        "axes_dim_rope": (4, 2, 2),
        "axes_lens": (32, 16, 16),
    },
    "LTX2VideoTransformer3DModel": {
        "attention_head_dim": 8,
        "rope_type": "split",
        "perturbed_attn": True,
        "audio_cross_attention_dim": 32,
        **dict.fromkeys(("audio_in_channels", "audio_out_channels"), 4),
        "audio_num_attention_heads": 8,
        "audio_attention_head_dim": 4,
    },
    "HunyuanVideo15Transformer3DModel": {
        **_HUNYUAN,
        "image_embed_dim": 16,
        "rope_axes_dim": (4, 2, 2),
    },
}
CONFIGS = {name: config(name, own) for name, own in _OWN.items()}
# The arguments that tell text from padding, and the classes that need them.
MASKS = {
    "ChromaTransformer2DModel": "attention_mask",
    "HunyuanImageTransformer2DModel": "encoder_attention_mask",
    "CosmosTransformer3DModel": "attention_mask",
    "LTX2VideoTransformer3DModel": "encoder_attention_mask",
    "Lumina2Transformer2DModel": "encoder_attention_mask",
    "HunyuanVideo15Transformer3DModel": "encoder_attention_mask",
}
ALWAYS_MASKED = (
    *("HunyuanImageTransformer2DModel", "HunyuanVideo15Transformer3DModel"),
    "Lumina2Transformer2DModel",
)


@dataclass(frozen=True)
class Sizes:
    """Of a batch of two samples.

    Args:
        padded: tokens of the first sample's text that are padding.
    """

    frames: int
    rows: int
    columns: int
    text: int
    padded: int

    def latents(self, *channels: int, frames: int = 0, patch: int = 1) -> Tensor:
        """``[2, channels, frames if any, height, width]``."""
        shape = (frames,) * bool(frames) + (patch * self.rows, patch * self.columns)
        return torch.randn(2, *channels, *shape)

    def mask(self, text: int = 0) -> Tensor:
        """``[2, text]``: False for padding."""
        text = text or self.text
        return torch.arange(text) < torch.tensor([[text - self.padded], [text]])


def conditions(*names: str) -> dict[str, Tensor]:
    """Return sizes and corners of images, ``[2, 2]`` each."""
    return {name: torch.randint(1, 32, (2, 2)).float() for name in names}


def arguments(name: str, sizes: Sizes) -> dict[str, Any]:
    """Those of a class of this module; text and timesteps are the same for most."""
    if name == "ZImageTransformer2DModel":
        return _listed_arguments(sizes)
    given: dict[str, Any] = {"encoder_hidden_states": torch.randn(2, sizes.text, 16)}
    given["timestep"] = torch.tensor([0.15, 0.55])
    if name == "CogView4Transformer2DModel":
        given |= conditions("original_size", "target_size", "crop_coords")
    if name.startswith("Hunyuan"):
        given["encoder_hidden_states_2"] = torch.randn(2, 5, 16)
        given["encoder_attention_mask_2"] = sizes.mask(5)
    if name == "HunyuanImageTransformer2DModel":
        given["guidance"] = torch.ones(2)
    if name == "HunyuanVideo15Transformer3DModel":
        given["hidden_states"] = sizes.latents(4, frames=sizes.frames)
        # Zeros stand for no image, whose tokens are padding.
        given["image_embeds"] = torch.randn(2, 3, 16) * (sizes.padded == 0)
    elif name == "LTX2VideoTransformer3DModel":
        given |= _audio_arguments(sizes)
    elif name == "CosmosTransformer3DModel":
        given["hidden_states"] = sizes.latents(3, frames=sizes.frames)
        given["condition_mask"] = sizes.latents(1, frames=sizes.frames)
        given["fps"] = 16
        given["timestep"] = torch.rand(2, 1, sizes.frames, 1, 1)
    elif name in ("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"):
        given["hidden_states"] = sizes.latents(4, frames=sizes.frames, patch=2)
    elif "axes_dims_rope" in CONFIGS[name]:
        given |= _token_arguments(name, sizes)
    else:
        given["hidden_states"] = sizes.latents(4)
    return given


def _audio_arguments(sizes: Sizes) -> dict[str, Any]:
    """Tokens of a video, with a timestep for each, and of its sound."""
    tokens, audio = sizes.frames * sizes.rows * sizes.columns, sizes.text + 4
    return {
        "hidden_states": torch.randn(2, tokens, 4),
        "timestep": torch.rand(2, tokens),
        "audio_hidden_states": torch.randn(2, audio, 4),
        "audio_timestep": torch.rand(2),
        "audio_encoder_hidden_states": torch.randn(2, sizes.text, 16),
        "audio_encoder_attention_mask": sizes.mask() if sizes.padded else None,
        "num_frames": sizes.frames,
        "height": sizes.rows,
        "width": sizes.columns,
        "audio_num_frames": audio,
    }


def _listed_arguments(sizes: Sizes) -> dict[str, Any]:
    """Lists of samples, of which the model makes 32 tokens or a multiple."""
    texts = [sizes.text, sizes.text + 32 * bool(sizes.padded)]
    return {
        "x": list(sizes.latents(4, 1, patch=2)),
        "t": torch.tensor([0.15, 0.55]),
        "cap_feats": [torch.randn(text, 16) for text in texts],
    }


def _token_arguments(name: str, sizes: Sizes) -> dict[str, Any]:
    """Tokens of the image, and positions of all."""
    grid = torch.cartesian_prod(torch.arange(sizes.rows), torch.arange(sizes.columns)).float()
    axes = len(CONFIGS[name]["axes_dims_rope"])
    given: dict[str, Any] = {"hidden_states": torch.randn(2, len(grid), 4)}
    given["img_ids"] = torch.nn.functional.pad(grid, (1, axes - 3))
    given["txt_ids"] = torch.arange(sizes.text).float()[:, None].expand(-1, axes)
    if name == "ChromaTransformer2DModel" and sizes.padded:
        image = torch.ones(2, len(grid), dtype=torch.bool)
        given["attention_mask"] = torch.cat([sizes.mask(), image], 1)
    return given
