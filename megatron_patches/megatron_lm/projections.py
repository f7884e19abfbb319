"""``--usp-projection-overlap recompute`` on Megatron-LM's local layers."""

from __future__ import annotations

from typing import Any

from megatron_patches.megatron_lm.relied_on import FRAMEWORK, PROJECTIONS_FLAG
from megatron_patches.patch_set import verify_flag
from megatron_patches.projection_checks import FLAG, OFF, OR_OFF, projects_again
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


def verify_edits(args: Any) -> tuple[str, ...]:
    """Check that no edited function is bypassed; each rank by itself, before there are groups.

    Returns:
        Lines for rank 0 to print.

    Raises:
        PatchError: edited functions that the flag bypasses.
    """
    if args.usp_projection_overlap == OFF:
        return ()
    if args.context_parallel_size == 1:
        return (f"{FLAG.format(**vars(args))} has no effect with --context-parallel-size 1",)
    verify_flag(FRAMEWORK, PROJECTIONS_FLAG)
    return ()


def project_in_layer(layer: Any, args: Any) -> None:
    """Let the attention of a ``TransformerLayer`` project by itself, if the flag asks for it.

    Raises:
        ConfigError: a layer that cannot be served.
    """
    core = getattr(layer.self_attention, "core_attention", None)
    mesh = getattr(core, "mesh", None)
    if mesh is not None and projects_again(args, mesh.sp_degree):
        from megatron_patches.megatron_core.projections import project_again

        project_again(layer)
