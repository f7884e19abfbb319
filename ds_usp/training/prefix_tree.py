"""Rows with a common prefix, as one tree: a prompt once, and its answers as branches.

Preference and reinforcement learning repeat one prompt for many answers. Causal attention computes
the same numbers for it each time; a tree (``MaskSpec.tree``) has it once. A data loader collates
by it, and transformers' and verl's integrations find the trees of a batch; nothing communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ds_usp.errors import ConfigError, DataError
from ds_usp.training.whole_batch import IGNORE_INDEX, LABELS, LOSS_WEIGHTS, SHIFTED, TOKENS, TREE

# Tokens that rows must have in common for a segment of their own. Fewer (a first token that begins
# every text, a phrase) save less than the kernel call costs that each level of a tree adds.
MIN_SHARED = 16

Reduction = Literal["tokens", "rows"]


@dataclass(frozen=True)
class SharedPrefixes:
    """Says where the tokens of some rows are in one tree.

    Attributes:
        segments: ``(start, end, parent)``, as of ``MaskSpec.tree``, depth first.
        places: of each row's tokens, in order, the token of the tree that stands for it, ``[n]``.
            Rows that are equal have the same tensor.
    """

    segments: tuple[tuple[int, int, int], ...]
    places: tuple[Tensor, ...]

    # Note [the last token of a prefix is in each of its branches]
    # A token predicts the next one, and the last token of a prompt has as many next ones as there
    # are answers: as many labels for one output. So a shared segment ends one token early, and each
    # branch begins with a copy of that token, at the position that it has in its row. The copy sees
    # what it sees in the row (the prompt before it, and itself), its output is the row's, and what
    # follows in the branch sees the row's keys: nothing is approximated. Each branch then is a
    # row's rest with its own labels, and every token before it has one next token in all rows. The
    # loss of such a token counts once for each row that has it, which is a weight.
    @classmethod
    def of(
        cls, rows: Sequence[Tensor], starts: Sequence[int] = (), min_shared: int = MIN_SHARED
    ) -> SharedPrefixes:
        """Find the tree.

        Shapes:
            rows: ``[n]`` of each, token ids on the CPU, without padding.

        Args:
            starts: positions of the rows' first tokens, 0 where there are none; rows that begin at
                different ones share nothing.
            min_shared: fewest tokens that make a segment.

        Raises:
            ConfigError: ``min_shared`` below 2: a prefix of one token would be in its branches.
            DataError: no rows, or one without tokens.
        """
        if isinstance(min_shared, bool) or not isinstance(min_shared, int) or min_shared < 2:
            raise ConfigError(
                f"min_shared={min_shared!r} must be a whole number of 2 or more: the last token of "
                "a shared prefix is in each of its branches"
            )
        empty = [index for index, row in enumerate(rows) if not len(row)]
        if empty or not rows:
            raise DataError(f"rows {empty[:8]} of {len(rows)} have no tokens: leave them out")
        places: list[Tensor] = [torch.empty(0)] * len(rows)
        segments, total = list[tuple[int, int, int]](), 0
        path = torch.empty(max(map(len, rows)), dtype=torch.long)  # of the prefix that is visited
        # A stack, not recursion: rows that are prefixes of each other make a tree as deep as many.
        # The prefixes with the first of their tokens that has no segment yet, and the one before.
        stack = [(root, 0, -1) for root in reversed(_tries(rows, list(starts) or [0] * len(rows)))]
        while stack:
            prefix, start, parent = stack.pop()
            stop = prefix.length - 1 if prefix.longer else prefix.length
            if not prefix.longer or prefix.length - start >= min_shared:
                path[start:stop] = torch.arange(total, total + stop - start)
                segments.append((total, total + stop - start, parent))
                total += stop - start
                start, parent = stop, len(segments) - 1
            if prefix.longer:
                branches = [*prefix.longer, *prefix.whole_rows()]
                branches.sort(key=lambda branch: branch.first, reverse=True)
                stack += [(branch, start, parent) for branch in branches]
            else:
                place = path[:stop].clone()
                for row in prefix.rows:
                    places[row] = place
        return cls(tuple(segments), tuple(places))

    @property
    def tokens(self) -> int:
        """Tokens of the tree."""
        return self.segments[-1][1]

    @property
    def row_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.places))

    def gather_from(self, rows: Sequence[Tensor]) -> Tensor:
        """Return ``[tokens]`` of the tree from values ``[n]`` of each row, which are equal where
        rows share a token."""
        out = rows[0].new_zeros(self.tokens)
        for row, place in zip(rows, self.places, strict=True):
            out[place] = row
        return out

    def labels(self, labels: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The tree's labels, and the sum of the weights with which rows count each of them.

        Shapes:
            labels, weights: ``[n]`` of each row, the next token of each or -100; ``[tokens]`` out,
            int64 and float64.

        Raises:
            DataError: rows with different labels for the same token: they are not the next tokens.
        """
        joined = torch.full((self.tokens,), IGNORE_INDEX)
        total = torch.zeros(len(joined), dtype=torch.float64)
        rows = zip(labels, weights, self.places, strict=True)
        for index, (row, row_weights, place) in enumerate(rows):
            counts = row != IGNORE_INDEX
            counted_places, counted_labels = place[counts], row[counts]
            before = joined[counted_places]
            if bool(((before != IGNORE_INDEX) & (before != counted_labels)).any()):
                raise DataError(
                    f"row {index} has other labels than a row with the same tokens before them: "
                    "labels of shared prefixes are the next tokens, or -100"
                )
            joined[counted_places] = counted_labels
            total[counted_places] += row_weights[counts].double()
        return joined, total


