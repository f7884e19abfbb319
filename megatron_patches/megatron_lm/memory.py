"""Activation memory of Megatron-LM's layers: ``--usp-recompute`` and ``--usp-mlp-chunks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory import LayerMemory
from megatron_patches.flags import check_mlp_chunks
from megatron_patches.megatron_lm.context_parallel_kind import is_mixed, uses_usp
from megatron_patches.megatron_lm.relied_on import FRAMEWORK, GEMM_LAST
from megatron_patches.megatron_lm.unsupported import carries_state, is_hybrid
from megatron_patches.patch_set import verify_flag
from megatron_patches.refusals import Refusal, refuse, refuse_settings

_ATTRIBUTE = "usp_memory"  # a layer's LayerMemory, absent for the policies none and gemm-last


def _other_backwards(flag: str) -> tuple[Refusal, ...]:
    """Rows of options that change a layer's backward; ``flag`` begins their reasons."""
    return (
        Refusal(
            lambda args: args.overlap_moe_expert_parallel_comm or args.delay_wgrad_compute,
            f"{flag}: --overlap-moe-expert-parallel-comm and --delay-wgrad-compute split a "
            "layer's backward pass",
            "Leave them out",
        ),
        Refusal(
            lambda args: args.fine_grained_activation_offloading or args.cpu_offloading_num_layers,
            f"{flag} and Megatron-LM's offloading of activations do not go together",
            "Leave one of them out",
        ),
    )


_RECOMPUTE = "--usp-recompute {usp_recompute}"
_RECOMPUTE_REFUSALS = (
    Refusal(
        lambda args: args.recompute_granularity,
        f"{_RECOMPUTE} and --recompute-granularity {{recompute_granularity}} recompute the same",
        "Leave one of them out",
    ),
    Refusal(
        lambda args: args.fp8 or args.fp4,
        f"{_RECOMPUTE}: layers in fp8 or fp4 have a checkpoint of their own",
        "Use --recompute-granularity instead",
    ),
    Refusal(
        lambda args: args.cuda_graph_impl != "none",
        f"{_RECOMPUTE} and --cuda-graph-impl {{cuda_graph_impl}} do not go together",
        "Leave one of them out",
    ),
    *_other_backwards(_RECOMPUTE),
)
_GEMM_LAST_REFUSALS = (
    Refusal(
        lambda args: args.transformer_impl != "local",
        f"{_RECOMPUTE}: the norms of --transformer-impl {{transformer_impl}} are part of its "
        "linear layers",
        "Use --recompute-granularity selective --recompute-modules layernorm mlp",
    ),
    Refusal(
        lambda args: args.num_experts or args.multi_latent_attention,
        f"{_RECOMPUTE} serves dense layers with one projection of queries, keys and values, not "
        "experts and not --multi-latent-attention",
        "Use --usp-recompute attention",
    ),
    Refusal(
        carries_state,
        f"{_RECOMPUTE} serves layers with attention and an MLP, not Mamba layers and not gated "
        "delta nets",
        "Use --usp-recompute attention",
    ),
    Refusal(
        lambda args: args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        f"{_RECOMPUTE} recomputes the activation function itself, without fusion",
        "Add --no-bias-swiglu-fusion --no-bias-gelu-fusion",
    ),
    Refusal(
        lambda args: args.gradient_accumulation_fusion,
        f"{_RECOMPUTE} and gradient accumulation fusion do not go together",
        "Add --no-gradient-accumulation-fusion",
    ),
    Refusal(
        lambda args: args.apply_residual_connection_post_layernorm,
        f"{_RECOMPUTE}: --apply-residual-connection-post-layernorm needs the norm's output",
        "Leave one of the two out",
    ),
)
_CHUNKS = "--usp-mlp-chunks {usp_mlp_chunks}"
_MLP_CHUNKS_REFUSALS = (
    Refusal(
        is_hybrid,
        f"{_CHUNKS}: the layers of a hybrid model have attention, a Mamba mixer or an MLP each",
        "Leave it out",
    ),
    Refusal(
        lambda args: args.num_experts,
        f"{_CHUNKS} is for dense MLPs, and --num-experts {{num_experts}} asks for experts",
        "Leave one of the two out",
    ),
    Refusal(
        lambda args: args.recompute_granularity,
        f"{_CHUNKS} and --recompute-granularity {{recompute_granularity}} recompute the same",
        "Use --usp-recompute instead",
    ),
    Refusal(
        lambda args: args.gradient_accumulation_fusion,
        f"{_CHUNKS} and gradient accumulation fusion do not go together",
        "Add --no-gradient-accumulation-fusion",
    ),
    Refusal(
        lambda args: args.hidden_dropout > 0,
        f"{_CHUNKS}: chunks draw other masks than a whole MLP, and --hidden-dropout is "
        "{hidden_dropout}",
        "Set --hidden-dropout 0",
    ),
    Refusal(
        lambda args: args.fp8 or args.fp4 or args.cuda_graph_impl != "none",
        f"{_CHUNKS} does not go with fp8, fp4 or --cuda-graph-impl",
        "Leave them out",
    ),
    *_other_backwards(_CHUNKS),
)
_REFUSALS: Mapping[str, tuple[Refusal, ...]] = MappingProxyType(
    {"mlp_chunks": _MLP_CHUNKS_REFUSALS, "recompute": _RECOMPUTE_REFUSALS}
)


