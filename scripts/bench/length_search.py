"""The search for the longest sequence that fits, by the peaks of shorter ones."""

from __future__ import annotations

from dataclasses import dataclass, field

_CLOSE = 1.03  # the shortest that failed over the longest that trained, to stop at
_FARTHEST = 8  # times the longest that trained, of which the next is tried


@dataclass
class Search:
    """Which length to try next, from the peaks of those before: they grow linearly.

    Args:
        capacity: bytes that a rank can use.
        first: tokens to begin with; the second trial has twice as many, or less where one length
            shows that more may not fit.
        unit: lengths are multiples of it.
    """

    capacity: float
    first: int
    unit: int
    peaks: dict[int, float] = field(default_factory=dict)
    failed: int | None = None

    @property
    def longest(self) -> int:
        """Of those that trained; 0: none."""
        return max(self.peaks, default=0)

    def next(self) -> int | None:
        """The next length; None: the longest is known."""
        best = self.longest
        if self.failed is None and not self.peaks:
            return self.first
        if self.failed is None and len(self.peaks) == 1:  # a part of the peak does not grow
            fits = best * self.capacity / max(self.peaks[best], 1.0)
            return self._rounded(min(2 * best, max(fits * 0.98, best * _CLOSE)))
        if self.failed is not None:
            if self.failed - best <= self.unit or self.failed <= best * _CLOSE:
                return None
            return self._rounded(min(self._reached() or self.failed, (best + self.failed) / 2))
        return self._rounded(min(max(self._reached() * 0.98, best * _CLOSE), best * _FARTHEST))

    def _reached(self) -> float:
        """Tokens at which the line through the last two peaks meets the capacity."""
        if len(self.peaks) < 2:
            return 0.0
        (a, low), (b, high) = sorted(self.peaks.items())[-2:]
        slope = (high - low) / (b - a)
        return b + (self.capacity - high) / slope if slope > 0 else 2.0 * b

    def _rounded(self, tokens: float) -> int:
        """A multiple of the unit above the longest that trained, below the shortest that failed."""
        length = max(int(tokens) // self.unit * self.unit, self.longest + self.unit)
        return length if self.failed is None else min(length, self.failed - self.unit)
