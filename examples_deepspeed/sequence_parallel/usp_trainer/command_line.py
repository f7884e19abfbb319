"""The trainer's argument parser: errors are one line, printed by rank 0, with a suggestion."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from usp_trainer import environment
from usp_trainer.suggestions import closest_name


class SingleDefaultFormatter(argparse.HelpFormatter):
    """Help texts that state one default: that of the text, or else the value."""

    def _get_help_string(self, action: argparse.Action) -> str:
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
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error("; ".join(map(self._unknown_flag_message, flags or unknown)))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; only rank 0 prints, since all ranks have the same flags."""
        if environment.rank() == 0:
            text = message.removeprefix("argument ")
            print(f"{self.prog}: error: {text} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)

    def _unknown_flag_message(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} belongs to no flag"
        known = [name for action in self._actions for name in action.option_strings]
        suggestion = closest_name(word, known)
        return f"there is no flag {word}" + (f"; did you mean {suggestion}?" if suggestion else "")
