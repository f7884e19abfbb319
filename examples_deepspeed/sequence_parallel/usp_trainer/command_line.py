"""The trainer's parser: one line for an error, printed by one rank, with the nearest flag."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from usp_trainer import environment
from usp_trainer.nearest import nearest


class OneDefault(argparse.HelpFormatter):
    """Help texts with one default: the text's own words, or else the value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default:" in text or action.default in (None, False, argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Flags are written out; an error is one line on rank 0 and exit code 2 on every rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=OneDefault, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error("; ".join(map(self._unknown, flags or unknown)))
        return found

    def error(self, message: str) -> NoReturn:
        """Exit with 2, after a line on rank 0: the ranks of a launcher have the same flags."""
        if environment.rank() == 0:
            text = message.removeprefix("argument ")
            print(f"{self.prog}: error: {text} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} belongs to no flag"
        known = [name for action in self._actions for name in action.option_strings]
        meant = nearest(word, known)
        return f"there is no flag {word}" + (f"; did you mean {meant}?" if meant else "")
