"""Which attention heads each Ulysses rank computes, and which key/value heads it needs."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.errors import ConfigError
from ds_usp.geometry.segments import balanced


@dataclass(frozen=True)
class HeadSplit:
    """Query heads cut among Ulysses ranks along KV groups, and the KV heads that they use.

    With at least as many KV heads as ranks, a rank gets whole groups, as in DeepSpeed. With fewer,
    the ranks are cut among the KV heads and share each one's query heads. So each rank's query
    heads fall on its KV heads evenly, and a KV head goes only to the ranks that use it.

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
                f"tensor-parallel rank, there are {self.heads}"
            )

    def query_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the query heads of one Ulysses rank."""
        group = self.heads // self.kv_heads
        first, last = self.kv_range(rank)
        if self.kv_heads >= self.ulysses:
            return first * group, last * group
        users = balanced(self.ulysses, self.kv_heads, first)
        begin, end = balanced(group, users[1] - users[0], rank - users[0])
        return first * group + begin, first * group + end

    def kv_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the key/value heads that one Ulysses rank uses."""
        if self.kv_heads >= self.ulysses:
            return balanced(self.kv_heads, self.ulysses, rank)
        for head in range(self.kv_heads):
            begin, end = balanced(self.ulysses, self.kv_heads, head)
            if begin <= rank < end:
                return head, head + 1
        raise ConfigError(f"rank {rank} is outside the {self.ulysses} Ulysses ranks")
