"""Token layouts: which tokens of a sequence each rank holds, and in which order. Each rank makes
those of all ranks (``mesh.layout``); with each call they compare its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, overload

from ds_usp.errors import LayoutError
from ds_usp.geometry.document_sharding import Documents, balance_documents
from ds_usp.geometry.masks import Borders, MaskSpec, Parents, format_documents
from ds_usp.geometry.segments import (
    Segment,
    Shard,
    coalesce,
    even_split,
    slice_segments,
    split_at_documents,
    with_offsets,
)

ORDERS = ("ulysses-ring", "ring-ulysses")
DEFAULT_SP_ORDER = ORDERS[0]
_KINDS_OF_DOCUMENTS = ("balanced", "context_parallel", "contiguous")

MAX_SLICES = 2  # of a rank, in one dense exchange: context_parallel's early and late tokens

Shards = tuple[tuple[Segment, ...], ...]  # of every rank, in the order in which it stores them


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``start : stop`` of one Ulysses rank's shard, contiguous in ring order too."""

    ulysses_rank: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


class TokenSlice(NamedTuple):
    """Tokens ``start : stop`` in the ring rank's order, all of one Ulysses rank, of whose shard the
    first one is ``row``."""

    start: int
    stop: int
    row: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TokenSlices:
    """The slices of a ring rank's tokens, for the dense exchange of ``uniform_all_to_all.py``:
    ``by_rank`` has each Ulysses rank's, as they follow each other in its shard."""

    by_rank: tuple[tuple[TokenSlice, ...], ...]

    @classmethod
    def from_runs(cls, runs: Sequence[Run], ulysses: int) -> TokenSlices | None:
        """The slices of a ring rank's :meth:`TokenLayout.runs`; None if a Ulysses rank has none, or
        more than ``MAX_SLICES``, or has them in another order than the ring rank."""
        slices: list[list[TokenSlice]] = [[] for _ in range(ulysses)]
        start = 0
        for run in runs:
            rank_slices = slices[run.ulysses_rank]
            if rank_slices and run.start < rank_slices[-1].row:
                return None
            rank_slices.append(TokenSlice(start, start + run.length, run.start))
            start += run.length
        if not all(1 <= len(rank_slices) <= MAX_SLICES for rank_slices in slices):
            return None
        return cls(tuple(map(tuple, slices)))

    @property
    def ranks(self) -> int:
        return len(self.by_rank)

    @property
    def lengths(self) -> list[int]:
        return [sum([x.length for x in slices]) for slices in self.by_rank]

    @property
    def in_rank_order(self) -> bool:
        """The ranks' shards follow each other."""
        slices = [x for rank_slices in self.by_rank for x in rank_slices]
        return len(slices) == self.ranks and slices == sorted(slices)


