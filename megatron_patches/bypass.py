"""Functions of a host that have no effect once it is patched, so that edits of them are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_patches.guards import Guard


@dataclass(frozen=True)
class Bypass:
    """One function that is not replaced, and that a patched host does not call, or not for all that
    it computes.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``.
        by: what is computed without it, and by what.
        guard: what it must be, because what runs in its place computes just that.
        flag: the flag of the host without which it is called all the same; "": always bypassed.
    """

    target: str
    reason: str
    guard: Guard
    flag: str = ""

    applies = True

    def mismatches(self) -> Iterator[str]:
        """What differs from the known function, one sentence each."""
        for line in self.guard.mismatches(self.target):
            yield f"{self.target}: {line}. An edit has no effect: {self.reason}"

    def retarget(self, module: str, to: str) -> Bypass:
        """The same for a module that is loaded under another name."""
        name, _, path = self.target.partition(":")
        return replace(self, target=f"{to}:{path}") if name == module else self
