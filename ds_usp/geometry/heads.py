"""Which attention heads each Ulysses rank computes, and which key/value heads it needs."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.errors import ConfigError
from ds_usp.geometry.segments import balanced


@dataclass(frozen=True)
class HeadSplit:
    """Query heads cut as evenly as possible among Ulysses ranks, with the KV heads they use.

    A KV head is given to every rank that holds a query head of its group, and to no other, so
    there may be fewer KV heads than ranks.

    Args:
        heads: query heads on this tensor-parallel rank.
        kv_heads: key/value heads on this tensor-parallel rank.
        ulysses: ranks that share them.

    Raises:
        ConfigError: KV heads that do not divide the query heads, or fewer query heads than ranks.
    """

    heads: int
    kv_heads: int
    ulysses: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads: the "
                "first number must be a multiple of the second"
            )
        if self.heads < self.ulysses:
            raise ConfigError(
                f"ulysses_degree={self.ulysses} needs at least {self.ulysses} query heads on each "
                f"tensor-parallel rank, there are {self.heads}. Use --ulysses-degree {self.heads} "
                "or less and let the ring take the rest."
            )

    def query_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the query heads of one Ulysses rank."""
        return balanced(self.heads, self.ulysses, rank)

    def kv_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the key/value heads that one Ulysses rank uses."""
        begin, end = self.query_range(rank)
        group = self.heads // self.kv_heads
        return begin // group, (end - 1) // group + 1

    def kv_index(self, rank: int) -> tuple[int, ...] | None:
        """Local KV head of each local query head, where no even grouping says it; else None.

        A rank whose query heads cut through groups (6 heads of 2 KV heads on 4 ranks: head 2 uses
        KV head 0, head 3 uses KV head 1, but 1 and 2 heads of each) must expand its KV heads.
        """
        begin, end = self.query_range(rank)
        first, last = self.kv_range(rank)
        group = self.heads // self.kv_heads
        index = tuple(head // group - first for head in range(begin, end))
        count, kv_count = end - begin, last - first
        even = count % kv_count == 0 and all(
            kv == i // (count // kv_count) for i, kv in enumerate(index)
        )
        return None if even else index
