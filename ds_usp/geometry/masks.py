"""Attention masks: which (query, key) pairs attend, in global positions."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ds_usp.errors import ConfigError

Borders = tuple[int, ...]
Blocks = tuple[tuple[int, int], ...]  # half-open, ascending

# Documents that are printed border by border; more are told apart by a digest of their borders.
_PRINTED = 8


# A mask is two bounds on a distance between global positions, and where documents begin; never a
# tensor. A dense mask of 128K tokens is 16 GiB of booleans, cannot be sharded without knowing the
# layout, and cannot be asked which blocks are empty. What two integers cannot say (an arbitrary
# dense mask) is refused where it is met, with the masks that are served.
#
# Documents are borders and not a number for each token (a "document id" tensor): borders are a few
# integers that ranks can compare and plans can be cached by, and which two shards share a document
# is known without looking at their tokens. Positions stay those of the whole sequence: a band
# compares differences, which a document's own positions would not change.
@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A query at position ``q`` sees a key at ``k`` if ``-left <= k - q <= right``.

    ``None`` means no bound on that side. Positions are global, so one value describes the mask
    for every rank and every layout.

    Args:
        documents: the sequence is documents, one after the other, and a query sees keys of its
            own alone. Their cumulative borders in tokens (``[0, 5, 17, seq_len]``), the same for
            every sample of a batch, or a list of them for each sample; tensors and arrays will do.
            A border that is repeated, as packers write it for an empty slot, is
            a document without tokens and is dropped. ``()`` or None: the sequence is one
            document; an empty list is refused.
        prefix: every query sees the first so many keys too, whatever the window is.
        blocks: for each sample that has documents of its own half-open ranges of tokens, ascending
            and each inside of a document. Within a block ``right`` does not bind: its tokens see
            those after them too (images and prefixes of causal models). They need documents, of
            which ``[0, seq_len]`` is one.

    Raises:
        ConfigError: a bound that is not a whole number of 0 or more; borders that do not start
            at 0 or do not ascend; a prefix together with documents; blocks of other samples than
            the documents, that overlap, or across a border.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[Borders, ...] = ()
    prefix: int = 0
    blocks: tuple[Blocks, ...] = ()

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
        """What kernels are asked for: the mask without its documents. Blocks are windows whose
        left bound is a query's own token."""
        left = 0 if self.blocks and self.left is None else self.left
        return MaskSpec(left, self.right) if self.documents else self

    @property
    def samples(self) -> int | None:
        """Samples of a batch that it was made for; None: any number, all alike."""
        return len(self.documents) if len(self.documents) > 1 else None

    def blocks_of(self, sample: int, document: int) -> Blocks:
        """The blocks inside of a document of a sample."""
        if not self.blocks:
            return ()
        blocks, borders = self.blocks[sample], self.documents[sample]
        first, last = (bisect_left(blocks, (x,)) for x in borders[document : document + 2])
        return blocks[first:last]

    def check_length(self, seq_len: int, batch: int) -> None:
        """Check that the documents, and the prefix, are those of such a batch.

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
        if self.documents:
            borders = self.documents[sample if len(self.documents) > 1 else 0]
            if bisect_right(borders, query) != bisect_right(borders, key):
                return False
        if key < self.prefix:
            return True
        distance = key - query
        blocks = self.blocks[sample if len(self.blocks) > 1 else 0] if self.blocks else ()
        in_block = any(a <= query < b and a <= key < b for a, b in blocks)
        return (self.left is None or -self.left <= distance) and (
            self.right is None or distance <= self.right or in_block
        )

    def __str__(self) -> str:
        text = f"window({self.left}, {self.right})"
        if self.left is None and self.right in (0, None):
            text = "causal" if self.right == 0 else "full"
        text += f" with a prefix of {self.prefix}" if self.prefix else ""
        if self.blocks:
            count = sum(map(len, self.blocks))
            text += f" with {count} blocks ({_digest(self.blocks)})"
        return f"{text} in {format_documents(self.documents)}" if self.documents else text


def normalize_documents(documents: Any) -> tuple[Borders, ...]:
    """Borders as :class:`MaskSpec` keeps them: none (``()`` or None), one tuple for all samples, or
    one for each.

    Raises:
        ConfigError: no whole numbers, not from 0, or not ascending.
    """
    if documents is None or (isinstance(documents, tuple) and not documents):
        return ()
    lists = _as_list(documents)
    if not any(getattr(x, "ndim", 0) > 0 or isinstance(x, Sequence) for x in lists):
        lists = [lists]
    return tuple(_validate_borders(_as_list(sample)) for sample in lists)


def _as_list(x: Any) -> list[Any]:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, str) or not isinstance(x, Sequence):
        raise ConfigError(
            f"documents={x!r} must be cumulative borders such as [0, 5, 17, seq_len], or a list "
            "of them for each sample"
        )
    return list(x)


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


def format_documents(documents: tuple[Borders, ...]) -> str:
    """One line of text, with a digest where the documents are many."""
    count = sum(len(borders) - 1 for borders in documents)
    if count <= _PRINTED:
        return "documents " + " | ".join("-".join(map(str, borders)) for borders in documents)
    return f"{count} documents of {len(documents)} samples ({_digest(documents)})"


def _digest(numbers: tuple[Any, ...]) -> str:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).hexdigest()
