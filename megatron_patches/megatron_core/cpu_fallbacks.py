"""megatron-core on machines without a GPU: its calls that name CUDA.

Each function gets the original, and calls it where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_usp


def current_device(original: Callable[[], int]) -> int | torch.device:
    """The device on which megatron-core allocates."""
    return original() if torch.cuda.is_available() else torch.device("cpu")


def rotary_of_this_rank(
    original: Callable[..., Tensor], pos_emb: Tensor, seq_dim: int, cp_group: dist.ProcessGroup
) -> Tensor:
    """Rotary angles of this context-parallel rank's tokens, in megatron-core's order."""
    if torch.cuda.is_available():
        return original(pos_emb, seq_dim, cp_group)
    layout = ds_usp.TokenLayout("context_parallel", pos_emb.shape[seq_dim], cp_group.size())
    angles: Tensor = layout.shard(pos_emb, seq_dim, cp_group.rank())
    return angles


def get_random_state(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The state of CUDA's generator; empty without a GPU, where the CPU's is the only one."""
    return original(*args, **kwargs) if torch.cuda.is_available() else torch.empty(0)


def set_random_state(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Restore a state of :func:`get_random_state`."""
    if torch.cuda.is_available():
        original(*args, **kwargs)


def causal_mask(original: Callable[[int], Tensor], sq: int) -> Tensor:
    """True where a query must not look, ``[sq, sq]``."""
    if torch.cuda.is_available():
        return original(sq)
    return torch.ones(sq, sq, dtype=torch.bool).triu(diagonal=1)
