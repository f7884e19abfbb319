"""Self-attention of megatron-core's layers that projects chunk by chunk of heads, and again in
backward (``--usp-projection-overlap recompute``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError
from megatron_patches.megatron_core.core_attention import USPCoreAttention
from megatron_patches.megatron_core.rotary import RotatingForward, rotary_table
from megatron_patches.projection_checks import has_hooks

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
    "rotary_interleaved",
    "sequence_parallel",
    "test_mode",
    "yarn_rotary_scaling_factor",  # scales cos and sin
)


def project_again(layer: TransformerLayer, *, partitioned: bool = False) -> None:
    """Compute a layer's attention with the products around it by
    :func:`ds_usp.projected_attention`. A call that it does not serve is computed as before, and one
    line in the log names the reason.

    Call it after everything else that changes the layer.

    Args:
        partitioned: the weights will be partitioned by ZeRO-3, which then gathers those of both
            projections for the attention module; before DeepSpeed's engine is made.

    Raises:
        ConfigError: a layer that it does not serve.
    """
    attention = layer.self_attention
    if reason := _reason_of(attention):
        raise _refusal(layer.layer_number, reason)
    if partitioned:
        from deepspeed.runtime.zero import register_external_parameter

        for linear in (attention.linear_qkv, attention.linear_proj):
            for parameter in linear.parameters():
                register_external_parameter(attention, parameter)
    attention.forward = partial(_forward, attention, attention.forward, partitioned)


def _refusal(layer_number: int, reason: str) -> ConfigError:
    return ConfigError(
        f"projections cannot be computed under the exchanges of layer {layer_number}: {reason}. "
        "Leave them to their own layers (--usp-projection-overlap off)"
    )


def _reason_of(attention: Any) -> str | None:
    """Why the layer is not served; None if it is."""
    if type(attention) is not SelfAttention:
        return f"attention is a {type(attention).__name__}, no SelfAttention"
    if reason := _kinds_reason(attention) or _hooks_reason(attention):
        return reason
    config = attention.config
    if config.tensor_model_parallel_size > 1:
        return "weights are sharded by tensor parallelism"
    for norm in (attention.q_layernorm, attention.k_layernorm):
        if norm is not None and not isinstance(norm, IdentityOp):
            return "queries or keys are normalized between their projection and attention"
    for name in _OPTIONS:
        if getattr(config, name, None):
            return f"megatron-core's {name} is set"
    if config.recompute_granularity == "selective":
        return "megatron-core recomputes parts of the layer (recompute_granularity='selective')"
    return None


def _modules(attention: Any) -> Iterator[tuple[Any, type, str]]:
    """The modules that are not called, in the order of their calls: with class and name."""
    yield attention.linear_qkv, ColumnParallelLinear, "a projection"
    yield attention.core_attention, USPCoreAttention, "core attention"
    yield attention.linear_proj, RowParallelLinear, "a projection"


def _kinds_reason(attention: Any) -> str | None:
    """Which module is of another class, as that of an adapter; None if none."""
    for module, kind, name in _modules(attention):
        if type(module) is not kind:
            return f"{name} is a {type(module).__name__}, no {kind.__name__}"
    return None


def _hooks_reason(attention: Any) -> str | None:
    """What the call of a module does besides its class's forward; None if nothing."""
    reasons = (_call_reason(module, name) for module, _, name in _modules(attention))
    return next(filter(None, reasons), None)


def _forward(
    attention: Any,
    original: Any,
    partitioned: bool,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
    packed_seq_params: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``SelfAttention.forward`` of hidden states ``[s_local, b, c]``."""
    if reason := _kinds_reason(attention):  # its weights are no longer all of a projection
        raise _refusal(attention.layer_number, reason)
    positions = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
    run = partial(original, hidden_states, attention_mask, *args, **positions, **options)
    reason = _reason_of_call(attention, attention_mask, rotary_pos_emb, args, options)
    project = attention.linear_qkv.forward
    rotary: tuple[Tensor, Tensor] | None = (
        project.rotary if isinstance(project, RotatingForward) else None
    )
    if reason is None:
        _wait_for_weights(attention, hidden_states)
        if isinstance(rotary_pos_emb, Tensor):
            rotary = rotary_table(attention, rotary_pos_emb, packed_seq_params, hidden_states)
    of_call, padding = attention.core_attention.call_options(packed_seq_params, hidden_states)
    out = ds_usp.projected_attention(
        hidden_states.transpose(0, 1),
        _projection(attention, partitioned),
        rotary=rotary,
        plain=lambda: run()[0].transpose(0, 1),
        why_plain=reason,
        **of_call,
    ).transpose(0, 1)
    if padding is not None:  # where core attention gives zeros, of which the product is zero
        out = out.masked_fill(padding, 0.0)
    return out, attention.linear_proj.bias


def _wait_for_weights(attention: Any, hidden: Tensor) -> None:
    """Run the hooks that wait for a distributed optimizer's gathered weights."""
    for module, _, _ in _modules(attention):
        for hook in module._forward_pre_hooks.values():
            if _is_wait(hook):
                hook(module, (hidden,))


def _is_wait(hook: Callable[..., Any]) -> bool:
    """Whether a hook is that of megatron-core's DistributedDataParallel, which waits for a module's
    weights and changes nothing."""
    maker = DistributedDataParallel._make_forward_pre_hook
    names = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return names == (maker.__module__, f"{maker.__qualname__}.<locals>.hook")


def _call_reason(module: Any, name: str) -> str | None:
    """:func:`_hooks_reason` of one module."""
    if has_hooks(module, _is_wait):
        return f"{name} has hooks, which only its own call runs"
    forward = vars(module).get("forward")
    if isinstance(forward, RotatingForward):  # which projected_attention does itself
        forward = None if forward.project == MethodType(type(module).forward, module) else forward
    if forward is not None:
        return f"the forward of {name} is replaced, as by GEMM-last recomputation"
    return None


def _reason_of_call(
    attention: Any, mask: Any, rotary: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> str | None:
    """Why one call is not served; None if it is. Modules may get hooks after they were built."""
    if reason := _hooks_reason(attention):
        return reason
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
