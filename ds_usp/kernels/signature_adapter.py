"""A FlashAttention function, called by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ds_usp.kernels.varlen import TileOrCall

_TILE_ARGS = ("softmax_scale", "causal", "window_size_left", "window_size_right")


class SignatureAdapter:
    """One face for the versions of a function whose parameters moved over the years.

    It is called with a tile or a call of several, which becomes its causal flag and its window
    under the names that it has for them, and with the scale of the scores. What it wants besides
    the arguments that are given is None: these libraries mean by it that a feature is not used.

    Args:
        function: a function or an operator that torch made of one.
        needs: the arguments that it may be given besides.

    Raises:
        ImportError: the function lacks some of them.
    """

    def __init__(self, function: Callable[..., Any], *required: str) -> None:
        # An operator has the signature (*args, **kwargs) and keeps the function that it was.
        source = getattr(function, "_init_fn", function)
        parameters = inspect.signature(source).parameters
        self._function = function
        self._is_causal = "is_causal" in parameters
        self._window_pair = "window_size" in parameters
        names = {name: name for name in (*_TILE_ARGS, *required)}
        if self._is_causal:
            names["causal"] = "is_causal"
        if self._window_pair:
            names["window_size_left"] = names["window_size_right"] = "window_size"
        missing = [arg for arg, name in names.items() if name not in parameters]
        if missing:
            raise ImportError(
                f"{source.__module__}.{source.__qualname__} of this version has no parameter "
                f"{', '.join(missing)}"
            )
        self._none_defaults = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
        }

    def __call__(self, tile: TileOrCall, scale: float, **kwargs: Any) -> Any:
        """What the function returns."""
        left, right = (-1 if bound is None else bound for bound in tile.window)
        kwargs["softmax_scale"] = scale
        kwargs["is_causal" if self._is_causal else "causal"] = tile.is_causal
        if self._window_pair:
            kwargs["window_size"] = (left, right)
        else:
            kwargs.update(window_size_left=left, window_size_right=right)
        return self._function(**{**self._none_defaults, **kwargs})
