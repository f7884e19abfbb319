"""The ``--ulysses-degree`` and ``--usp-*`` flags, which the patched Megatron-DeepSpeed and
Megatron-LM and the trainer share, and what the planner and the transformer layers get from them.

The planner reads Megatron-DeepSpeed's names of the arguments in all programs. Needs torch in
:func:`choose_degree` and :func:`layer_memory` alone, so that a parser starts without it.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_usp import TokenLayout
from ds_usp.errors import ConfigError
from ds_usp.planner import (
    AUTO,
    Choice,
    ModelShape,
    ParallelConfig,
    Workload,
    choose_ulysses,
    degree_or_auto,
    framework_caps,
)
from megatron_patches.settings import MeshSettings

if TYPE_CHECKING:
    import torch

    from ds_usp.memory import LayerMemory

LAYOUTS = ("zigzag", "contiguous")
FlagType = Callable[[str], Any]
Parser = ArgumentParser | argparse._ArgumentGroup


def add_degree_flags(
    parser: Parser,
    *,
    degree_type: FlagType = degree_or_auto,
    cluster_type: FlagType = str,
    default: int | None = None,
    default_text: str = "all of them",
    sp_flag: str = "--ds-sequence-parallel-size",
) -> None:
    """``--ulysses-degree`` and ``--usp-cluster``.

    Args:
        degree_type, cluster_type: argparse types of the two.
        sp_flag: the program's flag for the ranks that share a sequence.
        default_text: what None means, for the help.
    """
    parser.add_argument(
        "--ulysses-degree",
        type=degree_type,
        default=default,
        metavar="U",
        help=f"ranks of {sp_flag} that exchange heads; the ring takes the rest; {AUTO}: what the "
        f"planner finds fastest (default: {default_text})",
    )
    parser.add_argument(
        "--usp-cluster",
        type=cluster_type,
        metavar="NAME",
        help=f"what {AUTO} plans for: a built-in cluster of ds_usp.planner, or a profile of this "
        "one, a JSON file that `python -m ds_usp.planner profile` writes (default: by the GPU's "
        "name)",
    )


def add_attention_flags(
    parser: Parser,
    *,
    layouts: Sequence[str] = LAYOUTS,
    kernels: Sequence[str] | None = None,
    settings: MeshSettings,
) -> None:
    """Add ``--usp-layout`` and ``--usp-kernel`` to a program's parser.

    Args:
        layouts: choices of ``--usp-layout``.
        kernels: choices of ``--usp-kernel``; None: argparse accepts any text.
        settings: its layout and kernel are the defaults of the two flags.
    """
    parser.add_argument(
        "--usp-layout",
        choices=layouts,
        default=settings.layout,
        help="which tokens a rank holds; zigzag balances causal work over the ring",
    )
    add_kernel_flag(parser, kernels=kernels, default=settings.kernel)


def add_kernel_flag(
    parser: Parser, *, kernels: Sequence[str] | None = None, default: str = "auto"
) -> None:
    """Add ``--usp-kernel`` to a program's parser.

    Args:
        kernels: its choices; None: argparse accepts any text.
    """
    parser.add_argument(
        "--usp-kernel",
        choices=kernels,
        default=default,
        help="attention kernel; auto: the fastest that serves the dtype and the head dim here",
    )


def add_memory_flags(parser: Parser, *, ratio_type: FlagType, chunks_type: FlagType = int) -> None:
    """Add ``--usp-recompute``, ``--usp-offload-ratio`` and ``--usp-loss-chunks`` to a parser.

    Args:
        ratio_type, chunks_type: argparse types of the last two.
    """
    add_recompute_flag(parser)
    parser.add_argument(
        "--usp-offload-ratio",
        type=ratio_type,
        default=0.0,
        metavar="R",
        help="fraction, 0 to 1, of what layers save for backward that is offloaded to host memory; "
        f"{AUTO}: the least with which the model fits by the planner's formulas",
    )
    parser.add_argument(
        "--usp-loss-chunks",
        type=chunks_type,
        default=0,
        metavar="N",
        help="compute the loss in N chunks of the tokens and never hold all logits; 0: in one",
    )


def add_mlp_chunks_flag(parser: Parser, *, chunks_type: FlagType = int) -> None:
    """Add ``--usp-mlp-chunks`` to a program's parser."""
    parser.add_argument(
        "--usp-mlp-chunks",
        type=chunks_type,
        default=0,
        metavar="N",
        help="compute each layer's MLP in N chunks of a rank's tokens and again in backward, so "
        "that its wide tensors never exist for all tokens; 0: in one, saved for backward",
    )


def add_states_flag(parser: Parser) -> None:
    """Add ``--usp-states-on-host`` to a program's parser."""
    parser.add_argument(
        "--usp-states-on-host",
        action="store_true",
        help="optimizer states and fp32 master weights wait in host memory during forward and "
        "backward, and are copied back for the optimizer step",
    )


def add_checkpoint_layers_flag(parser: Parser, *, size_type: FlagType = int) -> None:
    """Add ``--usp-checkpoint-layers`` to a program's parser."""
    parser.add_argument(
        "--usp-checkpoint-layers",
        type=size_type,
        default=1,
        metavar="K",
        help="with --usp-recompute full or attention: save the input of one of K consecutive "
        "layers, and run the other K - 1 once more in backward for their inputs",
    )


