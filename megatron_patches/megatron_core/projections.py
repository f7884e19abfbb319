"""Self-attention of megatron-core's layers with its projections under the exchanges."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Literal

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError
from megatron_patches.megatron_core.core_attention import USPCoreAttention
from megatron_patches.megatron_core.rotary import RotatingForward

Keep = Literal["arrivals", "input"]

# Options of a configuration with which a layer computes something else around attention.
_OPTIONS = (
    "attention_output_gate",
    "batch_invariant_mode",
    "fine_grained_activation_offloading",
    "fp8",
    "fp4",
    "gradient_accumulation_fusion",
    "no_rope_freq",
    "qk_clip",
    "recompute_granularity",
    "rotary_interleaved",
    "sequence_parallel",
    "test_mode",
    "yarn_rotary_scaling_factor",  # scales cos and sin
)


def overlap_projections(
    layer: TransformerLayer, keep: Keep = "arrivals", *, partitioned: bool = False
) -> None:
    """Compute the products around a layer's attention under its exchanges, by
    :func:`ds_usp.projected_attention`. A call that it does not serve is computed as before, and one
    line in the log names the reason.

    Call it after everything else that changes the layer.

    Args:
        keep: what is kept for backward.
        partitioned: the weights will be partitioned by ZeRO-3, which then gathers those of both
            projections for the attention module; before DeepSpeed's engine is made.

    Raises:
        ConfigError: a layer that it does not serve.
    """
    attention = layer.self_attention
    if reason := _reason_of(attention):
        raise ConfigError(
            f"projections cannot be computed under the exchanges of layer {layer.layer_number}: "
            f"{reason}. Leave them to their own layers"
        )
    if partitioned:
        from deepspeed.runtime.zero import register_external_parameter

        for linear in (attention.linear_qkv, attention.linear_proj):
            for parameter in linear.parameters():
                register_external_parameter(attention, parameter)
    attention.forward = partial(_forward, attention, attention.forward, keep, partitioned)


def _reason_of(attention: Any) -> str | None:
    """Why the layer is not served; None if it is."""
    if type(attention) is not SelfAttention:
        return f"attention is a {type(attention).__name__}, no SelfAttention"
    if type(attention.core_attention) is not USPCoreAttention:
        return f"core attention is a {type(attention.core_attention).__name__}"
    config, qkv, proj = attention.config, attention.linear_qkv, attention.linear_proj
    if config.tensor_model_parallel_size > 1:
        return "weights are sharded by tensor parallelism"
    for linear, kind in ((qkv, ColumnParallelLinear), (proj, RowParallelLinear)):
        if type(linear) is not kind:
            return f"a projection is a {type(linear).__name__}, no {kind.__name__}"
        if reason := _call_reason(linear):
            return reason
    for norm in (attention.q_layernorm, attention.k_layernorm):
        if norm is not None and not isinstance(norm, IdentityOp):
            return "queries or keys are normalized between their projection and attention"
    for name in _OPTIONS:
        if getattr(config, name, None):
            return f"megatron-core's {name} is set"
    return None


def _forward(
    attention: Any,
    original: Any,
    keep: Keep,
    partitioned: bool,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``SelfAttention.forward`` of hidden states ``[s_local, b, c]``."""

    def plain() -> Tensor:
        out: Tensor = original(
            hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **options
        )[0]
        return out.transpose(0, 1)

    project = attention.linear_qkv.forward
    rotary: tuple[Tensor, Tensor] | None = (
        project.rotary if isinstance(project, RotatingForward) else None
    )
    if isinstance(rotary_pos_emb, Tensor):  # in the dtype in which megatron-core rotates
        angles = rotary_pos_emb.flatten(1)
        rotary = angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)
    out = ds_usp.projected_attention(
        hidden_states.transpose(0, 1),
        _projection(attention, partitioned),
        rotary=rotary,
        keep=keep,
        plain=plain,
        why_plain=_reason_of_call(attention, attention_mask, rotary_pos_emb, args, options),
        **attention.core_attention.call_options(),
    )
    return out.transpose(0, 1), attention.linear_proj.bias


def _call_reason(linear: Any) -> str | None:
    """What a call of this layer does besides its class's forward; None if nothing."""
    hooks = linear._forward_hooks, linear._forward_pre_hooks
    if any(hooks) or linear._backward_hooks or linear._backward_pre_hooks:
        return "a projection has hooks, which only its own call runs"
    forward = vars(linear).get("forward")
    if isinstance(forward, RotatingForward):  # which projected_attention does itself
        forward = None if forward.project == MethodType(type(linear).forward, linear) else forward
    if forward is not None:
        return "a projection's forward is replaced, as by GEMM-last recomputation"
    return None


def _reason_of_call(
    attention: Any, mask: Any, rotary: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> str | None:
    """Why one call is not served; None if it is. Hooks come later too, as those of megatron-core's
    DistributedDataParallel, which wait for a layer's gathered weights."""
    for linear in (attention.linear_qkv, attention.linear_proj):
        is_partitioned = hasattr(linear.weight, "ds_id")  # ds_usp says so, instead of its hooks
        if not is_partitioned and (reason := _call_reason(linear)):
            return reason
    if options.get("packed_seq_params") is not None:
        return "documents are packed (packed_seq_params)"
    given = [name for name, value in options.items() if value is not None]
    if mask is not None or given or any(value is not None for value in args):
        return f"the call has more arguments: {', '.join(given) or 'an attention mask'}"
    if rotary is not None and not (isinstance(rotary, Tensor) and rotary.shape[1:3] == (1, 1)):
        return "rotary_pos_emb is no [s, 1, 1, r]"
    if attention.training and attention.config.attention_dropout:
        return "attention has dropout"
    return None


def _projection(attention: Any, partitioned: bool) -> ds_usp.Projection:
    """The layer's weights; the output's bias is added by its caller."""
    return ds_usp.Projection(
        attention.linear_qkv.weight,
        attention.linear_proj.weight,
        attention.num_attention_heads_per_partition,
        attention.num_query_groups_per_partition,
        attention.linear_qkv.bias,
        None,
        "grouped",
        gathered=partitioned,
    )
