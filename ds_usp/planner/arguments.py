"""Commands as dataclasses: each field made by :func:`flag` is a flag of the command line.

Complaints are one line, help states one default a flag, and lengths may be written as 128K.
"""

from __future__ import annotations

from argparse import (
    SUPPRESS,
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ds_usp.errors import ConfigError
from ds_usp.planner.field_checks import violations
from ds_usp.removed_settings import add_removed_flag

_T = TypeVar("_T")


def flag(help: str, default: Any = MISSING, **options: Any) -> Any:
    """A dataclass field that is a flag; required without a default, a switch if it is a bool.

    Args:
        options: of ``add_argument``: ``type``, ``choices``, ``nargs``. Without a ``type`` the
            field's annotation names it (``field_checks`` names are numbers).
    """
    return field(default=default, metadata={"help": help, **options})


_TYPES: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("int", "Count", "CountOrZero", "ZeroStage"), int),
        **dict.fromkeys(("float", "Positive", "NonNegative", "Fraction"), float),
        "Path": Path,
    }
)


def add_flags(parser: ArgumentParser, command: Any) -> None:
    """Add a flag to the parser for each field of a command, in the order of its fields."""
    for name in command.removed_flags:
        add_removed_flag(parser, name)
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
        """Raise ``ConfigError`` with the message."""
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> Namespace:
        """Parse the arguments of a program, and refuse unknown flags with the nearest known one.

        Flags are checked against those of the named command before their values are, so that the
        error is about the misspelt flag. Unambiguous beginnings of flags are accepted.

        Raises:
            ConfigError: an argument that is unknown, lacks its value, or has a wrong one.
        """
        command = self._command(argv)
        flags = [arg.partition("=")[0] for arg in argv if arg.startswith("--")]
        known = list(command._option_string_actions)
        command._refuse([f for f in flags if not any(name.startswith(f) for name in known)])
        args, unknown = self.parse_known_args(argv)
        command._refuse([arg.partition("=")[0] for arg in unknown])
        return args

    def _command(self, argv: Sequence[str]) -> OneLineParser:
        """The parser of the named command, else this one."""
        for action in self._actions:
            commands = action.choices if isinstance(action.choices, Mapping) else {}
            for arg in argv:
                if isinstance(parser := commands.get(arg), OneLineParser):
                    return parser
        return self

    def _refuse(self, unknown: Sequence[str]) -> None:
        """Raise ``ConfigError`` for the first of these arguments, with the nearest known one."""
        for name in unknown:
            actions = self._option_string_actions.items()
            flags = [flag for flag, x in actions if x.dest != "help" and x.help != SUPPRESS]
            near = get_close_matches(name, flags, n=1)
            self.error(f"unknown argument {name}" + (f" (did you mean {near[0]}?)" if near else ""))


class OneDefault(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
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
