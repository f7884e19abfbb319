"""What a megatron-core configuration asks of one layer's core attention: served, or refused."""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

import ds_usp
from ds_usp.errors import UnsupportedAttentionError

_DETERMINISTIC_ERROR = 2  # torch's mode that refuses nondeterministic kernels; 1 warns of them


def layer_mask(
    attn_mask_type: AttnMaskType, config: TransformerConfig, layer_number: int
) -> ds_usp.MaskSpec:
    """The mask rule of a layer: causal or full, with its window."""
    right_of = {AttnMaskType.causal: 0, AttnMaskType.no_mask: None}
    if attn_mask_type not in right_of:
        raise UnsupportedAttentionError(
            f"mask type {attn_mask_type} has no rule over global positions; USP attention serves "
            "AttnMaskType.causal and AttnMaskType.no_mask, with or without a window"
        )
    left, right = None, right_of[attn_mask_type]
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        left, lookahead = (None if bound < 0 else bound for bound in config.window_size)
        if right == 0 and lookahead:
            raise UnsupportedAttentionError(
                f"layer {layer_number}: window_size={config.window_size} looks {lookahead} tokens "
                f"beyond a causal mask. Use window_size=({config.window_size[0]}, 0)"
            )
        right = lookahead if right is None else right
    return ds_usp.MaskSpec.window(left, right)


def refuse_inexact_options(
    config: TransformerConfig,
    layer_number: int,
    attention_type: str,
    attention_dropout: float,
    num_splits: int | None,
) -> None:
    """Refuse what attention over ranks could not compute exactly as it is asked for.

    Raises:
        UnsupportedAttentionError: such an option of the configuration or of the layer.
    """
    refused = {
        f"attention_type={attention_type!r}": (
            attention_type != "self",
            "the keys of another sequence need a layout of their own; call ds_usp.usp_attention "
            "with kv_layout=",
        ),
        f"attention_dropout={attention_dropout}": (
            attention_dropout > 0.0,
            "ranks would drop different entries in forward and backward; set attention_dropout=0",
        ),
        f"softmax_type={config.softmax_type!r}": (
            config.softmax_type not in ("vanilla", "off-by-one", "learnable"),
            "use vanilla, off-by-one or learnable",
        ),
        "log_max_attention_logit / qk_clip": (
            config.log_max_attention_logit or config.qk_clip,
            "flash kernels do not return the largest logit; switch both off",
        ),
        "fp8_dot_product_attention / fp8_multi_head_attention": (
            config.fp8_dot_product_attention or config.fp8_multi_head_attention,
            "scores are computed in the dtype of q, k and v; switch both off (linear layers may "
            "stay in FP8)",
        ),
        "deterministic_mode": (
            config.deterministic_mode
            and torch.get_deterministic_debug_mode() != _DETERMINISTIC_ERROR,
            "kernels with a deterministic backward are used under "
            "torch.use_deterministic_algorithms(True) only; call it before the model is built",
        ),
        f"batch_invariant_mode / num_splits={num_splits}": (
            config.batch_invariant_mode or num_splits is not None,
            "the order of sums is the kernel's and depends on the degrees; leave both out",
        ),
    }
    for option, (is_set, fix) in refused.items():
        if is_set:
            raise UnsupportedAttentionError(f"layer {layer_number}: {option}: {fix}")
