"""The classes of diffusion transformers that are served: one :class:`Plan` for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ds_usp.integrations.diffusers.plan import Plan, TokenDim

_IMAGE, _TEXT, _SEQUENCE = (TokenDim(kind, 1) for kind in ("image", "text", "joint"))
_JOINT: Mapping[str, TokenDim] = MappingProxyType(
    {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}
)
_IMAGE_ROWS = TokenDim("image", 0), TokenDim("image", 0)
_OPTIONAL_IMAGE = TokenDim("image", 1, ndim=2)
_IMAGE_TIMESTEP = TokenDim("image", 1, ndim=3)
_BLOCKS, _SINGLE_BLOCKS = "transformer_blocks.*", "single_transformer_blocks.*"
_FIRST_BLOCK = "transformer_blocks.0"

_FLUX = Plan(
    inputs={"": {**_JOINT, "img_ids": TokenDim("image", -2), "txt_ids": TokenDim("text", -2)}},
    attention={f"{_BLOCKS}.attn": ("text", "image"), f"{_SINGLE_BLOCKS}.attn": ("text", "image")},
    whole=("timestep", "guidance", "pooled_projections"),
    unbatched=("img_ids", "txt_ids"),
)
_WAN = Plan(
    inputs={
        "": {"timestep": _OPTIONAL_IMAGE},  # Wan 2.2: one for each token
        "blocks.0": {"hidden_states": _IMAGE},
    },
    outputs={"rope": (_IMAGE, _IMAGE)},
    attention={"blocks.*.attn1": ("image",)},
    local=("blocks.*.attn2",),
    whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
)
_HUNYUAN = Plan(
    inputs={_FIRST_BLOCK: _JOINT},
    outputs={"rope": _IMAGE_ROWS},
    attention={f"{_BLOCKS}.attn": ("image", "text"), f"{_SINGLE_BLOCKS}.attn": ("image", "text")},
    masks={_BLOCKS: "attention_mask", _SINGLE_BLOCKS: "attention_mask"},
    local=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    whole=(
        *("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
        *("pooled_projections", "guidance"),
    ),
)
_HUNYUAN_TWO_TEXTS = (
    *("hidden_states", "timestep", "timestep_r", "encoder_hidden_states"),
    *("encoder_attention_mask", "encoder_hidden_states_2", "encoder_attention_mask_2"),
)
PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "FluxTransformer2DModel": _FLUX,
        "Flux2Transformer2DModel": replace(_FLUX, whole=("timestep", "guidance")),
        "WanTransformer3DModel": _WAN,
        "WanVACETransformer3DModel": Plan(
            inputs={
                "vace_blocks.*": {"hidden_states": _IMAGE},
                "vace_blocks.0": {"control_hidden_states": _IMAGE},
                "blocks.0": {"hidden_states": _IMAGE},
            },
            outputs={"rope": (_IMAGE, _IMAGE)},
            attention={"vace_blocks.*.attn1": ("image",), "blocks.*.attn1": ("image",)},
            local=("vace_blocks.*.attn2", "blocks.*.attn2"),
            whole=(
                *("hidden_states", "timestep", "encoder_hidden_states"),
                *("encoder_hidden_states_image", "control_hidden_states"),
                "control_hidden_states_scale",
            ),
            unbatched=("control_hidden_states_scale",),
        ),
        "QwenImageTransformer2DModel": Plan(
            inputs={
                "": {"hidden_states": _IMAGE},
                _FIRST_BLOCK: {"encoder_hidden_states": _TEXT},
                _BLOCKS: {"modulate_index": _OPTIONAL_IMAGE},
            },
            outputs={"pos_embed": (TokenDim("image", 0), TokenDim("text", 0))},
            attention={f"{_BLOCKS}.attn": ("text", "image")},
            masks={_BLOCKS: "encoder_hidden_states_mask"},
            whole=(
                *("encoder_hidden_states", "encoder_hidden_states_mask", "timestep"),
                *("img_shapes", "guidance", "additional_t_cond"),
            ),
        ),
        "LTXVideoTransformer3DModel": Plan(
            inputs={"": {"hidden_states": _IMAGE, "timestep": _OPTIONAL_IMAGE}},
            outputs={"rope": (_IMAGE, _IMAGE)},
            attention={f"{_BLOCKS}.attn1": ("image",)},
            local=(f"{_BLOCKS}.attn2",),
            whole=(
                *("encoder_hidden_states", "encoder_attention_mask", "num_frames", "height"),
                *("width", "rope_interpolation_scale", "video_coords"),
            ),
            unbatched=("rope_interpolation_scale",),
        ),
        "HunyuanVideoTransformer3DModel": replace(
            _HUNYUAN, refused={"image_condition_type": "token_replace"}
        ),
        "CogVideoXTransformer3DModel": Plan(
            inputs={"": {"image_rotary_emb": TokenDim("image", 0)}, _FIRST_BLOCK: _JOINT},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
            unbatched=("image_rotary_emb", "ofs"),
        ),
        "SD3Transformer2DModel": Plan(
            inputs={},
            outputs={"pos_embed": (_IMAGE,), "context_embedder": (_TEXT,)},
            attention={f"{_BLOCKS}.attn": ("image", "text"), f"{_BLOCKS}.attn2": ("image",)},
            whole=(
                *("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
                "skip_layers",
            ),
            unbatched=("skip_layers",),
        ),
        "PixArtTransformer2DModel": Plan(
            inputs={},
            outputs={"pos_embed": (_IMAGE,)},
            attention={f"{_BLOCKS}.attn1": ("image",)},
            local=(f"{_BLOCKS}.attn2",),
            whole=(
                *("hidden_states", "encoder_hidden_states", "timestep", "added_cond_kwargs"),
                "encoder_attention_mask",
            ),
        ),
        "ChromaTransformer2DModel": replace(
            _FLUX,
            masks={_BLOCKS: "attention_mask", _SINGLE_BLOCKS: "attention_mask"},
            whole=("timestep", "attention_mask"),
        ),
        "Flux3Transformer2DModel": Plan(
            inputs={
                "": {
                    **_FLUX.inputs[""],
                    "image_cond_hidden_states": TokenDim("reference", 1),
                    "image_cond_ids": TokenDim("reference", -2),
                }
            },
            attention={
                "txt_mode_blocks.*.attn": ("text",),
                "mode_blocks.image.*.attn": ("image",),
                "mode_blocks.image_cond.*.attn": ("reference",),
                f"{_SINGLE_BLOCKS}.attn": ("text", "image", "reference"),
            },
            whole=("timestep", "target_timestep"),
            unbatched=(*_FLUX.unbatched, "image_cond_ids"),
        ),
        "HunyuanImageTransformer2DModel": replace(
            _HUNYUAN, whole=(*_HUNYUAN_TWO_TEXTS, "guidance")
        ),
        "CogView4Transformer2DModel": Plan(
            inputs={},
            outputs={"rope": _IMAGE_ROWS, "patch_embed": (_IMAGE, _TEXT)},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(
                *("hidden_states", "encoder_hidden_states", "timestep"),
                *("original_size", "target_size", "crop_coords"),
            ),
        ),
        "CosmosTransformer3DModel": Plan(
            inputs={
                _FIRST_BLOCK: {"hidden_states": _IMAGE},
                # One for each token where it is one for each frame.
                _BLOCKS: {"embedded_timestep": _IMAGE_TIMESTEP, "temb": _IMAGE_TIMESTEP},
                "norm_out": {"embedded_timestep": _IMAGE_TIMESTEP, "temb": _IMAGE_TIMESTEP},
            },
            outputs={"rope": _IMAGE_ROWS, "learnable_pos_embed": (_IMAGE,)},
            attention={f"{_BLOCKS}.attn1": ("image",)},
            local=(f"{_BLOCKS}.attn2",),
            whole=(
                *("hidden_states", "timestep", "encoder_hidden_states", "attention_mask"),
                *("fps", "condition_mask", "padding_mask"),
            ),
        ),
        "SkyReelsV2Transformer3DModel": replace(
            _WAN,
            inputs={"blocks.0": {"hidden_states": _IMAGE}},
            whole=(*_WAN.whole, "timestep", "fps"),
            unbatched=("fps",),
        ),
        "ChronoEditTransformer3DModel": _WAN,
        "AuraFlowTransformer2DModel": Plan(
            inputs={"joint_transformer_blocks.0": _JOINT},
            attention={
                "joint_transformer_blocks.*.attn": ("text", "image"),
                f"{_SINGLE_BLOCKS}.attn": ("text", "image"),
            },
            whole=("hidden_states", "encoder_hidden_states", "timestep"),
        ),
        "LongCatImageTransformer2DModel": replace(_FLUX, whole=("timestep", "guidance")),
        "OvisImageTransformer2DModel": replace(_FLUX, whole=("timestep",)),
        "BriaTransformer2DModel": _FLUX,
        "ZImageTransformer2DModel": Plan(
            inputs={
                "noise_refiner.0": {"x": _IMAGE},
                "noise_refiner.*": {"freqs_cis": _IMAGE},
                "layers.0": {"x": _SEQUENCE},
                "layers.*": {"freqs_cis": _SEQUENCE},
            },
            attention={"noise_refiner.*.attention": ("image",), "layers.*.attention": ("joint",)},
            local=("context_refiner.*.attention", "siglip_refiner.*.attention"),
            masks={"layers.*": "attn_mask"},
            whole=("x", "t", "cap_feats", "patch_size", "f_patch_size"),
            batched="x",
            gathered={"noise_refiner.-1": "image"},
            joined="all_final_layer.*",
        ),
        "Lumina2Transformer2DModel": Plan(
            inputs={
                "noise_refiner.0": {"hidden_states": _IMAGE},
                "noise_refiner.*": {"image_rotary_emb": _IMAGE},
                "layers.0": {"hidden_states": _SEQUENCE},
                "layers.*": {"image_rotary_emb": _SEQUENCE},
            },
            attention={"noise_refiner.*.attn": ("image",), "layers.*.attn": ("joint",)},
            local=("context_refiner.*.attn",),
            masks={"layers.*": "attention_mask"},
            whole=("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
            gathered={"noise_refiner.-1": "image"},
            joined="norm_out",
        ),
        "LTX2VideoTransformer3DModel": Plan(
            inputs={
                "": {
                    "hidden_states": _IMAGE,
                    "timestep": _OPTIONAL_IMAGE,
                    "video_keyframes_mask": _IMAGE,
                    "audio_hidden_states": TokenDim("audio", 1),
                    "audio_timestep": TokenDim("audio", 1, ndim=2),
                }
            },
            outputs={
                "rope": (TokenDim("image", -2),) * 2,
                "cross_attn_rope": (TokenDim("image", -2),) * 2,
                "audio_rope": (TokenDim("audio", -2),) * 2,
                "cross_attn_audio_rope": (TokenDim("audio", -2),) * 2,
            },
            attention={
                f"{_BLOCKS}.attn1": ("image",),
                f"{_BLOCKS}.audio_attn1": ("audio",),
                f"{_BLOCKS}.audio_to_video_attn": ("image",),
                f"{_BLOCKS}.video_to_audio_attn": ("audio",),
            },
            keys={
                f"{_BLOCKS}.audio_to_video_attn": "audio",
                f"{_BLOCKS}.video_to_audio_attn": "image",
            },
            local=(f"{_BLOCKS}.attn2", f"{_BLOCKS}.audio_attn2"),
            whole=(
                *("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask"),
                *("audio_encoder_attention_mask", "sigma", "audio_sigma", "num_frames", "height"),
                *("width", "fps", "audio_num_frames", "video_coords", "audio_coords"),
                *("isolate_modalities", "use_cross_timestep"),
            ),
            also_joined={"audio_proj_out": "audio"},
        ),
        "HunyuanVideo15Transformer3DModel": replace(
            _HUNYUAN,
            attention={f"{_BLOCKS}.attn": ("image", "text")},
            masks={_BLOCKS: "attention_mask"},
            needs_mask=True,
            whole=(*_HUNYUAN_TWO_TEXTS, "image_embeds"),
            zero_or_not=("image_embeds",),
        ),
    }
)
