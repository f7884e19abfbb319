"""What the trainer's layers keep for their backward pass, by flags."""

from __future__ import annotations

import argparse
from argparse import Namespace

import torch

from ds_usp import ConfigError
from ds_usp.memory import RECOMPUTE, LayerMemory, Offload


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags, of the same names and meanings as in the patched Megatron-DeepSpeed."""
    group = parser.add_argument_group("memory", "what a layer does not keep for its backward pass")
    add = group.add_argument
    add(
        "--usp-recompute",
        choices=RECOMPUTE,
        default="none",
        help="computed again in backward: nothing, norms and activation functions (gemm-last), all "
        "but attention and its exchanges (attention), or all (full)",
    )
    add(
        "--usp-offload-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="share, 0 to 1, of what layers keep that waits in host memory",
    )
    add(
        "--usp-loss-chunks",
        type=int,
        default=0,
        metavar="N",
        help="compute the loss in N parts of the tokens and never hold all logits; 0: at once",
    )


def check_flags(args: Namespace) -> None:
    """Refuse numbers out of range.

    Raises:
        ConfigError: the message names the flag.
    """
    if not 0 <= args.usp_offload_ratio <= 1:
        raise ConfigError(f"--usp-offload-ratio {args.usp_offload_ratio}: must be from 0 to 1")
    if args.usp_loss_chunks < 0:
        raise ConfigError(f"--usp-loss-chunks {args.usp_loss_chunks}: must be 0 or more")


def layer_memory(args: Namespace, device: torch.device) -> LayerMemory:
    """What the flags say, for all layers of this rank."""
    return LayerMemory(args.usp_recompute, Offload(args.usp_offload_ratio, device))
