"""megatron-core where neither Apex nor TransformerEngine is installed, with a GPU or without.

torch's norms and torch's Adam take their place there. ``original`` is what a function replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_patches.guards import megatron_core_guard
from megatron_patches.patch import Patch, wrap

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_EXPERTS = "megatron.core.transformer.moe"


def patches() -> tuple[Patch, ...]:
    """The patches, listed in ``cpu_patch_table.py``, each for ranks without packages it names."""
    return (
        wrap(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            torch_norm,
            guard=megatron_core_guard("5389554fe034f8f0"),
            reason="without Apex: refuses --sequence-parallel, for which its weights have to be "
            "marked",
        ),
        wrap(
            f"{_OPTIMIZER}:DistributedOptimizer.state_dict",
            state_dict,
            guard=megatron_core_guard("3de79d8ad2047f75"),
            reason="without Apex and TransformerEngine: asserts that there is a state when a "
            "checkpoint is loaded",
        ),
        wrap(
            f"{_OPTIMIZER}:DistributedOptimizer.load_state_dict",
            load_state_dict,
            guard=megatron_core_guard("9c7a888a8360285f"),
            reason="without Apex and TransformerEngine: all weights share one counter of steps, "
            "which each of them increments",
        ),
        wrap(
            f"{_OPTIMIZER}:DistributedOptimizer._set_main_param_and_optimizer_states",
            set_states,
            guard=megatron_core_guard("685fc6341a39624e"),
            reason="without Apex and TransformerEngine: copies over fp32 weights under autograd, "
            "and looks for the counter of steps among the loaded tensors",
        ),
        wrap(
            f"{_EXPERTS}.moe_utils:router_gating_linear",
            router_gating_linear,
            also_in=(f"{_EXPERTS}.router:router_gating_linear",),
            guard=megatron_core_guard("6a60e4b06998df4f"),
            reason="without TransformerEngine: experts' routers read the name of its product, "
            "which is not there",
        ),
    )


def torch_norm(original: Callable[..., Any], cls: type, config: Any, *args: Any, **kw: Any) -> Any:
    """``WrappedTorchNorm`` under ``--sequence-parallel``.

    Its weights see a shard of the tokens on every tensor-parallel rank. Megatron sums the gradients
    of weights with the attribute ``sequence_parallel``, which Apex's norms set.
    """
    if not config.sequence_parallel:
        return original(cls, config, *args, **kw)
    unsharded = copy(config)
    unsharded.sequence_parallel = False
    norm = original(cls, unsharded, *args, **kw)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def router_gating_linear(
    original: Callable[..., Tensor],
    inp: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router_dtype: torch.dtype,
) -> Tensor:
    """``router_gating_linear``: torch's product in ``router_dtype``, where the module has no
    ``te_general_gemm``: it tests the name, but the import that failed has left it undefined.

    Shapes:
        inp ``[..., hidden]``, weight ``[experts, hidden]``, the result ``[..., experts]``.
    """
    if "te_general_gemm" in original.__globals__:
        return original(inp, weight, bias, router_dtype)
    bias = None if bias is None else bias.to(router_dtype)
    return functional.linear(inp.to(router_dtype), weight.to(router_dtype), bias)


def state_dict(original: Callable[[Any], Any], optimizer: Any) -> Any:
    """``DistributedOptimizer.state_dict``, also before the first step: the state is then that with
    which torch's Adam begins."""
    if _uses_torch() and optimizer.optimizer is not None and not optimizer.optimizer.state:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(0.0)
    return original(optimizer)


def load_state_dict(original: Callable[[Any, Any], None], optimizer: Any, loaded: Any) -> None:
    """``DistributedOptimizer.load_state_dict`` with a counter of steps for each weight."""
    original(optimizer, loaded)
    if _uses_torch():
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()


@torch.no_grad()
def set_states(
    original: Callable[..., None], optimizer: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    """``_set_main_param_and_optimizer_states``: ``tensors`` are a checkpoint's of one weight, by
    name; its counter of steps was loaded before, by :func:`load_state_dict`."""
    if _uses_torch():
        group, order = optimizer.model_param_group_index_map[model_param]
        main_param = optimizer.optimizer.param_groups[group]["params"][order]
        tensors = {**tensors, "step": optimizer.optimizer.state[main_param]["step"]}
    original(optimizer, model_param, tensors)


def _uses_torch() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE
