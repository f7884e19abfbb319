"""Faster code for single functions of Megatron-DeepSpeed and DeepSpeed, with the same results.

It has nothing to do with sequence parallelism, and can be left out: a step of GPT 1.3B on
16K tokens then takes 1.27 times as long (``megatron_deepspeed_speedups.csv``, 2 H200).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.guards import deepspeed_guard, source_guard
from megatron_patches.patch import Patch

# ------------------------------------------------------------------------------------------------
# GELU with its bias. Without nvfuser, which torch 2.6 no longer has, each of the original's ten
# operations is a kernel.


def gelu(original: Callable[..., Tensor], ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
    """``GeLUFunction.forward``: tanh GELU of ``[s, b, f] + [f]``, on GPUs in two kernels."""
    if not x.is_cuda:
        return original(ctx, x, bias)
    ctx.save_for_backward(x, bias)
    return F.gelu(x + bias, approximate="tanh")


def gelu_backward(original: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``GeLUFunction.backward``; autograd sums the bias' gradient over the tokens."""
    if not grad.is_cuda:
        return original(ctx, grad)
    x, bias = ctx.saved_tensors
    grad_input = torch.ops.aten.gelu_backward(grad, x + bias, approximate="tanh")
    return grad_input, grad_input


# ------------------------------------------------------------------------------------------------
# Gradient norms and overflow checks by ``torch._foreach_norm`` instead of loops over parameters.
#
# DeepSpeed's loops launch ten kernels a parameter while the GPU has no other work: a twentieth of
# the step of GPT 1.3B on 16K tokens (2 H200).


def has_overflow(original: Callable[[Any], Tensor], optimizer: Any) -> Tensor:
    """``has_overflow_partitioned_grads_serial`` of ZeRO-1 and 2: whether any gradient of this rank
    is not finite. DeepSpeed asks at most once a step, and reduces the answer over ranks.

    Shapes:
        result: ``[1]``, bool.
    """
    groups = (optimizer.averaged_gradients[i] for i in range(len(optimizer.bit16_groups)))
    gradients = [grad for group in groups for grad in group if grad is not None]
    if not _is_foreach_compatible(gradients):
        return original(optimizer)
    # The maximum norm is finite if all elements are; NaN propagates through it.
    max_abs = torch.stack(torch._foreach_norm(gradients, math.inf))
    return max_abs.isfinite().all().logical_not().unsqueeze(0)


def gradient_norm(
    original: Callable[..., Tensor],
    optimizer: Any,
    gradients: Iterable[Tensor],
    params: Iterable[Any],
    norm_type: float = 2,
) -> Tensor:
    """``get_grad_norm_direct`` of ZeRO-1 and 2 on one norm for each kind of parameter, instead of
    on their gradients: the norm of the norms is the norm of all."""
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.runtime.zero.utils import get_norm_dtype

    all_gradients, params = list(gradients), list(params)
    counted = [grad for grad in all_gradients if not getattr(grad, "_zero_padding", False)]
    if float(norm_type) == math.inf or not _is_foreach_compatible(counted):
        return original(optimizer, all_gradients, params, norm_type)
    # By what decides for DeepSpeed whether a parameter counts on this rank.
    by_kind: dict[tuple[bool, bool], list[tuple[Tensor, Any]]] = defaultdict(list)
    for grad, param in zip(counted, params, strict=False):  # as DeepSpeed pairs them
        replicated = bool(getattr(param, "ds_pipe_replicated", False))
        by_kind[replicated, is_model_parallel_parameter(param)].append((grad, param))
    kinds = [list(zip(*pairs, strict=True)) for pairs in by_kind.values()]
    norms = [_norm(kind, norm_type, get_norm_dtype()) for kind, _ in kinds]
    return original(optimizer, norms, [owners[0] for _, owners in kinds], norm_type)


def _norm(gradients: tuple[Tensor, ...], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm of all tensors as one vector, accumulated in ``dtype``."""
    norms = torch.stack(torch._foreach_norm(gradients, norm_type, dtype=dtype))
    return torch.linalg.vector_norm(norms, norm_type)


def _is_foreach_compatible(gradients: list[Tensor]) -> bool:
    """Whether ``torch._foreach_norm`` takes them: dense, of one dtype and device, none empty."""
    kinds = {(grad.device, grad.dtype, grad.layout) for grad in gradients}
    return len(kinds) == 1 and not gradients[0].is_sparse and all(x.numel() for x in gradients)


# ------------------------------------------------------------------------------------------------
# ``torch.tensor`` of a number without a synchronization of CPU and GPU.
#
# ``torch.tensor(0.0, device="cuda")`` copies 4 bytes and waits for all launched kernels. Twice a
# layer, that leaves the GPU idle for an eighth of the time of GPT 1.3B on 16K tokens (2 H200).


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """``torch.tensor``; a number reaches a GPU as the argument of a fill kernel, without a copy."""
    if (
        isinstance(data, (int, float))
        and device is not None
        and torch.device(device).type == "cuda"
    ):
        return torch.full((), data, device=device, **options)
    return torch.tensor(data, device=device, **options)


def lazy_sync_torch() -> ModuleType:
    """``torch`` for one importer, with a ``tensor`` that does not synchronize CPU and GPU."""
    module = ModuleType("torch")
    # Other attributes are looked up in torch at each use: profilers and ZeRO replace some later.
    vars(module).update(tensor=_tensor, __getattr__=partial(getattr, torch))
    return module


_LAYER = "megatron.model.transformer"
_GELU = "megatron.model.fused_bias_gelu:GeLUFunction"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


wrap = partial(Patch, kind="wrap", purpose="For speed alone")


def patches() -> tuple[Patch, ...]:
    """The patches, in the order of application."""
    return (
        wrap(
            f"{_GELU}.forward",
            gelu,
            guard=source_guard("fcc4122cb6e1d6c8"),
            reason="ten kernels without nvfuser; two of torch",
        ),
        wrap(
            f"{_GELU}.backward",
            gelu_backward,
            guard=source_guard("9939aa1d3de8e0a9"),
            reason="as above, for the gradient",
        ),
        Patch(
            f"{_LAYER}:torch",
            lazy_sync_torch(),
            purpose="For speed alone",
            reason="`torch.tensor(0.0, device=...)`, twice a layer, synchronizes CPU and GPU",
        ),
        wrap(
            f"{_ZERO}.has_overflow_partitioned_grads_serial",
            has_overflow,
            guard=deepspeed_guard("caa55adce779d393"),
            reason="ten kernels a parameter while the GPU is idle; one `_foreach_norm`",
        ),
        wrap(
            f"{_ZERO}.get_grad_norm_direct",
            gradient_norm,
            guard=deepspeed_guard("7e1e996197792bc2"),
            reason="as above, for the norm, which it computes from a copy in fp64",
        ),
    )
