"""The whole batch, before it is sharded: its tokens, labels, padding and documents.

Every door to the library reads batches of other names and refuses other mistakes: plain loops here
(:func:`read_batch`), transformers in its integration. What they have in common stands here once:
which tokens are real, where documents begin, what the label of a token is, and which of all that
a rank holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_usp.errors import ConfigError, DataError, LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec, Parents
from ds_usp.kernels.rotary import inverse_frequencies

IGNORE_INDEX = -100  # the label of a token that does not count, as in torch's cross_entropy

# The names that a loader's batch has in plain loops.
TOKENS, LABELS, SHIFTED, POSITIONS = "input_ids", "labels", "shift_labels", "position_ids"
PADDING = "attention_mask"
# Those under which packers pass cumulative lengths; Hugging Face's collator gives both last.
BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
# Segments of shared prefixes and their branches, as of ``MaskSpec.tree``; what losses are times.
TREE, LOSS_WEIGHTS = "tree", "loss_weights"


@dataclass(frozen=True)
class SequenceBatch:
    """What one sequence-parallel rank holds of a micro batch.

    Shapes:
        tokens, labels: ``[b, s_local]``, int64.
        loss_mask: ``[b, s_local]``, float32; 0 leaves a token out of the loss.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor


def shard_batch(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, *, layout: TokenLayout, rank: int
) -> SequenceBatch:
    """The tokens, labels and mask that sequence-parallel rank ``rank`` holds, in its order.

    Shapes:
        tokens, labels, loss_mask: ``[b, seq_len]``, the whole sequence; ``[b, s_local]`` out.

    Args:
        labels: of every token the next one (:func:`next_token_labels`).

    Raises:
        LayoutError: shapes that differ, or a length other than ``layout.seq_len``.
        DataError: labels that are the tokens themselves, not shifted.
    """
    shapes = {tuple(x.shape) for x in (tokens, labels, loss_mask)}
    if len(shapes) > 1:
        raise LayoutError(
            f"tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)} and loss mask "
            f"{tuple(loss_mask.shape)} must have one shape [batch, sequence]"
        )
    # The most common mistake, and a silent one: the loss falls as the model learns to copy.
    _check_shifted(tokens, labels, loss_mask)
    return SequenceBatch(
        tokens=layout.shard(tokens, dim=1, rank=rank),
        labels=layout.shard(labels, dim=1, rank=rank),
        loss_mask=layout.shard(loss_mask.float(), dim=1, rank=rank),
    )


def _check_shifted(tokens: Tensor, labels: Tensor, loss_mask: Tensor) -> None:
    counts = (loss_mask != 0) & (labels != IGNORE_INDEX)
    changes = tokens[:, 1:] != tokens[:, :-1]
    # No index of a mask: torch makes 8 bytes for each token of it.
    if bool((counts[:, :-1] & changes).any()) and bool(((labels == tokens) | ~counts).all()):
        raise DataError(
            f"all {int(counts.sum())} labels are the tokens at their own positions, so a model "
            "would learn to copy its input: shift them before they are sharded, "
            "labels = ds_usp.training.next_token_labels(labels)"
        )


def next_token_labels(labels: Tensor, documents: Any = ()) -> Tensor:
    """The label of every token: the next token; ``IGNORE_INDEX`` after the last one.

    Shapes:
        labels: ``[b, seq_len]``, each at the index of its own token (the tokens, or Hugging Face's
        ``labels`` with -100 where nothing is learned); the result has the same shape.

    Args:
        documents: borders of packed documents, as of ``MaskSpec``: the last token of one does not
            predict the first of the next.

    Raises:
        ConfigError: documents of another length, or of another number of samples.
    """
    # Once, here, while sequences are whole. The next token of a shard's last one is on another
    # rank, under zigzag and striped layouts on any; and a model that shifts by itself would shift
    # again.
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    mask = MaskSpec.causal(documents)
    mask.check_length(labels.shape[1], labels.shape[0])
    for sample, borders in enumerate(mask.documents):
        rows = shifted if mask.samples is None else shifted[sample : sample + 1]
        rows[:, [border - 1 for border in borders[1:]]] = IGNORE_INDEX
    return shifted


