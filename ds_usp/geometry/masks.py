"""Which (query, key) pairs may attend, in global positions."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A query at position ``q`` sees a key at ``k`` if ``-left <= k - q <= right``.

    ``None`` means no bound on that side. Positions are global, so one value describes the mask
    for every rank and every layout.

    Raises:
        ConfigError: a bound that is not a whole number of 0 or more.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("left", self.left), ("right", self.right)):
            whole = isinstance(bound, int) and not isinstance(bound, bool)
            if bound is not None and (not whole or bound < 0):
                raise ConfigError(
                    f"window {name}={bound!r} must be a whole number of tokens, 0 or more; "
                    "None leaves that side open (a library's -1 is None here)"
                )

    @classmethod
    def causal(cls) -> MaskSpec:
        """Every token sees itself and all before it."""
        return cls(None, 0)

    @classmethod
    def full(cls) -> MaskSpec:
        """Every token sees every token."""
        return cls(None, None)

    @classmethod
    def window(cls, left: int | None, right: int | None = 0) -> MaskSpec:
        """Every token sees ``left`` tokens before it and ``right`` after it, and itself."""
        return cls(left, right)

    @property
    def is_causal(self) -> bool:
        """True for the plain causal mask, without a window."""
        return self.left is None and self.right == 0

    def allows(self, query: int, key: int) -> bool:
        """Whether one query position sees one key position."""
        distance = key - query
        return (self.left is None or -self.left <= distance) and (
            self.right is None or distance <= self.right
        )

    def __str__(self) -> str:
        if self.is_causal:
            return "causal"
        if self.left is None and self.right is None:
            return "full"
        return f"window({self.left}, {self.right})"
