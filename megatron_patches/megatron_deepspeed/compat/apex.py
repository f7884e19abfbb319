"""The functions of apex that Megatron-DeepSpeed uses on GPUs, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class MixedFusedRMSNorm(torch.nn.RMSNorm):
    """``apex.normalization.MixedFusedRMSNorm`` with Megatron-DeepSpeed's extra keyword."""

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, sequence_parallel: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class FusedLayerNormAffineFunction:
    """The interface of apex's autograd function; torch differentiates it."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, shape: Sequence[int], eps: float
    ) -> Tensor:
        """``torch.nn.functional.layer_norm``."""
        return F.layer_norm(x, list(shape), weight, bias, eps)

    apply = forward


def fused_adam(params: Iterable[Any], **kwargs: Any) -> torch.optim.Optimizer:
    """``apex.optimizers.FusedAdam``, with AdamW's weight decay."""
    return torch.optim.AdamW(params, fused=True, **kwargs)


def fused_sgd(params: Iterable[Any], **kwargs: Any) -> torch.optim.Optimizer:
    """``apex.optimizers.FusedSGD``."""
    return torch.optim.SGD(params, fused=True, **kwargs)


def multi_tensor_applier(
    op: Callable[..., Any], overflow: Tensor, tensors: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """``apex.multi_tensor_apply.multi_tensor_applier``."""
    return op(overflow, tensors, *args)


def multi_tensor_l2norm(
    overflow: Tensor, tensors: Sequence[Sequence[Tensor]], per_parameter: bool
) -> tuple[Tensor, Tensor]:
    """``amp_C.multi_tensor_l2norm``: the norm of all tensors together, and of each one."""
    norms = torch.stack(torch._foreach_norm([x.float() for x in tensors[0]]))
    return norms.norm(), norms


def multi_tensor_scale(overflow: Tensor, tensors: Sequence[Sequence[Tensor]], scale: float) -> None:
    """``amp_C.multi_tensor_scale``: the second list becomes the first times ``scale``."""
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)


def modules() -> dict[str, ModuleType]:
    """Replacements of apex's modules by name, ready for ``sys.modules``."""
    contents: dict[str, dict[str, Any]] = {
        "apex": {"__path__": []},
        "apex.normalization": {"__path__": [], "MixedFusedRMSNorm": MixedFusedRMSNorm},
        "apex.normalization.fused_layer_norm": {
            "FusedLayerNormAffineFunction": FusedLayerNormAffineFunction
        },
        "apex.optimizers": {"FusedAdam": fused_adam, "FusedSGD": fused_sgd},
        "apex.multi_tensor_apply": {"multi_tensor_applier": multi_tensor_applier},
        "amp_C": {
            "multi_tensor_l2norm": multi_tensor_l2norm,
            "multi_tensor_scale": multi_tensor_scale,
        },
        "fused_layer_norm_cuda": {},
    }
    stubs = {}
    for name, names in contents.items():
        stubs[name] = ModuleType(name, "Stub of ds_usp.")
        stubs[name].__spec__ = ModuleSpec(name, None)  # find_spec() of other libraries
        vars(stubs[name]).update(names)
    return stubs
