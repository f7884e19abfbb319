"""The whole batch, before it is sharded: its tokens, labels, padding and documents.

Each entry point reads batches of other names and refuses other mistakes: plain loops here
(:func:`read_batch`), transformers in its ``whole_arguments.py``. What they have in common stands
here once: which tokens are real, where documents begin, what the label of a token is, and which of
all that a rank holds. It runs for each batch; nothing communicates.
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
from ds_usp.geometry.masks import Borders, MaskSpec, Parents, format_documents, normalize_documents
from ds_usp.kernels.rotary import inverse_frequencies

IGNORE_INDEX = -100  # the label of a token that does not count, as in torch's cross_entropy

# The names that a loader's batch has in plain loops.
TOKENS, LABELS, SHIFTED, POSITIONS = "input_ids", "labels", "shift_labels", "position_ids"
PADDING = "attention_mask"
# Those under which packers pass cumulative lengths; Hugging Face's collator gives both last.
BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
# Segments of shared prefixes and their branches, as of ``MaskSpec.tree``; what losses are times.
TREE, LOSS_WEIGHTS = "tree", "loss_weights"


def check_whole_numbers(name: str, x: Any) -> None:
    """DataError for tokens, labels or positions that are no dense tensor of whole numbers."""
    if not isinstance(x, Tensor):
        raise DataError(f"{name} is a {type(x).__name__}: give a tensor of whole numbers")
    if x.layout is not torch.strided or x.is_floating_point() or x.is_complex():
        kind = x.dtype if x.layout is torch.strided else x.layout
        raise DataError(f"{name} are {kind}, expected whole numbers in a dense tensor")
    if x.dtype == torch.bool:
        raise DataError(f"{name} are {x.dtype}, expected whole numbers: a mask is {PADDING}")


@dataclass(frozen=True)
class SequenceBatch:
    """The shard of a micro batch that one sequence-parallel rank holds.

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
    check_whole_numbers(LABELS, labels)
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


def position_steps(positions: Tensor) -> list[dict[int, int]]:
    """Return for each row ``[seq_len]`` the tokens, but the first, whose positions do not go on by
    one, and by how much they do: 0 or less where they start anew, 2 or more where they jump."""
    return _steps_other_than(1, positions)


def _steps_other_than(usual: int, numbers: Tensor) -> list[dict[int, int]]:
    # By the index of the later token, ascending, its number less the one before. One transfer.
    diff = numbers.diff(dim=-1)
    indices = (diff != usual).nonzero()
    steps: list[dict[int, int]] = [{} for _ in range(len(numbers))]
    found = torch.cat([indices, diff[indices.unbind(1)].to(indices)[:, None]], 1)
    for row, index, step in found.tolist():
        steps[row][index + 1] = step
    return steps


def borders_of_positions(position_ids: Tensor) -> list[list[int]]:
    """Cumulative borders of documents by their position ids, which start anew at 0 in each.

    Shapes:
        position_ids: ``[b, seq_len]``; the result has one list of cumulative borders a sample.

    Raises:
        DataError: positions that neither go on by one nor start anew at 0.
    """
    check_whole_numbers(POSITIONS, position_ids)
    if position_ids.ndim != 2:
        raise DataError(f"{POSITIONS} are {list(position_ids.shape)}, expected [batch, sequence]")
    starts = [list(steps) for steps in position_steps(position_ids)]
    for sample, (row, inside) in enumerate(zip(position_ids, starts, strict=True)):
        for position, value in zip(inside, row[inside].tolist(), strict=True):
            if value != 0:
                raise DataError(
                    f"position ids of sample {sample} go from {int(row[position - 1])} to {value} "
                    f"at token {position}: they must go on by one, or start anew at 0 where the "
                    f"next packed document begins; beside {BORDERS[0]} they may jump. Pad on the "
                    "right"
                )
    return [list(borders_through(inside, position_ids.shape[1])) for inside in starts]


