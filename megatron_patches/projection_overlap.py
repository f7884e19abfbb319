"""``--usp-projection-overlap``: products around attention under its exchanges, in every program.

A program adds the flag, gives rows of what its own layers cannot serve, and builds its layers by
:func:`keep_of`.
"""

from __future__ import annotations

from argparse import ArgumentParser, _ArgumentGroup
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from megatron_patches.refusals import Refusal, refuse

if TYPE_CHECKING:
    from ds_usp import SequenceMesh
    from ds_usp.planner import ProjectionChoice

Keep = Literal["arrivals", "input"]  # as of ds_usp.projected_attention
AUTO, ON, OFF, RECOMPUTE = "auto", "on", "off", "recompute"
CHOICES = (AUTO, ON, OFF, RECOMPUTE)
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


def add_projection_flag(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add ``--usp-projection-overlap`` to a program's parser."""
    parser.add_argument(
        "--usp-projection-overlap",
        choices=CHOICES,
        default=AUTO,
        help="compute the products before and after attention under its exchanges; recompute: also "
        "compute and exchange queries, keys and values again in backward, one chunk of heads at a "
        "time; auto: on where the planner forecasts a layer more than 1%% shorter, or, without a "
        "forecast, where exchanges cross nodes, and the layers can be served",
    )


def check_projections(args: Any, rows: Iterable[Refusal] = ()) -> None:
    """Refuse ``on`` and ``recompute`` where no layer can be served.

    Args:
        rows: what the program's own layers cannot serve.

    Raises:
        ConfigError: with the reason and the fix.
    """
    if args.usp_projection_overlap in (ON, RECOMPUTE):
        refuse((*_ROWS, *rows), args)


def resolve_projections(
    args: Any, choose: Callable[[], ProjectionChoice | None], rows: Iterable[Refusal] = ()
) -> tuple[str, ...]:
    """Replace ``auto`` by on or off where it can be decided before the mesh exists.

    Args:
        args: validated, of several ranks a sequence.
        choose: asks the planner, which may have no forecast for these devices.
        rows: as of :func:`check_projections`.

    Returns:
        The planner's reason, in one line; none where it was not asked or has no forecast.
    """
    if args.usp_projection_overlap != AUTO:
        return ()
    if not _is_served(args, rows):
        args.usp_projection_overlap = OFF
        return ()
    choice = choose()
    if choice is None:  # by the mesh's nodes, when it is there
        return ()
    args.usp_projection_overlap = ON if choice.overlap else OFF
    return (f"planner: {choice.why}",)


def keep_of(args: Any, mesh: SequenceMesh, rows: Iterable[Refusal] = ()) -> Keep | None:
    """What a layer's attention keeps for backward; None: its projections are not overlapped.

    Where the planner had no forecast, ``auto`` overlaps them where exchanges cross nodes.
    """
    wanted = args.usp_projection_overlap
    if wanted == AUTO:
        wanted = ON if mesh.crosses_nodes and _is_served(args, rows) else OFF
    if wanted == OFF or mesh.sp_degree == 1:
        return None
    return "input" if wanted == RECOMPUTE else "arrivals"


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


def _is_served(args: Any, rows: Iterable[Refusal]) -> bool:
    return not any(row.applies(args) for row in (*_ROWS, *rows))
