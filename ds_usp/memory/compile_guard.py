"""Functions that ``torch.compile`` must not trace."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def disable_in_compile(reason: str) -> Callable[[Function], Function]:
    """``torch.compiler.disable``, with the reason of a graph break or an error of ``fullgraph``."""
    return torch.compiler.disable(reason=f"ds_usp: {reason}")
