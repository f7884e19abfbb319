"""megatron-core on machines without a GPU: every place where it asks for CUDA by name.

Each function gets the original, and leaves everything to it where a GPU is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_usp


def current_device(original: Callable[[], int]) -> int | torch.device:
    """The device that megatron-core makes its tensors on."""
    return original() if torch.cuda.is_available() else torch.device("cpu")


def rotary_of_this_rank(
    original: Callable[..., Tensor], pos_emb: Tensor, seq_dim: int, cp_group: dist.ProcessGroup
) -> Tensor:
    """The angles of the tokens that this context-parallel rank holds, in megatron-core's order."""
    if torch.cuda.is_available():
        return original(pos_emb, seq_dim, cp_group)
    layout = ds_usp.TokenLayout("context_parallel", pos_emb.shape[seq_dim], cp_group.size())
    angles: Tensor = layout.shard(pos_emb, seq_dim, cp_group.rank())
    return angles


def get_random_state(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The state of CUDA's generator; empty without a GPU, where the CPU's is the only one."""
    return original(*args, **kwargs) if torch.cuda.is_available() else torch.empty(0)


def set_random_state(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Put back what :func:`get_random_state` gave."""
    if torch.cuda.is_available():
        original(*args, **kwargs)


def causal_mask(original: Callable[[int], Tensor], sq: int) -> Tensor:
    """True where a query must not look, ``[sq, sq]``."""
    if torch.cuda.is_available():
        return original(sq)
    return torch.ones(sq, sq, dtype=torch.bool).triu(diagonal=1)
