"""The patches of Megatron-DeepSpeed and DeepSpeed for sequence parallelism and activation memory.

Rows alone, which ``PatchSet`` applies before the script runs, those of :func:`script_functions`
once its arguments are parsed. Those for current packages are in :mod:`.compat`, those for speed in
:mod:`.speedups`. The README has all of them as tables.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from megatron_patches.guards import deepspeed_guard, source_guard
from megatron_patches.megatron_deepspeed import (
    arguments,
    attention,
    batch,
    gradients,
    groups,
    loss,
    memory,
    pipeline,
    startup,
    step,
)
from megatron_patches.patch import Patch, add, wrap
from megatron_patches.settings import MeshSettings

_MPU = "megatron.core.parallel_state"
_LAYER = "megatron.model.transformer"
_PIPE = "deepspeed.runtime.pipe"
_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def start(settings: MeshSettings) -> tuple[Patch, ...]:
    """The patches of argument parsing, the script's start and the data set's index."""
    return (
        wrap(
            "megatron.arguments:parse_args",
            partial(arguments.parse_args, settings=settings),
            also_in=("megatron.initialize:parse_args",),
            guard=source_guard("b1e5ef6da0124ff0"),
            reason="adds --ulysses-degree and the --usp-* flags",
        ),
        wrap(
            "megatron.arguments:validate_args",
            arguments.validate_args,
            also_in=("megatron.initialize:validate_args",),
            guard=source_guard("0a15da65c6c1e0a5"),
            reason="refuses, before any group exists, what cannot be trained exactly",
        ),
        wrap(
            "megatron.training:pretrain",
            startup.pretrain,
            guard=source_guard("7a78e77d379b6f4a"),
            reason="looks up the script's model_provider when it is called",
        ),
        wrap(
            "megatron.data.gpt_dataset:_build_index_mappings",
            batch.build_index_mappings,
            guard=source_guard("758522a0c883ef59"),
            reason="under tp and sp ranks read an index that rank 0 has not written yet",
        ),
    )


def rank_groups() -> tuple[Patch, ...]:
    """The patches of process groups and of the functions that return them."""
    queries = (("group", lambda group: group), ("rank", dist.get_rank), ("world_size", _size))
    getters = tuple(
        add(
            f"{_MPU}:get_{axis}_parallel_{name}",
            groups.getter(f"_{axis.upper()}_PARALLEL_GROUP", query),
            reason=f"the {axis} axis beside the sequence-parallel one",
        )
        for axis in ("ulysses", "ring")
        for name, query in queries
    )
    return (
        Patch(
            f"{_MPU}:initialize_model_parallel",
            groups.initialize_model_parallel,
            guard=source_guard("93b206b1b50a1845"),
            reason="asserts tp = pp = 1 with sequence parallelism; builds overlapping groups "
            "beyond",
            upstream="deepspeedai/DeepSpeed#4645",
        ),
        Patch(
            f"{_MPU}:get_sequence_parallel_src_rank",
            groups.get_sequence_parallel_src_rank,
            also_in=("megatron.core.tensor_parallel.data:get_sequence_parallel_src_rank",),
            guard=source_guard("436150935a17bd57"),
            reason="assumes consecutive sequence-parallel ranks, which they are not under tp",
        ),
        wrap(
            f"{_MPU}:destroy_model_parallel",
            groups.destroy_model_parallel,
            guard=source_guard("ede97fef665f1623"),
            reason="leaves some groups and sizes, and does not know the new ones",
        ),
        *getters,
    )


def model() -> tuple[Patch, ...]:
    """The patches of attention, positions, loss and dropout."""
    return (
        wrap(
            f"{_LAYER}:ParallelAttention.__init__",
            attention.build_attention,
            guard=source_guard("a1228859bd19ca69"),
            reason="attention is usp_attention, under tensor parallelism too",
        ),
        wrap(
            f"{_LAYER}:ParallelAttention.forward",
            attention.attend,
            guard=source_guard("2f229ab72e3fe995"),
            reason="splits the projection by global sizes (wrong under tp) and into thirds (wrong "
            "for grouped queries); applies the cosine to rotary tables twice",
        ),
        wrap(
            f"{_LAYER}:CoreAttention.forward",
            attention.contiguous_core_attention,
            guard=source_guard("14c78ce831ae27bb"),
            reason="assumes contiguous inputs, which they are not with a micro batch above 1",
        ),
        wrap(
            "megatron.model.language_model:TransformerLanguageModel.__init__",
            attention.build_language_model,
            guard=source_guard("0c7ba235cc0e90a4"),
            reason="rotary tables count positions from 0 on every rank; attention rotates instead",
        ),
        Patch(
            "megatron.core.sequence_parallel.cross_entropy:vocab_sequence_parallel_cross_entropy",
            loss.vocab_sequence_parallel_cross_entropy,
            also_in=("megatron.core.sequence_parallel:vocab_sequence_parallel_cross_entropy",),
            guard=source_guard("b80d5ba12d2fa92b"),
            reason="under tp its softmax covers one shard of the vocabulary, its logarithm can "
            "be minus infinity, and it concatenates losses in rank order",
        ),
        wrap(
            "megatron.model.gpt_model:CrossEntropy",
            loss.pipeline_loss,
            guard=source_guard("4481e84a76e8d43a"),
            reason="the pipeline's loss has no sequence parallelism",
        ),
        wrap(
            "megatron.training:train_step",
            step.train_step,
            guard=source_guard("c2358aeebdebeb7b"),
            reason="dropout masks would be equal for every shard of a sequence",
        ),
    )


def layers() -> tuple[Patch, ...]:
    """The patches of what layers and the loss save for backward."""
    return (
        wrap(
            f"{_LAYER}:ParallelTransformerLayer.__init__",
            memory.build_layer,
            guard=source_guard("04eb5488bebcd10b"),
            reason="--usp-recompute gemm-last: norms are recomputed, not saved",
        ),
        wrap(
            f"{_LAYER}:ParallelTransformerLayer.forward",
            memory.run_layer,
            guard=source_guard("e182c5c1633245ce"),
            reason="--usp-recompute attention, full: a checkpoint around each layer; Megatron-"
            "DeepSpeed's own recomputes attention and its exchanges",
        ),
        wrap(
            f"{_LAYER}:ParallelMLP.forward",
            memory.run_mlp,
            guard=source_guard("f50daafe84ee07fd"),
            reason="--usp-recompute gemm-last: the activation function is recomputed, not saved; "
            "--usp-mlp-chunks",
        ),
        wrap(
            "megatron.model.gpt_model:post_language_model_processing",
            loss.losses_of_hidden,
            guard=source_guard("a1806a024e168ae1"),
            reason="--usp-loss-chunks: no logits, whose fp32 copy is larger than a layer",
        ),
    )


def engine() -> tuple[Patch, ...]:
    """DeepSpeed: pipelines over sequence shards, and gradients."""
    return (
        wrap(
            f"{_PIPE}.topology:PipeModelDataParallelTopology.__init__",
            pipeline.fold_topology,
            guard=deepspeed_guard("b721387a0045a309"),
            reason="no sequence axis: folded into the data axis",
        ),
        wrap(
            f"{_PIPE}.topology:PipelineParallelGrid.__init__",
            pipeline.build_grid,
            guard=deepspeed_guard("7503e7b22551d507"),
            reason="data- and sequence-parallel groups are those of the mpu",
        ),
        wrap(
            f"{_PIPE}.engine:PipelineEngine.__init__",
            pipeline.build_engine,
            guard=deepspeed_guard("f728be4572cd9dcf"),
            reason="compares batch sizes with the folded axis",
        ),
        wrap(
            "deepspeed.runtime.engine:DeepSpeedEngine._reduce_non_expert_gradients",
            gradients.reduce_gradients,
            guard=deepspeed_guard("8fc99329151324f7"),
            reason="ZeRO-0 under a pipeline does not reduce over sequence-parallel ranks",
        ),
        wrap(
            f"{_ZERO3}._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
            gradients.scatter_gradients,
            guard=deepspeed_guard("4778614e9d24e293"),
            reason="ZeRO-3 averages gradients over sequence-parallel ranks instead of summing",
            upstream="deepspeedai/DeepSpeed#5248",
        ),
        wrap(
            "deepspeed:initialize",
            gradients.initialize_engine,
            guard=deepspeed_guard("701251c51c2e1e69"),
            reason="ZeRO-0 in fp32 reports no gradient norm, clips by a wrong one over stages; "
            "ZeRO-2 with overlap_comm frees gradients larger than its bucket before it has "
            "reduced them; --usp-states-on-host",
        ),
    )


def script_functions() -> tuple[Patch, ...]:
    """The patches of functions that the stock script defines."""
    return (
        wrap(
            f"{startup.SCRIPT}:get_batch",
            batch.get_batch,
            guard=source_guard("30cb2d6ea736e67e"),
            reason="shards sequences contiguously in rank order; builds a dense mask",
        ),
        wrap(
            f"{startup.SCRIPT}:model_provider",
            batch.model_provider,
            guard=source_guard("e62b5fd7da89456d"),
            reason="a pipeline gets whole sequences and a dense mask; rotary positions crash it",
        ),
    )


def _size(group: dist.ProcessGroup) -> int:
    return dist.get_world_size(group)
