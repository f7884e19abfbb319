"""Warnings to the user: each line once a process, on one rank; renamed keywords."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def warn_once(text: str, *, rank: int) -> None:
    """Log a line as a warning of the logger ``ds_usp``, the first time that rank 0 passes it.

    Args:
        text: the line.
        rank: of the caller among those that pass the same line.
    """
    if rank == 0:
        _emit_once(text)


@cache
def _emit_once(text: str) -> None:
    logging.getLogger("ds_usp").warning("%s", text)


def renamed_keywords(**new_names: str) -> Callable[[FunctionT], FunctionT]:
    """Decorator: the function takes these keywords by their old names too, with a
    DeprecationWarning."""

    def decorate(function: FunctionT) -> FunctionT:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in new_names.keys() & kwargs.keys():
                text = f"{function.__name__}({old}=) is now {new_names[old]}="
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new_names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(FunctionT, call)

    return decorate
