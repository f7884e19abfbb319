"""Communication ledger: counts of calls and bytes sent."""

from __future__ import annotations

from collections import Counter


class CommLedger:
    """Calls and bytes that this rank has sent to other ranks, by kind of exchange.

    Kinds: ``all_to_all``, ``ring_kv``, ``ring_dkv``; a double ring's traffic between nodes is
    ``ring_kv_outer``, ``ring_dkv_outer``. What a rank keeps is not counted.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, sent_bytes: int) -> None:
        """Record one exchange."""
        self.calls[kind] += 1
        self.bytes[kind] += sent_bytes

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.bytes.clear()

    def __str__(self) -> str:
        rows = (f"{kind} {self.calls[kind]} calls {self.bytes[kind]} B" for kind in self.calls)
        return ", ".join(rows) or "nothing sent"
