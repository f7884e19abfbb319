"""Flags of a command line as fields of dataclasses, and the checks of what fields take.

Each field made by :func:`flag` is a flag. ``ds-usp env`` and ``verify`` use the parser, too.
"""

from __future__ import annotations

import json
from argparse import (
    SUPPRESS,
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
)
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from functools import lru_cache
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar, cast

from ds_usp.errors import ConfigError
from ds_usp.settings import Choices, Integer, Switch, settings_of

_T = TypeVar("_T")

# What flags of several commands say or take.
BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
DTYPES = tuple(BYTES)
TOKENS = "in tokens: 131072, or 128K, or 1M (powers of 1024)"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """The number and its noun: ``1 GPU``, ``1,024 GPUs``; ``plural``: what more than one adds."""
    return f"{count:,} {noun}{plural if count != 1 else ''}"


def flag(help: str, default: Any = MISSING, **options: Any) -> Any:
    """A dataclass field that is a flag; required without a default, a switch if it is a bool.

    Args:
        options: of ``add_argument``: ``type``, ``choices``, ``nargs``. Without a ``type`` the
            field's annotation names it (those of checks are numbers).
    """
    return field(default=default, metadata={"help": help, **options})


def with_settings(command: type[_T]) -> type[_T]:
    """A class with a field, and so a flag, for each of the planner's rows of ``ds_usp.settings``;
    to be applied before ``dataclass``."""
    for row in settings_of("planner"):
        options: dict[str, Any] = {}
        kind, annotation = row.kind, "str"
        if isinstance(kind, Switch):
            annotation = "bool"
        elif isinstance(kind, Integer):
            annotation = "Count" if kind.low else "CountOrZero"
            options["metavar"] = row.metavar
        elif isinstance(kind, Choices):
            options["choices"] = kind.values
        setattr(command, row.name, flag(f"{row.help} ({row.flag})", row.default, **options))
        command.__annotations__[row.name] = annotation
    return command


_INTEGERS = ("int", "Count", "CountOrZero", "ZeroStage", "Gpus", "Sequences", "Layers")
_TYPES: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        **dict.fromkeys(_INTEGERS, int),
        **dict.fromkeys(("float", "Positive", "NonNegative", "Fraction"), float),
    }
)


def add_flags(parser: ArgumentParser, command: Any) -> None:
    """Add a flag to the parser for each field of a command, in the order of its fields."""
    for f in fields(command):
        options = dict(f.metadata)
        if f.type == "bool":
            options["action"] = "store_true"
        else:
            options.setdefault("type", _TYPES.get(str(f.type).removesuffix(" | None"), str))
            options["required"] = f.default is MISSING
            options["default"] = None if f.default is MISSING else f.default
        parser.add_argument(f"--{f.name.replace('_', '-')}", **options)


def command_from(args: Namespace, command: Callable[..., _T]) -> _T:
    """The command with the values of its flags.

    Raises:
        ConfigError: a value that its field's type does not take.
    """
    made = command(**{f.name: getattr(args, f.name) for f in fields(command)})  # type: ignore[arg-type]
    for wrong in violations(made, flags=True):
        raise ConfigError(wrong)
    return made


