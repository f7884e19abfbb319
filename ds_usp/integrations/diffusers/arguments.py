"""The arguments of a forward pass: what they are called, what is refused, what ranks compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.diffusers.plan import Plan, parameters_of

ATTENTION_KWARGS = frozenset(
    {"attention_kwargs", "joint_attention_kwargs", "cross_attention_kwargs"}
)
_LORA_SCALE = "scale"
_ADVICE: Mapping[str, str] = {
    "controlnet": "residuals of a ControlNet belong to tokens by their index; leave it out",
    "ip_adapter": "IP-Adapters are not served; unload them",
    "kv_cache": "a cache of keys belongs to whole tokens; leave it out",
    "num_ref_tokens": "reference tokens are known by their index; leave the cache of them out",
}


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a module's forward pass by their names."""
    return {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}


def check_arguments(transformer: nn.Module, plan: Plan, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the plan does not know.

    Raises:
        UnsupportedAttentionError: which ones.
    """
    known = plan.arguments | {"return_dict"}
    for name, value in arguments.items():
        if name in ATTENTION_KWARGS:
            for key, inner in (value or {}).items():
                if key == _LORA_SCALE:
                    _check_lora_scale(transformer, inner)
                elif _is_given(inner):
                    raise _refusal(transformer, key, f" in {name}")
        elif name not in known and _is_given(value):
            raise _refusal(transformer, name)


def _check_lora_scale(transformer: nn.Module, scale: Any) -> None:
    """Refuse LoRA's scale where blocks are computed again without it: diffusers sets the layers
    back when the forward pass ends (``apply_lora_scale``), before the backward pass.

    Raises:
        UnsupportedAttentionError: adapters with a scale, and gradient checkpointing.
    """
    again = torch.is_grad_enabled() and getattr(transformer, "is_gradient_checkpointing", False)
    if not again or scale in (None, 1):
        return
    if any(map(is_adapter, transformer.modules())):
        raise UnsupportedAttentionError(
            f"{type(transformer).__name__}: LoRA's scale {scale} with gradient checkpointing: "
            "diffusers resets the scale before backward computes the blocks again, and gradients "
            "would be wrong. Put the scale into lora_alpha, or disable_gradient_checkpointing()"
        )


def is_adapter(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT."""
    return hasattr(module, "unscale_layer")


def _is_given(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _refusal(transformer: nn.Module, name: str, where: str = "") -> UnsupportedAttentionError:
    advice = "its plan does not know whether that has tokens; leave it out"
    if not where and name not in parameters_of(transformer):
        advice = f"diffusers {diffusers.__version__} knows no such argument; leave it out"
    for part, text in _ADVICE.items():
        if part in name:
            advice = text
    return UnsupportedAttentionError(f"{type(transformer).__name__}: {name}{where}: {advice}")
