"""Types of dataclass fields that say which values they take: one rule and one message for each.

A field annotated with one of these names (they are plain numbers to a type checker), or made by
:func:`choice`, is checked by :func:`violations`: JSON files, command-line flags and calls alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from functools import lru_cache
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from ds_usp.errors import ConfigError

Positive: TypeAlias = float
NonNegative: TypeAlias = float
Fraction: TypeAlias = float
LaunchSeconds: TypeAlias = float
Count: TypeAlias = int
CountOrZero: TypeAlias = int
ZeroStage: TypeAlias = int
Collective: TypeAlias = str

_COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p")

_Rule = tuple[Callable[[Any], bool], str]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "Positive": (lambda x: _is_number(x) and 0 < x < inf, "a finite number above 0"),
        "NonNegative": (lambda x: _is_number(x) and 0 <= x < inf, "a finite number, 0 or more"),
        "Fraction": (lambda x: _is_number(x) and 0 <= x <= 1, "a number between 0 and 1"),
        "LaunchSeconds": (
            lambda x: _is_number(x) and 0 <= x < inf,
            "a finite number above 0, or 0: not known",
        ),
        "Count": (lambda x: _is_int(x) and x >= 1, "a whole number of 1 or more"),
        "CountOrZero": (lambda x: _is_int(x) and x >= 0, "a whole number of 0 or more"),
        "ZeroStage": (lambda x: _is_int(x) and 0 <= x <= 3, "0, 1, 2 or 3"),
        "Collective": (lambda x: x in _COLLECTIVES, f"one of {', '.join(_COLLECTIVES)}"),
        "bool": (lambda x: isinstance(x, bool), "true or false"),
    }
)


def choice(values: Sequence[str], default: str) -> Any:
    """A dataclass field that takes one of these texts."""
    return field(default=default, metadata={"choices": tuple(values)})


def violations(record: Any, *, flags: bool = False) -> Iterator[str]:
    """``field=value must be ...`` for each field whose value its type does not take.

    Args:
        flags: name the fields as command-line flags, ``--field value must be ...``.
    """
    for name, (accepts, wanted) in _rules_of(cast(Hashable, type(record))):
        value = getattr(record, name)
        if not accepts(value):
            named = f"--{name.replace('_', '-')} {value}" if flags else f"{name}={value!r}"
            yield f"{named} must be {wanted}"


@lru_cache
def _rules_of(kind: Hashable) -> tuple[tuple[str, _Rule], ...]:
    rules = ((f.name, _rule(f)) for f in fields(cast(Any, kind)))
    return tuple((name, rule) for name, rule in rules if rule)


def _rule(f: Field[Any]) -> _Rule | None:
    """The check of a field by its type's name or ``choices``, and what it wants; None: no check."""
    kind, choices = str(f.type), f.metadata.get("choices")
    rule = _RULES.get(kind.removesuffix(" | None"))
    if choices:
        rule = (lambda x: x in choices), f"one of {', '.join(map(str, choices))}"
    if rule and kind.endswith(" | None"):
        accepts, wanted = rule
        return (lambda x: x is None or accepts(x)), wanted
    return rule


def read_json(path: Path, kind: str) -> Any:
    """The content of a user's JSON file.

    Raises:
        ConfigError: a file that cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
