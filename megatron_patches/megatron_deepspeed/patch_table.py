"""Everything that is changed in Megatron-DeepSpeed and in DeepSpeed, one row a change."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from megatron_patches.guards import Guard
from megatron_patches.megatron_deepspeed import (
    arguments,
    attention,
    batch,
    datasets,
    dropout,
    gradients,
    groups,
    kernels,
    local_rank,
    loss,
    memory,
    norms,
    pipeline,
    rotary,
    script,
    stubs,
)
from megatron_patches.patch import Patch
from megatron_patches.settings import MeshSettings

_MPU = "megatron.core.parallel_state"
_LAYER = "megatron.model.transformer"
_GELU = "megatron.model.fused_bias_gelu:GeLUFunction"
_PIPE = "deepspeed.runtime.pipe"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def start(settings: MeshSettings) -> tuple[Patch, ...]:
    """Arguments, and what keeps the host from starting on today's packages."""
    return (
        Patch(
            "megatron.arguments:parse_args",
            partial(arguments.parse_args, settings=settings),
            "wrap",
            also_in=("megatron.initialize:parse_args",),
            guard=_checkout("b1e5ef6da0124ff0"),
            reason="adds --ulysses-degree, --usp-layout, --usp-kernel, --usp-cluster and the "
            "memory flags",
        ),
        Patch(
            "megatron.arguments:validate_args",
            arguments.validate_args,
            "wrap",
            also_in=("megatron.initialize:validate_args",),
            guard=_checkout("0a15da65c6c1e0a5"),
            reason="refuses, before any group exists, what cannot be trained exactly",
        ),
        Patch(
            "megatron.training:pretrain",
            script.pretrain,
            "wrap",
            guard=_checkout("7a78e77d379b6f4a"),
            reason="looks up the script's model_provider when it is called",
        ),
        Patch(
            "megatron.initialize:_initialize_distributed",
            local_rank.initialize_distributed,
            "wrap",
            guard=_checkout("b6139f69e8c1b6ee"),
            reason="numbers ranks without GPUs by NUMA nodes, which DeepSpeed refuses",
        ),
        Patch(
            "megatron.data.dataset_utils:compile_helper",
            stubs.compile_helpers,
            "wrap",
            guard=_checkout("cba729e752fc3c35"),
            reason="builds the index builder outside the checkout, without a pybind11 package",
        ),
        Patch(
            "megatron.data.gpt_dataset:_build_index_mappings",
            datasets.build_index_mappings,
            "wrap",
            guard=_checkout("758522a0c883ef59"),
            reason="under tp and sp ranks read an index that rank 0 has not written yet",
        ),
    )


def fused_kernels() -> tuple[Patch, ...]:
    """Kernels that the host builds or has fused, where today's torch and CUDA do not."""
    return (
        Patch(
            "megatron.fused_kernels:load",
            kernels.load_fused_kernels,
            "wrap",
            guard=_checkout("5f24da30565fcba1"),
            reason="its compiler flags (sm_70) fail on CUDA 13; skipped there",
        ),
        Patch(
            "megatron.initialize:set_jit_fusion_options",
            kernels.set_jit_fusion_options,
            "wrap",
            also_in=("megatron.training:set_jit_fusion_options",),
            guard=_checkout("8ada37e0af672f08"),
            reason="sets nvfuser switches that newer torch lacks",
        ),
        Patch(
            f"{_GELU}.forward",
            kernels.gelu,
            "wrap",
            guard=_checkout("fcc4122cb6e1d6c8"),
            reason="ten kernels since torch lacks nvfuser; one in Triton, or two of torch",
        ),
        Patch(
            f"{_GELU}.backward",
            kernels.gelu_backward,
            "wrap",
            guard=_checkout("9939aa1d3de8e0a9"),
            reason="the same of its gradient",
        ),
        Patch(
            "megatron.core.tensor_parallel.layers:"
            "LinearWithGradAccumulationAndAsyncCommunication.forward",
            kernels.linear,
            "wrap",
            guard=_checkout("a9ddaf5ae9419175"),
            reason="adds the bias in a pass of its own over the output",
        ),
        Patch(
            f"{_LAYER}:bias_dropout_add",
            kernels.add_bias,
            "wrap",
            guard=_checkout("5de07f0330b1146f"),
            reason="adds bias and residual in two passes; one in Triton, where nothing is dropped",
        ),
        Patch(
            f"{_LAYER}:torch",
            kernels.lazy_sync_torch(),
            reason="puts two numbers on the GPU in every layer (`torch.tensor(0.0, device=...)`), "
            "and each time waits for all that was launched",
        ),
    )