@dataclass(frozen=True)
class TokenLayout:
    """The shard of a sequence that every rank of a sequence-parallel group holds.

    Args:
        kind: one of :data:`KINDS`.

            * ``contiguous``: rank ``r`` of the group holds the ``r``-th piece, as
              ``torch.tensor_split`` cuts it, in both orders of the axes. Causal work is unbalanced.
              Given documents, the ``r``-th piece of each of them; each has to divide.
            * ``zigzag``: the sequence is cut into ``2 * ring`` chunks, ring rank ``r`` holds
              chunks ``r`` and ``2 * ring - 1 - r``. Causal work is balanced.
            * ``striped``: ring rank ``r`` holds positions ``r, r + ring, r + 2 * ring, ...``
              (Striped Attention, arXiv 2311.09431).
            * ``context_parallel``: megatron-core's order, a zigzag over all ranks of the group,
              so that its RoPE and batch slicing stay valid. Given documents, a zigzag for each of
              them, as its packed sequences (``thd``) are; each has to divide.
            * ``balanced``: made for the documents of one batch. Ring ranks hold equally many tokens
              and have equal causal work within documents: short documents are whole on one of
              them, long ones a zigzag each.

            In ``zigzag``, ``striped`` and ``balanced`` a ring rank's tokens are cut evenly among
            its Ulysses ranks.
        seq_len: tokens in the whole sequence. It need not divide: shards differ by a token then,
            by two where a shard is two chunks (``zigzag``, ``context_parallel``).
        ulysses: ranks that exchange heads for sequence.
        ring: ranks that exchange keys and values.
        order: which of the two axes varies fastest over the ranks of the group.
        documents: cumulative borders, as of ``MaskSpec``, for ``balanced``, ``context_parallel``
            and ``contiguous``. All samples of a batch share a layout, and so these documents.
            ``balanced`` also takes a mask, and its documents or tree.
        parents: of each document, as of ``MaskSpec``, for ``balanced``: the documents are a tree.

    Invariant: the shards of the Ulysses ranks of one ring rank together are that ring rank's
    tokens; :meth:`runs` says in which order.

    Raises:
        LayoutError: an unknown name, a size below 1, fewer tokens than every rank needs, or
            documents that the layout has no use for or that do not end with the sequence.
        ConfigError: documents that are no borders.

    Attributes:
        LEAST: tokens that every rank needs.
        CALLERS_KIND: the default of every entry point whose caller shards the tokens itself: the
            order that the caller has already.
        LOADERS_KIND: the default of programs that shard the batch themselves, whose user never
            sees the order: causal work is balanced.
    """

    LEAST: ClassVar[int] = 1
    CALLERS_KIND: ClassVar[str] = "contiguous"
    LOADERS_KIND: ClassVar[str] = "zigzag"

    kind: str
    seq_len: int
    ulysses: int = 1
    ring: int = 1
    order: str = DEFAULT_SP_ORDER
    documents: Borders = ()
    parents: Parents = ()
    # Of every rank, once: a batch asks for lengths and segments a dozen times.
    _shards: Shards = field(init=False, repr=False, compare=False)
    _lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _places: tuple[Shard, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayoutError(f"unknown token layout {self.kind!r}; there are {', '.join(KINDS)}")
        if self.order not in ORDERS:
            raise LayoutError(f"unknown rank order {self.order!r}; there are {', '.join(ORDERS)}")
        for name in ("seq_len", "ulysses", "ring"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f"{name}={size!r} must be a whole number of 1 or more")
        documents, parents = self._validate_documents()
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "parents", parents)
        for name, value in zip(
            ("_shards", "_lengths", "_places"), _cached_shards(self), strict=True
        ):
            object.__setattr__(self, name, value)
        if min(self._lengths) < self.LEAST:
            raise LayoutError(
                f"{self.seq_len} tokens leave a rank of ulysses {self.ulysses} x ring {self.ring} "
                f"({self.kind}) without any. Use a sequence of at least {self.degree} tokens "
                "or smaller degrees."
            )

    def _validate_documents(self) -> tuple[Borders, Parents]:
        """Return the fields ``documents`` and ``parents`` of the one row, empty where not given."""
        mask: Any = self.documents
        if isinstance(mask, MaskSpec):
            if self.parents and (self.parents,) != mask.parents:
                raise LayoutError(
                    "the parents are the mask's, and others are given: leave them out"
                )
        else:
            mask = MaskSpec(None, 0, mask, parents=(self.parents,) if self.parents else ())
        documents, is_balanced = mask.documents, self.kind == "balanced"
        if is_balanced and not documents:
            raise LayoutError(
                "the layout 'balanced' is made for the documents of a batch, and none were given: "
                "mesh.layout('balanced', seq_len, documents=borders)"
            )
        if documents and self.kind not in _KINDS_OF_DOCUMENTS:
            raise LayoutError(
                f"the layout {self.kind!r} is the same for all documents and takes none: leave "
                "documents= to the mask, MaskSpec.causal(documents=borders), or ask for 'balanced'"
            )
        if len(documents) > 1:
            raise LayoutError(
                f"the layout {self.kind!r} was given borders for each of {len(documents)} samples, "
                "and all samples of a batch share one layout: give one list of borders, which all "
                "have, or batches of one sample. Borders of each sample go to the mask, under "
                "another layout ('zigzag')"
            )
        if not documents:
            return (), ()
        if documents[0][-1] != self.seq_len:
            raise LayoutError(
                f"the documents end at {documents[0][-1]}, the sequence has {self.seq_len} tokens"
            )
        parents = mask.parents[0] if mask.parents else ()
        if parents and not is_balanced:
            raise LayoutError(
                f"the layout {self.kind!r} is the same for a tree as for documents and takes no "
                "parents: leave them to the mask, MaskSpec.tree(segments), or ask for 'balanced'"
            )
        chunks, packer = self.degree, "ring_flash_attn's varlen functions"
        if self.kind == "context_parallel":
            chunks, packer = 2 * self.degree, "megatron-core"
        indivisible = [b - a for a, b in pairwise(documents[0]) if (b - a) % chunks]
        if indivisible and not is_balanced:
            raise LayoutError(
                f"a document of {indivisible[0]} tokens does not divide into {chunks} "
                f"chunks, as packed sequences of {packer} must; the layout 'balanced' splits "
                "any length"
            )
        return documents[0], parents

    @property
    def degree(self) -> int:
        return self.ulysses * self.ring

    def sp_rank(self, ulysses_rank: int, ring_rank: int) -> int:
        """Rank in the sequence-parallel group of a point of the axes, as ``RankGrid`` counts it."""
        if not (0 <= ulysses_rank < self.ulysses and 0 <= ring_rank < self.ring):
            raise LayoutError(
                f"ulysses rank {ulysses_rank}, ring rank {ring_rank} is outside {self}"
            )
        if self.order == "ulysses-ring":
            return ring_rank * self.ulysses + ulysses_rank
        return ulysses_rank * self.ring + ring_rank

    def coords(self, rank: int) -> tuple[int, int]:
        """``(ulysses_rank, ring_rank)`` of a rank of the sequence-parallel group."""
        self._check_rank(rank)
        if self.order == "ulysses-ring":
            ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        else:
            ulysses_rank, ring_rank = divmod(rank, self.ring)
        return ulysses_rank, ring_rank

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ulysses * self.ring:
            raise LayoutError(f"rank {rank} is outside the {self.degree} ranks of {self}")

    def _make_shards(self) -> Shards:
        table = _TABLES[self.kind]
        return tuple(coalesce(table(self, *self.coords(rank))) for rank in range(self.degree))

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The tokens of one sequence-parallel rank, in the order in which it stores them."""
        self._check_rank(rank)
        return self._shards[rank]

    def length(self, rank: int) -> int:
        """Tokens that one sequence-parallel rank holds."""
        self._check_rank(rank)
        return self._lengths[rank]

    @overload
    def positions(self, rank: int) -> list[int]: ...

    @overload
    def positions(self, rank: int, *, mask: MaskSpec) -> list[Any]: ...

    @overload
    def positions(self, rank: int, *, like: Any, mask: MaskSpec | None = None) -> Any: ...

    def positions(self, rank: int, *, like: Any = None, mask: MaskSpec | None = None) -> Any:
        """Global position of every token of one rank, in storage order.

        Args:
            like: a tensor, as of the tokens; the result then is an int64 tensor ``[length(rank)]``
                on its device, and otherwise a list.
            mask: returns instead the positions that embeddings have (``position_ids``): a token's
                in its document, which in a tree goes on from its parent. Where samples have
                documents of their own, a row for each sample, ``[samples, length(rank)]``.

        Raises:
            ConfigError: a mask for another length.
        """
        positions: list[Any]
        if mask is None:
            positions = [x for segment in self.segments(rank) for x in segment.positions]
        else:
            mask.check_length(self.seq_len, mask.samples or 1)
            samples = range(max(1, len(mask.documents)))
            rows = [self._positions_in(mask, sample, rank) for sample in samples]
            positions = rows if mask.samples else rows[0]
        return positions if like is None else like.new_empty(0).long().new_tensor(positions)

    def _positions_in(self, mask: MaskSpec, sample: int, rank: int) -> list[int]:
        """Return the positions of a rank's tokens in the documents of a sample."""
        borders = mask.documents[sample] if mask.documents else (0, self.seq_len)
        contexts = mask.contexts(sample) if mask.documents else (0,)
        positions = [0] * self.length(rank)
        for document, shard in split_at_documents(self.segments(rank), borders).items():
            first = borders[document] - contexts[document]
            for segment, offset in shard:
                run = segment.positions
                local = range(run.start - first, run.stop - first, run.step)
                positions[offset : offset + segment.length] = local
        return positions

    def has_same_shards_as(self, other: TokenLayout) -> bool:
        """Whether every rank stores the same tokens in the same order as under another layout."""
        return self._shards == other._shards

    def ring_segments(self, ring_rank: int) -> tuple[Segment, ...]:
        """The tokens of one ring rank in ascending order, as attention sees them."""
        return _ring_order(self, ring_rank)[0]

    def ring_length(self, ring_rank: int) -> int:
        return sum(segment.length for segment in self.ring_segments(ring_rank))

    def ring_positions(self, ring_rank: int) -> list[int]:
        segments = self.ring_segments(ring_rank)
        return [position for segment in segments for position in segment.positions]

    def runs(self, ring_rank: int) -> tuple[Run, ...]:
        """How the shards of a ring rank's Ulysses ranks interleave to its ascending order."""
        return _ring_order(self, ring_rank)[1]

    def permutation(self) -> list[int]:
        """Global position of each token when the shards are joined in rank order."""
        return [position for rank in range(self.degree) for position in self.positions(rank)]

    def inverse(self) -> list[int]:
        """Index in the joined shards of each global position: undoes :meth:`permutation`."""
        inverse = [0] * self.seq_len
        for index, position in enumerate(self.permutation()):
            inverse[position] = index
        return inverse

    def shard(self, x: Any, dim: int, rank: int) -> Any:
        """A differentiable copy of the part of a full tensor that a rank of the group holds.

        Shapes:
            x: ``seq_len`` along ``dim``, or LayoutError; the result has ``length(rank)`` there.
        """
        dim = self.check_dim(x, dim, self.seq_len, "the full tensor")
        out = x.new_empty((*x.shape[:dim], self.length(rank), *x.shape[dim + 1 :]))
        for segment, begin in self._places[rank]:
            run = segment.positions
            out.narrow(dim, begin, segment.length).copy_(
                x[(slice(None),) * dim + (slice(run.start, run.stop, run.step),)]
            )
        return out

    def gather(self, shards: Any, dim: int) -> Any:
        """Return the full tensor, from a list of all ranks' shards in rank order.

        It undoes :meth:`shard` and carries gradients; nothing is sent.

        Raises:
            LayoutError: shards that are not this layout's, or that differ in more than tokens.
        """
        if hasattr(shards, "new_empty"):
            raise LayoutError(
                f"one tensor {list(shards.shape)} was given: give a list of all ranks' shards, or "
                "gather them over the mesh, mesh.gather(local, layout, dim)"
            )
        if len(shards) != self.degree:
            raise LayoutError(f"{len(shards)} shards were given for the {self.degree} of {self}")
        first = shards[0]
        for rank, part in enumerate(shards):
            dim = self.check_dim(part, dim, self.length(rank), f"the shard of rank {rank}")
            rest = (part.dtype, part.shape[:dim], part.shape[dim + 1 :])
            if rest != (first.dtype, first.shape[:dim], first.shape[dim + 1 :]):
                raise LayoutError(
                    f"the shard of rank {rank} is {tuple(part.shape)} of {part.dtype}, that of "
                    f"rank 0 {tuple(first.shape)} of {first.dtype}: only dim {dim} may differ"
                )
        out = first.new_empty((*first.shape[:dim], self.seq_len, *first.shape[dim + 1 :]))
        for part, segments in zip(shards, self._places, strict=True):
            for segment, begin in segments:
                run = segment.positions
                out[(slice(None),) * dim + (slice(run.start, run.stop, run.step),)] = part.narrow(
                    dim, begin, segment.length
                )
        return out

    def check_dim(self, x: Any, dim: int, length: int, what: str) -> int:
        """``dim`` of ``x``, counted from the front; LayoutError if it does not exist or has another
        length."""
        if not hasattr(x, "new_empty") or not isinstance(dim, int):
            raise LayoutError(
                f"{what} must be a tensor, and dim={dim!r} one of its dims: got a "
                f"{type(x).__name__}"
            )
        if not -x.ndim <= dim < x.ndim:
            raise LayoutError(f"dim {dim} does not exist in {what} of shape {tuple(x.shape)}")
        dim %= x.ndim
        if x.shape[dim] != length:
            raise LayoutError(
                f"{what} has {x.shape[dim]} tokens along dim {dim} of {tuple(x.shape)}; "
                f"{self} puts {length} there"
            )
        return dim

    def __str__(self) -> str:
        documents = ""
        if self.documents:
            documents = f" in {format_documents((self.documents,), (self.parents,))}"
        degrees = f"ulysses {self.ulysses} x ring {self.ring}"
        return f"{self.kind}({self.seq_len} tokens{documents}, {degrees})"


