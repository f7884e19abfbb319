"""The attention heads that each Ulysses rank computes, and the key/value heads that it needs: those
of all ranks on each, while a call is planned, and in the planner."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.segments import even_split


@dataclass(frozen=True)
class HeadChunk:
    """Half-open ranges of heads, one for each Ulysses rank.

    Attributes:
        queries, keys: of query heads, and of key/value heads, as :class:`HeadSplit` numbers them.
        kv_chunk: the chunk that brings its keys and values: itself, or the first of its KV group.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    kv_chunk: int


# Grouped-query heads over Ulysses ranks, 8 query heads (q) in 2 KV groups (k):
#
#     ulysses 2    rank 0: q 0-3, k 0          rank 1: q 4-7, k 1         a KV head goes to one rank
#     ulysses 4    rank 0: q 0-1, k 0   rank 1: q 2-3, k 0                a KV head goes to two
#                  rank 2: q 4-5, k 1   rank 3: q 6-7, k 1
#
# Expanded to query heads first, a KV head would be sent as often as it has query heads; here it
# goes to its users only, and their gradients of it are summed when they return.
@dataclass(frozen=True)
class HeadSplit:
    """Query heads split over Ulysses ranks along KV groups, and the KV heads that they use.

    With at least as many KV heads as ranks, a rank gets whole groups, as in DeepSpeed. With fewer,
    the ranks are split over the KV heads and share each one's query heads.

    Args:
        heads, kv_heads: on this tensor-parallel rank.
        ulysses: ranks that share them.

    Raises:
        ConfigError: KV heads that do not divide the query heads, or fewer query heads than ranks.
    """

    heads: int
    kv_heads: int
    ulysses: int

    def __post_init__(self) -> None:
        heads, kv_heads, ulysses = self.heads, self.kv_heads, self.ulysses
        Degrees(sp=ulysses, ulysses=ulysses, heads=heads, kv_heads=kv_heads).check()

    @property
    def max_chunks(self) -> int:
        """Most head chunks into which every rank's heads can be split, along KV groups."""
        ranges = (self.kv_range(rank) for rank in range(self.ulysses))
        return min(end - begin for begin, end in ranges)

    @property
    def max_chunks_in_groups(self) -> int:
        """Most head chunks that may be smaller than a KV group; :attr:`max_chunks` where ranks use
        different numbers of KV heads."""
        ranks = range(self.ulysses)
        if len({end - begin for begin, end in map(self.kv_range, ranks)}) > 1:
            return self.max_chunks
        return min(end - begin for begin, end in map(self.query_range, ranks))

    def chunk_limit(self, ring_degree: int) -> int:
        """Most head chunks of a call: smaller than a KV group only without a ring, which would
        exchange the group's KV again."""
        return self.max_chunks_in_groups if ring_degree == 1 else self.max_chunks

    def check_chunks(self, count: int, ring_degree: int) -> None:
        """Refuse more chunks than :meth:`chunk_limit` (ConfigError)."""
        limit = self.chunk_limit(ring_degree)
        if count > limit:
            kind_of_heads = "query heads" if limit > self.max_chunks else "key/value heads"
            raise ConfigError(
                f"chunks={count}, but a rank has only {limit} {kind_of_heads} "
                f"({self.heads} query and {self.kv_heads} key/value heads among {self.ulysses} "
                f"Ulysses ranks). Use at most {limit}"
            )

    def chunk(self, count: int, index: int) -> HeadChunk:
        """The heads of every rank in chunk ``index`` of ``count``: whole KV groups, or, with more
        chunks than groups, a part of the query heads of one group.

        Raises:
            ConfigError: more chunks than :attr:`max_chunks_in_groups`.
        """
        limit = self.max_chunks_in_groups
        if not 0 <= index < count <= limit:
            raise ConfigError(f"no head chunk {index} of {count}, at most {limit}")
        ranks = range(self.ulysses)
        if count == 1:
            queries, keys = map(self.query_range, ranks), map(self.kv_range, ranks)
            return HeadChunk(tuple(queries), tuple(keys), 0)
        if count > self.max_chunks:
            return self._chunk_in_group(count, index)
        group, spans = self.heads // self.kv_heads, []
        for begin, end in map(self.kv_range, ranks):
            edges = _chunk_edges(end - begin, count)
            spans.append((begin + edges[index], begin + edges[index + 1]))
        return HeadChunk(tuple((a * group, b * group) for a, b in spans), tuple(spans), index)

    def _chunk_in_group(self, count: int, index: int) -> HeadChunk:
        # Here every rank has this many KV groups, to which chunks are dealt evenly: `first : stop`
        # are those of the chunk's own group, which divide its query heads and share its KV head.
        groups = self.max_chunks
        chunks = [even_split(count, groups, group) for group in range(groups)]
        group = next(i for i, (_, stop) in enumerate(chunks) if index < stop)
        first, stop = chunks[group]
        queries, keys = [], []
        for rank in range(self.ulysses):
            (begin, end), (kv_begin, _) = self.query_range(rank), self.kv_range(rank)
            heads = (end - begin) // groups
            edges = _chunk_edges(heads, stop - first, equal=groups > 1)
            start = begin + group * heads
            queries.append((start + edges[index - first], start + edges[index - first + 1]))
            keys.append((kv_begin + group, kv_begin + group + 1))
        return HeadChunk(tuple(queries), tuple(keys), first)

    def query_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the query heads that one Ulysses rank computes."""
        group = self.heads // self.kv_heads
        first, last = self.kv_range(rank)
        if self.kv_heads >= self.ulysses:
            return first * group, last * group
        users = even_split(self.ulysses, self.kv_heads, first)
        begin, end = even_split(group, users[1] - users[0], rank - users[0])
        return first * group + begin, first * group + end

    def kv_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the key/value heads that one Ulysses rank uses."""
        if self.kv_heads >= self.ulysses:
            return even_split(self.kv_heads, self.ulysses, rank)
        for head in range(self.kv_heads):
            begin, end = even_split(self.ulysses, self.kv_heads, head)
            if begin <= rank < end:
                return head, head + 1
        raise ConfigError(f"rank {rank} is outside the {self.ulysses} Ulysses ranks")


