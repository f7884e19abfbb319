"""Functions of single tokens, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError


def in_chunks(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chunks: int, dim: int = 0
) -> torch.Tensor:
    """``run(x)`` in parts along ``dim``, each computed again in its backward pass: an MLP whose
    wide tensors never exist for all tokens.

    Args:
        run: treats every place along ``dim`` alone, as an MLP treats tokens.
        chunks: parts; as equal as can be.

    Raises:
        ConfigError: more parts than places, or none.
    """
    if not 1 <= chunks <= x.shape[dim]:
        raise ConfigError(
            f"chunks={chunks} must be from 1 to the {x.shape[dim]} places along dim {dim}"
        )
    if chunks == 1:
        return run(x)
    parts = torch.tensor_split(x, chunks, dim)
    return torch.cat([checkpoint(run, part, use_reentrant=False) for part in parts], dim)
