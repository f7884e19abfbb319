"""``--usp-projection-overlap``: products around attention under its exchanges."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Literal

from ds_usp import ConfigError
from usp_trainer import transformer_impl

if TYPE_CHECKING:
    from ds_usp import SequenceMesh

AUTO, ON, OFF, RECOMPUTE = "auto", "on", "off", "recompute"
CHOICES = (AUTO, ON, OFF, RECOMPUTE)


def check(args: Namespace) -> None:
    """Refuse ``on`` and ``recompute`` where no layer can be served.

    Raises:
        ConfigError: with the reason and the fix.
    """
    wanted = args.usp_projection_overlap
    if wanted in (ON, RECOMPUTE) and (reason := obstacle(args)):
        raise ConfigError(
            f"--usp-projection-overlap {wanted} {reason}, or --usp-projection-overlap {OFF}"
        )


def keep_of(args: Namespace, mesh: SequenceMesh) -> Literal["arrivals", "input"] | None:
    """What a layer's attention keeps for backward; None: its projections are not overlapped.

    Where the planner had no forecast, ``auto`` overlaps them where exchanges cross nodes.
    """
    wanted = args.usp_projection_overlap
    if wanted == AUTO:
        wanted = ON if mesh.crosses_nodes and not obstacle(args) else OFF
    if wanted == OFF or mesh.sp_degree == 1:
        return None
    return "input" if wanted == RECOMPUTE else "arrivals"


def obstacle(args: Namespace) -> str:
    """Why no layer can be served, and the fix; "" if they can."""
    if args.tensor_model_parallel_size > 1:
        return "needs whole weights: use --tensor-model-parallel-size 1"
    if args.usp_recompute == "gemm-last":
        return "and GEMM-last recomputation both replace the projections: use --usp-recompute full"
    if transformer_impl.chosen(args) != transformer_impl.LOCAL:
        return (
            "multiplies weights of megatron-core's own linear layers: use --transformer-impl "
            f"{transformer_impl.LOCAL}"
        )
    return ""
