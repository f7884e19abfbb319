"""Attention masks: which (query, key) pairs attend, in global positions. All ranks have equal ones,
compare their text with each call, and read their areas while they plan it."""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from ds_usp.errors import ConfigError

Borders = tuple[int, ...]
Blocks = tuple[tuple[int, int], ...]  # half-open, ascending
Parents = tuple[int, ...]  # of each document, -1: none

_END = sys.maxsize  # after the last token of any sequence
# Documents that are printed border by border; of more, a digest of their borders.
_PRINTED = 8


class Area(NamedTuple):
    """The pairs of the queries ``q_start : q_stop`` and keys ``k_start : k_stop``, in global
    positions, with ``-left <= key - query <= right``; None: no bound."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int | None = None
    right: int | None = None

    @property
    def diagonal(self) -> tuple[int, int]:
        """The tokens that see themselves, of an area without a left bound."""
        if self.right is not None and self.right < 0:
            return 0, 0
        return max(self.q_start, self.k_start), min(self.q_stop, self.k_stop)


# A mask is two bounds on a distance between global positions, and where documents begin; never a
# tensor. A dense mask of 128K tokens is 16 GiB of booleans, cannot be sharded without knowing the
# layout, and cannot be asked which blocks are empty. What two integers cannot say (an arbitrary
# dense mask) is refused where it is given, with the masks that are served.
#
# Documents are borders and not a number for each token (a "document id" tensor): borders are a few
# integers that ranks can compare and plans can be cached by, and which two shards share a document
# is known without looking at their tokens. Positions stay those of the whole sequence: a band
# compares differences, which a document's own positions would not change.
#
# A tree is documents with one more row of data, the parent of each:
#
#     documents  0-4 4-6 6-9     keys  0 0 0 0 1 1 2 2 2     Everything below asks for areas: of a
#     parents     -1   0   0   rows 0  \ . . .                document its own triangle, of a parent
#                                   1  # # # # \ .            the rectangle of its descendants' rows
#                                   2  # # # # . . \ . .      and its columns. Depth first, these
#                                                            rows are one run, so one rectangle.
# A window in a tree is of depths, the places of tokens in their rows. They ascend by one in each
# segment, so what a segment sees of an ancestor is a band too: an area for each such pair.
#
# A new field goes into `areas_of`, `allows`, `band` and `__str__`, and if it is no number into
# `_LEFT_OUT` of attention/custom_ops.py.
@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A query at position ``q`` sees a key at ``k`` if ``-left <= k - q <= right``.

    ``None`` means no bound on that side. Positions are global, so one value describes the mask
    for every rank and every layout.

    Args:
        documents: the sequence is documents, one after the other, and a query sees keys of its
            own alone. Their cumulative borders in tokens (``[0, 5, 17, seq_len]``), the same for
            every sample of a batch, or a list of them for each sample; tensors and arrays will do.
            A repeated border, as packers write for an empty slot, is a document without tokens and
            is dropped. ``()`` or None: the sequence is one document; an empty list is refused.
        prefix: every query sees the first so many keys too, whatever the window is.
        blocks: for each sample that has documents of its own half-open ranges of tokens, ascending
            and each inside of a document. Within a block ``right`` does not bind: its tokens see
            those after them too (images and prefixes of causal models). They need documents, of
            which ``[0, seq_len]`` is one.
        parents: for each sample that has documents of its own the parent of each of them, the
            index of an earlier document or -1: a document's tokens see all tokens of its ancestors
            (:meth:`tree`). Only of masks with ``right=0``; ``left`` counts tokens of a document's
            row, which are its ancestors' and its own.
        areas: in place of all other fields, for every sample (:meth:`rectangles`) of one document.

    Raises:
        ConfigError: a bound that is no number of 0 or more; borders that do not start at 0 or do
            not ascend; a prefix together with documents; blocks that overlap or cross a border,
            parents that do not come first, either of other samples than the documents; parents with
            blocks or ``right``; areas that share a pair, or in none of which a token sees itself.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[Borders, ...] = ()
    prefix: int = 0
    blocks: tuple[Blocks, ...] = ()
    parents: tuple[Parents, ...] = ()
    areas: tuple[Area, ...] = ()

    def __post_init__(self) -> None:
        for name, bound in (("left", self.left), ("right", self.right)):
            is_int = isinstance(bound, int) and not isinstance(bound, bool)
            if bound is not None and (not is_int or bound < 0):
                raise ConfigError(
                    f"window {name}={bound!r} must be a whole number of tokens, 0 or more; "
                    "None leaves that side open (a library's -1 is None here)"
                )
        if not isinstance(self.documents, tuple) or self.documents:
            object.__setattr__(self, "documents", normalize_documents(self.documents))
        if isinstance(self.prefix, bool) or not isinstance(self.prefix, int) or self.prefix < 0:
            raise ConfigError(f"prefix={self.prefix!r} must be a whole number of tokens, 0 or more")
        if self.prefix and self.documents:
            raise ConfigError(
                f"a prefix of {self.prefix} tokens is the whole sequence's, and here it is "
                "documents: leave one of the two out"
            )
        if self.blocks:
            blocks = tuple(tuple((int(a), int(b)) for a, b in sample) for sample in self.blocks)
            object.__setattr__(self, "blocks", blocks)
            self._check_blocks()
        if self.parents:
            object.__setattr__(self, "parents", tuple(map(tuple, self.parents)))
            self._check_parents()
        if self.areas:
            object.__setattr__(self, "areas", tuple(Area(*area) for area in self.areas))
            self._check_areas()

    def _check_areas(self) -> None:
        one_document = [len(borders) for borders in self.documents] == [2]
        bounded = any(area.left is not None for area in self.areas)
        others = replace(self, documents=(), areas=()) != MaskSpec(None, 0)
        if others or bounded or not one_document:
            raise ConfigError(
                "areas are all of a mask and have no left bound, and here are such a bound, other "
                "fields, or not the one document that is the sequence: use "
                "MaskSpec.rectangles(rectangles, seq_len)"
            )
        seq_len, earlier = self.documents[0][-1], list[Area]()  # that reach the next one's rows
        for area in sorted(self.areas, key=itemgetter(0, 1, 2, 3)):
            shown = _format_area(area)
            if not (0 <= area.q_start < area.q_stop <= seq_len) or not (
                0 <= area.k_start < area.k_stop <= seq_len
            ):
                raise ConfigError(f"{shown} must have a query and a key of 0 to {seq_len}")
            earlier = [x for x in earlier if x.q_stop > area.q_start]
            for other in earlier:
                if _share_pairs(other, area):
                    raise ConfigError(
                        f"{shown} and {_format_area(other)} share a pair, which would count twice: "
                        "cut one of them at the other's border"
                    )
            earlier.append(area)
        seen = 0
        for start, stop in sorted([*(x.diagonal for x in self.areas), (seq_len, seq_len)]):
            if start > seen:
                raise ConfigError(
                    f"tokens {seen} to {start} are in no rectangle with themselves: a token sees "
                    f"itself at least, as by ({seen}, {start}, {seen}, {start}, 'causal')"
                )
            seen = max(seen, stop)

    def _check_parents(self) -> None:
        if self.right != 0 or self.blocks:
            mask = MaskSpec(self.left, self.right, self.documents, blocks=self.blocks)
            raise ConfigError(
                f"parents of documents, and the mask is {mask}: a tree is causal in each document "
                "and open to its ancestors. Leave right and blocks out, MaskSpec.tree(segments)"
            )
        counts = [len(borders) - 1 for borders in self.documents]
        if [len(parents) for parents in self.parents] != counts:
            raise ConfigError(
                f"parents of {[len(parents) for parents in self.parents]} documents, there are "
                f"{counts} in the samples: give each document its parent, -1 for none"
            )
        for sample, (borders, parents) in enumerate(zip(self.documents, self.parents, strict=True)):
            for index, parent in enumerate(parents):
                if type(parent) is not int or not -1 <= parent < len(parents):
                    raise ConfigError(
                        f"segment {index} of sample {sample} has the parent {parent!r}, there are "
                        f"{len(parents)} segments: give an index of 0 to {len(parents) - 1}, or "
                        "None for a root"
                    )
                if parent >= index:
                    child, other = (f"{i} ({borders[i]}-{borders[i + 1]})" for i in (index, parent))
                    which = "itself" if parent == index else f"{other}, which begins later"
                    raise ConfigError(
                        f"segment {child} of sample {sample} has as its parent {which}: tokens see "
                        "earlier ones only. Order the segments so that each comes after its parent"
                    )

    def _check_blocks(self) -> None:
        if len(self.blocks) != len(self.documents):
            raise ConfigError(
                f"blocks of {len(self.blocks)} samples, and documents of {len(self.documents)}: "
                "give both for each sample"
            )
        for sample, blocks in enumerate(self.blocks):
            after = 0
            for start, stop in blocks:
                border = self._end_of_document(start, sample)
                if not after <= start < stop <= border:
                    raise ConfigError(
                        f"block {start}-{stop} of sample {sample} must be of 1 token or more, "
                        f"begin at {after} or later and end at {border}, with its document, or "
                        "before"
                    )
                after = stop

    def _end_of_document(self, token: int, sample: int) -> int:
        borders = self.documents[sample]
        return borders[min(bisect_right(borders, token), len(borders) - 1)]

    @classmethod
    def causal(cls, documents: Any = ()) -> MaskSpec:
        """Every token sees itself and all before it, of its document."""
        return cls(None, 0, documents)

    @classmethod
    def full(cls, documents: Any = ()) -> MaskSpec:
        """Every token sees every token of its document."""
        return cls(None, None, documents)

    @classmethod
    def window(cls, left: int | None, right: int | None = 0, documents: Any = ()) -> MaskSpec:
        """Every token sees ``left`` tokens before it and ``right`` after it, and itself.

        ``sliding_window=w`` of transformers counts the token itself: ``window(w - 1)``.
        """
        return cls(left, right, documents)

    @classmethod
    def tree(cls, segments: Any, left: int | None = None) -> MaskSpec:
        """Causal in each segment, and each sees all of its ancestors: a prompt once, and many
        answers that do not see each other. Several roots are packed trees.

        Args:
            segments: ``(start, end, parent)`` in tokens, ascending, from 0 to the sequence's end;
                ``parent`` is the index of an earlier segment, None or -1 for a root. Or a list of
                them for each sample. Padding is a root of its own. Depth first (a segment's
                descendants follow it) takes the fewest kernel calls. The only child that follows
                its parent is joined to it: the same mask.
            left: tokens before it that a token sees in its row, of its segment and ancestors, as of
                :meth:`window`; None: all.

        Raises:
            ConfigError: segments that are empty, overlap or leave tokens out; a parent that does
                not exist or does not come first.

        Source: Tree Training, arXiv 2511.00413.
        """
        lists = _as_list(segments, _SEGMENTS)
        rows = [_as_list(x, _SEGMENTS) for x in lists]
        nested = bool(rows) and all(row and _is_list(row[0]) for row in rows)
        samples = [_validate_segments(x) for x in (rows if nested else [rows])]
        documents = tuple(borders for borders, _ in samples)
        checked = cls(left, 0, documents, parents=tuple(parents for _, parents in samples))
        joined = [
            _join_only_children(*sample)
            for sample in zip(checked.documents, checked.parents, strict=True)
        ]
        parents = tuple(parents for _, parents in joined)
        if all(parent < 0 for row in parents for parent in row):
            parents = ()  # nothing branches: packed documents
        return cls(left, 0, tuple(borders for borders, _ in joined), parents=parents)

    @classmethod
    def rectangles(cls, rectangles: Any, seq_len: int) -> MaskSpec:
        """Return the mask that shows what the rectangles show, and nothing else.

        Args:
            rectangles: ``(q_start, q_stop, k_start, k_stop, kind)`` in tokens, for every sample; of
                kind ``"full"``, or ``"causal"``: its last query sees its last key, the query before
                it the key before that, and so on. Each pair of tokens is in one rectangle at most;
                every token sees itself (padding too).
            seq_len: tokens of the sequence.

        Raises:
            ConfigError: a rectangle that is empty or goes beyond the sequence; two that share a
                pair; a token that does not see itself.
        """
        areas = []
        for index, rectangle in enumerate(_as_list(rectangles, _RECTANGLES)):
            *numbers, kind = _as_list(rectangle, _RECTANGLES) or [None]
            whole = len(numbers) == 4 and all(type(x) is int for x in numbers)
            if not whole or kind not in ("full", "causal"):
                raise ConfigError(_RECTANGLES.format(rectangle) + f"; rectangle {index} is not")
            q_start, q_stop, k_start, k_stop = numbers
            right = k_stop - q_stop if kind == "causal" else None
            areas.append(Area(q_start, q_stop, k_start, k_stop, None, right))
        if not areas:
            raise ConfigError(_RECTANGLES.format(rectangles) + ", and there is none")
        return cls(None, 0, ((0, seq_len),), areas=tuple(areas))

    @classmethod
    def prefix_lm(cls, prefix: int) -> MaskSpec:
        """Causal, but the first ``prefix`` tokens see each other in both directions (T5's prefix
        language model, arXiv 1910.10683)."""
        return cls(None, 0, prefix=prefix)

    @property
    def is_causal(self) -> bool:
        """The plain causal mask, without a window or prefix and of one document."""
        return self == MaskSpec(None, 0)

    @property
    def is_full(self) -> bool:
        """Every query sees every key, in one document."""
        return self == MaskSpec()

    @property
    def band(self) -> MaskSpec:
        """Return what kernels are asked for: the mask without its documents. Blocks are windows
        whose left bound is a query's own token."""
        left = 0 if self.blocks and self.left is None else self.left
        return MaskSpec(left, self.right) if self.documents else self

    def areas_of(self, sample: int = 0) -> Iterator[tuple[Area, ...]]:
        """All pairs that attend, each in one area. Areas that tiles.py may merge into one tile are
        together, in a tuple, as which tuning.py counts them; ring_traffic.py sends what they see,
        chunking.py counts their pairs. ``sample``: an index of ``documents``; 0 without."""
        if self.areas:
            yield from zip(self.areas, strict=True)
            return
        if not self.documents:
            start = self.prefix
            prefix = (Area(0, _END, 0, start),) if start else ()
            yield *prefix, Area(0, _END, start, _END, self.left, self.right)
            return
        borders = self.documents[sample]
        for index, (start, stop) in enumerate(pairwise(borders)):
            document_area = Area(start, stop, start, stop, self.left, self.right)
            blocks = () if self.right is None else self.blocks_of(sample, index)
            yield document_area, *(Area(a, b, a, b, -1 - (self.right or 0)) for a, b in blocks)
        if self.parents and self.left is not None:
            yield from self._areas_in_window(sample, self.left)
        elif self.parents:
            for index, runs in enumerate(_descendants(borders, self.parents[sample])):
                for start, stop in runs:
                    yield (Area(start, stop, *borders[index : index + 2]),)

    def _areas_in_window(self, sample: int, left: int) -> Iterator[tuple[Area]]:
        """Yield areas of a segment's queries and an ancestor's keys, in global positions, each in a
        tuple of its own. ``sample``: an index of ``documents``; ``left``: tokens before a query in
        its row, the window. That of an area counts other rows' tokens between the two as well."""
        borders, parents = self.documents[sample], self.parents[sample]
        depths = self.contexts(sample)  # of the first token of each segment
        for index, (start, stop) in enumerate(pairwise(borders)):
            ancestor, first_seen = parents[index], depths[index] - left
            while ancestor >= 0:
                k_start, k_stop = borders[ancestor : ancestor + 2]
                depth = depths[ancestor]
                end = depth + k_stop - k_start
                if end <= first_seen:
                    break  # and all above it
                # Tokens between the two that are in the sequence and not in the row.
                others = (start - depths[index]) - (k_start - depth)
                q_stop = min(stop, start + end + left - depths[index])
                k_start += max(0, first_seen - depth)
                yield (Area(start, q_stop, k_start, k_stop, left + others),)
                ancestor = parents[ancestor]

    def contexts(self, sample: int = 0) -> tuple[int, ...]:
        """Count for each document of a sample the tokens of all its ancestors."""
        borders = self.documents[sample]
        contexts: list[int] = []
        for parent in self.parents[sample] if self.parents else (-1,) * (len(borders) - 1):
            before = contexts[parent] + borders[parent + 1] - borders[parent] if parent >= 0 else 0
            contexts.append(before)
        return tuple(contexts)

    @property
    def samples(self) -> int | None:
        """Samples of a batch that it was made for; None: any number, all equal."""
        return len(self.documents) if len(self.documents) > 1 else None

    def blocks_of(self, sample: int, document: int) -> Blocks:
        """The blocks inside of a document of a sample."""
        if not self.blocks:
            return ()
        blocks, borders = self.blocks[sample], self.documents[sample]
        first, last = (bisect_left(blocks, (x,)) for x in borders[document : document + 2])
        return blocks[first:last]

    def check_length(self, seq_len: int, batch: int) -> None:
        """Check that documents and prefix fit ``batch`` samples of ``seq_len`` tokens.

        Raises:
            ConfigError: documents that end elsewhere, or of another number of samples; a longer
                prefix.
        """
        if self.prefix > seq_len:
            raise ConfigError(f"a prefix of {self.prefix} tokens in a sequence of {seq_len}")
        for sample, borders in enumerate(self.documents):
            if borders[-1] != seq_len:
                raise ConfigError(
                    f"the documents of sample {sample} end at {borders[-1]}, the sequence has "
                    f"{seq_len} tokens: the last border must be {seq_len} (padding is a "
                    "document of its own)"
                )
        if self.samples not in (None, batch):
            raise ConfigError(
                f"documents are given for {self.samples} samples, the batch has {batch}: give one "
                "list of borders for all or one for each sample"
            )

    def allows(self, query: int, key: int, sample: int = 0) -> bool:
        """Whether a query sees a key, by their global positions; what tests hold tiles to."""
        if self.areas:
            return any(
                x.q_start <= query < x.q_stop
                and x.k_start <= key < x.k_stop
                and (x.right is None or key - query <= x.right)
                for x in self.areas
            )
        if self.documents:
            sample = sample if len(self.documents) > 1 else 0
            borders = self.documents[sample]
            document, other = (bisect_right(borders, position) - 1 for position in (query, key))
            if document != other:
                ancestor, parents = document, self.parents[sample] if self.parents else ()
                while parents and ancestor > other:
                    ancestor = parents[ancestor]
                if not parents or ancestor != other:
                    return False
                places, depths = (borders[document], borders[other]), self.contexts(sample)
                between = query - places[0] + depths[document] - (key - places[1] + depths[other])
                return self.left is None or between <= self.left
        if key < self.prefix:
            return True
        distance = key - query
        blocks = self.blocks[sample if len(self.blocks) > 1 else 0] if self.blocks else ()
        in_block = any(a <= query < b and a <= key < b for a, b in blocks)
        return (self.left is None or -self.left <= distance) and (
            self.right is None or distance <= self.right or in_block
        )

    def __str__(self) -> str:  # ranks compare it: different masks have different texts
        text = f"window({self.left}, {self.right})"
        if self.left is None and self.right in (0, None):
            text = "causal" if self.right == 0 else "full"
        text += f" with a prefix of {self.prefix}" if self.prefix else ""
        if self.blocks:
            count = sum(map(len, self.blocks))
            text += f" with {count} blocks ({_digest(self.blocks)})"
        if self.areas:
            return f"{len(self.areas)} rectangles ({_digest(self.areas)})"
        if not self.documents:
            return text
        return f"{text} in {format_documents(self.documents, self.parents)}"


