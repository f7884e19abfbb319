"""Tiny models with towers for images or sounds: a configuration, weights and a batch of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any

import torch
import transformers
from cases import mesh_of
from harness import RankContext
from model_runs import IGNORED, MESHES, on_the_mesh, plain_batch, whole_model
from packaging.version import Version
from tiny_models import FP64, NOT_BUILT, SPREAD, VERSION, shrunk
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import ds_usp
from ds_usp.integrations.transformers import enable

IMAGE = 90  # the token that stands for a piece of an image or a sound
SPECIAL = {"image_token_id": IMAGE, "video_token_id": 89, "image_token_index": IMAGE}
SPECIAL |= {"vision_start_token_id": 88, "vision_end_token_id": 87, "audio_token_id": IMAGE}
SPECIAL |= {"audio_token_index": IMAGE}
Batch = dict[str, Tensor]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def pixels(size: int = 28, crop: bool = False, name: str = "pixel_values") -> Callable[[], Batch]:
    """Two images, or two of one crop."""
    shape = (2, 1, 3, size, size) if crop else (2, 3, size, size)
    return lambda: {name: random(*shape)}


def patches(features: int, grid: tuple[int, int, int] = (1, 4, 4)) -> Callable[[], Batch]:
    """Two images of Qwen-VL: patches of both, and their numbers along time, height and width."""
    t, h, w = grid
    return lambda: {
        "pixel_values": random(2 * t * h * w, features),
        "image_grid_thw": torch.tensor([grid, grid]),
    }


def tiny(model_type: str, **changes: Any) -> Any:
    known = model_type in CONFIG_MAPPING  # not in every version
    small = shrunk(CONFIG_MAPPING[model_type]) if known else {}
    return {**small, "model_type": model_type, **changes}


def vit(model_type: str, **changes: Any) -> Any:
    small = {"image_size": 28, "patch_size": 14, "hidden_size": 64, "intermediate_size": 96}
    return tiny(model_type, **small | {"num_hidden_layers": 2, "num_attention_heads": 4} | changes)


MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
GLM_ROPE = MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
QWEN = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "patch_size": 2}
QWEN |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "intermediate_size": 96}
QWEN |= {"out_hidden_size": 64}
QWEN_WINDOWS = QWEN | {"window_size": 8, "fullatt_block_indexes": [1]}
QWEN_DEEP = QWEN | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
QWEN_FLAT = QWEN_DEEP | {"deepstack_visual_indexes": []}
GLM = QWEN | {"image_size": 8, "model_type": "glm4v_vision"}
CLIP, SIGLIP = vit("clip_vision_model"), vit("siglip_vision_model")
PIXTRAL = tiny("pixtral", image_size=28, patch_size=7)
SMALL = {"image_size": 28, "patch_size": 7, "hidden_size": 64, "intermediate_size": 96}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4}
VIT3D = {"patch_size": 7, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
VIT3D |= {"intermediate_size": 96, "model_type": "minimax_m3_vl_vision"}
# Layers share keys, indices and neither.
LARGE4 = {"kv_source_layers": [0, 1, 0, 1], "indexer_types": ["full", "shared"] * 2}
LARGE4 |= {"no_rope_layers": [1, 0, 1, 0], "layer_types": ["indexed_attention"] * 4}
LARGE4 |= {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_hidden_layers": 4}
LARGE4 = tiny("mistral_large4_text", **LARGE4)
# Layers with a state, an indexer of their own, and the indices of the layer before.
GLM5 = {"layer_types": ["linear_attention", *["indexed_attention"] * 2], "num_hidden_layers": 3}
GLM5 |= {"indexer_types": ["full", "full", "shared"], "num_key_value_heads": 4}
GLM5 |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "index_kpool": 4}
GLM5 = tiny("glm5_next_text", **GLM5, qk_rope_head_dim=0)
PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28]]}
PERCEIVER = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_head_dim": 16}
PERCEIVER |= {"hidden_size": 64, "resampler_n_heads": 4, "num_key_value_heads": 2}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 16, "intermediate_size": 256}


def parts(text: Any, vision: Any, **more: Any) -> dict[str, Any]:
    return {"text_config": tiny(text) if isinstance(text, str) else text} | {
        "vision_config": vision,
        **more,
    }


def mrope(model_type: str, rope: Mapping[str, Any] = MROPE) -> Any:
    return tiny(model_type, rope_parameters=rope, use_sliding_window=False)


def crops() -> Batch:
    """Two images, cut into two crops each beside the whole."""
    return {
        "pixel_values": random(2, 3, 3, 28, 28),
        "image_sizes": torch.tensor([[28, 56], [56, 28]]),
    }


def sized() -> Batch:
    return {"pixel_values": random(2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]] * 2)}


def flat() -> Batch:
    """Two images as rows of patches."""
    return {
        "pixel_values": random(2, 16, 147),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


def gemma4_patches() -> Batch:
    positions = torch.tensor([[[x, y] for y in range(4) for x in range(4)]] * 2)
    return {"pixel_values": random(2, 16, 12).sigmoid(), "image_position_ids": positions}


# By model type: what its configuration says, and what its batch has beside tokens.
TOWERS: Mapping[str, tuple[Mapping[str, Any], Callable[[], Batch]]] = {
    "aria": (
        parts("aria_text", vit("idefics3_vision"), projector_patch_to_query_dict={4: 4}),
        pixels(),
    ),
    "aya_vision": (parts("cohere2", SIGLIP, downsample_factor=2), pixels()),
    "cohere2_vision": (
        parts("cohere2", SIGLIP, downsample_factor=2, alignment_intermediate_size=64),
        pixels(),
    ),
    "exaone4_5": (parts("exaone4", QWEN_WINDOWS | {"num_key_value_heads": 4}), patches(12)),
    "gemma3": (parts("gemma3_text", SIGLIP, mm_tokens_per_image=4), pixels()),
    "gemma4": (
        parts(
            "gemma4_text",
            tiny("gemma4_vision", patch_size=2, position_embedding_size=16, pooling_kernel_size=2),
            audio_config=None,
        ),
        gemma4_patches,
    ),
    "deepseek_vl": (parts("llama", SIGLIP), pixels()),
    "glm46v": (parts(mrope("glm4v_text", GLM_ROPE), GLM), patches(12)),
    "glm4v": (parts(mrope("glm4v_text", GLM_ROPE), GLM), patches(12)),
    "glm4v_moe": (
        parts(mrope("glm4v_moe_text", GLM_ROPE), GLM | {"model_type": "glm4v_moe_vision"}),
        patches(12),
    ),
    "glm5_next": (
        parts(
            GLM5,
            tiny("glm5_next_vision", **QWEN | {"projection_intermediate_size": 64}),
        ),
        patches(12),
    ),
    "glm_ocr": (
        parts(mrope("glm_ocr_text", GLM_ROPE), GLM | {"model_type": "glm_ocr_vision"}),
        patches(12),
    ),
    "got_ocr2": (parts("qwen2", tiny("got_ocr2_vision")), pixels(32)),
    "idefics2": (
        parts("mistral", vit("idefics2_vision"), perceiver_config=PERCEIVER),
        pixels(crop=True),
    ),
    "idefics3": (parts("llama", vit("idefics3_vision"), scale_factor=2), pixels(crop=True)),
    "internvl": (
        parts("qwen2", tiny("internvl_vision", image_size=[28, 28], patch_size=[7, 7])),
        pixels(),
    ),
    "lfm2_vl": (parts("lfm2", tiny("siglip2_vision_model", num_patches=16, patch_size=7)), flat),
    "lighton_ocr": (parts("qwen3", PIXTRAL, spatial_merge_size=2), sized),
    "llama4": (
        parts(
            "llama4_text",
            tiny("llama4_vision_model", image_size=28, patch_size=7, intermediate_size=256)
            | dict.fromkeys(
                ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64
            ),
        ),
        pixels(),
    ),
    "llava": (parts("llama", CLIP), pixels()),
    "llava_next": (parts("llama", CLIP, **PINPOINTS), crops),
    "llava_onevision": (parts("qwen2", SIGLIP, **PINPOINTS), crops),
    "llava_next_video": (parts("llama", CLIP, **PINPOINTS), crops),
    "minimax_m3_vl": (
        parts("minimax_m3_vl_text", VIT3D, projector_hidden_size=64),
        patches(3 * 2 * 7 * 7),
    ),
    "mistral3": (parts("mistral", PIXTRAL, spatial_merge_size=2), sized),
    "mistral_large4": (parts(LARGE4, PIXTRAL, spatial_merge_size=2), sized),
    "ovis2": (
        parts(
            "qwen2", SMALL | {"hidden_stride": 2, "vocab_size": 32}, hidden_size=64, vocab_size=97
        )
        | {"visual_indicator_token_ids": [80, 81, 82, 83, 84]},
        pixels(),
    ),
    "paligemma": (
        parts("gemma", SIGLIP | {"projection_dim": 64}, projection_dim=64),
        pixels(),
    ),
    "qwen2_5_omni_thinker": (
        parts(
            mrope("qwen2_5_omni_text"),
            QWEN_WINDOWS,
            audio_config=tiny("qwen2_5_omni_audio_encoder"),
        ),
        patches(12),
    ),
    "qwen2_5_vl": (parts(mrope("qwen2_5_vl_text"), QWEN_WINDOWS), patches(12)),
    "qwen2_vl": (parts(mrope("qwen2_vl_text"), QWEN), patches(12)),
    "qwen3_5": (parts(mrope("qwen3_5_text"), QWEN_FLAT), patches(12)),
    "qwen3_5_moe": (parts(mrope("qwen3_5_moe_text"), QWEN_FLAT), patches(12)),
    "qwen4_exp": (
        parts(mrope("qwen4_exp_text"), tiny("qwen4_exp_vision", **QWEN_FLAT)),
        patches(12),
    ),
    "qwen3_vl": (parts(mrope("qwen3_vl_text"), QWEN_DEEP), patches(12)),
    "qwen3_vl_moe": (parts(mrope("qwen3_vl_moe_text"), QWEN_DEEP), patches(12)),
    "qwen3_omni_moe_thinker": (
        parts(
            mrope("qwen3_omni_moe_text"),
            QWEN_DEEP,
            audio_config=tiny("qwen3_omni_moe_audio_encoder", **AUDIO),
        ),
        patches(12),
    ),
    "smolvlm": (parts("llama", vit("smolvlm_vision"), scale_factor=2), pixels(crop=True)),
    "video_llava": (
        parts("llama", CLIP),
        pixels(name="pixel_values" if Version("5.23") <= VERSION else "pixel_values_images"),
    ),
    "video_llama_3": (
        parts("qwen2", tiny("video_llama_3_vision", patch_size=2)),
        lambda: patches(12)() | {"image_merge_sizes": torch.tensor([2, 2])},
    ),
    "vipllava": (parts("llama", CLIP, vision_feature_layers=[-1, -2]), pixels()),
    "voxtral": (
        {"text_config": tiny("llama"), "audio_config": tiny("voxtral_encoder", **AUDIO)},
        lambda: {"input_features": random(2, 8, 32)},
    ),
}


NAMES = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
# Types that other versions have not, or that cannot be made, or given a batch, as here.
OTHERWISE = frozenset(TOWERS) - frozenset(NAMES) | frozenset(TOWERS) & frozenset(NOT_BUILT)
if Version("5.9") > VERSION:
    # One trains with token_type_ids only, one has other widths.
    OTHERWISE |= {"paligemma", "llama4"}
TRIED = tuple(name for name in TOWERS if name not in OTHERWISE)


def class_of(model_type: str) -> Any:
    return getattr(transformers, NAMES[model_type])


def build_with_tower(model_type: str) -> Any:
    """A model with weights of a seed, in training mode, with attention computed eagerly."""
    cls = class_of(model_type)
    config = cls.config_class(**TOWERS[model_type][0])
    for name, token in SPECIAL.items():
        setattr(config, name, token)
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    return model.to(torch.float64 if model_type in FP64 else torch.float32)


def features(model: Any, extra: Batch) -> list[Tensor]:
    """What the tower makes of each image or sound, ``[tokens, hidden]``."""
    if hasattr(model, "get_audio_features") and "input_features" in extra:
        out = model.get_audio_features(**extra).pooler_output
        return list(out.split(len(out) // len(extra["input_features"])))
    owner = model if hasattr(model, "get_image_features") else model.base_model
    strategy = signature(owner.get_image_features).parameters.get("vision_feature_select_strategy")
    if strategy is not None and strategy.default is strategy.empty:  # Llama 4 of 5.17
        extra = {**extra, strategy.name: "default"}  # type: ignore[dict-item]
    out = owner.get_image_features(**extra)
    found = out.last_hidden_state if out.pooler_output is None else out.pooler_output
    if isinstance(found, Tensor) and found.ndim == 2:  # of both images, Gemma 4 of 5.17
        found = found.split(len(found) // 2)
    return list(found)


def batch_with_images(model: Any, extra: Batch, rows: Mapping[str, Tensor] | None = None) -> Batch:
    """Two rows of tokens, an image in each: not in the same place."""
    batch: Batch = dict(rows or plain_batch())
    with torch.no_grad():
        counts = [len(x) for x in features(model, extra)]
    for row, count in enumerate(counts):
        at = slice(5 + 9 * row, 5 + 9 * row + count)
        batch["input_ids"][row, at], batch["labels"][row, at] = IMAGE, IGNORED
    kinds = batch["input_ids"] == IMAGE
    if model.config.model_type == "paligemma":  # 0 is the prefix, whose tokens see each other
        kinds = torch.arange(kinds.shape[1]).expand_as(kinds) > 20
    takes = signature(model.base_model.forward).parameters
    for name in takes.keys() & {"mm_token_type_ids", "token_type_ids"}:
        batch[name] = kinds.long()
    return {**batch, **extra}


def tower_case(
    ctx: RankContext, model_type: str, meshes: Collection[str] = tuple(MESHES)
) -> dict[str, float | str]:
    """How a type fares on two ranks with images or sounds, by mesh: its error, or why these are
    refused. What the tower gives must be the same on the enabled model, outside of a pass."""
    model = build_with_tower(model_type)
    dtype = next(model.parameters()).dtype
    extra = {
        name: x.to(dtype) if x.is_floating_point() else x
        for name, x in TOWERS[model_type][1]().items()
    }
    batch = batch_with_images(model, extra)
    want = whole_model(model, batch)
    with torch.no_grad():
        alone = features(model, extra)
    outcomes: dict[str, float | str] = {}
    for name in meshes:
        ulysses = MESHES[name]
        try:
            with enable(model, mesh_of(ulysses), logits="whole"):
                with torch.no_grad():
                    unchanged = all(map(torch.equal, alone, features(model, extra)))
                error = on_the_mesh(model, mesh_of(ulysses), batch).error(want)
                outcomes[name] = error if unchanged else float("inf")
        except ds_usp.USPError as refusal:
            outcomes[name] = str(refusal)
    return outcomes