@dataclass
class _Prefix:
    """The tokens with which some rows begin, up to where these rows part or one of them ends.

    Args:
        length: in tokens.
        rows: those that end there.
        first: the smallest index of the rows that begin so.
        longer: prefixes that go on from there.
    """

    length: int
    rows: list[int]
    first: int
    longer: list[_Prefix]

    def whole_rows(self) -> Iterator[_Prefix]:
        """The rows that end where others go on, as a prefix of their own."""
        if self.rows:
            yield _Prefix(self.length, self.rows, self.rows[0], [])

    def join(self, other: _Prefix) -> None:
        self.longer.append(other)
        self.first = min(self.first, other.first)


# In sorted order rows with a common prefix are neighbors, whatever the order is. That of bytes is
# compared at the speed of memory, each row with log2(rows) others, and equal tokens are equal
# bytes. How far neighbors are equal then says which prefixes there are (a radix tree).
def _tries(rows: Sequence[Tensor], starts: Sequence[int]) -> list[_Prefix]:
    """Return the roots: a prefix of no tokens for each start, with all rows that have it below."""
    arrays = [row.numpy() for row in rows]
    row_bytes = [array.tobytes() for array in arrays]
    by_start: dict[int, list[int]] = {start: [] for start in starts}
    for row in sorted(range(len(rows)), key=row_bytes.__getitem__):
        by_start[starts[row]].append(row)
    prefixes = []
    for group in by_start.values():
        path = [_Prefix(0, [], group[0], [])]
        before = arrays[group[0]][:0]
        for row in group:
            array, shorter = arrays[row], min(len(before), len(arrays[row]))
            differ = before[:shorter] != array[:shorter]
            common_length = int(differ.argmax()) if differ.any() else shorter
            _close(path, common_length)
            if len(array) == path[-1].length:  # as the row before
                path[-1].rows.append(row)
            else:
                path.append(_Prefix(len(array), [row], row, []))
            before = array
        _close(path, 0)
        prefixes += path
    return prefixes


def _close(path: list[_Prefix], length: int) -> None:
    """End the prefixes of ``path`` that are longer than ``length``, each into the one before it; a
    prefix of that length comes between where there is none. It is the last one then."""
    while path[-1].length > length:
        ended = path.pop()
        if path[-1].length < length:
            path.append(_Prefix(length, [], ended.first, []))
        path[-1].join(ended)


