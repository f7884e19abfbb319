"""A FlashAttention function, called by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ds_usp.kernels.varlen import Band

_OF_A_TILE = ("softmax_scale", "causal", "window_size_left", "window_size_right")


class NamedCall:
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

    def __init__(self, function: Callable[..., Any], *needs: str) -> None:
        # An operator has the signature (*args, **kwargs) and keeps the function that it was.
        plain = getattr(function, "_init_fn", function)
        parameters = inspect.signature(plain).parameters
        self._function = function
        self._is_causal = "is_causal" in parameters
        self._window_pair = "window_size" in parameters
        names = {name: name for name in (*_OF_A_TILE, *needs)}
        if self._is_causal:
            names["causal"] = "is_causal"
        if self._window_pair:
            names["window_size_left"] = names["window_size_right"] = "window_size"
        missing = [need for need, name in names.items() if name not in parameters]
        if missing:
            raise ImportError(
                f"{plain.__module__}.{plain.__qualname__} of this version has no parameter "
                f"{', '.join(missing)}"
            )
        self._unused = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
        }

    def __call__(self, tile: Band, scale: float, **given: Any) -> Any:
        """What the function returns."""
        left, right = (-1 if bound is None else bound for bound in tile.window)
        given["softmax_scale"] = scale
        given["is_causal" if self._is_causal else "causal"] = tile.is_causal
        if self._window_pair:
            given["window_size"] = (left, right)
        else:
            given.update(window_size_left=left, window_size_right=right)
        return self._function(**{**self._unused, **given})