def has_only(mask: MaskSpec, *names: str) -> bool:
    """Return whether all fields but the named ones have their defaults. Code that reads fields one
    by one asks this first: it refuses what it does not read, a field of a later version too."""
    kind: Any = type(mask)  # which mypy takes for no Hashable
    return all(getattr(mask, name) == default for name, default in _defaults_but(names, kind))


@cache
def _defaults_but(names: tuple[str, ...], kind: type[MaskSpec]) -> list[tuple[str, Any]]:
    return [(x.name, x.default) for x in fields(kind) if x.name not in names]


def normalize_documents(documents: Any) -> tuple[Borders, ...]:
    """Borders as :class:`MaskSpec` keeps them: none (``()`` or None), one tuple for all samples, or
    one for each. The last border is not compared with the sequence (``check_length`` does).

    Raises:
        ConfigError: no whole numbers, not from 0, or not ascending.
    """
    if documents is None or (isinstance(documents, tuple) and not documents):
        return ()
    lists = _as_list(documents, _BORDERS)
    if not any(getattr(x, "ndim", 0) > 0 or isinstance(x, Sequence) for x in lists):
        lists = [lists]
    return tuple(_validate_borders(_as_list(sample, _BORDERS)) for sample in lists)


_BORDERS = "documents={!r} must be cumulative borders such as [0, 5, 17, seq_len]"
_SEGMENTS = "segments={!r} must be (start, end, parent) of each, as [(0, 5, None), (5, seq_len, 0)]"
_RECTANGLES = (
    "rectangles={!r} must be (q_start, q_stop, k_start, k_stop, 'full' or 'causal') of each"
)


