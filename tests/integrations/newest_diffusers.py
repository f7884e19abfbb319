"""Tiny random transformers of the classes that ``test_diffusers_classes.py`` sweeps over, and their
arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from further_diffusers import WAN, Sizes, conditions, with_noise
from torch import Tensor

_HEADS = {"num_attention_heads": 6, "attention_head_dim": 8}
_WAN = {**WAN, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 6}
_ROPE = {"rope_axes_dim": (4, 2, 2)}
_HUNYUAN = {
    **_HEADS,
    **_ROPE,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 1,
    "patch_size_t": 1,
    **dict.fromkeys(("num_layers", "num_single_layers"), 1),
    "text_embed_dim": 16,
}
_KANDINSKY = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 16,
    "in_text_dim2": 8,
    "time_dim": 8,
    "patch_size": (1, 1, 1),
    "model_dim": 48,
    "ff_dim": 32,
    "axes_dims": (4, 2, 2),
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "in_audio_dim": 4,
    "out_audio_dim": 4,
}
_COGVIDEOX = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 14,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 9,
    "use_rotary_positional_embeddings": True,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Krea2Transformer2DModel": {
        **_HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "timestep_embed_dim": 8,
        "text_hidden_dim": 16,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 16,
        "axes_dims_rope": (4, 2, 2),
    },
    "CogView3PlusTransformer2DModel": {
        **_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "patch_size": 1,
        "text_embed_dim": 16,
        "time_embed_dim": 16,
        "condition_dim": 4,
        "pos_embed_max_size": 16,
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_in_dim": 16,
        **_ROPE,
    },
    "Ideogram4Transformer2DModel": {
        **_HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 16,
        "mrope_section": (2, 1, 1),
    },
    "MiniMaxH3Transformer3DModel": {
        **_HEADS,
        "hidden_size": 48,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "ffn_dim": 32,
        "in_channels": 4,
        "audio_in_channels": 4,
        "patch_size": (1, 1, 1),
        "text_dim": 16,
        "freq_dim": 8,
        "time_embed_hidden_dim": 16,
        "time_embed_dim": 8,
        "rope_freq_dim": 1,
    },
    "Kandinsky6Transformer3DModel": _KANDINSKY,
    "GlmImageTransformer2DModel": {
        **_HEADS,
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "text_embed_dim": 16,
        "time_embed_dim": 16,
        "condition_dim": 4,
        "prior_vq_quantizer_codebook_size": 16,
    },
    "BriaFiboTransformer2DModel": {
        **_HEADS,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 16,
        "axes_dims_rope": [4, 2, 2],
        "text_encoder_dim": 8,
    },
    "BriaFibo2Transformer2DModel": {
        "in_channels": 4,
        "dim": 48,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 6,
        "cap_feat_dim": 16,
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 1,
        "min_num_gist_tokens": 6,
        "max_num_gist_tokens": 12,
        "gist_step": 1,
        "gist_min_text_len": 2,
        "gist_max_text_len": 12,
        "axes_dims": (4, 2, 2),
        "axes_lens": (64, 16, 16),
        "patch_size": 1,
    },
    "WanAnimateTransformer3DModel": {
        **_WAN,
        "in_channels": 12,
        "latent_channels": 4,
        "cross_attn_norm": True,
        "image_dim": 8,
        "added_kv_proj_dim": None,
        "motion_encoder_size": 16,
        "motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4},
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    },
    "HeliosTransformer3DModel": {
        **{key: value for key, value in _WAN.items() if key != "rope_max_seq_len"},
        "rope_dim": (4, 4, 4),
        "is_amplify_history": True,
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        **_HUNYUAN,
        "num_refiner_layers": 1,
        "pooled_projection_dim": 8,
        "has_image_proj": True,
        "image_proj_dim": 8,
        "has_clean_x_embedder": True,
        "patch_size": 2,
    },
    "StableAudioDiTModel": {
        **_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_key_value_attention_heads": 3,
        "cross_attention_dim": 24,
        "time_proj_dim": 8,
        "global_states_input_dim": 8,
        "cross_attention_input_dim": 16,
    },
    "StableAudio3DiTModel": {
        "io_channels": 4,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 6,
        "cond_token_dim": 16,
        "global_cond_dim": 8,
        "timestep_features_dim": 8,
        "num_memory_tokens": 3,
    },
    "MiniMaxMusic3Transformer1DModel": {
        **_HEADS,
        "in_channels": 4,
        "condition_dim": 16,
        "num_layers": 2,
        "ff_inner_dim": 32,
        "rotary_dim": 4,
        "fourier_embedding_dim": 8,
    },
    "LongCatAudioDiTTransformer": {
        "dit_dim": 48,
        "dit_depth": 2,
        "dit_heads": 6,
        "dit_text_dim": 16,
        "latent_dim": 4,
    },
    "MotifVideoTransformer3DModel": {
        **_HUNYUAN,
        "enable_text_cross_attention_dual": True,
        "enable_text_cross_attention_single": True,
    },
    "JoyImageEditTransformer3DModel": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "text_dim": 16,
        "num_layers": 2,
        "in_channels": 4,
        "rope_dim_list": [4, 2, 2],
        "rope_type": "mrope",
    },
    "HunyuanDiT2DModel": {
        **_HEADS,
        "in_channels": 4,
        "patch_size": 1,
        "hidden_size": 48,
        "num_layers": 4,
        "cross_attention_dim": 16,
        "cross_attention_dim_t5": 16,
        "pooled_projection_dim": 8,
        "text_len": 4,
        "text_len_t5": 5,
        "sample_size": 8,
        "learn_sigma": False,
        "use_style_cond_and_image_meta_size": False,
    },
    "EasyAnimateTransformer3DModel": {
        **_HEADS,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "num_layers": 2,
        "mmdit_layers": 1,
        "time_embed_dim": 8,
        "text_embed_dim": 16,
    },
    "LuminaNextDiT2DModel": {
        "hidden_size": 48,
        "num_layers": 2,
        "num_attention_heads": 6,
        "multiple_of": 8,
        "num_kv_heads": 3,
        "cross_attention_dim": 16,
        "patch_size": 1,
    },
    "DiTTransformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "sample_size": 14,
        "norm_num_groups": 1,
    },
    "AllegroTransformer3DModel": {
        **_HEADS,
        "attention_head_dim": 12,
        "num_layers": 2,
        "cross_attention_dim": 72,
        "caption_channels": 16,
        "sample_height": 6,
        "sample_width": 14,
        "sample_frames": 3,
    },
    "AnyFlowTransformer3DModel": _WAN,
    "ConsisIDTransformer3DModel": {
        **_COGVIDEOX,
        "is_train_face": True,
        "cross_attn_dim_head": 8,
        "cross_attn_num_heads": 2,
        "LFE_id_dim": 8,
        "LFE_vit_dim": 8,
        "LFE_depth": 5,
        "LFE_dim_head": 4,
        "LFE_num_heads": 2,
        "LFE_num_id_token": 2,
        "LFE_num_querie": 3,
        "LFE_output_dim": 32,
        "LFE_ff_mult": 1,
    },
    "DreamLiteTransformer2DModel": {
        **_HEADS,
        "in_channels": 8,
        "num_layers": 2,
        "norm_num_groups": 2,
        "cross_attention_dim": 16,
    },
}

# The arguments that tell text from padding.
MASKS = {
    "Krea2Transformer2DModel": "encoder_attention_mask",
    "ErnieImageTransformer2DModel": "text_lens",
    "Ideogram4Transformer2DModel": "segment_ids",
    "Kandinsky6Transformer3DModel": "encoder_attention_mask",
    "BriaFibo2Transformer2DModel": "encoder_attention_mask",
    "HunyuanVideoFramepackTransformer3DModel": "encoder_attention_mask",
    "StableAudioDiTModel": "encoder_attention_mask",
    "StableAudio3DiTModel": "encoder_attention_mask",
    "LongCatAudioDiTTransformer": "encoder_attention_mask",
    "MotifVideoTransformer3DModel": "encoder_attention_mask",
    "HunyuanDiT2DModel": "text_embedding_mask",
    "LuminaNextDiT2DModel": "encoder_mask",
    "AllegroTransformer3DModel": "encoder_attention_mask",
    "DreamLiteTransformer2DModel": "encoder_attention_mask",
}


def _rotations(tokens: int, dim: int = 8) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, dim)
    return angles.cos(), angles.sin()


def _grid(sizes: Sizes) -> Tensor:
    return torch.cartesian_prod(torch.arange(sizes.rows), torch.arange(sizes.columns)).float()


def _sequence_ids(sizes: Sizes) -> Tensor:
    """Positions of text and then of the image, ``[tokens, 3]``."""
    text = torch.nn.functional.pad(torch.arange(sizes.text).float()[:, None], (0, 2))
    return torch.cat([text, torch.nn.functional.pad(_grid(sizes), (1, 0))])


def _krea2(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, sizes.rows * sizes.columns, 4),
        "encoder_hidden_states": torch.randn(2, sizes.text, 3, 16),
        "position_ids": _sequence_ids(sizes),
        # Padding is between the prompt and the end of its template.
        "encoder_attention_mask": sizes.mask() | (torch.arange(sizes.text) == sizes.text - 1),
    }


def _cogview(sizes: Sizes) -> dict[str, Any]:
    of_sizes = conditions("original_size", "target_size", "crop_coords")
    return {"hidden_states": sizes.latents(4), **of_sizes}


def _ernie(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.latents(4),
        "text_bth": torch.randn(2, sizes.text, 16),
        "text_lens": torch.tensor([sizes.text - sizes.padded, sizes.text]),
    }


def _ideogram(sizes: Sizes) -> dict[str, Any]:
    tokens = len(_sequence_ids(sizes))
    indicator = torch.where(torch.arange(tokens) < sizes.text, 3, 2).expand(2, -1)
    segments = torch.ones(2, tokens, dtype=torch.long)
    segments[0, : sizes.padded] = -1  # padding comes first
    return {
        "hidden_states": torch.randn(2, tokens, 4),
        "encoder_hidden_states": torch.randn(2, tokens, 16),
        "position_ids": _sequence_ids(sizes).expand(2, -1, -1),
        "segment_ids": segments,
        "indicator": indicator,
    }


def _minimax_h3(sizes: Sizes) -> dict[str, Any]:
    lengths = (sizes.rows * sizes.columns, 6, sizes.text)
    order = torch.randperm(sum(lengths))
    video, audio, text = order.split(lengths)
    tags = torch.zeros(len(order), dtype=torch.long)
    tags[audio], tags[text] = 1, 2
    return {
        "hidden_states": torch.randn(1, lengths[0], 4),
        "audio_hidden_states": torch.randn(1, 6, 4),
        "encoder_hidden_states": torch.randn(1, sizes.text, 16),
        "timestep": torch.tensor([3.0, 11.0]),
        "timestep_indices": torch.randint(0, 2, (len(order),)),
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (len(order), 3)),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def _kandinsky6(sizes: Sizes) -> dict[str, Any]:
    shape = (2, sizes.frames, sizes.rows, sizes.columns)
    return {
        "hidden_states": torch.randn(*shape, 9),
        "pooled_projections": torch.randn(2, 8),
        "audio_hidden_states": torch.randn(2, sizes.text + 2, 4),
    }


def _glm(sizes: Sizes) -> dict[str, Any]:
    tokens = sizes.rows * sizes.columns
    return {
        "hidden_states": sizes.latents(4),
        "prior_token_id": torch.randint(0, 16, (2, tokens)),
        "prior_token_drop": torch.zeros(2, tokens, dtype=torch.bool),
        "timestep": torch.tensor([3.0, 11.0]),
        **conditions("target_size", "crop_coords"),
        "kv_caches": GlmImageKVCache(2),  # which is neither written nor read
    }


def _fibo(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, sizes.rows * sizes.columns, 4),
        "text_encoder_layers": [torch.randn(2, sizes.text, 8) for _ in range(2)],
        "img_ids": torch.nn.functional.pad(_grid(sizes), (1, 0)),
        "txt_ids": torch.zeros(sizes.text, 3),
    }


def _fibo2(sizes: Sizes) -> dict[str, Any]:
    mask = torch.arange(12) < torch.tensor([[9 if sizes.padded else 12], [12]])
    return {
        "hidden_states": sizes.latents(4),
        "encoder_hidden_states": torch.randn(2, 2, 12, 16),
        "encoder_attention_mask": mask,
        "context_latents": [sizes.latents(4)],
    }


def _wan_animate(sizes: Sizes) -> dict[str, Any]:
    face = torch.randn(2, 3, 4 * (sizes.frames - 1), 16, 16)
    return {
        "hidden_states": sizes.latents(12, frames=sizes.frames, patch=2),
        "timestep": torch.tensor([3.0, 11.0]),
        "pose_hidden_states": sizes.latents(4, frames=sizes.frames, patch=2)[:, :, 1:],
        "face_pixel_values": face,
    }


def _helios(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.latents(4, frames=sizes.frames, patch=2),
        "timestep": torch.tensor([3, 11]),
        "indices_hidden_states": torch.arange(3, 3 + sizes.frames).expand(2, -1),
        "indices_latents_history_short": torch.arange(1, 3).expand(2, -1),
        "latents_history_short": sizes.latents(4, frames=2, patch=2),
    }


def _framepack(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.latents(4, frames=sizes.frames, patch=2),
        "encoder_attention_mask": sizes.mask(),
        "pooled_projections": torch.randn(2, 8),
        "image_embeds": torch.randn(2, 3, 8),
        "indices_latents": torch.arange(4, 4 + sizes.frames),
        "guidance": torch.full((2,), 6.0),
        "latents_clean": sizes.latents(4, frames=2, patch=2),
        "indices_latents_clean": torch.arange(2),
        "latents_history_2x": sizes.latents(4, frames=2, patch=2),
        "indices_latents_history_2x": torch.arange(2, 4),
        "latents_history_4x": sizes.latents(4, frames=4, patch=2),
        "indices_latents_history_4x": torch.arange(4),
    }


def _audio(sizes: Sizes) -> dict[str, Any]:
    return {"hidden_states": torch.randn(2, 4, sizes.rows * sizes.columns)}


def _stable_audio(sizes: Sizes) -> dict[str, Any]:
    given = _audio(sizes) | {"global_hidden_states": torch.randn(2, 1, 8)}
    rotary = tuple(x.repeat(1, 2) for x in _rotations(sizes.rows * sizes.columns + 1, 2))
    return given | {"rotary_embedding": rotary, "timestep": torch.tensor([0.15])}


def _stable_audio3(sizes: Sizes) -> dict[str, Any]:
    return _audio(sizes) | {"global_hidden_states": torch.randn(2, 8)}


def _music(sizes: Sizes) -> dict[str, Any]:
    tokens = sizes.rows * sizes.columns
    return _audio(sizes) | {"encoder_hidden_states": torch.randn(2, tokens, 16)}


def _longcat_audio(sizes: Sizes) -> dict[str, Any]:
    tokens = sizes.rows * sizes.columns
    return {
        "hidden_states": torch.randn(2, tokens, 4),
        "latent_cond": torch.randn(2, tokens, 4),
        "encoder_attention_mask": sizes.mask(),
    }


def _video(sizes: Sizes) -> dict[str, Any]:
    return {"hidden_states": sizes.latents(4, frames=sizes.frames)}


def _joy(sizes: Sizes) -> dict[str, Any]:
    return {"hidden_states": sizes.latents(4, frames=sizes.frames, patch=2)}


def _hunyuan_dit(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.latents(4),
        "timestep": torch.tensor([3.0, 11.0]),
        "encoder_hidden_states": torch.randn(2, 4, 16),
        "text_embedding_mask": sizes.mask(4).float(),
        "encoder_hidden_states_t5": torch.randn(2, 5, 16),
        "text_embedding_mask_t5": sizes.mask(5).float(),
        "image_rotary_emb": _rotations(sizes.rows * sizes.columns),
        "controlnet_block_samples": [torch.randn(2, sizes.rows * sizes.columns, 48)],
    }


def _lumina(sizes: Sizes) -> dict[str, Any]:
    angles = torch.randn(16, 16, 4)
    return {
        "hidden_states": sizes.latents(4),
        "encoder_mask": sizes.mask(),
        "image_rotary_emb": torch.polar(torch.ones_like(angles), angles),
        "cross_attention_kwargs": {},
    }


def _dit(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 14, 14) if sizes.rows == 3 else torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 11]),
        "class_labels": torch.tensor([1, 2]),
    }


def _allegro(sizes: Sizes) -> dict[str, Any]:
    tokens = sizes.frames * sizes.rows * sizes.columns
    tables = tuple(_rotations(9, 4) for _ in range(3))
    positions = torch.randint(0, 9, (3, 1, tokens))
    return {
        "hidden_states": sizes.latents(4, frames=sizes.frames, patch=2),
        "encoder_attention_mask": sizes.mask(),
        "image_rotary_emb": (tables, positions),
    }


def _anyflow(sizes: Sizes) -> dict[str, Any]:
    latents = sizes.latents(4, frames=sizes.frames, patch=2).transpose(1, 2)
    return {
        "hidden_states": latents,
        "timestep": torch.rand(2, sizes.frames),
        "r_timestep": torch.rand(2, sizes.frames),
    }


def _consisid(sizes: Sizes) -> dict[str, Any]:
    tokens = sizes.frames * sizes.rows * sizes.columns
    return {
        "hidden_states": sizes.latents(4, frames=sizes.frames, patch=2).transpose(1, 2),
        "image_rotary_emb": _rotations(tokens),
        "id_cond": torch.randn(2, 8),
        "id_vit_hidden": [torch.randn(2, 2, 8) for _ in range(5)],
    }


def _dreamlite(sizes: Sizes) -> dict[str, Any]:
    return {"hidden_states": sizes.latents(8)}


_MAKE: Mapping[str, Callable[[Sizes], dict[str, Any]]] = {
    "Krea2Transformer2DModel": _krea2,
    "CogView3PlusTransformer2DModel": _cogview,
    "ErnieImageTransformer2DModel": _ernie,
    "Ideogram4Transformer2DModel": _ideogram,
    "MiniMaxH3Transformer3DModel": _minimax_h3,
    "Kandinsky6Transformer3DModel": _kandinsky6,
    "GlmImageTransformer2DModel": _glm,
    "BriaFiboTransformer2DModel": _fibo,
    "BriaFibo2Transformer2DModel": _fibo2,
    "WanAnimateTransformer3DModel": _wan_animate,
    "HeliosTransformer3DModel": _helios,
    "HunyuanVideoFramepackTransformer3DModel": _framepack,
    "StableAudioDiTModel": _stable_audio,
    "StableAudio3DiTModel": _stable_audio3,
    "MiniMaxMusic3Transformer1DModel": _music,
    "LongCatAudioDiTTransformer": _longcat_audio,
    "MotifVideoTransformer3DModel": _video,
    "JoyImageEditTransformer3DModel": _joy,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "EasyAnimateTransformer3DModel": _joy,
    "LuminaNextDiT2DModel": _lumina,
    "DiTTransformer2DModel": _dit,
    "AllegroTransformer3DModel": _allegro,
    "AnyFlowTransformer3DModel": _anyflow,
    "ConsisIDTransformer3DModel": _consisid,
    "DreamLiteTransformer2DModel": _dreamlite,
}
_WITHOUT_TEXT = ("ErnieImageTransformer2DModel", "DiTTransformer2DModel")


def build(name: str, **changes: Any) -> Any:
    """A transformer with the same weights in every process, none of them zero, in training."""
    torch.manual_seed(0)
    transformer = with_noise(getattr(diffusers, name)(**{**CONFIGS[name], **changes}))
    if name == "LuminaNextDiT2DModel":  # diffusers leaves it as memory has it
        torch.nn.init.normal_(transformer.pad_token)
    # The labels of the first are left out at random in training.
    return transformer.float().train(name != "DiTTransformer2DModel")


def arguments(name: str, sizes: Sizes) -> dict[str, Any]:
    """Those of a class of this module, the same in every call."""
    torch.manual_seed(1)
    given: dict[str, Any] = {"timestep": torch.tensor([0.15, 0.55])}
    if name not in _WITHOUT_TEXT:
        given["encoder_hidden_states"] = torch.randn(2, sizes.text, 16)
    given |= _MAKE[name](sizes)
    if MASKS.get(name) == "encoder_attention_mask" and MASKS[name] not in given:
        given[MASKS[name]] = sizes.mask()
    return given
