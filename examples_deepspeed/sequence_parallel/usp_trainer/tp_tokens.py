"""``--usp-tp-shard-tokens``: tokens sharded over the tensor-parallel ranks between linear layers;
needs no torch until used."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from ds_usp import ConfigError

if TYPE_CHECKING:
    import torch

    from ds_usp import TokenLayout
    from ds_usp.training import ParallelGroups, TensorParallelComm

ON, OFF = "on", "off"
CHOICES = (OFF, ON)


def check(args: Namespace, layout: TokenLayout) -> None:
    """Refuse ``on`` where tokens cannot be sharded, and what does not fit together with it.

    Raises:
        ConfigError: with the reason and the fix.
    """
    if args.usp_tp_shard_tokens != ON:
        return
    if reason := _obstacle(args, layout):
        raise ConfigError(f"--usp-tp-shard-tokens {ON} {reason}")


def _obstacle(args: Namespace, layout: TokenLayout) -> str:
    """Why tokens cannot be sharded over the tensor-parallel ranks, and the fix; "" if they can."""
    ranks, otherwise = args.tensor_model_parallel_size, f"or --usp-tp-shard-tokens {OFF}"
    if ranks == 1:
        return f"needs --tensor-model-parallel-size 2 or more, which is 1: raise it, {otherwise}"
    tokens = sorted({layout.length(rank) for rank in range(layout.degree)})
    if any(n % ranks for n in tokens):
        step = ranks * layout.degree
        return (
            f"shards the {' or '.join(map(str, tokens))} tokens of a sequence-parallel rank over "
            f"--tensor-model-parallel-size {ranks}, which does not divide them. Use --seq-length "
            f"{-(-args.seq_length // step) * step}, {otherwise}"
        )
    if args.usp_mlp_chunks > tokens[0] // ranks:
        return (
            f"leaves {tokens[0] // ranks} tokens of a sequence to a tensor-parallel rank: use "
            f"--usp-mlp-chunks of 0 to that, not {args.usp_mlp_chunks}, {otherwise}"
        )
    return ""


def communication(
    args: Namespace, layout: TokenLayout, groups: ParallelGroups, device: torch.device
) -> TensorParallelComm | None:
    """The collectives of the linear layers, or None without sharded tokens. Collective."""
    from ds_usp.training import TensorParallelComm

    if args.usp_tp_shard_tokens == OFF:
        return None
    comm = TensorParallelComm.build(groups.tp, device)
    comm.say_if_plain()
    return comm
