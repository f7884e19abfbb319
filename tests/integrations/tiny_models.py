"""Tiny random models of transformers' types: a configuration of each, its weights, its numbers.

``config(model_type)`` shrinks the defaults of a type: every size becomes one of ``SIZES``, every
kind of layer that the defaults name stays. What that leaves impossible is mended by ``OVERRIDES``.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ds_usp.integrations.transformers.refusals import OLDEST_WITH_STATES

VERSION = Version(transformers.__version__)
HAS_STATES = Version(OLDEST_WITH_STATES) <= VERSION
# Before it models write their masks of blocks themselves, and these are refused.
HAS_BLOCKS = Version("5.9") <= VERSION
VOCAB = 97
MAX_PARAMETERS = 3_000_000
SPREAD = 0.08  # of the weights: scores of order 1 at 64 hidden units, so that positions matter

SIZES: Mapping[str, Any] = {
    # Widths.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("backbone_hidden_size", "pronunciation_embed_dim", "shape_embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "feed_forward_size"), 96),
    **dict.fromkeys(("n_inner", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "laurel_rank"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "router_hidden_size", "hc_lowrank"), 8),
    # Depths.
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    "num_encoder_layers": 2,
    # Heads.
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim", "dim_head"), 16),
    **dict.fromkeys(("attention_head_size", "swa_head_dim"), 16),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(("rotary_dim", "rotary_ndims", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 16),
    "q_lora_rank": 24,
    # Tokens and positions.
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size"), 11),
    **dict.fromkeys(("local_attention", "window_size", "attention_chunk_size"), 12),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
    # Indexers of sparse attention, states.
    **dict.fromkeys(("index_head_dim", "mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    # With fewer heads keys tie at a score of 0, and top-k of a document alone takes others of them.
    "index_n_heads": 16,
    **dict.fromkeys(("index_topk_blocks", "index_block_size"), 4),
    "index_topk": 16,
    # No dropout: the reference draws other numbers.
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "dropout", "activation_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout_prob"), 0.0),
    **dict.fromkeys(("embedding_dropout_prob", "decoder_layerdrop", "dropout_p"), 0.0),
    **dict.fromkeys(("dropout_rate", "resid_dropout", "mlp_dropout", "hidden_dropout_rate"), 0.0),
    "output_router_logits": False,
    "is_decoder": True,
}

WINDOWS = ["sliding_attention", "full_attention"]
KV_SHARED = {"layer_types": WINDOWS * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
SHARED_INDICES = {"indexer_types": ["full", "shared"]}
CONV = {"layer_types": ["conv", "full_attention"]}
IMAGES = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

# What a type needs beyond SIZES to be possible, or to use what its name stands for.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 8},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB, "encoder_hash_byte_group_size": [3]},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "cohere_compass_text": {
        "layer_types": WINDOWS,
        "rope_parameters": dict.fromkeys(WINDOWS, ROTARY),
    },
    "csm_depth_decoder_model": {"num_codebooks": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64}
        | {"moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": {"head_dim": 8, "num_hidden_layers": 3},
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 4,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {
        "layer_types": WINDOWS,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_hidden_layers": 2,
    },
    "dots3_note_text": {"layer_types": ["indexed_attention", "sliding_attention"]}
    | {"per_layer_config": {1: {"head_dim": 24, "q_lora_rank": 16}}},
    "falcon_h1": {"mamba_chunk_size": 8},
    "fuyu": {"text_config": "persimmon", "image_size": 28, "patch_size": 14},
    "gemma2": {"attn_logit_softcapping": 2.0},  # scores of order 1 are bent
    "gemma3": {"vision_config": "siglip_vision_model"} | IMAGES,
    "gemma3n_text": KV_SHARED | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": KV_SHARED | {"global_head_dim": 32},
    "gemma4_unified_text": KV_SHARED | {"global_head_dim": 32},
    "gemma4_unified_vision": {"mm_embed_dim": 64, "output_proj_dims": 64, "patch_size": 4},
    "git_vision_model": {"image_size": 28, "patch_size": 14},
    "got_ocr2": {"text_config": "qwen2", "image_token_index": 90},
    "got_ocr2_vision": {"output_channels": 16, "mlp_dim": 64, "image_size": 32, "window_size": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "glm_moe_dsa": SHARED_INDICES,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_chunk_size": 8,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4": SHARED_INDICES,
    "inkling2_text": {"swa_num_key_value_heads": 2, "rel_extent": 64, "d_rel": 8},
    "inkling_text": {"swa_num_key_value_heads": 2, "rel_extent": 64, "d_rel": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 16, "num_heads": 8, "chunk_size": 8},
    # A picked block of keys for each KV head.
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    | {"index_n_heads": 2},
    "ministral": {"head_dim": 16, "layer_types": WINDOWS},
    "moshi": {"audio_vocab_size": VOCAB},
    "moss_transcribe_diarize": {"text_config": "qwen3", "audio_token_id": 90},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "mamba_head_dim": 16, "chunk_size": 8},
    "phi4_multimodal_audio": {
        "num_blocks": 1,
        "nemo_conv_channels": 64,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
    },
    "phi4_multimodal_vision": {"image_size": 28, "patch_size": 14, "crop_size": 28},
    "qwen2": QWEN_WINDOWS | {"layer_types": WINDOWS},
    "qwen3": QWEN_WINDOWS | {"layer_types": WINDOWS},
    "qwen3_moe": QWEN_WINDOWS,
    # Value and key heads that four ranks cannot share out.
    "qwen3_next": {"linear_num_value_heads": 6, "linear_num_key_heads": 3},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
        "eos_token_id": 7,  # one of a batch: n-grams end there
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "siglip_vision_model": {"image_size": 28, "patch_size": 14},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
}
OVERRIDES = {**OVERRIDES, "qwen4_exp_text": OVERRIDES["qwen4_exp"]}

# Types without a tiny model that takes tokens.
NOT_BUILT: Mapping[str, str] = {
    "gemma3n": "needs the package timm for its vision tower; its text model is `gemma3n_text`",
    "gemma4_assistant": "drafts from the KV of the model that it assists",
    "gemma4_unified_assistant": "drafts from the KV of the model that it assists",
}
if Version("5.23") > VERSION:
    NOT_BUILT = {**NOT_BUILT, "csm": "its class is that of a part, with the whole's configuration"}
if "got_ocr2_vision" not in CONFIG_MAPPING:
    NOT_BUILT = {**NOT_BUILT, "got_ocr2": "its tower has no model type, by which it is shrunk"}
if Version("5.6") > VERSION:
    NOT_BUILT = {**NOT_BUILT, "gemma3": "trains with token_type_ids only"}
# Types whose gradients in fp32, on one process, are more than 1e-5 off those in fp64.
FP64 = frozenset({"gemma4", "gemma4_text", "gemma4_unified_text"})


@functools.cache
def model_types() -> Mapping[str, str]:
    """The class of every model type: a ``*ForCausalLM``, or what Auto classes take for one. By its
    name, as each class is a file to import."""
    types = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    known = {*types.values(), "AutoModelForCausalLM"}
    for name in dir(transformers):
        if name.endswith("ForCausalLM") and name not in known:
            types[getattr(transformers, name).config_class.model_type] = name
    return types


# Types of masked language models that can be made here; others are larger, or have parts.
MASKED = sorted(
    set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    - {"esm", "esmc", "luke", "modernvbert", "ultravbert", "perceiver", "wav2vec2"}
)
model_types()  # by the server of ranks, once: it imports 20 files and takes each rank 0.3 s


def config(model_type: str, masked: bool = False, **changes: Any) -> Any:
    """A tiny configuration; ``changes`` go beyond :data:`OVERRIDES`."""
    cls = model_class(model_type, masked).config_class
    small = shrunk(cls) | changes
    if masked:
        small.pop("is_decoder", None)
    return cls(**small)


def model_class(model_type: str, masked: bool = False) -> type[Any]:
    """The class of a causal language model, or of a masked one where there is none."""
    name = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type, "")
    cls: type[Any] = getattr(transformers, name if masked else model_types().get(model_type, name))
    return cls


def shrunk(cls: type[Any]) -> dict[str, Any]:
    """The arguments that make a configuration class tiny: the sizes it knows by their names, its
    sub-configurations, and the overrides of its type."""
    defaults = read(cls)
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    names = set(fields)
    real = set(getattr(cls, "attribute_map", {}).values()) & names & set(SIZES)
    small = {
        name: value
        for name, value in SIZES.items()
        if name in names and read(defaults, name, fields[name]) is not None
    }
    for alias, name in getattr(cls, "attribute_map", {}).items():
        if name in real and alias not in real:
            small.pop(alias, None)
    for name, part in getattr(cls, "sub_configs", {}).items():
        if hasattr(part, "model_type") and part.model_type:
            small[name] = shrunk(part) | {"model_type": part.model_type}
    small |= OVERRIDES.get(cls.model_type, {})
    for name, part in small.items():
        if name.endswith("_config") and isinstance(part, str):
            small[name] = shrunk(CONFIG_MAPPING[part]) | {"model_type": part}
    if "kv_lora_rank" in small and "num_key_value_heads" in names:
        small["num_key_value_heads"] = 4  # latent attention expands to all heads
    if "layer_types" in names:
        kinds = small.get("layer_types") or read(defaults, "layer_types")
        small |= layers(kinds, read(defaults, "mlp_layer_types"), small) if kinds else {}
    return small


def layers(kinds: list[str], mlp_kinds: list[str] | None, small: dict[str, Any]) -> dict[str, Any]:
    """Every kind of layer, at least two layers."""
    if "layer_types" not in small:
        kinds = list(dict.fromkeys(kinds))
        kinds = kinds * 2 if len(kinds) == 1 else kinds
    chosen: dict[str, Any] = {"layer_types": kinds}
    chosen |= {name: len(kinds) for name in ("num_hidden_layers", "n_layer") if name in small}
    if mlp_kinds:
        each = list(dict.fromkeys(mlp_kinds))
        chosen["mlp_layer_types"] = (each + each[-1:] * len(kinds))[: len(kinds)]
    return chosen


def read(values: Any, name: str = "", otherwise: Any = None) -> Any:
    """An attribute, or what a class makes by default; ``otherwise`` where that is refused: defaults
    may contradict each other, some attributes differ between layers."""
    with contextlib.suppress(Exception):
        return getattr(values, name) if name else values()
    return otherwise


def build(model_type: str, masked: bool = False, **changes: Any) -> Any:
    """A model with weights of a seed, in training mode, with attention computed eagerly."""
    cls = model_class(model_type, masked)
    tiny = config(model_type, masked, **changes)
    torch.manual_seed(0)
    count = 0

    def counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += parameter.numel() if parameter is not None else 0
        if count > MAX_PARAMETERS:  # before they are written, which takes memory
            raise MemoryError(f"{model_type} has more than {MAX_PARAMETERS} parameters")

    handle = register_module_parameter_registration_hook(counted)
    try:
        model = cls._from_config(tiny, attn_implementation="eager")
    finally:
        handle.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    return model.train().to(torch.float64 if model_type in FP64 else torch.float32)
