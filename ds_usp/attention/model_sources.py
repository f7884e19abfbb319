"""Reads from the code of a model's modules how they are computed, once where a model is checked:
``compat/models_on_shards.py`` and ``integrations/transformers/refusals.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from torch import nn

# Attention modules that count their tokens in some layers or configurations only.
_WHEN_COUNTED: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "Llama4TextAttention": lambda m: m.attn_temperature_tuning and not m.use_rope,
        "MiniMaxM3VLAttention": lambda m: m.indexer is not None,
    }
)


def counts_tokens(module: nn.Module) -> bool:
    """Whether an attention module makes positions of its own from the number of its tokens, which
    are wrong where it has a shard."""
    kind: Any = type(module)
    if not hasattr(module, "layer_idx") or "arange(" not in source_of_forward(kind):
        return False
    uses_it = _WHEN_COUNTED.get(kind.__name__)
    return uses_it is None or uses_it(module)


@lru_cache(maxsize=1024)
def source_of_forward(kind: Any) -> str:
    """The code of a class's forward pass; empty where it has none in a file."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):  # made at run time
        return ""
