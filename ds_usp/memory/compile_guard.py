"""Functions that ``torch.compile`` must not trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def disable_in_compile(reason: str) -> Callable[[Function], Function]:
    """``torch.compiler.disable``, with the reason of a graph break or an error of ``fullgraph``."""

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(
            torch.compiler.disable
        ).parameters  # torch 2.6 has no reasons
        options = {"reason": f"ds_usp: {reason}"} if "reason" in parameters else {}
        disabled: Function = torch.compiler.disable(function, **options)
        return disabled

    return decorate