# The layouts, 16 tokens on ring 2 (Ulysses splits each ring rank's tokens further, in order):
#
#     contiguous         0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1     rank 1 has 3 x the causal work
#     zigzag             0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0     equal work, two runs a rank
#     striped            0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1     equal work, a window spans all ranks
#     context_parallel   Megatron's: zigzag over all sp ranks, also inside Ulysses
#     balanced           packed documents: whole where they are short, zigzag where they are long
#
# Causal work of a token grows with its position, so a rank needs one early and one late run.
def _contiguous(layout: TokenLayout, ulysses_rank: int, ring_rank: int) -> tuple[Segment, ...]:
    rank = layout.sp_rank(ulysses_rank, ring_rank)
    return _chunks_of_documents(layout, layout.degree, (rank,))


def _zigzag(layout: TokenLayout, ring_rank: int) -> tuple[Segment, ...]:
    chunks = 2 * layout.ring
    return tuple(_nth_chunk(layout.seq_len, chunks, i) for i in (ring_rank, chunks - 1 - ring_rank))


def _striped(layout: TokenLayout, ring_rank: int) -> tuple[Segment, ...]:
    length = len(range(ring_rank, layout.seq_len, layout.ring))
    return (Segment(ring_rank, length, layout.ring),)


def _balanced(layout: TokenLayout, ring_rank: int) -> tuple[Segment, ...]:
    documents = Documents(layout.documents)
    if layout.parents:
        mask = MaskSpec(None, 0, (layout.documents,), parents=(layout.parents,))
        documents = Documents(layout.documents, mask.contexts())
    return balance_documents(documents, layout.ring)[ring_rank]