def check_flags(args: Any) -> None:
    """Check ``--usp-recompute`` and ``--usp-mlp-chunks`` in validated arguments.

    Raises:
        ConfigError: Megatron-LM recomputes too, layers for which it is not exact, or attention
            that is not computed by ds_usp.
        PatchError: an edit of what ``--usp-recompute gemm-last`` does not call.
    """
    shards = args.context_parallel_size
    shards *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    check_mlp_chunks(args, args.seq_length // shards)
    refuse_settings(_REFUSALS, args)
    if args.usp_recompute == "gemm-last":
        refuse(_GEMM_LAST_REFUSALS, args)
        verify_flag(FRAMEWORK, GEMM_LAST)
    has_other_attention = args.context_parallel_size > 1 and (is_mixed(args) or not uses_usp(args))
    if args.usp_recompute == "attention" and has_other_attention:
        raise ConfigError(
            f"--usp-recompute attention saves the results of USP attention, and --cp-comm-type "
            f"{' '.join(args.cp_comm_type)} gives layers TransformerEngine's. Use --usp-recompute "
            "full, or leave --cp-comm-type out"
        )


def build_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """``TransformerLayer.__init__``: the layer gets the policy of ``--usp-recompute`` for
    :func:`run_layer`, its MLP the chunks of ``--usp-mlp-chunks``."""
    from megatron.training import get_args

    from megatron_patches.megatron_core.layer_memory import save_less

    original(layer, *args, **kwargs)
    flags = get_args()
    save_less(layer, flags.usp_recompute, flags.usp_mlp_chunks)
    if flags.usp_recompute != "gemm-last":
        _give_policy(layer, flags.usp_recompute)


def build_mamba_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """``MambaLayer.__init__``: the layer gets the policy of ``--usp-recompute``."""
    from megatron.training import get_args

    original(layer, *args, **kwargs)
    _give_policy(layer, get_args().usp_recompute)


def _give_policy(layer: Any, recompute: str) -> None:
    from megatron.core.tensor_parallel import checkpoint

    if recompute != "none":
        memory = LayerMemory(recompute, checkpoint=lambda run, x: checkpoint(run, False, x))
        object.__setattr__(layer, _ATTRIBUTE, memory)  # of one layer: it knows no neighbours


def run_layer(
    original: Callable[..., Any], layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``TransformerLayer.forward``, ``MambaLayer.forward`` under the policy.

    Returns:
        As the original: the hidden states; of a transformer layer also the context, which is None
        in GPT models.
    """
    memory = getattr(layer, _ATTRIBUTE, None)
    if memory is None:
        return original(layer, hidden_states, *args, **kwargs)
    has_context = False

    def run(hidden: Tensor) -> Tensor:
        nonlocal has_context
        output = original(layer, hidden, *args, **kwargs)
        has_context = isinstance(output, tuple)
        if has_context:
            output, context = output
            if context is not None:
                raise ConfigError(
                    "--usp-recompute: a layer with cross attention has a second result. Leave "
                    "--usp-recompute out"
                )
        return output

    output = memory.run(layer.layer_number, run, hidden_states)
    return (output, None) if has_context else output
