"""Activation checkpoints of token-wise functions, one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError


def in_chunks(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chunks: int, dim: int = 0
) -> torch.Tensor:
    """``run(x)`` in chunks along ``dim``, each checkpointed: an MLP whose intermediate tensors
    never exist for all tokens.

    Args:
        run: computes every index along ``dim`` independently, as an MLP does tokens.
        chunks: how many, of sizes that differ by at most 1.

    Raises:
        ConfigError: fewer than 1, or more than ``x`` has indices along ``dim``.
    """
    if not 1 <= chunks <= x.shape[dim]:
        raise ConfigError(
            f"chunks={chunks} must be from 1 to the size of dim {dim}, {x.shape[dim]}"
        )
    if chunks == 1:
        return run(x)
    split = torch.tensor_split(x, chunks, dim)
    return torch.cat([checkpoint(run, chunk, use_reentrant=False) for chunk in split], dim)