def _as_list(x: Any, expected: str) -> list[Any]:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, str) or not isinstance(x, Sequence):
        raise ConfigError(expected.format(x) + ", or a list of them for each sample")
    return list(x)


def _format_area(area: Area) -> str:
    kind = "full" if area.right is None else "causal"
    return "rectangle ({}, {}, {}, {}, {!r})".format(*area[:4], kind)


def _share_pairs(a: Area, b: Area) -> bool:
    """Whether two areas without left bounds have a (query, key) pair in common."""
    rows = max(a.q_start, b.q_start), min(a.q_stop, b.q_stop)
    columns = max(a.k_start, b.k_start), min(a.k_stop, b.k_stop)
    bounds = [area.right for area in (a, b) if area.right is not None]
    nearest = columns[0] - (rows[1] - 1)  # of the last row to the first column
    return rows[0] < rows[1] and columns[0] < columns[1] and all(nearest <= x for x in bounds)


def _is_list(x: Any) -> bool:
    return getattr(x, "ndim", 0) > 0 or (isinstance(x, Sequence) and not isinstance(x, str))


def _validate_segments(segments: list[Any]) -> tuple[Borders, Parents]:
    """One sample's borders, and the parent of each segment, which is still to be checked."""
    borders, parents = [0], list[int]()
    for index, segment in enumerate(segments):
        row = [x.item() if hasattr(x, "item") else x for x in _as_list(segment, _SEGMENTS)]
        if len(row) != 3 or not all(type(x) is int for x in row[:2]):
            raise ConfigError(_SEGMENTS.format(row) + f"; segment {index} is not")
        start, end, parent = row
        before = borders[-1]
        if start < before:
            raise ConfigError(
                f"segment {index} ({start}-{end}) begins before segment {index - 1} ends, at "
                f"{before}: segments do not overlap, and ascend"
            )
        if start > before:
            raise ConfigError(
                f"tokens {before} to {start} are in no segment, {index} is {start}-{end}: segments "
                "follow each other from 0 on (padding is a segment without a parent)"
            )
        if end <= start:
            raise ConfigError(f"segment {index} ({start}-{end}) has no token: leave it out")
        borders.append(end)
        parents.append(-1 if parent is None else parent)
    if not segments:
        raise ConfigError(_SEGMENTS.format(segments) + ", and there is none")
    return tuple(borders), tuple(parents)