# Why chunks differ in size. Chunk 0's all-to-all has nothing to hide under, and neither has the
# last chunk's return; all between are hidden:
#
#     a2a 0 | attn 0      | attn 1            | attn 2      | ret 2
#           | a2a 1       | a2a 2, ret 0      | ret 1       |
#     exposed                                               exposed
#
# So the first chunk is small, and of more than two chunks the last. Not too small: a chunk must
# compute as long as the next one's exchange takes.
def exposed_fraction(count: int) -> float:
    """Fraction of the bytes of all exchanges that nothing overlaps, with so many chunks: q, k and v
    of the first chunk and the return of the last one, which is a third as large for its heads."""
    sizes = _chunk_sizes(count)
    return (3 * sizes[0] + sizes[-1]) / (4 * sum(sizes))


def _chunk_sizes(count: int) -> tuple[int, ...]:
    """Relative sizes; on 4 H200 at 32K tokens the exchange of a chunk of six times the size still
    fits under the computation of the one before."""
    up_to_three = {1: (1,), 2: (1, 3), 3: (1, 6, 1)}
    return up_to_three.get(count) or (1, *[3] * (count - 2), 1)


def _chunk_edges(heads: int, count: int, *, equal: bool = False) -> list[int]:
    """The ``count + 1`` bounds of chunks of a head or more (``heads`` are at least ``count``), of
    :func:`_chunk_sizes` or equal."""
    sizes, edges = (1,) * count if equal else _chunk_sizes(count), [0]
    for index in range(1, count):
        ideal = round(heads * sum(sizes[:index]) / sum(sizes))
        edges.append(min(max(ideal, edges[-1] + 1), heads - (count - index)))
    return [*edges, heads]