def _split_over_ulysses(ring_table: Callable[[TokenLayout, int], tuple[Segment, ...]]) -> _Table:
    """A ring rank's tokens, cut evenly, in order, over its Ulysses ranks."""

    def table(layout: TokenLayout, ulysses_rank: int, ring_rank: int) -> tuple[Segment, ...]:
        whole = coalesce(ring_table(layout, ring_rank))
        total = sum(segment.length for segment in whole)
        return slice_segments(whole, *even_split(total, layout.ulysses, ulysses_rank))

    return table


def _context_parallel(
    layout: TokenLayout, ulysses_rank: int, ring_rank: int
) -> tuple[Segment, ...]:
    """Megatron's order: each document's chunks r and 2 sp - 1 - r of 2 sp."""
    rank, chunks = layout.sp_rank(ulysses_rank, ring_rank), 2 * layout.degree
    return _chunks_of_documents(layout, chunks, (rank, chunks - 1 - rank))


def _chunks_of_documents(
    layout: TokenLayout, chunks: int, indices: tuple[int, ...]
) -> tuple[Segment, ...]:
    """The chunks ``indices``, of ``chunks`` in all, of each document, or of the sequence."""
    return tuple(
        replace(chunk, start=start + chunk.start)
        for start, stop in pairwise(layout.documents or (0, layout.seq_len))
        for chunk in (_nth_chunk(stop - start, chunks, i) for i in indices)
    )