class Packing(NamedTuple):
    """Says which tokens of a batch belong together: packed documents, or trees of them.

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

    Args:
        entries: the batch's by name, not changed; of labels only whether there are some counts.
        size, seq_len: samples, and tokens of each.

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
    parents = mask.parents or ((),) * len(mask.documents)
    pairs = list(zip(mask.documents, parents, strict=True))
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
        starts, total = torch.tensor(borders), borders[-1]
        lengths = starts.diff().to(device)
        shifts = (torch.tensor(mask.contexts(sample)) - starts[:-1]).to(device)  # of each segment
        token_shifts = shifts.repeat_interleave(lengths, output_size=total)
        rows.append(token_shifts + torch.arange(total, device=device))
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
            token = wrong[0]
            raise DataError(
                f"{POSITIONS} of row {row} go from {int(positions[row, token - 1])} to "
                f"{int(positions[row, token])} at token {token} of a {TREE}: they go on by one in "
                "a segment, and after the parent's last position in its children. Leave them out, "
                "they follow from the tree"
            )


class RealTokens(NamedTuple):
    """The real tokens of a row by its padding mask: the first, the last + 1, how many there are,
    and how many numbers of the mask are neither 0 nor 1."""

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


def borders_of_mask(mask: Tensor, rows: Sequence[RealTokens]) -> tuple[Borders, ...]:
    """Cumulative borders of the documents of each row, padding being one of its own; () of a mask
    of ones. Real tokens are one document, or as many as the mask has numbers: 1, 1, 2, 2, 0, as
    neat packing makes it.

    Args:
        rows: its :func:`real_tokens`, without zeros between them.

    Raises:
        DataError: numbers that are not whole, or that fall.
    """
    seq_len = mask.shape[1]
    documents = [borders_through((row.first, row.stop), seq_len) for row in rows]
    if any(row.num_others for row in rows):
        numbers = mask.long()
        is_whole = bool((mask == numbers).all())  # no 0.5, and no -inf that is added to scores
        for sample, changes in enumerate(_steps_other_than(0, numbers)):
            row = rows[sample]
            falls = [x for x, step in changes.items() if step < 0 and x != row.stop]
            if falls or not is_whole or int(numbers[sample, row.first]) < 0:
                raise DataError(
                    f"{PADDING} of row {sample} has values other than 0 and 1 that do not number "
                    "packed documents either, as 1, 1, 2, 2, 0 does"
                    f"{f': they fall at token {falls[0]}' if falls else ''}. Give documents by "
                    f"{POSITIONS} that start anew, or by cumulative lengths"
                )
            documents[sample] = borders_through(changes, seq_len)
    return () if set(documents) == {(0, seq_len)} else tuple(documents)


def read_borders(name: str, lengths: Any) -> tuple[Borders, ...]:
    """Cumulative lengths, one tuple for all samples or one for each; ``[1, n]`` as collators of one
    row give them. ConfigError, with their name, for what are none."""
    nested = getattr(lengths, "ndim", 1) == 2 and len(lengths) == 1
    try:
        return normalize_documents(lengths[0] if nested else lengths)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def borders_within(
    name: str, borders: Borders, real: RealTokens, seq_len: int, sample: int
) -> Borders:
    """The borders of a row's documents with padding as one of its own, from those of cumulative
    lengths, which may leave padding out, end the last document with it, or have several for it.
    DataError if they end elsewhere. ``name`` (of the entry) and ``sample`` are for messages."""
    if borders[-1] not in (real.stop, seq_len):
        raise DataError(
            f"the documents of {name} of sample {sample} end at {borders[-1]}, and {PADDING} keeps "
            f"{real.num} of its {seq_len} tokens: the last border must be {real.stop} or {seq_len}"
        )
    inside = (border for border in borders if real.first < border < real.stop)
    return borders_through((real.first, *inside, real.stop), seq_len)


def agreed_documents(
    stated: Mapping[str, Sequence[Borders]],
    steps: Sequence[Mapping[int, int]],
    rows: Sequence[RealTokens],
) -> Sequence[Borders]:
    """The documents of each row, of which a batch has several descriptions.

    Args:
        stated: by entry, the documents of each row by it. Positions beside them start anew, or
            jump, where each document begins; they may jump elsewhere, and start anew nowhere else.
        steps: :func:`position_steps` of each row; () without positions.
        rows: the real tokens of each; only borders between them are compared with positions.

    Raises:
        DataError: two that contradict each other.
    """
    (name, documents), *others = stated.items()
    for other, other_documents in others:
        pairs = zip(documents, other_documents, strict=True)
        for sample, (borders, second) in enumerate(pairs):
            if borders != second:
                raise DataError(
                    f"{name} and {other} name different documents of row {sample}: "
                    f"{format_documents((borders,))} and {format_documents((second,))}. Leave out "
                    "the wrong one"
                )
    for sample, (borders, row_steps, real) in enumerate(zip(documents, steps, rows, strict=False)):
        starts = {x: step for x, step in row_steps.items() if real.first < x < real.stop}
        inside = {x for x in borders if real.first < x < real.stop}
        anew = {x for x, step in starts.items() if step < 1}
        # Nor a count that goes on: the last batch's lengths beside one document look the same.
        wrong = (anew - inside) | (inside - starts.keys())
        if wrong:
            times = f"{len(anew)} times, first at token {min(anew)}" if anew else "nowhere"
            raise DataError(
                f"{name} and {POSITIONS} contradict each other in row {sample} at token "
                f"{min(wrong)}: {name} has {format_documents((borders,))}, and {POSITIONS} start "
                f"anew {times}: they must where each document begins. Leave out the wrong one, but "
                f"keep {PADDING} where there is padding"
            )
    return documents


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
        borders: a list for each sample, of its whole sequence; result ``[b, s_local]``, int64.
    """
    # Not a shard of all positions: at a million tokens those would be 8 MB on every rank.
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
    # whatever the model's dtype: bf16 no longer distinguishes positions beyond 256.
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
        """How many labels count, or the sum of their weights where the batch has some."""
        counts = self.sharded[SHIFTED] != IGNORE_INDEX
        weights = self.sharded.get(LOSS_WEIGHTS)
        return float((counts if weights is None else counts * weights).sum())

    def digest(self) -> bytes:
        """8 bytes that are equal for equal tokens."""
        tokens = self.sharded[TOKENS].cpu().contiguous().view(torch.uint8)
        return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()


