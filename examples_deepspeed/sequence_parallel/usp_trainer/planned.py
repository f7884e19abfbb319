"""``--ulysses-degree auto``: the planner is asked before anything else, on rank 0 for all."""

from __future__ import annotations

from argparse import Namespace

import torch

from ds_usp import ConfigError
from ds_usp.planner import (
    AUTO,
    Choice,
    ModelShape,
    Split,
    Workload,
    choose_ulysses,
    cluster_of,
    engine,
)
from usp_trainer.checks import check
from usp_trainer.launch import from_rank0

BYTE_VOCABULARY = 257  # of text files; encoded data says its own with --vocab-size


def decide(args: Namespace, world_size: int) -> tuple[Namespace, tuple[str, ...]]:
    """:func:`check`, after ``auto`` has become a number. Collective.

    Returns:
        The checked arguments, and why the planner chose so, in lines; none without ``auto``.

    Raises:
        ConfigError, LayoutError: on every rank; also where the planner finds that nothing fits.
    """
    if args.ulysses_degree != AUTO:
        if args.usp_cluster:
            raise ConfigError(
                f"--usp-cluster {args.usp_cluster} is for --ulysses-degree auto; leave it out"
            )
        return check(args, world_size), ()
    trial = check(_with_ulysses(args, None), world_size)
    choice: Choice = from_rank0(lambda: choose(trial, world_size))
    return check(_with_ulysses(args, choice.ulysses), world_size), choice.why


def _with_ulysses(args: Namespace, degree: int | None) -> Namespace:
    return Namespace(**{**vars(args), "ulysses_degree": degree})


def choose(args: Namespace, world_size: int) -> Choice:
    """What the planner says of a run whose other flags are checked."""
    on_gpu = args.device == "cuda"
    gpus_per_node = min(world_size, torch.cuda.device_count()) if on_gpu else world_size
    device, memory = "", 0.0
    if on_gpu:
        device = torch.cuda.get_device_name()
        memory = float(torch.cuda.get_device_properties().total_memory)
    cluster = cluster_of(args.usp_cluster, device, gpus_per_node, memory)
    split = Split(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=args.data_parallel_size,
        zero=args.zero_stage,
        micro_batch=args.micro_batch_size,
        param_bytes=2 if args.bf16 else 4,
    )
    work = Workload(model_shape(args), args.seq_length, args.global_batch_size)
    return choose_ulysses(cluster, work, engine("megatron-deepspeed"), split, world_size)


def model_shape(args: Namespace) -> ModelShape:
    """The trainer's model as the planner knows it."""
    return ModelShape(
        name="this model",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_key_value_heads,
        vocab=args.vocab_size or BYTE_VOCABULARY,
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        learned_positions=not args.use_rotary_position_embeddings,
        biases=not args.disable_bias_linear,
    )