def rank_groups() -> tuple[Patch, ...]:
    """Process groups, and the questions about them."""
    queries = (("group", lambda group: group), ("rank", dist.get_rank), ("world_size", _size))
    getters = tuple(
        Patch(
            f"{_MPU}:get_{axis}_parallel_{name}",
            groups.getter(f"_{axis.upper()}_PARALLEL_GROUP", query),
            "add",
            reason=f"the {axis} axis beside the sequence-parallel one",
        )
        for axis in ("ulysses", "ring")
        for name, query in queries
    )
    return (
        Patch(
            f"{_MPU}:initialize_model_parallel",
            groups.initialize_model_parallel,
            guard=_checkout("93b206b1b50a1845"),
            reason="asserts tp = pp = 1 with sequence parallelism; builds overlapping groups "
            "beyond",
            upstream="deepspeedai/DeepSpeed#4645",
        ),
        Patch(
            f"{_MPU}:get_sequence_parallel_src_rank",
            groups.get_sequence_parallel_src_rank,
            also_in=("megatron.core.tensor_parallel.data:get_sequence_parallel_src_rank",),
            guard=_checkout("436150935a17bd57"),
            reason="counts sequence-parallel ranks as neighbours, which they are not under tp",
        ),
        Patch(
            f"{_MPU}:destroy_model_parallel",
            groups.destroy_model_parallel,
            "wrap",
            guard=_checkout("ede97fef665f1623"),
            reason="forgets some groups and sizes, and does not know the new ones",
        ),
        *getters,
    )


def model() -> tuple[Patch, ...]:
    """Attention, positions, loss and dropout."""
    return (
        Patch(
            f"{_LAYER}:ParallelAttention.__init__",
            attention.build_attention,
            "wrap",
            guard=_checkout("a1228859bd19ca69"),
            reason="attention is usp_attention, under tensor parallelism too",
        ),
        Patch(
            f"{_LAYER}:ParallelAttention.forward",
            attention.attend,
            "wrap",
            guard=_checkout("2f229ab72e3fe995"),
            reason="cuts the projection by global sizes (wrong under tp) and into thirds (wrong "
            "for grouped queries); rotary positions are the cosine of a cosine",
        ),
        Patch(
            f"{_LAYER}:CoreAttention.forward",
            attention.contiguous_core_attention,
            "wrap",
            guard=_checkout("14c78ce831ae27bb"),
            reason="views inputs as contiguous that are not with a micro batch above 1",
        ),
        Patch(
            "megatron.model.language_model:TransformerLanguageModel.__init__",
            rotary.switch_off_in_model,
            "wrap",
            guard=_checkout("0c7ba235cc0e90a4"),
            reason="rotary tables count positions from 0 on every rank; attention rotates instead",
        ),
        Patch(
            "megatron.core.sequence_parallel.cross_entropy:vocab_sequence_parallel_cross_entropy",
            loss.vocab_sequence_parallel_cross_entropy,
            also_in=("megatron.core.sequence_parallel:vocab_sequence_parallel_cross_entropy",),
            guard=_checkout("b80d5ba12d2fa92b"),
            reason="takes the softmax over a part of the vocabulary under tp, its logarithm can "
            "be minus infinity, and it joins losses in rank order",
        ),
        Patch(
            "megatron.model.gpt_model:CrossEntropy",
            loss.pipeline_loss,
            "wrap",
            guard=_checkout("4481e84a76e8d43a"),
            reason="the pipeline's loss knows no sequence parallelism",
        ),
        Patch(
            "megatron.training:train_step",
            dropout.train_step,
            "wrap",
            guard=_checkout("c2358aeebdebeb7b"),
            reason="dropout would hit the same places of every shard of a sequence",
        ),
    )


