"""``--usp-projection-overlap recompute``: a layer's attention projects chunk by chunk of heads, and
again in backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError
from megatron_patches.projection_checks import has_hooks


def prepare_layer(layer: Any, *, partitioned: bool) -> None:
    """Check a ``ParallelAttention`` that projects by itself.

    Args:
        partitioned: by ZeRO-3: the layer, not its linear layers, has their weights gathered.

    Raises:
        ConfigError: linear layers that compute something else than a product and a bias.
    """
    from deepspeed.runtime.zero import register_external_parameter

    _check_linear_layers(layer)
    if partitioned:
        for linear in (layer.query_key_value, layer.dense):
            for parameter in linear.parameters():
                register_external_parameter(layer, parameter)


def attend(layer: Any, hidden: Tensor, *, partitioned: bool) -> tuple[Tensor, Tensor | None]:
    """``ParallelAttention.forward`` by :func:`ds_usp.projected_attention`.

    Shapes:
        hidden and the first result ``[s_local, b, c]``; the second, which the caller adds, is the
        bias ``[c]`` of the output.

    Raises:
        ConfigError: a linear layer was replaced after the model was built.
    """
    attention = layer.sequence_parallel_attention
    _check_linear_layers(layer)

    def plain() -> Tensor:
        out: Tensor = layer.dense(attention(layer.query_key_value(hidden)[0]))[0]
        return out.transpose(0, 1)

    qkv, dense = layer.query_key_value, layer.dense
    out = ds_usp.projected_attention(
        hidden.transpose(0, 1),
        ds_usp.Projection(
            qkv.weight,
            dense.weight,
            attention.heads,
            attention.kv_heads,
            qkv.bias,
            None,
            gathered=partitioned,
        ),
        rotary=attention.rotary(hidden.device),
        plain=plain,
        why_plain=_reason_of_hooks(layer),
        **attention.call_options(),
    )
    # Linear layers behind it view what norms and sums make of it as [s * b, c].
    return out.transpose(0, 1).contiguous(), dense.bias


def _check_linear_layers(layer: Any) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for name, kind in (("query_key_value", ColumnParallelLinear), ("dense", RowParallelLinear)):
        linear = getattr(layer, name)
        if type(linear) is not kind or "forward" in vars(linear):
            raise ConfigError(
                f"--usp-projection-overlap multiplies the weights of {kind.__name__}: {name} of "
                f"layer {layer.layer_number} is a {type(linear).__name__}"
                f"{' with another forward' * ('forward' in vars(linear))}. Use "
                "--usp-projection-overlap off"
            )


def _reason_of_hooks(layer: Any) -> str | None:
    """Why a call is not served; None if it is."""
    modules = layer.query_key_value, layer.sequence_parallel_attention, layer.dense
    if any(map(has_hooks, modules)):
        return "a projection or attention has hooks, which only its own call runs"
    return None
