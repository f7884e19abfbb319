"""Misspelt and missing keywords of public functions, explained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch

from ds_usp.errors import ConfigError

# As a user writes them, in messages.
MASKS = (
    "MaskSpec.causal(), .full(), .window(left, right), .prefix_lm(prefix), .tree(segments) or "
    ".rectangles(rectangles, seq_len)"
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
# Keywords without a default that a user would suggest.
_REQUIRED = MappingProxyType(
    {
        "mesh": "the ranks, SequenceMesh.from_group(group, ulysses_degree=...) or .single()",
        "layout": "which tokens a rank holds, mesh.layout(kind, seq_len) or a kind ('zigzag')",
        "mask": f"who sees whom, {MASKS}",
    }
)


def explain_keywords(call: FunctionT) -> FunctionT:
    """Decorator of a function, or of a class for its constructor: a misspelt or missing keyword is
    a ConfigError that says what was meant, on every rank of ``mesh=``."""
    if isinstance(call, type):
        call.__init__ = explain_keywords(call.__init__)  # type: ignore[misc]
        return call

    @wraps(call)
    def explained(*args: Any, **kwargs: Any) -> object:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except TypeError:
            error = keyword_error(call, args, kwargs)
            if error is None:
                raise
        if hasattr(kwargs.get("mesh"), "consistency"):
            kwargs["mesh"].consistency.check_call("", error=error)
        raise error

    return cast(FunctionT, explained)


def keyword_error(
    call: Callable[..., object], args: Sequence[object], keywords: Mapping[str, object]
) -> ConfigError | None:
    """Return the error of a call whose keywords are wrong; None if Python's TypeError says as much,
    or if nothing is wrong."""
    signature, name = inspect.signature(call), call.__qualname__.removesuffix(".__init__")
    accepted = [key for key in signature.parameters if key != "self"]
    unknown = [key for key in keywords if key not in accepted]
    if unknown:
        near = get_close_matches(unknown[0], accepted, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(accepted)}"
        return ConfigError(f"{name} has no argument {unknown[0]!r}; {meant}")
    try:
        bound = signature.bind_partial(*args, **keywords).arguments
    except TypeError:
        return None
    empty, parameters = inspect.Parameter.empty, signature.parameters
    missing = [key for key in accepted if key not in bound and parameters[key].default is empty]
    if not missing or any(key not in _REQUIRED for key in missing):
        return None
    return ConfigError(f"{name} needs " + "; ".join(f"{key}=: {_REQUIRED[key]}" for key in missing))