def read_batch(batch: Mapping[str, Any], whole: Sequence[str] = ()) -> WholeBatch:
    """Check a loader's batch, as :class:`SequenceParallelDataLoader` takes it, shift its labels and
    find its documents; ``whole`` names tensors that every rank gets as they are. Called by the rank
    that reads alone. The batch is not changed.

    Raises:
        DataError: entries that are missing, contradict each other, or cannot be sharded.
        ConfigError: cumulative lengths, or a tree, that are not valid borders.
    """
    entries = _checked_entries(batch)
    tokens = entries[TOKENS]
    size, seq_len = tokens.shape
    rows = [RealTokens(0, seq_len, seq_len, 0)] * size
    mask_documents: tuple[Borders, ...] = ()
    mask = entries.pop(PADDING, None)
    if mask is not None:
        rows = real_tokens(mask)
        bad = [sample for sample, row in enumerate(rows) if not row.is_prefix or row.num == 0]
        if bad:
            raise DataError(
                f"{PADDING} of sample {bad[0]} keeps {rows[bad[0]].num} of {seq_len} tokens, and "
                "not the first ones: pad on the right (tokenizer.padding_side = 'right'), leave no "
                "sample empty"
            )
        mask_documents = borders_of_mask(mask, rows)
    if TREE in entries:
        packing = _tree_of(entries, mask_documents, tokens)
    else:
        packing = Packing(_documents(entries, mask_documents, rows, tokens))
    labels = _shifted_labels(entries, packing.documents, [row.num for row in rows])
    positions = entries.pop(POSITIONS, None)
    sharded = {**_sharded(entries, whole, tokens), SHIFTED: labels}
    sharded |= {} if positions is None else {POSITIONS: positions}
    others = {name: value for name, value in entries.items() if name not in sharded}
    return WholeBatch(sharded=sharded, whole=others, **packing._asdict())