class OneLineParser(ArgumentParser):
    """Raises ``ConfigError`` where argparse prints its usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> Namespace:
        """Parse the arguments of a program, and refuse unknown flags with the nearest known one.
        Unambiguous beginnings of flags are accepted.

        Raises:
            ConfigError: an argument that is unknown, lacks its value, or has a wrong one.
        """
        command = self._command(argv)  # whose flags are checked first, before any flag's value
        flags = [arg.partition("=")[0] for arg in argv if arg.startswith("--")]
        spellings = list(command._option_string_actions)
        command._refuse([f for f in flags if not any(name.startswith(f) for name in spellings)])
        args, unknown = self.parse_known_args(argv)
        command._refuse([arg.partition("=")[0] for arg in unknown])
        return args

    def _command(self, argv: Sequence[str]) -> OneLineParser:
        for action in self._actions:
            commands = action.choices if isinstance(action.choices, Mapping) else {}
            for arg in argv:
                if isinstance(parser := commands.get(arg), OneLineParser):
                    return parser
        return self

    def _refuse(self, unknown: Sequence[str]) -> None:
        for name in unknown:
            actions = self._option_string_actions.items()
            flags = [flag for flag, x in actions if x.dest != "help" and x.help != SUPPRESS]
            near = get_close_matches(name, flags, n=1, cutoff=0.7)
            self.error(f"unknown argument {name}" + (f" (did you mean {near[0]}?)" if near else ""))


class OneDefault(ArgumentDefaultsHelpFormatter):
    """States the default of a flag where there is one and the text does not state it already."""

    def _get_help_string(self, action: Action) -> str | None:
        """The help text with its default, unless the text states one or there is none to state."""
        unset = action.default is None or action.default is False
        if unset or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def tokens(text: str) -> int:
    """A number of tokens: 4096, or 4K = 4 * 1024, or 1M = 1024 * 1024."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    count = text if factor == 1 else text[:-1]
    if not count.isdecimal() or int(count) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number of 1 or more, or one with K or M")
    return int(count) * factor


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens, with commas."""
    return tuple(tokens(length) for length in text.split(","))


# ------------------------------------------------------------------ values that fields take
# A field annotated with one of these names (plain numbers to a type checker), or made by `choice`,
# is checked by `violations`: one rule and one message for JSON files, flags and calls.


Positive: TypeAlias = float
NonNegative: TypeAlias = float
Finite: TypeAlias = float
Fraction: TypeAlias = float
Count: TypeAlias = int
CountOrZero: TypeAlias = int
Gpus: TypeAlias = int
Sequences: TypeAlias = int
Layers: TypeAlias = int
ZeroStage: TypeAlias = int

# How much an answer may cost. A search tries all ways to write the GPUs as a product, micro batches
# that divide the global batch and, for each, stages that divide the layers; the largest runs and
# deepest models that are known are a tenth of this. Other numbers only must not leave fp64.
MOST_GPUS, MOST_SEQUENCES, MOST_LAYERS = 2**17, 2**15, 2**11
_LARGEST_COUNT, _LARGEST = 2**50, 1e30

_Rule = tuple[Callable[[Any], bool], str]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _at_most(largest: float) -> _Rule:
    return (lambda x: x <= largest), f"at most {largest:,}"


_COUNT: _Rule = (lambda x: _is_int(x) and x >= 1), "a whole number of 1 or more"
# In order: the first that refuses a value says what is wanted.
_RULES: Mapping[str, tuple[_Rule, ...]] = MappingProxyType(
    {
        "Positive": (
            (lambda x: _is_number(x) and 0 < x < inf, "a finite number above 0"),
            _at_most(_LARGEST),
        ),
        "NonNegative": (
            (lambda x: _is_number(x) and 0 <= x < inf, "a finite number, 0 or more"),
            _at_most(_LARGEST),
        ),
        "Finite": ((lambda x: _is_number(x) and abs(x) <= _LARGEST, "a finite number"),),
        "Fraction": ((lambda x: _is_number(x) and 0 <= x <= 1, "a number between 0 and 1"),),
        "Count": (_COUNT, _at_most(_LARGEST_COUNT)),
        "CountOrZero": (
            (lambda x: _is_int(x) and x >= 0, "a whole number of 0 or more"),
            _at_most(_LARGEST_COUNT),
        ),
        "Gpus": (_COUNT, _at_most(MOST_GPUS)),
        "Sequences": (_COUNT, _at_most(MOST_SEQUENCES)),
        "Layers": (_COUNT, _at_most(MOST_LAYERS)),
        "ZeroStage": ((lambda x: _is_int(x) and 0 <= x <= 3, "0, 1, 2 or 3"),),
        "bool": ((lambda x: isinstance(x, bool), "true or false"),),
    }
)


class Components:
    """A dataclass of numbers whose sum has a name: its fields are the components.

    Attributes:
        apart: fields that are no part of the total.
    """

    apart: ClassVar[tuple[str, ...]] = ()

    @property
    def total(self) -> float:
        """The sum of the components."""
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        """Name -> number, of what is part of the total."""
        return {name: size for name, size in vars(self).items() if name not in self.apart}


def choice(values: Sequence[str], default: str) -> Any:
    """A dataclass field that takes one of these texts."""
    return field(default=default, metadata={"choices": tuple(values)})


def violations(record: Any, *, flags: bool = False) -> Iterator[str]:
    """``field=value must be ...`` for each field whose value its type does not take.

    Args:
        flags: name the fields as command-line flags, ``--field value must be ...``.
    """
    for name, rules in _rules_of(cast(Hashable, type(record))):
        value = getattr(record, name)
        wanted = next((wanted for accepts, wanted in rules if not accepts(value)), "")
        if wanted:
            named = f"--{name.replace('_', '-')} {value}" if flags else f"{name}={value!r}"
            yield f"{named} must be {wanted}"


@lru_cache
def _rules_of(kind: Hashable) -> tuple[tuple[str, tuple[_Rule, ...]], ...]:
    rules = ((f.name, _rules(f)) for f in fields(cast(Any, kind)))
    return tuple((name, checks) for name, checks in rules if checks)


def _rules(f: Field[Any]) -> tuple[_Rule, ...]:
    """The checks of a field by its type's name or ``choices``, each with what it wants."""
    kind, choices = str(f.type), f.metadata.get("choices")
    rules = _RULES.get(kind.removesuffix(" | None"), ())
    if choices:
        rules = (((lambda x: x in choices), f"one of {', '.join(map(str, choices))}"),)
    if kind.endswith(" | None"):
        return tuple(((lambda x, a=a: x is None or a(x)), wanted) for a, wanted in rules)
    return rules


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
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep for a {kind}: {error}") from error