def _join_only_children(borders: Borders, parents: Parents) -> tuple[Borders, Parents]:
    """The same tree in fewer segments: a segment with a single child that follows it is joined with
    that child."""
    children = [0] * len(parents)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    starts, joined, new_index = list[int](), list[int](), list[int]()
    for index, parent in enumerate(parents):
        if parent < 0 or parent != index - 1 or children[parent] > 1:
            starts.append(borders[index])
            joined.append(-1 if parent < 0 else new_index[parent])
        new_index.append(len(joined) - 1)
    return (*starts, borders[-1]), tuple(joined)


def _descendants(borders: Borders, parents: Parents) -> list[list[tuple[int, int]]]:
    """Return for each document the runs of tokens of all its descendants, ascending."""
    runs: list[list[tuple[int, int]]] = [[] for _ in parents]
    for index in range(len(parents) - 1, -1, -1):
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(runs[index]):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        runs[index] = joined
        if parents[index] >= 0:
            runs[parents[index]] += ((borders[index], borders[index + 1]), *joined)
    return runs


def _validate_borders(borders: list[Any]) -> Borders:
    """One sample's borders as a tuple, without repeated ones (empty documents)."""
    borders = [border.item() if hasattr(border, "item") else border for border in borders]
    if not all(type(border) is int for border in borders):
        raise ConfigError(f"documents {_abbreviate(borders)} must be whole numbers of tokens")
    if not borders or borders[0] != 0 or borders[-1] == 0:
        raise ConfigError(
            f"documents {_abbreviate(borders)} must be cumulative borders from 0 to the length of "
            "the sequence"
        )
    for index, (previous, border) in enumerate(pairwise(borders)):
        if border < previous:
            raise ConfigError(
                f"documents must ascend: border {index + 1} is {border}, after one of {previous}"
            )
    return tuple(dict.fromkeys(borders))


def _abbreviate(borders: Sequence[Any]) -> str:
    printed = list(borders[: _PRINTED + 1])
    return f"{printed}" if len(borders) == len(printed) else f"{str(printed)[:-1]}, ...]"


def format_documents(documents: tuple[Borders, ...], parents: tuple[Parents, ...] = ()) -> str:
    """One line of text, which ranks compare: with a digest where documents are many, or a tree."""
    count = sum(len(borders) - 1 for borders in documents)
    if any(parents):
        tree = _digest((documents, parents))
        return f"a tree of {count} segments of {len(documents)} samples ({tree})"
    if count <= _PRINTED:
        return "documents " + " | ".join("-".join(map(str, borders)) for borders in documents)
    return f"{count} documents of {len(documents)} samples ({_digest(documents)})"


def _digest(numbers: tuple[Any, ...]) -> str:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).hexdigest()
