"""Validates combinations of flags and derives the values that depend on them.

Ranges of single flags are declared with the flags. Torch is imported only for ZeRO stages other
than 1: all other bad flags are refused before.
"""

from __future__ import annotations

from argparse import Namespace

from ds_usp import ConfigError, Degrees, TokenLayout
from ds_usp.planner import AUTO
from megatron_patches.flags import (
    CHECKPOINT_LAYERS_REFUSALS,
    SHARED_REFUSALS,
    check_mlp_chunks,
)
from megatron_patches.refusals import refuse
from usp_trainer import environment, run_files, transformer_impl


def model_parallel_size(args: Namespace) -> int:
    """Ranks of one data-parallel replica: tensor x sequence x pipeline."""
    return (
        args.tensor_model_parallel_size
        * args.ds_sequence_parallel_size
        * args.pipeline_model_parallel_size
    )


def check_start(args: Namespace) -> None:
    """All checks of flags, on every rank of a launcher, before any process group or folder is
    created. Files are checked on rank 0 only.

    Raises:
        ConfigError, LayoutError: as :func:`validate_and_derive`, and for invalid variables of the
            launcher.
        DataError, CheckpointError: a file does not exist.
    """
    if environment.under_launcher():
        if args.quickstart:
            raise ConfigError("--quickstart starts its own ranks: run it without a launcher")
        if args.num_processes:
            raise ConfigError("--num-processes is set by the launcher: leave it out under one")
    refuse(SHARED_REFUSALS, args)
    if args.ulysses_degree == AUTO and args.window_size:
        raise ConfigError(
            f"--ulysses-degree {AUTO} plans attention over all tokens, and --window-size is "
            f"{args.window_size}: give a degree"
        )
    # Without a launcher torch counts the GPUs later; until then assume the ranks of one replica.
    ranks = environment.world_size() or args.num_processes or model_parallel_size(args)
    trial = Namespace(**vars(args))
    if args.ulysses_degree == AUTO:
        trial.ulysses_degree = None
    validate_flags(trial, ranks)
    if args.zero_stage != 1:  # ZeRO-1 supports everything; the check of the others imports torch
        _check_zero_stage(args)
    environment.check()
    if environment.rank() == 0:
        run_files.check_files(args)
        run_files.check_packages(args)


def validate_and_derive(args: Namespace, world_size: int) -> Namespace:
    """Validate the flags and fill in what follows from them and from the number of ranks.

    Adds ``ring_degree``, ``data_parallel_size`` and ``accumulation_steps``.

    Raises:
        ConfigError, LayoutError: the flags contradict each other; the message has the fix.
    """
    args = Namespace(**vars(args))
    validate_flags(args, world_size)
    _check_zero_stage(args)
    return args


def _check_zero_stage(args: Namespace) -> None:
    from ds_usp.training import check_zero_stage

    check_zero_stage(args.zero_stage, stages=args.pipeline_model_parallel_size, bf16=args.bf16)


def validate_flags(args: Namespace, world_size: int) -> None:
    """Validate the flags and fill in what follows from them, in place, without torch."""
    _check_model(args)
    _check_degrees(args, world_size)
    _check_batch(args)
    _check_documents(args)
    refuse(CHECKPOINT_LAYERS_REFUSALS, args)
    _check_states(args)
    transformer_impl.check(args)


def _check_degrees(args: Namespace, world_size: int) -> None:
    """Refuse degrees that do not fit ranks, heads, FFN or sequence length, and more chunks of the
    MLP than a rank has tokens. Sets ``ulysses_degree`` (by default the largest that fits),
    ``ring_degree`` and ``data_parallel_size``."""
    degrees = Degrees(
        sp=args.ds_sequence_parallel_size,
        ulysses=args.ulysses_degree,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        world=world_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_key_value_heads,
        ffn=args.ffn_hidden_size,
    ).check(Degrees.FLAGS)
    args.ulysses_degree = args.ulysses_degree or degrees.valid_ulysses()[0]
    args.ring_degree = degrees.sp // args.ulysses_degree
    args.data_parallel_size = degrees.dp
    layout = TokenLayout(
        args.usp_layout, seq_len=args.seq_length, ulysses=args.ulysses_degree, ring=args.ring_degree
    )
    check_mlp_chunks(args, min(map(layout.length, range(layout.degree))))


def _check_documents(args: Namespace) -> None:
    resets = args.reset_attention_mask or args.reset_position_ids
    if resets and args.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "--reset-attention-mask and --reset-position-ids are not supported with a pipeline: "
            "stages exchange hidden states only. Use --pipeline-model-parallel-size 1 and more "
            "sequence parallelism"
        )
    rotary = args.use_rotary_position_embeddings
    if args.reset_position_ids and rotary and not args.reset_attention_mask:
        raise ConfigError(
            "--reset-position-ids with rotary positions changes the attention to earlier "
            "documents. Add --reset-attention-mask, or leave it out"
        )


def _check_states(args: Namespace) -> None:
    has_states = args.optimizer != "sgd" or args.sgd_momentum
    if args.usp_states_on_host and args.zero_stage == 0 and not has_states:
        raise ConfigError(
            "--usp-states-on-host: SGD without momentum has no states, and --zero-stage 0 no "
            "master weights. Leave it out"
        )


def _check_batch(args: Namespace) -> None:
    """Set the default global batch size and the number of micro batches per step and replica."""
    one_pass = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or one_pass
    if args.global_batch_size % one_pass:
        suggested = max(one_pass, args.global_batch_size // one_pass * one_pass)
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel replicas = "
            f"{one_pass}. Use --global-batch-size {suggested}"
        )
    args.accumulation_steps = args.global_batch_size // one_pass


def _check_model(args: Namespace) -> None:
    """Fill in the model's default sizes in ``args``, then refuse sizes that do not fit together."""
    width = 8 * args.hidden_size // 3 // 64 * 64 if args.swiglu else 4 * args.hidden_size
    args.ffn_hidden_size = args.ffn_hidden_size or max(width, 64)
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    heads, stages = args.num_attention_heads, args.pipeline_model_parallel_size
    args.num_key_value_heads = args.num_key_value_heads or heads
    if args.hidden_size % heads:
        raise ConfigError(
            f"--num-attention-heads {heads} must divide --hidden-size {args.hidden_size}"
        )
    if args.use_rotary_position_embeddings and args.hidden_size // heads % 2:
        raise ConfigError(
            f"rotary position embeddings need an even head dimension, --hidden-size "
            f"{args.hidden_size} over {heads} heads gives {args.hidden_size // heads}"
        )
    if args.num_layers < stages:
        raise ConfigError(f"--num-layers {args.num_layers} cannot fill {stages} pipeline stages")
    if args.max_position_embeddings < args.seq_length:
        raise ConfigError(
            f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length "
            f"{args.seq_length}"
        )
    if args.min_lr > args.lr:
        raise ConfigError(
            f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: the learning rate decays from "
            f"--lr to --min-lr. Use --min-lr {args.lr / 10:g}"
        )
    if args.attention_dropout or args.hidden_dropout:
        raise ConfigError(
            f"--attention-dropout {args.attention_dropout} --hidden-dropout {args.hidden_dropout}: "
            "dropout over sharded sequences would differ from one rank's. Use 0 for both"
        )
