"""Full-sequence batches of a data loader: checked, labels shifted, documents found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_usp.errors import DataError
from ds_usp.geometry.masks import Borders, MaskSpec
from ds_usp.training.batch import (
    IGNORE_INDEX,
    borders_of_positions,
    next_token_labels,
)

TOKENS, LABELS, SHIFTED, POSITIONS = "input_ids", "labels", "shift_labels", "position_ids"
PADDING = "attention_mask"
# The names under which packers pass cumulative lengths; Hugging Face's collator gives both last.
BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Full sequences with shifted labels, positions and documents.

    Shapes:
        sharded: by name, each ``[b, seq_len, ...]``; among them ``input_ids`` and
        ``shift_labels``; ``position_ids`` where the loader gave some, else each rank makes its
        own.

    Attributes:
        whole: what every rank gets as it is, by name.
        documents: cumulative borders, one tuple for all samples or one for each; () without any.
    """

    sharded: dict[str, Tensor]
    whole: dict[str, Any] = field(default_factory=dict)
    documents: tuple[Borders, ...] = ()

    @property
    def seq_len(self) -> int:
        """Tokens of each sequence."""
        return self.sharded[TOKENS].shape[1]

    @property
    def loss_tokens(self) -> int:
        """The number of labels that count in the loss."""
        return int((self.sharded[SHIFTED] != IGNORE_INDEX).sum())

    def digest(self) -> bytes:
        """Eight bytes of a hash of the tokens, to compare batches by."""
        tokens = self.sharded[TOKENS].cpu().contiguous().view(torch.uint8)
        return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()


