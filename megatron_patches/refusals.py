"""Options of a framework that are refused while a program checks its arguments: rows of a table.

Each rank checks by itself, and all raise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.settings import setting


@dataclass(frozen=True)
class Refusal:
    """One refused option.

    Args:
        applies: whether to refuse the parsed arguments, and what else :func:`refuse` is given.
        reason: why; ``{name}`` stands for an argument's value, in ``fix`` too.
        fix: what works instead; empty where the reason says it.
    """

    applies: Callable[..., Any]
    reason: str
    fix: str = ""


def refuse(rows: Iterable[Refusal], args: Any, *more: Any) -> None:
    """ConfigError of the first row that applies to parsed arguments."""
    for row in rows:
        if row.applies(args, *more):
            text = f"{row.reason}. {row.fix}" if row.fix else row.reason
            raise ConfigError(text.format(**vars(args)))


def refuse_settings(tables: Mapping[str, Iterable[Refusal]], args: Any) -> None:
    """:func:`refuse` what does not go together with settings that are used; ``tables`` are by name
    of a ``ds_usp.settings.Setting``, not of its flag."""
    for name, rows in tables.items():
        if setting(name).is_used(setting(name).value_in(args)):
            refuse(rows, args)


def apart(reason: str, others: Mapping[str, Callable[..., object]]) -> tuple[Refusal, ...]:
    """Rows of options that do not go together with a setting.

    Args:
        reason: ``%s`` stands for the option, ``{name}`` for an argument.
        others: by option, a function of the arguments: whether it is set.
    """
    return tuple(Refusal(is_set, reason % option) for option, is_set in others.items())