def check_checkpoint_layers(args: Any) -> None:
    """Refuse groups of layers that are no checkpoints.

    Raises:
        ConfigError: fewer than 1 layer, or another ``--usp-recompute`` than ``full`` and
            ``attention``.
    """
    size = args.usp_checkpoint_layers
    if size < 1:
        raise ConfigError(f"--usp-checkpoint-layers {size} must be 1 or more")
    if size > 1 and args.usp_recompute not in ("full", "attention"):
        raise ConfigError(
            f"--usp-checkpoint-layers {size} with --usp-recompute {args.usp_recompute}: no layer's "
            "input is saved for a checkpoint. Use --usp-recompute full, or attention"
        )


def check_mlp_chunks(args: Any, layout: TokenLayout) -> None:
    """Refuse more chunks of the MLP than a rank has tokens.

    Args:
        layout: of one sequence.

    Raises:
        ConfigError: with the numbers; also for a negative number.
    """
    chunks, tokens = args.usp_mlp_chunks, min(map(layout.length, range(layout.degree)))
    if not 0 <= chunks <= tokens:
        raise ConfigError(
            f"--usp-mlp-chunks {chunks}: a rank has {tokens} of a sequence's {layout.seq_len} "
            f"tokens; use 0 to {tokens} chunks"
        )


def add_recompute_flag(parser: Parser) -> None:
    """Add ``--usp-recompute`` to a program's parser."""
    parser.add_argument(
        "--usp-recompute",
        choices=framework_caps("megatron-deepspeed").recompute,
        default="none",
        help="what each layer computes again in backward: nothing, norms and activation functions "
        "(gemm-last), all but attention and its exchanges (attention), or all (full)",
    )


def add_report_flag(parser: Parser, *, step_type: FlagType = int) -> None:
    """Add ``--usp-report-communication`` to a program's parser."""
    parser.add_argument(
        "--usp-report-communication",
        type=step_type,
        metavar="STEP",
        help="trace this step, counted from 1, and report its communication: bytes, time, and how "
        "much of it no kernel hides",
    )


def check_report_flag(args: Any) -> None:
    """Refuse a step that is never trained, and a second profiler.

    Raises:
        ConfigError: the step is below 1 or above ``--train-iters``; or the program's own profiler
            is on.
    """
    step, last = args.usp_report_communication, args.train_iters
    if step is not None and (step < 1 or (last is not None and step > last)):
        raise ConfigError(
            f"--usp-report-communication {step} is no step of 1 to --train-iters {last}; steps are "
            "counted from 1"
        )
    if step is not None and getattr(args, "profile", None):
        raise ConfigError(
            "--profile and --usp-report-communication both need the profiler, of which there is "
            "one: leave one of them out"
        )


def check_cluster_flag(args: Any) -> None:
    """Refuse a cluster that nothing would read.

    Raises:
        ConfigError: ``--usp-cluster`` without ``--ulysses-degree auto``.
    """
    if args.usp_cluster and args.ulysses_degree != AUTO:
        raise ConfigError(
            f"--usp-cluster {args.usp_cluster} is for --ulysses-degree {AUTO}; leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One program's arguments as the planner and the layers read them.

    Args:
        args: validated arguments, with Megatron-DeepSpeed's names.
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
        """The planner's :class:`ModelShape` of the program's arguments."""
        args = self.args
        vocab = getattr(args, "padded_vocab_size", None) or args.vocab_size or self.default_vocab
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
        again = getattr(args, "usp_projection_overlap", "off") == "recompute" and sp > 1
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
            mlp_chunks=getattr(args, "usp_mlp_chunks", 0),
            projection_overlap="recompute" if again else "off",
            checkpoint_layers=getattr(args, "usp_checkpoint_layers", 1),
            states_on_host=getattr(args, "usp_states_on_host", False),
            param_bytes=2 if args.bf16 or getattr(args, "fp16", False) else 4,
        )

    def choose_degree(self, *, on_gpu: bool) -> Choice:
        """The Ulysses degree that ``auto`` stands for, with the planner's reasons.

        Raises:
            ConfigError: the planner knows no such cluster, or finds that no degree fits.
        """
        from ds_usp.training import this_cluster

        # "auto" is solved when the degrees are known; a ratio that the user gave stays.
        solves_ratio = self.args.usp_offload_ratio == AUTO
        config = replace(self.parallel_config(), ulysses=1, ring=1)
        caps = framework_caps(self.framework)
        caps = replace(caps, offloads=solves_ratio, recompute=(config.recompute,))
        return choose_ulysses(
            this_cluster(self.args.usp_cluster, self.world_size, on_gpu=on_gpu),
            self.workload(),
            caps,
            config,
            self.world_size,
        )

    def layer_memory(self, device: torch.device, **options: Any) -> LayerMemory:
        """The memory policy of the flags, for all layers of this rank.

        Args:
            options: further arguments of ``LayerMemory``, such as ``checkpoint``.

        Raises:
            ConfigError: the offload ratio ``auto`` where no GPU sets a budget, or nothing fits.
        """
        from ds_usp.memory import LayerMemory, Offload
        from ds_usp.training import solved_ratio

        ratio = solved_ratio(
            self.args.usp_offload_ratio, self.workload(), self.parallel_config(), device
        )
        return LayerMemory(
            self.args.usp_recompute,
            Offload(ratio, device),
            checkpoint_layers=self.args.usp_checkpoint_layers,
            **options,
        )
