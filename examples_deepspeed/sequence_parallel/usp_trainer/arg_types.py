"""Types for argparse: range-checked integers, numbers and paths, with the range in the error."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Integer:
    """An integer from ``low`` to ``high``, both included; None: no upper limit."""

    low: int = 1
    high: int | None = None

    def __call__(self, text: str) -> int:
        """The integer of a flag's text; ``ArgumentTypeError`` outside of ``low`` to ``high``."""
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < self.low or (self.high is not None and value > self.high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return value

    def __str__(self) -> str:
        if self.high is not None:
            return f"a whole number from {self.low} to {self.high}"
        return f"a whole number of {self.low} or more"


@dataclass(frozen=True)
class Number:
    """A finite number from ``low`` to ``high``.

    Args:
        above: ``low`` itself is out of range.
        below: ``high`` itself is out of range.
    """

    low: float = 0.0
    high: float | None = None
    above: bool = False
    below: bool = False

    def __call__(self, text: str) -> float:
        """The number of a flag's text; ``ArgumentTypeError`` outside of the bounds."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and self._includes(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return value

    def _includes(self, value: float) -> bool:
        """Whether a number is within the bounds; ``above``, ``below``: the bound itself is not."""
        if value < self.low or (self.above and value == self.low):
            return False
        if self.high is None:
            return True
        return value < self.high or (value == self.high and not self.below)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"of {self.low:g} or more"
        if self.high is None:
            return f"a finite number {low}"
        return f"a number {low} and {'below' if self.below else 'at most'} {self.high:g}"


@dataclass(frozen=True)
class KeywordOr:
    """A keyword such as ``auto``, or a value of type ``otherwise``."""

    keyword: str
    otherwise: Integer | Number

    def __call__(self, text: str) -> Any:
        """The keyword itself, or what ``otherwise`` makes of the text."""
        if text == self.keyword:
            return text
        try:
            return self.otherwise(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, and not {self.keyword!r}") from None

    def __str__(self) -> str:
        return f"{self.keyword}, or {self.otherwise}"


@dataclass(frozen=True)
class Text:
    """A path or a name that is not empty."""

    noun: str = "a path"

    def __call__(self, text: str) -> str:
        if not text.strip():
            raise argparse.ArgumentTypeError(f"{text!r} is empty; give {self.noun}")
        return text


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
