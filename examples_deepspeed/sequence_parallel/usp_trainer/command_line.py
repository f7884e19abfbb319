"""The trainer's argument parser: an error is one line, printed by rank 0, with the range or a
suggestion. Types of numbers and paths are those of ``ds_usp.settings``."""

from __future__ import annotations

import argparse
import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from usp_trainer import environment


class SingleDefaultFormatter(argparse.HelpFormatter):
    """Help texts that state one default: that of the text, or else the value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """The help text with its default, unless the text states one or there is none to state."""
        text = action.help or ""
        if "default:" in text or action.default in (None, False, argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """No abbreviated flags; an error is one line on rank 0 and exit code 2 on every rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=SingleDefaultFormatter, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> Namespace:
        """Parse the flags; exit with one message that names every unknown flag."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            self.error("; ".join(map(self._unknown_flag_message, flags or unknown)))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; only rank 0 prints, since all ranks have the same flags."""
        if environment.rank() == 0:
            text = message.removeprefix("argument ")
            print(f"{self.prog}: error: {text} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)

    def _unknown_flag_message(self, flag: str) -> str:
        if not flag.startswith("-"):
            return f"{flag!r} belongs to no flag"
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        known = [name for action in shown for name in action.option_strings]
        suggestion = closest_name(flag, known)
        return f"there is no flag {flag}" + (f"; did you mean {suggestion}?" if suggestion else "")


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known flag that is most similar to ``name``, which may be its beginning; None if none is
    similar. Dashes and underscores are the same."""
    names = {candidate.replace("_", "-").strip("-"): candidate for candidate in known}
    given = name.replace("_", "-").strip("-")
    completions = [candidate for candidate in names if candidate.startswith(given)]
    if len(completions) != 1 or len(given) < 3:
        completions = get_close_matches(given, names, 1, 0.8)
    return names[completions[0]] if completions else None


@dataclass(frozen=True)
class Ratios:
    """Fractions of training, validation and test data: three numbers of 0 or more with commas, the
    first above 0. They need not sum to 1."""

    def __call__(self, text: str) -> str:
        """The unchanged text of three ratios, of which the first, for training, is not 0."""
        try:
            ratios = [float(ratio) for ratio in text.split(",")]
        except ValueError:
            ratios = []
        finite = all(math.isfinite(ratio) and ratio >= 0 for ratio in ratios)
        if len(ratios) != 3 or not finite or ratios[0] == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return text

    def __str__(self) -> str:
        return "three finite numbers of 0 or more with commas, the first above 0, such as 95,5,0"
