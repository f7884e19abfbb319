"""The patches of Megatron-LM beside those of its megatron-core: rows alone, which ``PatchSet``
applies before the script runs. A guard's digits are the ``guards.fingerprint`` of the target.
"""

from __future__ import annotations

from functools import partial

from megatron_patches.guards import megatron_core_guard
from megatron_patches.megatron_core.context_parallel import ContextParallel
from megatron_patches.megatron_lm import arguments, loss, memory, missing, packed, step
from megatron_patches.patch import Patch, wrap
from megatron_patches.settings import MeshSettings

_TRAINING = "megatron.training"
_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_MAMBA_LAYER = "megatron.core.ssm.mamba_layer:MambaLayer"


def start(settings: MeshSettings, context_parallel: ContextParallel) -> tuple[Patch, ...]:
    """The patches of argument parsing, which sets ``context_parallel.settings``, and of the data
    sets' extension."""
    return (
        wrap(
            f"{_TRAINING}.arguments:parse_args",
            partial(arguments.parse_args, settings=settings),
            also_in=(f"{_TRAINING}.initialize:parse_args",),
            guard=megatron_core_guard("6a7334d46c9718c9"),
            reason="adds --ulysses-degree, --usp-cluster, --usp-kernel, --usp-recompute and "
            "--usp-mlp-chunks",
        ),
        wrap(
            f"{_TRAINING}.arguments:validate_args",
            partial(arguments.validate_args, context_parallel=context_parallel),
            also_in=(f"{_TRAINING}.initialize:validate_args",),
            guard=megatron_core_guard("33e95ea74ddccf32"),
            reason="selects USP for context parallelism; refuses, before any group exists, what "
            "cannot be trained exactly",
        ),
        wrap(
            "megatron.core.datasets.utils:compile_helpers",
            missing.compile_helpers,
            guard=megatron_core_guard("60dbc2badd8b7934"),
            reason="builds the index builder outside the checkout, without a pybind11 package",
        ),
    )


def training() -> tuple[Patch, ...]:
    """The patches of layers, packed batches, the loss and a step."""
    return (
        wrap(
            f"{_LAYER}.__init__",
            memory.build_layer,
            guard=megatron_core_guard("550f56a2af65ecad"),
            reason="--usp-recompute: a layer gets its policy; --usp-mlp-chunks: its MLP is called "
            "in chunks of tokens",
        ),
        wrap(
            f"{_LAYER}.forward",
            memory.run_layer,
            guard=megatron_core_guard("0e1c1177064ad13a"),
            reason="--usp-recompute attention, full: a checkpoint around each layer; Megatron-LM's "
            "own recomputes attention and its exchanges, or attention alone",
        ),
        wrap(
            f"{_MAMBA_LAYER}.__init__",
            memory.build_mamba_layer,
            guard=megatron_core_guard("75b8e69b32cbbce2"),
            reason="--usp-recompute: a layer gets its policy",
        ),
        wrap(
            f"{_MAMBA_LAYER}.forward",
            memory.run_layer,
            guard=megatron_core_guard("3598ee64cdce2b2d"),
            reason="--usp-recompute attention, full: a checkpoint around each layer, where "
            "Megatron-LM's Mamba models have none",
        ),
        wrap(
            "megatron.core.utils:get_thd_batch_on_this_cp_rank",
            packed.get_thd_batch_on_this_cp_rank,
            guard=megatron_core_guard("7eba55650a399915"),
            reason="needs TransformerEngine, and padded offsets that --sft does not give",
        ),
        wrap(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            loss.forward_step_calc_loss,
            guard=megatron_core_guard("f2566efccb050839"),
            reason="--sft: its evaluation averages the mean losses of the ranks",
        ),
        wrap(
            f"{_TRAINING}.training:train_step",
            step.train_step,
            guard=megatron_core_guard("4de7b5433aed06eb"),
            reason="dropout masks would be equal for every shard of a sequence",
        ),
    )
