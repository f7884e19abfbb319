"""A parser whose complaints are one line, and the spelling of lengths and masks."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
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
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = get_close_matches(flag, self._option_string_actions, n=1)
            self.error(f"unknown argument {flag}" + (f" (did you mean {near[0]}?)" if near else ""))
        return args


def tokens(text: str) -> int:
    """A number of tokens: 4096, or 4K = 4 * 1024, or 1M = 1024 * 1024."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    return positive(text if factor == 1 else text[:-1]) * factor


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def mask(text: str) -> tuple[int | None, int | None, int]:
    """``(left, right, prefix)`` of causal | full | window:LEFT | window:LEFT,RIGHT | prefix:N."""
    name, _, numbers = text.partition(":")
    if text in ("causal", "full"):
        return None, 0 if text == "causal" else None, 0
    try:
        sizes = [_count(number) for number in numbers.split(",")]
    except ArgumentTypeError:
        sizes = []
    if name == "window" and len(sizes) in (1, 2):
        return sizes[0], sizes[1] if len(sizes) == 2 else 0, 0
    if name == "prefix" and len(sizes) == 1:
        return None, 0, sizes[0]
    raise ArgumentTypeError(
        f"{text!r} must be causal, full, window:LEFT, window:LEFT,RIGHT or prefix:N, in tokens"
    )


def _count(text: str) -> int:
    return 0 if text == "0" else tokens(text)


def documents(text: str) -> tuple[tuple[int, ...], ...]:
    """Lengths of packed documents, with commas; with slashes those of each sample."""
    return tuple(
        tuple(tokens(length) for length in sample.split(",")) for sample in text.split("/")
    )
