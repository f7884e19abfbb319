"""``--usp-tp-overlap``: tensor-parallel communication under products; needs no torch until used."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from ds_usp import ConfigError, TokenLayout
from usp_trainer import transformer_impl

if TYPE_CHECKING:
    import torch

    from ds_usp.training import ParallelGroups, TensorParallelComm

AUTO, ON, OFF = "auto", "on", "off"
CHOICES = (AUTO, ON, OFF)
# From these sizes on "auto" takes it: below, a layer has more launches than there is to hide.
AUTO_HIDDEN = 2048
AUTO_TOKENS = 4096  # of a rank, all micro-batch sequences together


def check(args: Namespace, layout: TokenLayout) -> None:
    """Refuse ``on`` where tokens cannot be sharded, and what does not fit together with it.

    Raises:
        ConfigError: with the reason and the fix.
    """
    if args.usp_tp_overlap != ON:
        return
    if reason := _obstacle(args, layout):
        raise ConfigError(f"--usp-tp-overlap {ON} {reason}")


def _obstacle(args: Namespace, layout: TokenLayout) -> str:
    """Why tokens cannot be sharded over the tensor-parallel ranks, and the fix; "" if they can."""
    ranks, otherwise = args.tensor_model_parallel_size, f"or --usp-tp-overlap {OFF}"
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


def is_worth_it(args: Namespace, layout: TokenLayout) -> bool:
    """Whether ``auto`` wants it: sizes from which the pieces of a product fill a GPU."""
    return (
        args.device == "cuda"
        and args.bf16
        and args.transformer_impl == transformer_impl.LOCAL
        and args.hidden_size >= AUTO_HIDDEN
        and layout.length(0) * args.micro_batch_size >= AUTO_TOKENS
        and not _obstacle(args, layout)
    )


def communication(
    args: Namespace, layout: TokenLayout, groups: ParallelGroups, device: torch.device
) -> TensorParallelComm | None:
    """The collectives of the linear layers, or None without sharded tokens. Collective.

    ``auto`` takes it only if the fused operators can be used; ``on`` takes plain collectives
    otherwise, and says so once.

    Args:
        args: validated, with ``transformer_impl`` chosen.
    """
    from ds_usp.training import TensorParallelComm

    if args.usp_tp_overlap == OFF or (
        args.usp_tp_overlap == AUTO and not is_worth_it(args, layout)
    ):
        return None
    comm = TensorParallelComm.build(groups.tp, device)
    if args.usp_tp_overlap == AUTO:
        return None if comm.plain_reason else comm
    comm.say_if_plain()
    return comm
