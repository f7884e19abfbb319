"""A FlashAttention function, called by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class NamedCall:
    """One face for the versions of a function whose parameters moved over the years.

    It is called with ``causal``, ``window_size_left`` and ``window_size_right`` also where the
    function says ``is_causal`` or takes the window as a pair. What it wants besides the arguments
    that are given is None: these libraries mean by it that a feature is not used.

    Args:
        function: a function or an operator that torch made of one.
        needs: the arguments that it will be given.

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
        names = {name: name for name in needs}
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
            if parameter.default is parameter.empty and name not in names.values()
        }

    def __call__(self, **given: Any) -> Any:
        """What the function returns."""
        if self._is_causal:
            given["is_causal"] = given.pop("causal")
        if self._window_pair:
            left, right = given.pop("window_size_left"), given.pop("window_size_right")
            given["window_size"] = (left, right)
        return self._function(**self._unused, **given)