def full_batch(batch: Mapping[str, Any], whole: Sequence[str] = ()) -> FullBatch:
    """Check a loader's batch, shift its labels and find its documents.

    Args:
        batch: what the loader gave; see :class:`SequenceParallelDataLoader`.
        whole: names of tensors that every rank gets as they are.

    Raises:
        DataError: entries that are missing, contradict each other, or cannot be sharded.
        ConfigError: borders that are none.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get(TOKENS), Tensor):
        names = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"the loader's batch is {names}: it must be a dict with the tensor {TOKENS!r} "
            "[batch, sequence], and as entries of the same shape 'labels' and 'position_ids'"
        )
    entries = dict(batch)
    tokens = entries[TOKENS]
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise DataError(f"{TOKENS} are {list(tokens.shape)}, expected [batch, sequence]")
    if tokens.is_floating_point():
        raise DataError(f"{TOKENS} are {tokens.dtype}, expected whole numbers")
    for name in (LABELS, SHIFTED, POSITIONS, PADDING):
        value = entries.get(name)
        if value is None:
            entries.pop(name, None)
        elif not isinstance(value, Tensor):
            raise DataError(f"{name} is a {type(value).__name__}: give a tensor, as {TOKENS} is")
        elif value.shape != tokens.shape:
            hint = (
                ". Masks of pairs of tokens are not sharded: give attention a MaskSpec, and "
                "documents by position_ids or cu_seqlens"
            )
            raise DataError(
                f"{name} is {list(value.shape)}, {TOKENS} are {list(tokens.shape)}: both "
                f"must be [batch, sequence]{hint if name == PADDING else ''}"
            )
    num_real_tokens = _count_real_tokens(entries.pop(PADDING, None), tokens)
    documents = _documents(entries, num_real_tokens, tokens)
    labels = _shifted_labels(entries, documents, num_real_tokens)
    positions = entries.pop(POSITIONS, None)
    sharded = {**_sharded(entries, whole, tokens), SHIFTED: labels}
    sharded |= {} if positions is None else {POSITIONS: positions}
    others = {name: value for name, value in entries.items() if name not in sharded}
    return FullBatch(sharded=sharded, whole=others, documents=documents)


def _count_real_tokens(mask: Tensor | None, tokens: Tensor) -> list[int]:
    """How many tokens of each sample are no padding."""
    if mask is None:
        return [tokens.shape[1]] * tokens.shape[0]
    counts: list[int] = mask.bool().sum(dim=1).tolist()
    right_padded = torch.arange(tokens.shape[1], device=mask.device) < mask.bool().sum(
        1, keepdim=True
    )
    bad_samples = (right_padded != mask.bool()).any(dim=1).nonzero().flatten().tolist()
    bad_samples += [sample for sample, count in enumerate(counts) if count == 0]
    if bad_samples:
        raise DataError(
            f"{PADDING} of sample {bad_samples[0]} keeps {counts[bad_samples[0]]} of "
            f"{tokens.shape[1]} tokens, and not the first ones: pad on the right "
            "(tokenizer.padding_side = 'right'), leave no sample empty"
        )
    return counts


def _documents(
    entries: dict[str, Any], num_real_tokens: list[int], tokens: Tensor
) -> tuple[Borders, ...]:
    """Borders from cumulative lengths or from positions; padding is a document of its own."""
    size, seq_len = tokens.shape
    named = {name: entries.pop(name) for name in BORDERS if entries.get(name) is not None}
    masks = {name: MaskSpec.causal(_rows(value)) for name, value in named.items()}
    if POSITIONS in entries:
        rows = [
            [*borders_of_positions(row[None, :count])[0], *([seq_len] if count < seq_len else [])]
            for row, count in zip(entries[POSITIONS], num_real_tokens, strict=True)
        ]
        masks[POSITIONS] = MaskSpec.causal(rows)
    elif min(num_real_tokens) < seq_len:
        masks[PADDING] = MaskSpec.causal(
            [[0, n, *([seq_len] if n < seq_len else [])] for n in num_real_tokens]
        )
    documents_by_entry: dict[str, tuple[Borders, ...]] = {}
    for name, mask in masks.items():
        mask.check_length(seq_len, size)
        all_equal = len(set(mask.documents)) == 1
        documents_by_entry[name] = mask.documents[:1] if all_equal else mask.documents
    if len(set(documents_by_entry.values())) > 1:
        printed = ", ".join(f"{name} {value}" for name, value in documents_by_entry.items())
        raise DataError(
            f"{' and '.join(documents_by_entry)} name different documents: {printed[:300]}. Leave "
            "out the wrong one; padding is a document of its own, and positions start anew in each"
        )
    documents = next(iter(documents_by_entry.values()), ())
    return () if documents == ((0, seq_len),) else documents


def _rows(borders: Any) -> Any:
    """Cumulative lengths; ``[1, n]`` as collators of one row give them is ``[n]``."""
    return borders[0] if getattr(borders, "ndim", 1) == 2 and len(borders) == 1 else borders


def _shifted_labels(
    entries: dict[str, Any], documents: tuple[Borders, ...], num_real_tokens: list[int]
) -> Tensor:
    """Labels ``[b, seq_len]`` of next tokens: the entry ``shift_labels``, or ``labels``, or without
    either the tokens, shifted inside each document; ``IGNORE_INDEX`` for padding.

    Args:
        entries: of the batch; the labels are removed.
        documents: borders; their last tokens get ``IGNORE_INDEX``.
        num_real_tokens: of each sample, before its padding.

    Raises:
        DataError: both entries, or ``labels`` that are shifted already.
    """
    if LABELS in entries and SHIFTED in entries:
        raise DataError(f"the batch has {LABELS!r} and {SHIFTED!r}: leave one of the two out")
    tokens = entries[TOKENS]
    if SHIFTED in entries:
        shifted = entries.pop(SHIFTED).clone()
    else:
        labels = entries.pop(LABELS, tokens)
        _check_not_shifted(tokens, labels)
        shifted = next_token_labels(labels, documents)
    for row, count in zip(shifted, num_real_tokens, strict=True):
        if count < len(row):
            row[count:] = IGNORE_INDEX
    return shifted


def _check_not_shifted(tokens: Tensor, labels: Tensor) -> None:
    """Check that labels, which will be shifted, are not next tokens yet; synchronizes the GPU.

    Raises:
        DataError: every label is the next token, and not every label is the token at its position.
    """
    counts = labels != IGNORE_INDEX
    inside = counts[:, :-1]
    # No index of a mask: torch makes 8 bytes for each token of it.
    are_next = (labels[:, :-1] == tokens[:, 1:]) | ~inside
    if bool(inside.any()) and bool(are_next.all()) and bool((counts & (labels != tokens)).any()):
        raise DataError(
            f"the batch's {LABELS!r} are the next tokens already, and would be shifted twice: name "
            f"them {SHIFTED!r}"
        )


def _sharded(entries: dict[str, Any], whole: Sequence[str], tokens: Tensor) -> dict[str, Tensor]:
    """The tensors ``[b, seq_len, ...]`` among the entries, which are sharded along the sequence."""
    tensors = {
        name: value
        for name, value in entries.items()
        if isinstance(value, Tensor) and name not in whole
    }
    for name, value in tensors.items():
        if value.shape[:2] != tokens.shape:
            raise DataError(
                f"the batch's {name!r} is {list(value.shape)}, not [{tokens.shape[0]}, "
                f"{tokens.shape[1]}, ...] as {TOKENS}: it cannot be sharded along the sequence. "
                f"Name it in whole=({name!r},) if every rank needs all of it, else drop it"
            )
    return tensors