def _tree_of(
    entries: dict[str, Any], mask_documents: tuple[Borders, ...], tokens: Tensor
) -> Packing:
    """The tree of a batch, which is taken out of the entries with the labels that it has twice."""
    size, seq_len = tokens.shape
    if mask_documents:
        raise DataError(
            f"{PADDING} has {format_documents(mask_documents)} beside a {TREE}, of which padding "
            f"is a root of its own without labels: leave {PADDING} out"
        )
    # Without any labels the tokens are the labels, which a tree refuses as it does others.
    packing = read_tree({LABELS: tokens, **entries}, size, seq_len)
    del entries[TREE]
    entries.pop(LABELS, None)
    return packing


def _checked_entries(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the batch, less known entries that are None; DataError for what is no batch."""
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
    check_whole_numbers(TOKENS, tokens)
    for name in (LABELS, SHIFTED, POSITIONS, PADDING, LOSS_WEIGHTS):
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
        elif name not in (PADDING, LOSS_WEIGHTS):
            check_whole_numbers(name, value)
    return entries


def _documents(
    entries: dict[str, Any],
    mask_documents: tuple[Borders, ...],
    rows: list[RealTokens],
    tokens: Tensor,
) -> tuple[Borders, ...]:
    """Borders from cumulative lengths, which are taken out of the entries, positions or padding;
    what says them twice must agree. () where every row is one document."""
    size, seq_len = tokens.shape
    # Padding is a document of its own: no real token sees it, and no kernel needs a mask tensor.
    stated: dict[str, Sequence[Borders]] = {}
    for name in BORDERS:
        lengths = entries.pop(name, None)
        if lengths is None:
            continue
        mask = MaskSpec(None, 0, read_borders(name, lengths))
        # With padding borders may end before seq_len: borders_within checks where.
        if not mask_documents or mask.samples not in (None, size):
            mask.check_length(seq_len, size)
        documents = mask.documents if mask.samples else mask.documents * size
        stated[name] = [
            borders_within(name, borders, real, seq_len, sample)
            for sample, (borders, real) in enumerate(zip(documents, rows, strict=True))
        ]
    if any(row.num_others for row in rows):
        stated[PADDING] = mask_documents or [(0, seq_len)] * size
    positions = entries.get(POSITIONS)
    if stated:
        steps = () if positions is None else position_steps(positions)
        documents = tuple(agreed_documents(stated, steps, rows))
    elif positions is not None:
        documents = tuple(
            borders_through(borders_of_positions(row[None, : real.num])[0], seq_len)
            for row, real in zip(positions, rows, strict=True)
        )
    else:
        documents = mask_documents
    collapsed = documents[:1] if len(set(documents)) == 1 else documents
    return () if collapsed == ((0, seq_len),) else collapsed


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
    # The tensors that have a value for each token: all but those that `whole` names.
    tensors = {k: x for k, x in entries.items() if isinstance(x, Tensor) and k not in whole}
    for name, value in tensors.items():
        if value.shape[:2] != tokens.shape:
            raise DataError(
                f"the batch's {name!r} is {list(value.shape)}, not [{tokens.shape[0]}, "
                f"{tokens.shape[1]}, ...] as {TOKENS}: it cannot be sharded along the sequence. "
                f"Name it in whole=({name!r},) if every rank needs all of it, else drop it"
            )
    return tensors
