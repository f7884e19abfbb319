"""Checks the settings that the trainer and the patched Megatron-DeepSpeed and Megatron-LM share
(``ds_usp.settings``), and makes of them what the planner and the transformer layers get.

Every rank calls it while a program starts, without communication: when arguments are validated, and
before layers are built (:meth:`PlannedRun.layer_memory`). torch is imported by
:meth:`PlannedRun.choose_degree` and below alone: a parser starts without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_usp.errors import ConfigError
from ds_usp.planner import (
    AUTO,
    Choice,
    ModelShape,
    ParallelConfig,
    Workload,
    choose_ulysses,
    cluster_of,
    framework_caps,
    offload_needed,
)
from ds_usp.settings import settings_of
from megatron_patches.refusals import Refusal

if TYPE_CHECKING:
    import torch

    from ds_usp.memory import LayerMemory


# Of a GPU's memory; what is left is the CUDA context's, NCCL's, and fragmentation.
_USABLE = 0.9  # for the offload ratio; for the degree it is Cluster.budget_bytes of the planner
_WORKSPACE_BYTES = 2 * 2**30  # in no formula: cuBLAS, gradient buckets, attention workspaces

# What every program refuses before its own checks.
SHARED_REFUSALS = (
    Refusal(
        lambda args: args.usp_cluster and args.ulysses_degree != AUTO,
        f"--usp-cluster {{usp_cluster}} is for --ulysses-degree {AUTO}; leave it out",
    ),
)
# Groups of layers that are no checkpoints.
CHECKPOINT_LAYERS_REFUSALS = (
    Refusal(
        lambda args: args.usp_checkpoint_layers < 1,
        "--usp-checkpoint-layers {usp_checkpoint_layers} must be 1 or more",
    ),
    Refusal(
        lambda args: args.usp_checkpoint_layers > 1 and args.usp_recompute in ("none", "gemm-last"),
        "--usp-checkpoint-layers {usp_checkpoint_layers} with --usp-recompute {usp_recompute}: no "
        "layer's input is saved for a checkpoint",
        "Use --usp-recompute full, or attention",
    ),
)


def check_mlp_chunks(args: Any, tokens: int) -> None:
    """Raise ConfigError for a negative number of chunks of the MLP, and for more than ``tokens``,
    those of a sequence in the shortest shard (per TP rank if MLPs get a TP rank's share); 0: none.
    Each program refuses what chunks do not go with by a table of its own, and ``args`` are its own:
    Megatron-LM's names are not mapped here. The planner's limits are in ``memory_violations``."""
    chunks = args.usp_mlp_chunks
    if not 0 <= chunks <= tokens:
        raise ConfigError(
            f"--usp-mlp-chunks {chunks}: a rank has {tokens} of a sequence's {args.seq_length} "
            f"tokens; use 0 to {tokens} chunks"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One program's arguments as the planner and the layers read them.

    Args:
        args: validated arguments, with Megatron-DeepSpeed's names in all programs. One that is read
            anew here has to be in ``megatron_lm/planned.py`` too, which maps Megatron-LM's.
        zero: DeepSpeed's ZeRO stage.
        world_size: ranks of the program.
        default_vocab: entries of the vocabulary before the program has read it.
        framework: whose abilities the planner assumes.
        tp_sequence, layers_per_virtual_stage, overlap_gradients: as in ``ParallelConfig``.
    """

    args: Any
    zero: int
    world_size: int
    default_vocab: int
    framework: str = "megatron-deepspeed"
    tp_sequence: bool = False
    layers_per_virtual_stage: int = 0
    overlap_gradients: bool = False

    def model_shape(self) -> ModelShape:
        """Return the model as the planner has it: dense, as programs refuse others before."""
        args = self.args
        vocab = getattr(args, "padded_vocab_size", None) or args.vocab_size or self.default_vocab
        # The trainer has --disable-bias-linear as it stands, the frameworks as add_bias_linear.
        biases = not getattr(args, "disable_bias_linear", False)
        return ModelShape(
            name="this model",
            layers=args.num_layers,
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size,
            heads=args.num_attention_heads,
            kv_heads=args.num_key_value_heads,
            vocab=vocab,
            head_dim=getattr(args, "kv_channels", 0),
            gated=args.swiglu,
            tied=not args.untie_embeddings_and_output_weights,
            learned_positions=not args.use_rotary_position_embeddings,
            biases=getattr(args, "add_bias_linear", biases),
        )

    def workload(self) -> Workload:
        """Tokens and sequences of a step."""
        return Workload(self.model_shape(), self.args.seq_length, self.args.global_batch_size)

    def parallel_config(self) -> ParallelConfig:
        """The degrees and the memory policy; ``auto`` counts as Ulysses 1 and ratio 0."""
        args = self.args
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        sp, ratio = args.ds_sequence_parallel_size, args.usp_offload_ratio
        ulysses = 1 if args.ulysses_degree == AUTO else args.ulysses_degree or sp
        checkpointed = getattr(args, "checkpoint_activations", False)
        settings = {row.name: row.value_in(args) for row in settings_of("planner")}
        return ParallelConfig(
            tp=tp,
            ulysses=ulysses,
            ring=sp // ulysses,
            pp=pp,
            dp=self.world_size // (tp * sp * pp),
            zero=self.zero,
            recompute="full" if checkpointed else args.usp_recompute,
            micro_batch=args.micro_batch_size,
            offload_ratio=0.0 if ratio == AUTO else ratio,
            offload_unit="layer",
            tp_sequence=self.tp_sequence,
            layers_per_virtual_stage=self.layers_per_virtual_stage,
            schedule=framework_caps(self.framework).schedule,
            overlap_gradients=self.overlap_gradients,
            fused_loss=args.usp_loss_chunks > 0,
            **settings,
            param_bytes=2 if args.bf16 or getattr(args, "fp16", False) else 4,
        )

    def choose_degree(self, *, on_gpu: bool) -> Choice:
        """The Ulysses degree that ``auto`` stands for, ``ulysses``, and ``why``, lines to print;
        ConfigError if the planner knows no such cluster, or no degree fits.

        Args:
            on_gpu: plan for GPUs like the current one, else for CPUs; ``--usp-cluster`` goes first.
        """
        import torch

        requested, ranks_on_node = self.args.usp_cluster, self.world_size  # cluster_of lowers it
        if on_gpu:
            gpu = torch.cuda.get_device_properties()
            ranks_on_node = min(ranks_on_node, torch.cuda.device_count())
            # All of the memory: the planner keeps a margin itself.
            cluster = cluster_of(requested, gpu.name, ranks_on_node, gpu.total_memory)
        else:
            cluster = cluster_of(requested, "", ranks_on_node)
        # "auto" is solved when the degrees are known; a ratio that the user gave stays.
        solves_ratio = self.args.usp_offload_ratio == AUTO
        config = replace(self.parallel_config(), ulysses=1, ring=1)
        caps = framework_caps(self.framework)
        caps = replace(caps, offloads=solves_ratio, recompute=(config.recompute,))
        return choose_ulysses(cluster, self.workload(), caps, config, self.world_size)

    def layer_memory(self, device: torch.device, **options: Any) -> LayerMemory:
        """The memory policy of the flags for this rank's layers; ConfigError as of
        :func:`solved_ratio`. Megatron-LM's layers make their own.

        Args:
            options: further arguments of ``LayerMemory``, such as ``checkpoint``.
        """
        from ds_usp.memory import LayerMemory, Offload

        ratio = solved_ratio(
            self.args.usp_offload_ratio, self.workload(), self.parallel_config(), device
        )
        layers = self.layers_per_virtual_stage or (
            self.args.num_layers // self.args.pipeline_model_parallel_size
        )
        layers = -(-layers // self.args.usp_checkpoint_layers)  # one of each group saves its input
        return LayerMemory(
            self.args.usp_recompute,
            Offload(ratio, device, layers=layers),
            checkpoint_layers=self.args.usp_checkpoint_layers,
            **options,
        )


def solved_ratio(
    requested: float | str,
    work: Workload,
    config: ParallelConfig,
    device: torch.device,
    memory_bytes: float | None = None,
) -> float:
    """The requested offload ratio, 0 to 1; for ``auto`` the smallest with which the workload fits,
    whatever ``config.offload_ratio`` is. ConfigError for ``auto`` without a GPU, or if none fits.

    Args:
        memory_bytes: that the run may fill; None: ``_USABLE`` of the device's.
    """
    if not isinstance(requested, str):
        return requested
    if memory_bytes is None:
        if device.type != "cuda":
            raise ConfigError(
                f"--usp-offload-ratio auto fills a GPU's memory, and the device is {device}: give "
                "a number from 0 to 1"
            )
        import torch

        memory_bytes = torch.cuda.get_device_properties(device).total_memory * _USABLE
    ratio = offload_needed(work, config, memory_bytes, _WORKSPACE_BYTES)
    if ratio > 1:
        raise ConfigError(
            f"{work.seq_len} tokens of {work.model.name} on {config} do not fit into "
            f"{memory_bytes / 2**30:.0f} GiB even with everything offloaded. Use more ranks a "
            "sequence, --usp-recompute attention or full, or a higher ZeRO stage"
        )
    return ratio