class PrefixTree:
    """A collator: rows with a common prefix become one row with a ``tree``.

    As ``collate_fn`` of a ``DataLoader``, or ``data_collator`` of a ``Trainer`` with
    ``remove_unused_columns=False``, beside ``ds_usp.integrations.transformers.enable`` or
    ``attach``. The loss and all gradients are those of a row for each answer.

    An example is a dict of one of these:

    * ``prompt`` and ``answers``: token ids, and a list of them. An answer may be such a dict again:
      its prompt goes on after this one.
    * ``input_ids``, and ``labels`` at the index of their own tokens, as Hugging Face has them, -100
      where nothing is learned: one row. What rows have in common is found.

    The batch: ``input_ids``, ``labels``, ``shift_labels`` ``[1, tokens]``, ``tree``
    ``[segments, 3]``, and ``loss_weights`` where tokens do not all count once. The loss is
    ``sum(weights * token losses) / sum(weights)``. Both labels are the next tokens: the first name
    is what a Trainer looks for.

    Args:
        train_on_prompt: prompts count, once for each answer, as they do in rows; else answers do.
        reduction: the mean over the ``tokens`` of all rows, or the mean over ``rows`` of each row's
            mean.
        min_shared: fewest tokens in common that make a segment.

    Raises:
        ConfigError: at construction, for arguments that do not exist.
        DataError: at a batch whose examples are none of these, or without a label.

    Source: Tree Training, arXiv 2511.00413.
    """

    def __init__(
        self,
        *,
        train_on_prompt: bool = False,
        reduction: Reduction = "tokens",
        min_shared: int = MIN_SHARED,
    ) -> None:
        if reduction not in get_args(Reduction):
            raise ConfigError(f"reduction={reduction!r} must be 'tokens' or 'rows'")
        SharedPrefixes.of([torch.zeros(1)], min_shared=min_shared)  # which checks it
        self._train_on_prompt, self._reduction = train_on_prompt, reduction
        self._min_shared = min_shared

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [row for index, x in enumerate(examples) for row in self._rows(x, index)]
        tokens = [ids for ids, _ in rows]
        shared = SharedPrefixes.of(tokens, min_shared=self._min_shared)
        shifted = [torch.cat([labels[1:], labels.new_tensor([IGNORE_INDEX])]) for _, labels in rows]
        counts = [int((x != IGNORE_INDEX).sum()) for x in shifted]
        if not any(counts):
            raise DataError(
                f"none of {len(rows)} rows has a token to learn from: all labels are {IGNORE_INDEX}"
            )
        weights = [torch.ones(len(x), dtype=torch.float64) for x in shifted]
        if self._reduction == "rows":  # rows without a label are no rows
            weights = [x / max(n, 1) for x, n in zip(weights, counts, strict=True)]
        labels, total = shared.labels(shifted, weights)
        batch = {
            TOKENS: shared.gather_from(tokens)[None],
            LABELS: labels[None],
            SHIFTED: labels[None],
            TREE: torch.tensor(shared.segments),
        }
        if bool((total[labels != IGNORE_INDEX] != 1).any()):
            # Counts stay whole numbers: FSDP2 casts what is none to its own dtype.
            dtype = torch.long if self._reduction == "tokens" else torch.float
            batch[LOSS_WEIGHTS] = total.to(dtype)[None]
        return batch

    def _rows(self, example: Mapping[str, Any], index: int) -> Iterator[tuple[Tensor, Tensor]]:
        if TOKENS in example:
            ids = _ids(example[TOKENS], index)
            labels = _ids(example.get(LABELS, ids), index)
            wrong = (labels != IGNORE_INDEX) & (labels != ids) if len(ids) == len(labels) else None
            if wrong is None or bool(wrong.any()):
                raise DataError(
                    f"labels of example {index} are not its tokens, or -100, at their own index: "
                    "rows with a common prefix would be learned differently"
                )
            yield ids, labels
            return
        for ids, learned in _branches(example, index):
            labels = ids if self._train_on_prompt else ids.masked_fill(~learned, IGNORE_INDEX)
            yield ids, labels


def _branches(example: Any, index: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each answer the tokens with all before it, and which of them are the answer's,
    bool. ``index`` is the example's, for messages."""
    if not isinstance(example, Mapping) or not {"prompt", "answers"} <= example.keys():
        keys = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        raise DataError(
            f"example {index} is {keys}: give a dict of 'prompt' and 'answers', token ids and a "
            f"list of them, or of {TOKENS!r} and {LABELS!r}"
        )
    prompt, answers = _ids(example["prompt"], index), example["answers"]
    if not len(answers):
        raise DataError(f"example {index} has a prompt of {len(prompt)} tokens and no answers")
    for answer in answers:
        if isinstance(answer, Mapping):
            for ids, learned in _branches(answer, index):
                before = torch.zeros(len(prompt), dtype=torch.bool)
                yield torch.cat([prompt, ids]), torch.cat([before, learned])
            continue
        ids = _ids(answer, index)
        learned = torch.ones(len(prompt) + len(ids), dtype=torch.bool)
        learned[: len(prompt)] = False
        yield torch.cat([prompt, ids]), learned


def _ids(x: Any, index: int) -> Tensor:
    ids = torch.as_tensor(x)
    if ids.ndim != 1 or (len(ids) and ids.is_floating_point()):
        raise DataError(
            f"example {index} has {list(ids.shape)} {ids.dtype} where token ids [tokens] are "
            "expected: tokenize it, without padding"
        )
    return ids.long()