def borders_through(inside: Iterable[int], seq_len: int) -> Borders:
    """Ascending borders from 0 to ``seq_len`` through those inside."""
    return tuple(sorted({0, seq_len, *inside}))


def document_borders(tokens: Tensor, eod: int) -> list[list[int]]:
    """Cumulative borders of the documents of packed sequences, for ``MaskSpec(documents=...)``.

    Shapes:
        tokens: ``[b, seq_len]``, before they are sharded; the result has one list of
        cumulative borders for each sample.
    """
    # An end-of-document token is the last one of its document, as in Megatron.
    ends: list[list[int]] = [[] for _ in range(len(tokens))]
    for sample, position in (tokens == eod).nonzero().tolist():
        ends[sample].append(position + 1)
    return [list(borders_through(inside, tokens.shape[1])) for inside in ends]


def document_positions(
    borders: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> Tensor:
    """Position of every token in its document, for position embeddings that start anew there.

    Shapes:
        borders: cumulative, a list for each sample; result ``[b, seq_len]``, int64.

    Raises:
        ConfigError: no sample, whose borders would say the length.
    """
    if not len(borders):
        raise ConfigError("borders must be cumulative, a list for each sample, and there is none")
    positions = torch.empty(len(borders), borders[0][-1], dtype=torch.int64, device=device)
    for row, sample in zip(positions, borders, strict=True):
        for start, stop in pairwise(sample):
            row[start:stop] = torch.arange(stop - start, device=device)
    return positions


def document_starts(positions: Tensor) -> list[list[int]]:
    """For each row ``[seq_len]`` the tokens, but the first, whose positions do not go on by one."""
    starts: list[list[int]] = [[] for _ in range(len(positions))]
    for row, index in (positions.diff(dim=-1) != 1).nonzero().tolist():
        starts[row].append(index + 1)
    return starts


def borders_of_positions(position_ids: Tensor) -> list[list[int]]:
    """Cumulative borders of documents by their position ids, which start anew at 0 in each.

    Shapes:
        position_ids: ``[b, seq_len]``; the result has one list of cumulative borders a sample.

    Raises:
        DataError: positions that neither go on by one nor start anew at 0.
    """
    starts = document_starts(position_ids)
    for sample, (row, inside) in enumerate(zip(position_ids, starts, strict=True)):
        for position, value in zip(inside, row[inside].tolist(), strict=True):
            if value != 0:
                raise DataError(
                    f"position ids of sample {sample} go from {int(row[position - 1])} to {value} "
                    f"at token {position}: they must go on by one, or start anew at 0 where the "
                    "next packed document begins. Pad on the right"
                )
    return [list(borders_through(inside, position_ids.shape[1])) for inside in starts]


class Packing(NamedTuple):
    """Which tokens of a batch belong together: packed documents, or trees of them.

    Args:
        documents: cumulative borders, one tuple for all samples or one for each; () without any.
        parents: of each document, as of ``MaskSpec``; () where none has one.
    """

    documents: tuple[Borders, ...] = ()
    parents: tuple[Parents, ...] = ()

    @property
    def causal_mask(self) -> MaskSpec:
        return MaskSpec(None, 0, self.documents, parents=self.parents)


NO_PACKING = Packing()


def read_tree(entries: Mapping[str, Any], size: int, seq_len: int) -> Packing:
    """The documents of a batch's ``tree``; the positions and labels beside it are checked.

    Raises:
        ConfigError: segments that are none, or of another length.
        DataError: borders beside it, positions that do not go on after the parent, labels that are
            not shifted.
    """
    mask = MaskSpec.tree(entries[TREE])
    mask.check_length(seq_len, size)
    others = sorted({*BORDERS, "seq_idx"} & entries.keys())
    if others:
        raise DataError(
            f"{TREE} and {', '.join(others)} both say where documents end: leave the latter out, a "
            "tree may have several roots"
        )
    # The next token of a segment's last one is another in each of its branches.
    if LABELS in entries and SHIFTED not in entries:
        raise DataError(
            f"{LABELS!r} beside a {TREE} do not say what the last token of a segment predicts, "
            f"which has several next ones: give {SHIFTED!r}, the next token of each. "
            "ds_usp.training.PrefixTree makes both"
        )
    pairs = [
        (mask.documents[i], mask.parents[i] if mask.parents else ())
        for i in range(len(mask.documents))
    ]
    if len(set(pairs)) == 1:  # the same for all samples
        pairs = pairs[:1]
    documents = tuple(borders for borders, _ in pairs)
    packing = Packing(documents, tuple(x for _, x in pairs) if mask.parents else ())
    if POSITIONS in entries:
        _check_tree_positions(entries[POSITIONS], packing)
    return packing


def tree_positions(packing: Packing, device: torch.device | str | None = None) -> Tensor:
    """Position ids of every token, ``[1 or samples, seq_len]``: each child goes on after its
    parent's last token. As of ``TokenLayout.positions(mask=)``, of all tokens and in torch."""
    rows, mask = [], packing.causal_mask
    for sample, borders in enumerate(packing.documents):
        starts = torch.tensor(borders)
        first = torch.tensor(mask.contexts(sample)) - starts[:-1]
        each = first.to(device).repeat_interleave(starts.diff().to(device), output_size=borders[-1])
        rows.append(each + torch.arange(borders[-1], device=device))
    return torch.stack(rows)


def _check_tree_positions(positions: Tensor, packing: Packing) -> None:
    # A tree may begin at any position (padding on the left, models that count from 2), but inside
    # of it distances are those of the rows that it stands for.
    if positions.ndim != 2:
        raise DataError(
            f"{POSITIONS} {list(positions.shape)} beside a {TREE} must be [batch, tokens]: leave "
            "them out, or give rows of their own"
        )
    offsets = positions - tree_positions(packing, positions.device)
    for row, changes in enumerate((offsets.diff(dim=1) != 0).cpu()):
        sample = row if len(packing.documents) > 1 else 0
        borders = packing.documents[sample]
        parents = packing.parents[sample] if packing.parents else (-1,) * (len(borders) - 1)
        roots = [border for border, parent in zip(borders, parents, strict=False) if parent < 0]
        wrong = sorted(set((changes.nonzero().flatten() + 1).tolist()) - set(roots))
        if wrong:
            at = wrong[0]
            raise DataError(
                f"{POSITIONS} of row {row} go from {int(positions[row, at - 1])} to "
                f"{int(positions[row, at])} at token {at} of a {TREE}: they go on by one in a "
                "segment, and after the parent's last position in its children. Leave them out, "
                "they follow from the tree"
            )


class RealTokens(NamedTuple):
    """What a row's padding mask says: the first real token, the last + 1, how many there are, and
    how many numbers are neither 0 nor 1."""

    first: int
    stop: int
    num: int
    num_others: int

    @property
    def is_prefix(self) -> bool:
        return self.num == self.stop


def real_tokens(mask: Tensor) -> list[RealTokens]:
    """The real tokens of each row of a mask ``[b, seq_len]``, 0 for padding; one transfer."""
    real = mask != 0
    flags = real.to(torch.uint8)  # of which argmax is the first real token: no index of all tokens
    columns = [
        flags.argmax(dim=1),
        mask.shape[1] - flags.flip(1).argmax(dim=1),
        real.sum(dim=1),
        (real & (mask != 1)).sum(dim=1),
    ]
    rows = [RealTokens(*row) for row in torch.stack(columns, dim=1).tolist()]
    return [row if row.num else RealTokens(0, 0, 0, 0) for row in rows]


def local_positions(
    layout: TokenLayout, rank: int, device: torch.device | str | None = None
) -> Tensor:
    """Global position of every token that ``rank`` holds, ``[s_local]``, int64."""
    segments = [segment.positions for segment in layout.segments(rank)]
    return torch.cat([torch.arange(x.start, x.stop, x.step, device=device) for x in segments])


def local_document_positions(
    layout: TokenLayout,
    rank: int,
    borders: Sequence[Sequence[int]],
    device: torch.device | str | None = None,
) -> Tensor:
    """Position in its document of every token that ``rank`` holds.

    Shapes:
        borders: cumulative, a list for each sample; result ``[b, s_local]``, int64.
    """
    # From the borders, not from a shard of all positions: at a million tokens those would be 8 MB
    # on every rank, for numbers that each rank can compute.
    positions = local_positions(layout, rank, device)
    rows = []
    for sample in borders:
        starts = torch.tensor(sample[:-1], dtype=torch.int64, device=device)
        rows.append(positions - starts[torch.searchsorted(starts, positions, right=True) - 1])
    return torch.stack(rows) if rows else positions.new_empty(0, len(positions))


def rotary_frequencies(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """Angles of rotary position embedding at any set of positions, in fp32.

    Shapes:
        positions: ``[s_local]``; result ``[s_local, 1, 1, dim]``, halves repeated (not
        interleaved), in radians.

    Raises:
        ConfigError: positions of another shape, an odd ``dim``.

    Source: RoFormer (arXiv 2104.09864), equation 15.
    """
    if positions.ndim != 1 or dim < 2 or dim % 2:
        raise ConfigError(
            f"positions {list(positions.shape)} must be [s_local], as one row of batch.positions "
            f"is, and dim={dim} even"
        )
    # Made from positions and not from a range, so that every token layout gets its own. In fp32
    # whatever the model's dtype: bf16 tells positions beyond 256 apart no more.
    inverse = inverse_frequencies(dim, base, torch.float32, positions.device)
    angles = torch.outer(positions.float(), inverse)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """Whole sequences with shifted labels, positions and documents.

    Attributes:
        sharded: by name, each ``[b, seq_len, ...]``; among them ``input_ids`` and ``shift_labels``;
            ``position_ids`` where the loader gave some, else each rank makes its own.
        whole: what every rank gets as it is, by name.
        documents, parents: as of :class:`Packing`.
    """

    sharded: dict[str, Tensor]
    whole: dict[str, Any] = field(default_factory=dict)
    documents: tuple[Borders, ...] = ()
    parents: tuple[Parents, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.sharded[TOKENS].shape[1]

    @property
    def mask(self) -> MaskSpec:
        return Packing(self.documents, self.parents).causal_mask

    @property
    def loss_tokens(self) -> float:
        """Labels that count, or the sum of their weights."""
        counts = self.sharded[SHIFTED] != IGNORE_INDEX
        weights = self.sharded.get(LOSS_WEIGHTS)
        return float((counts if weights is None else counts * weights).sum())

    def digest(self) -> bytes:
        tokens = self.sharded[TOKENS].cpu().contiguous().view(torch.uint8)
        return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()


def read_batch(batch: Mapping[str, Any], whole: Sequence[str] = ()) -> WholeBatch:
    """Check a loader's batch, as :class:`SequenceParallelDataLoader` takes it, shift its labels and
    find its documents.

    Raises:
        DataError: entries that are missing, contradict each other, or cannot be sharded.
        ConfigError: borders that are none.
    """
    entries = _checked_entries(batch)
    tokens = entries[TOKENS]
    size, seq_len = tokens.shape
    counts = [seq_len] * size
    mask = entries.pop(PADDING, None)
    if mask is not None:
        rows = real_tokens(mask)
        counts = [row.num for row in rows]
        numbered = [sample for sample, row in enumerate(rows) if row.num_others]
        if numbered:
            raise DataError(
                f"{PADDING} of sample {numbered[0]} has numbers other than 0 and 1: it says which "
                f"tokens are real. Packed documents are given by {POSITIONS} that start anew, or "
                f"by {BORDERS[0]}"
            )
        bad = [sample for sample, row in enumerate(rows) if not row.is_prefix or row.num == 0]
        if bad:
            raise DataError(
                f"{PADDING} of sample {bad[0]} keeps {counts[bad[0]]} of {seq_len} tokens, and not "
                "the first ones: pad on the right (tokenizer.padding_side = 'right'), leave no "
                "sample empty"
            )
    if TREE in entries:
        packing = _tree_of(entries, counts, tokens)
    else:
        packing = Packing(_documents(entries, counts, tokens))
    labels = _shifted_labels(entries, packing.documents, counts)
    positions = entries.pop(POSITIONS, None)
    sharded = {**_sharded(entries, whole, tokens), SHIFTED: labels}
    sharded |= {} if positions is None else {POSITIONS: positions}
    others = {name: value for name, value in entries.items() if name not in sharded}
    return WholeBatch(sharded=sharded, whole=others, **packing._asdict())


def _tree_of(entries: dict[str, Any], counts: list[int], tokens: Tensor) -> Packing:
    """The tree of a batch, which is taken out of the entries with the labels that it has twice."""
    size, seq_len = tokens.shape
    if min(counts) < seq_len:
        raise DataError(
            f"{PADDING} keeps {min(counts)} of {seq_len} tokens beside a {TREE}, of which padding "
            f"is a root of its own without labels: leave {PADDING} out"
        )
    packing = read_tree({LABELS: tokens, **entries}, size, seq_len)
    del entries[TREE]
    entries.pop(LABELS, None)
    return packing


def _checked_entries(batch: Mapping[str, Any]) -> dict[str, Any]:
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
    return entries


def _documents(entries: dict[str, Any], counts: list[int], tokens: Tensor) -> tuple[Borders, ...]:
    """Borders from cumulative lengths, positions or padding; what says them twice must agree."""
    size, seq_len = tokens.shape
    # Padding is a document of its own: attention is causal or bidirectional within documents, so no
    # real token sees padding, and no kernel needs a mask tensor.
    masks: dict[str, MaskSpec] = {}
    for name in BORDERS:
        borders = entries.pop(name, None)
        if borders is not None:
            # Collators of one row give [1, n].
            nested = getattr(borders, "ndim", 1) == 2 and len(borders) == 1
            mask = MaskSpec.causal(borders[0] if nested else borders)
            masks[name] = _without_padding(mask, counts, seq_len)
    if POSITIONS in entries:
        rows = [
            borders_through(borders_of_positions(row[None, :count])[0], seq_len)
            for row, count in zip(entries[POSITIONS], counts, strict=True)
        ]
        masks[POSITIONS] = MaskSpec.causal(rows)
    elif min(counts) < seq_len and not masks:
        masks[PADDING] = MaskSpec.causal([borders_through([count], seq_len) for count in counts])
    documents_by_entry: dict[str, tuple[Borders, ...]] = {}
    for name, mask in masks.items():
        mask.check_length(seq_len, size)
        all_equal = len(set(mask.documents)) == 1
        documents_by_entry[name] = mask.documents[:1] if all_equal else mask.documents
    if len(set(documents_by_entry.values())) > 1:
        printed = ", ".join(f"{name} {value}" for name, value in documents_by_entry.items())
        raise DataError(
            f"{' and '.join(documents_by_entry)} name different documents: {printed[:300]}. Leave "
            f"out the wrong one, but keep {PADDING} where there is padding, whose labels would "
            "count without it; positions start anew in each document"
        )
    documents = next(iter(documents_by_entry.values()), ())
    return () if documents == ((0, seq_len),) else documents


def _without_padding(mask: MaskSpec, counts: list[int], seq_len: int) -> MaskSpec:
    """The documents of real tokens, then padding, whatever cumulative lengths say of padding: it is
    left out by them, the end of the last document, or some documents."""
    size = len(counts)
    if min(counts) == seq_len or mask.samples not in (None, size):
        return mask  # to be refused
    rows = []
    documents = mask.documents if mask.samples else mask.documents * size
    for sample, (borders, count) in enumerate(zip(documents, counts, strict=True)):
        if borders[-1] not in (count, seq_len):
            raise DataError(
                f"the documents of sample {sample} end at {borders[-1]}, and {PADDING} keeps "
                f"{count} of its {seq_len} tokens: the last border must be one of the two"
            )
        inside = (border for border in borders if border < count)
        rows.append(borders_through((*inside, count), seq_len))
    return MaskSpec.causal(rows)


def _shifted_labels(
    entries: dict[str, Any], documents: tuple[Borders, ...], counts: list[int]
) -> Tensor:
    """Labels ``[b, seq_len]`` of next tokens, taken out of the entries.

    Args:
        counts: real tokens of each sample.
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
    for row, count in zip(shifted, counts, strict=True):
        row[count:] = IGNORE_INDEX
    return shifted


def _check_not_shifted(tokens: Tensor, labels: Tensor) -> None:
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
