"""``--usp-projection-overlap`` on Megatron-LM's local layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ds_usp.errors import ConfigError, PatchError
from ds_usp.planner import ProjectionChoice
from megatron_patches.megatron_lm.planned import planned_run
from megatron_patches.megatron_lm.relied_on import PROJECTIONS_FLAG
from megatron_patches.megatron_lm.state import verify_flag
from megatron_patches.megatron_lm.unsupported import is_planned
from megatron_patches.projection_overlap import (
    FLAG,
    OFF,
    ON,
    OR_OFF,
    RECOMPUTE,
    check_projections,
    keep_of,
    resolve_projections,
)
from megatron_patches.refusals import Refusal

_LEAVE_OUT = f"Leave them out, {OR_OFF}"
NOT_SERVED = (
    Refusal(
        lambda args: args.transformer_impl != "local",
        f"{FLAG} multiplies weights of Megatron-LM's own linear layers, and --transformer-impl is "
        "{transformer_impl}",
        f"Use --transformer-impl local, {OR_OFF}",
    ),
    Refusal(
        lambda args: args.multi_latent_attention,
        f"{FLAG}: --multi-latent-attention has several products one after the other before "
        "attention",
        f"Leave it out, {OR_OFF}",
    ),
    Refusal(
        lambda args: args.qk_layernorm or args.qk_l2_norm,
        f"{FLAG}: --qk-layernorm and --qk-l2-norm normalize queries and keys between their "
        "projection and attention",
        _LEAVE_OUT,
    ),
    Refusal(
        lambda args: args.attention_output_gate or args.rotary_interleaved or args.no_rope_freq,
        f"{FLAG} serves neither --attention-output-gate nor --rotary-interleaved nor "
        "--no-rope-freq",
        _LEAVE_OUT,
    ),
    Refusal(
        lambda args: args.usp_recompute == "attention",
        f"{FLAG}: --usp-recompute attention saves the results of attention without its projections",
        f"Use --usp-recompute full, {OR_OFF}",
    ),
    Refusal(
        lambda args: args.recompute_granularity == "selective",
        f"{FLAG}: --recompute-granularity selective (--recompute-activations) recomputes parts of "
        "a layer",
        f"Use --recompute-granularity full or --usp-recompute full, {OR_OFF}",
    ),
    Refusal(
        lambda args: args.fp8 or args.fp4,
        f"{FLAG} multiplies weights in their own dtype, not in fp8 or fp4",
        _LEAVE_OUT,
    ),
    Refusal(
        lambda args: args.gradient_accumulation_fusion,
        f"{FLAG} and gradient accumulation fusion do not go together",
        f"Add --no-gradient-accumulation-fusion, {OR_OFF}",
    ),
    Refusal(
        lambda args: args.use_torch_fsdp2 or args.use_megatron_fsdp,
        f"{FLAG}: --use-torch-fsdp2 and --use-megatron-fsdp gather weights by hooks of their "
        "layers",
        _LEAVE_OUT,
    ),
    Refusal(
        lambda args: args.delay_wgrad_compute or args.test_mode,
        f"{FLAG}: --delay-wgrad-compute and --test-mode change the passes of linear layers",
        f"Leave both out, {OR_OFF}",
    ),
)


def check_flag(args: Any) -> None:
    """Check ``--usp-projection-overlap`` in validated arguments.

    Raises:
        ConfigError: ``on`` or ``recompute`` where no layer can be served.
    """
    check_projections(args, NOT_SERVED)


def resolve_flag(args: Any) -> tuple[str, ...]:
    """Replace ``auto`` where it can be decided before there are groups; each rank by itself.

    Ranks on GPUs of different kinds that decide differently are refused at the first call.

    Returns:
        Lines for rank 0 to print.

    Raises:
        PatchError: edited functions that the flag bypasses, if the user asked for it.
    """
    wanted = args.usp_projection_overlap
    args.usp_projections_asked_for = wanted in (ON, RECOMPUTE)
    if args.context_parallel_size == 1:
        text = f"{PROJECTIONS_FLAG} {wanted} has no effect with --context-parallel-size 1"
        return (text,) if args.usp_projections_asked_for else ()
    why = resolve_projections(args, lambda: _forecast(args), NOT_SERVED)
    if args.usp_projection_overlap == OFF:
        return why
    try:
        verify_flag(PROJECTIONS_FLAG)
    except PatchError as error:
        if args.usp_projections_asked_for:
            raise
        args.usp_projection_overlap = OFF
        return (*why, f"{PROJECTIONS_FLAG} auto is off. {error}")
    return why


def _forecast(args: Any) -> ProjectionChoice | None:
    """The planner's; None of models that it does not know."""
    if not is_planned(args):
        return None
    return planned_run(args).choose_projections(on_gpu=torch.cuda.is_available())


def overlap_in_layer(layer: Any, args: Any) -> None:
    """Compute the products around attention of a ``TransformerLayer`` under its exchanges, if the
    flag asks for it.

    Raises:
        ConfigError: a layer that cannot be served, if the user asked for it.
    """
    core = getattr(layer.self_attention, "core_attention", None)
    mesh = getattr(core, "mesh", None)
    keep = None if mesh is None else keep_of(args, mesh, NOT_SERVED)
    if keep is None:
        return
    from megatron_patches.megatron_core.projections import overlap_projections

    try:
        overlap_projections(layer, keep)
    except ConfigError as error:
        if args.usp_projections_asked_for:
            raise
        if args.rank == 0:
            warnings.warn(str(error), stacklevel=2)
