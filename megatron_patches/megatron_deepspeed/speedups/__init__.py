"""Faster code for single functions of Megatron-DeepSpeed and DeepSpeed, with the same results.

It has nothing to do with sequence parallelism, and can be left out.
"""

from __future__ import annotations

from functools import partial

from megatron_patches.guards import deepspeed_guard, source_guard
from megatron_patches.megatron_deepspeed.speedups import fused_bias, gradient_norms
from megatron_patches.megatron_deepspeed.speedups.lazy_sync import lazy_sync_torch
from megatron_patches.patch import Patch

_LAYER = "megatron.model.transformer"
_GELU = "megatron.model.fused_bias_gelu:GeLUFunction"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


wrap = partial(Patch, kind="wrap", purpose="For speed alone")


def patches() -> tuple[Patch, ...]:
    """The patches, in the order of application."""
    return (
        wrap(
            f"{_GELU}.forward",
            fused_bias.gelu,
            guard=source_guard("fcc4122cb6e1d6c8"),
            reason="ten kernels without nvfuser; one in Triton, or two of torch",
        ),
        wrap(
            f"{_GELU}.backward",
            fused_bias.gelu_backward,
            guard=source_guard("9939aa1d3de8e0a9"),
            reason="as above, for the gradient",
        ),
        wrap(
            "megatron.core.tensor_parallel.layers:"
            "LinearWithGradAccumulationAndAsyncCommunication.forward",
            fused_bias.linear,
            guard=source_guard("a9ddaf5ae9419175"),
            reason="adds the bias in a second pass over the output; fused into the GEMM",
        ),
        wrap(
            f"{_LAYER}:bias_dropout_add",
            fused_bias.add_bias,
            guard=source_guard("5de07f0330b1146f"),
            reason="adds bias and residual in two passes; one in Triton where dropout is 0",
        ),
        Patch(
            f"{_LAYER}:torch",
            lazy_sync_torch(),
            purpose="For speed alone",
            reason="`torch.tensor(0.0, device=...)`, twice a layer, synchronizes CPU and GPU",
        ),
        wrap(
            f"{_ZERO}.has_overflow_partitioned_grads_serial",
            gradient_norms.has_overflow,
            guard=deepspeed_guard("caa55adce779d393"),
            reason="ten kernels a parameter while the GPU is idle; one `_foreach_norm`",
        ),
        wrap(
            f"{_ZERO}.get_grad_norm_direct",
            gradient_norms.gradient_norm,
            guard=deepspeed_guard("7e1e996197792bc2"),
            reason="as above, for the norm, which it computes from a copy in fp64",
        ),
    )
