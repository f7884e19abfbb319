"""Megatron-LM's arguments as the planner reads them, for ``--ulysses-degree auto``: the one place
that maps names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ds_usp.settings import SETTINGS
from megatron_patches.flags import PlannedRun

_GPT2_VOCABULARY = 50257  # Megatron-LM reads its own later; the degrees do not depend on it
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("swiglu", "untie_embeddings_and_output_weights", "add_bias_linear", "vocab_size"),
    *("seq_length", "global_batch_size", "micro_batch_size", "bf16", "fp16"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)


def key_value_heads(args: Any) -> int:
    """Key/value heads of the whole model, one a tensor-parallel rank at least."""
    if not args.group_query_attention:
        return int(args.num_attention_heads)
    # Attention.__init__ gives every tensor-parallel rank a group where there are fewer of them.
    return max(args.num_query_groups, args.tensor_model_parallel_size)


def planned_run(args: Any) -> PlannedRun:
    """The run of validated arguments; a setting without a flag has its default."""
    chunks = args.virtual_pipeline_model_parallel_size
    stages = args.pipeline_model_parallel_size * chunks if chunks else 0
    return PlannedRun(
        args=SimpleNamespace(
            **{name: getattr(args, name) for name in _SAME},
            **{row.dest: row.value_in(args) for row in SETTINGS}
            | {"usp_recompute": _recompute(args)},
            num_key_value_heads=key_value_heads(args),
            use_rotary_position_embeddings=args.position_embedding_type != "learned_absolute",
            ds_sequence_parallel_size=args.context_parallel_size,
            rank=args.rank,
        ),
        zero=1 if args.use_distributed_optimizer else 0,
        world_size=args.world_size,
        default_vocab=_GPT2_VOCABULARY,
        framework="megatron-lm",
        tp_sequence=args.sequence_parallel,
        layers_per_virtual_stage=args.num_layers // stages if stages else 0,
        overlap_gradients=args.overlap_grad_reduce,
    )


def _recompute(args: Any) -> str:
    """The planner's name of what is recomputed."""
    planner_names = {None: args.usp_recompute, "full": "full", "selective": "attention-only"}
    return str(planner_names[args.recompute_granularity])