def _nth_chunk(total: int, parts: int, index: int) -> Segment:
    begin, end = even_split(total, parts, index)
    return Segment(begin, end - begin)


_Table = Callable[[TokenLayout, int, int], tuple[Segment, ...]]

# One row a layout: (layout, ulysses rank, ring rank) -> that rank's tokens in storage order. Names
# are in ds_usp/settings.py, too, and closed forms in `expected_positions` of ds_usp/testing.py.
_TABLES: Mapping[str, _Table] = MappingProxyType(
    {
        "contiguous": _contiguous,
        "zigzag": _split_over_ulysses(_zigzag),
        "striped": _split_over_ulysses(_striped),
        "context_parallel": _context_parallel,
        "balanced": _split_over_ulysses(_balanced),
    }
)
KINDS = tuple(_TABLES)


@lru_cache(maxsize=512)
def _cached_shards(layout: TokenLayout) -> tuple[Shards, tuple[int, ...], tuple[Shard, ...]]:
    """Return every rank's segments, their length, and where each of them lies in the shard."""
    shards = layout._make_shards()
    lengths = tuple(sum(segment.length for segment in shard) for shard in shards)
    return shards, lengths, tuple(map(with_offsets, shards))


@lru_cache(maxsize=1024)
def _ring_order(layout: TokenLayout, ring_rank: int) -> tuple[tuple[Segment, ...], tuple[Run, ...]]:
    """Segments of a ring rank in global order, and the Ulysses ranks' runs that hold them."""
    runs_by_position = [
        (segment, Run(ulysses_rank, begin, segment.length))
        for ulysses_rank in range(layout.ulysses)
        for segment, begin in with_offsets(layout.segments(layout.sp_rank(ulysses_rank, ring_rank)))
    ]
    # Segments of a ring rank do not interleave: not of one Ulysses rank, nor of two.
    runs_by_position.sort(key=lambda placed: placed[0].start)
    runs: list[Run] = []
    for _, run in runs_by_position:
        last = runs[-1] if runs else None
        if last and (last.ulysses_rank, last.stop) == (run.ulysses_rank, run.start):
            runs[-1] = Run(last.ulysses_rank, last.start, last.length + run.length)
        else:
            runs.append(run)
    return coalesce(segment for segment, _ in runs_by_position), tuple(runs)
