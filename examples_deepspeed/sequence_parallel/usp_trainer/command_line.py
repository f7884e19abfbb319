"""The trainer's argument parser: errors are one line, printed by rank 0, with a suggestion."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
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
    """The known name with the smallest edit distance; None if that is above a third of ``name``.

    A name that is a prefix of exactly one known name is completed to it.
    """
    dashed = name.replace("_", "-")
    names = list(known)
    completions = [
        candidate for candidate in names if candidate.replace("_", "-").startswith(dashed)
    ]
    if len(completions) == 1 and len(dashed) > 4:
        return completions[0]
    distances = [
        (edit_distance(dashed, candidate.replace("_", "-")), candidate) for candidate in names
    ]
    count, best = min(distances, default=(len(name), ""))
    return best if count <= max(1, len(name.strip("-")) // 3) else None


def edit_distance(a: str, b: str) -> int:
    """Edit distance (optimal string alignment): letters inserted, removed, replaced, or swapped
    with a neighbour to turn ``a`` into ``b``."""
    previous_row, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous_row, row_before_previous, row = row, previous_row, [i]
        for j, y in enumerate(b, 1):
            count = min(previous_row[j] + 1, row[j - 1] + 1, previous_row[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                count = min(count, row_before_previous[j - 2] + 1)
            row.append(count)
    return row[-1]
