"""A parser whose complaints are one line, help with one default a flag, and lengths like 128K."""

from __future__ import annotations

from argparse import (
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from ds_usp.errors import ConfigError


class OneLineParser(ArgumentParser):
    """Raises ``ConfigError`` where argparse prints its usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> Namespace:
        """All arguments; an unknown flag is refused with the nearest known one.

        Raises:
            ConfigError: an argument that is unknown, lacks its value, or has a wrong one.
        """
        command = self._command(argv)
        flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
        known = list(command._option_string_actions)
        command._refuse([f for f in flags if not any(name.startswith(f) for name in known)])
        args, unknown = self.parse_known_args(argv)
        command._refuse([word.partition("=")[0] for word in unknown])
        return args

    def _command(self, argv: Sequence[str]) -> OneLineParser:
        """The parser of the command that is named, else this one."""
        for action in self._actions:
            commands = action.choices if isinstance(action.choices, Mapping) else {}
            for word in argv:
                if isinstance(found := commands.get(word), OneLineParser):
                    return found
        return self

    def _refuse(self, unknown: Sequence[str]) -> None:
        for flag in unknown:
            near = get_close_matches(flag, self._option_string_actions, n=1)
            self.error(f"unknown argument {flag}" + (f" (did you mean {near[0]}?)" if near else ""))


class OneDefault(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """States the default of a flag where there is one and the text does not say it already."""

    def _get_help_string(self, action: Action) -> str | None:
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
