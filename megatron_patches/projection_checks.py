"""``--usp-projection-overlap``: attention projects queries, keys and values chunk by chunk of
heads, and again in backward, in every program.

A program gives rows of what its own layers cannot serve, and builds its layers by
:func:`projects_again`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_patches.refusals import Refusal, refuse

OFF, RECOMPUTE = "off", "recompute"
FLAG = "--usp-projection-overlap {usp_projection_overlap}"
OR_OFF = f"or --usp-projection-overlap {OFF}"
# What no program's layers serve.
_ROWS = (
    Refusal(
        lambda args: args.tensor_model_parallel_size > 1,
        f"{FLAG} needs whole weights, and --tensor-model-parallel-size is "
        "{tensor_model_parallel_size}",
        f"Use --tensor-model-parallel-size 1, {OR_OFF}",
    ),
    Refusal(
        lambda args: args.usp_recompute == "gemm-last",
        f"{FLAG} and --usp-recompute gemm-last both replace the projections",
        f"Use --usp-recompute full, {OR_OFF}",
    ),
)


def check_projections(args: Any, rows: Iterable[Refusal] = ()) -> None:
    """Refuse ``recompute`` where no layer can be served.

    Args:
        rows: what the program's own layers cannot serve.

    Raises:
        ConfigError: with the reason and the fix.
    """
    if args.usp_projection_overlap == RECOMPUTE:
        refuse((*_ROWS, *rows), args)


def projects_again(args: Any, sp_degree: int) -> bool:
    """Whether a layer's attention projects by itself: on one rank there is nothing to exchange."""
    return bool(args.usp_projection_overlap == RECOMPUTE and sp_degree > 1)


def has_hooks(module: Any, allowed: Callable[[Any], bool] | None = None) -> bool:
    """Whether a module has hooks that would not run where its weights are used without its call.

    Those of DeepSpeed's ZeRO-3, which gather and partition the weights, do not count: the module
    that uses the weights has them gathered, or :func:`ds_usp.projected_attention` leaves them be.

    Args:
        allowed: of further hooks that do not count.
    """
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    hooks = (hook for kind in kinds for hook in getattr(module, kind).values())
    return any(not (_is_of_zero3(hook) or (allowed and allowed(hook))) for hook in hooks)


def _is_of_zero3(hook: Any) -> bool:
    """DeepSpeed defines them there; some are wrapped for profiles, by a function of utils.nvtx."""
    name = getattr(hook, "__module__", None) or ""
    return name.startswith("deepspeed.runtime.zero.") or name == "deepspeed.utils.nvtx"