def layers() -> tuple[Patch, ...]:
    """What layers and the loss keep for their backward pass."""
    return (
        Patch(
            f"{_LAYER}:ParallelTransformerLayer.__init__",
            memory.build_layer,
            "wrap",
            guard=_checkout("04eb5488bebcd10b"),
            reason="--usp-recompute gemm-last: norms are computed again, not kept",
        ),
        Patch(
            f"{_LAYER}:ParallelTransformerLayer.forward",
            memory.run_layer,
            "wrap",
            guard=_checkout("e182c5c1633245ce"),
            reason="--usp-recompute attention, full: a checkpoint around each layer; the host's "
            "own computes attention and its exchanges again",
        ),
        Patch(
            f"{_LAYER}:ParallelMLP.forward",
            memory.run_mlp,
            "wrap",
            guard=_checkout("f50daafe84ee07fd"),
            reason="--usp-recompute gemm-last: the activation function is computed again, not kept",
        ),
        Patch(
            "megatron.model.gpt_model:post_language_model_processing",
            loss.losses_of_hidden,
            "wrap",
            guard=_checkout("a1806a024e168ae1"),
            reason="--usp-loss-chunks: no logits, whose fp32 copy is larger than a layer",
        ),
    )


def engine() -> tuple[Patch, ...]:
    """DeepSpeed: pipelines that hold parts of sequences, and gradients."""
    return (
        Patch(
            f"{_PIPE}.topology:PipeModelDataParallelTopology.__init__",
            pipeline.fold_topology,
            "wrap",
            guard=_deepspeed("b721387a0045a309"),
            reason="no sequence axis: folded into the data axis",
        ),
        Patch(
            f"{_PIPE}.topology:PipelineParallelGrid.__init__",
            pipeline.build_grid,
            "wrap",
            guard=_deepspeed("7503e7b22551d507"),
            reason="answers as the host's mpu: what is data parallel, what is sequence parallel",
        ),
        Patch(
            f"{_PIPE}.engine:PipelineEngine.__init__",
            pipeline.build_engine,
            "wrap",
            guard=_deepspeed("f728be4572cd9dcf"),
            reason="compares batch sizes with the folded axis",
        ),
        Patch(
            "deepspeed.runtime.engine:DeepSpeedEngine._reduce_non_expert_gradients",
            gradients.reduce_gradients,
            "wrap",
            guard=_deepspeed("8fc99329151324f7"),
            reason="ZeRO-0 under a pipeline does not reduce over the ranks of a sequence",
        ),
        Patch(
            f"{_ZERO3}._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
            gradients.scatter_gradients,
            "wrap",
            guard=_deepspeed("4778614e9d24e293"),
            reason="ZeRO-3 averages gradients over the ranks of a sequence instead of summing",
            upstream="deepspeedai/DeepSpeed#5248",
        ),
        Patch(
            f"{_ZERO}.has_overflow_partitioned_grads_serial",
            norms.has_overflow,
            "wrap",
            guard=_deepspeed("caa55adce779d393"),
            reason="ten kernels a parameter while the GPU waits; torch looks at all at once",
        ),
        Patch(
            f"{_ZERO}.get_grad_norm_direct",
            norms.gradient_norm,
            "wrap",
            guard=_deepspeed("7e1e996197792bc2"),
            reason="the same of the norm, which it takes of a copy in fp64",
        ),
        Patch(
            "deepspeed:initialize",
            gradients.initialize_engine,
            "wrap",
            guard=_deepspeed("701251c51c2e1e69"),
            reason="ZeRO-0 in fp32 reports no gradient norm, and clips by a wrong one over stages",
        ),
    )


def script_functions() -> tuple[Patch, ...]:
    """What the stock script defines itself."""
    return (
        Patch(
            f"{script.SCRIPT}:get_batch",
            batch.get_batch,
            "wrap",
            guard=_checkout("30cb2d6ea736e67e"),
            reason="cuts sequences into contiguous pieces in rank order; builds a mask of tokens x "
            "tokens",
        ),
        Patch(
            f"{script.SCRIPT}:model_provider",
            batch.model_provider,
            "wrap",
            guard=_checkout("e62b5fd7da89456d"),
            reason="a pipeline gets whole sequences, and a mask of tokens x tokens; rotary "
            "positions crash it",
        ),
    )


def _size(group: dist.ProcessGroup) -> int:
    return dist.get_world_size(group)


def _checkout(source_sha256: str) -> Guard:
    return Guard(source_sha256=source_sha256)


def _deepspeed(source_sha256: str) -> Guard:
    return Guard("deepspeed", ">=0.19,<0.20", source_sha256)
