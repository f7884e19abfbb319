"""Options of a framework that are refused before any process group exists: rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ds_usp.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """One refused option.

    Args:
        applies: of the framework's arguments, and of what else :func:`refuse` is given.
        reason: why; ``{name}`` stands for an argument.
        fix: what works instead.
    """

    applies: Callable[..., Any]
    reason: str
    fix: str


def refuse(rows: Iterable[Refusal], args: Any, *more: Any) -> None:
    """Refuse options of parsed arguments.

    Raises:
        ConfigError: the first row that applies.
    """
    for row in rows:
        if row.applies(args, *more):
            raise ConfigError(f"{row.reason}. {row.fix}".format(**vars(args)))
