"""The arguments of a forward pass: documents, layout, and this rank's shard of each.

Read as transformers reads them on one rank: what its own attention would make of a mask, of
positions or of borders is what the ranks make of them together, or it is refused. Primitives are
those of :mod:`ds_usp.training.whole_batch`; the rules here are transformers'. Every rank reads the
same whole batch in each pass, in hooks of ``EnabledModel``: nothing communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import DataError, LayoutError, UnsupportedAttentionError
from ds_usp.geometry.layout import KINDS, TokenLayout
from ds_usp.geometry.masks import Borders, format_documents
from ds_usp.training.prefix_tree import SharedPrefixes
from ds_usp.training.whole_batch import (
    IGNORE_INDEX,
    LOSS_WEIGHTS,
    NO_PACKING,
    PADDING,
    TREE,
    Packing,
    RealTokens,
    agreed_documents,
    borders_of_mask,
    borders_through,
    borders_within,
    check_whole_numbers,
    next_token_labels,
    position_steps,
    read_borders,
    read_tree,
    real_tokens,
    tree_positions,
)

AUTO_LAYOUT = "auto"

# The dim of the tokens, of every argument that has one and is sharded. Another one that layers are
# handed has to be in attention._KNOWN_TENSORS and _QUERY_DIMS of decoders.py and query_chunks.py.
TOKEN_DIM = MappingProxyType(
    {
        "input_ids": 1,
        "inputs_embeds": 1,
        "labels": 1,
        "shift_labels": 1,
        LOSS_WEIGHTS: 1,
        "token_type_ids": 1,
        "position_ids": -1,
    }
)
# Those that a model with towers hands its text model beside the embeddings: which tokens are an
# image's, one more embedding of each layer, the numbers of tokens.
PLACED_DIM = MappingProxyType({"visual_pos_masks": 1, "per_layer_inputs": 1, "ple_input_ids": 1})
# Arguments of FlashAttention's packed sequences, and trees: the layout and documents replace them.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
PACKING = (*_LENGTHS, "max_length_q", "max_length_k", "seq_idx", TREE)


@dataclass(frozen=True)
class WholeArguments:
    """The keyword arguments of a forward pass before sharding, and what was read from them.

    Args:
        arguments: those that were given and are not None; without a mask that masks nothing.
        size, seq_len: rows and tokens.
        left_padded: a row begins with padding.
        packing: the documents of the rows, or a tree of them.
        stop: where cumulative lengths without a mask end before the row: padding comes after it.
    """

    arguments: Mapping[str, Any]
    size: int
    seq_len: int
    left_padded: bool
    packing: Packing = NO_PACKING
    stop: int | None = None

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> WholeArguments:
        """Read the documents of a batch: from a tree, from cu_seq_lens or the numbers of a mask, or
        from padding and positions that start anew.

        Raises:
            UnsupportedAttentionError, DataError, LayoutError: arguments that contradict each other,
                or that a shard cannot serve.
        """
        present = {name: value for name, value in arguments.items() if value is not None}
        tokens = present.get("input_ids", present.get("inputs_embeds"))
        if tokens is None or ("input_ids" in present and "inputs_embeds" in present):
            raise DataError("give either input_ids or inputs_embeds, of the whole sequence")
        for name in TOKEN_DIM.keys() & present.keys():
            _check_dims(name, present[name])
        size, seq_len = tokens.shape[:2]
        for name, dim in TOKEN_DIM.items():
            if name in present and present[name].shape[dim] != seq_len:
                raise LayoutError(
                    f"{name} {list(present[name].shape)} has other tokens than the {seq_len} of "
                    "the batch: give every argument of the whole sequence, not of a shard"
                )
        mask, rows = present.pop(PADDING, None), [RealTokens(0, seq_len, seq_len, 0)] * size
        if mask is not None:
            rows = _real_tokens(mask, size, seq_len)
        mask_documents = () if mask is None else borders_of_mask(mask, rows)
        if any(row.num < seq_len for row in rows):  # else it says nothing that documents do not
            present[PADDING] = (mask != 0) if any(row.num_others for row in rows) else mask
        if TREE in present:
            if mask_documents:
                raise DataError(
                    f"attention_mask has {format_documents(mask_documents)} beside a tree, of "
                    "which padding is a root of its own without labels: leave attention_mask out"
                )
            packing = read_tree(present, size, seq_len)
            if "position_ids" not in present:
                present["position_ids"] = tree_positions(packing, tokens.device)
            return cls(present, size, seq_len, left_padded=False, packing=packing)
        documents, rows = _documents(present, mask, mask_documents, rows, seq_len)
        if "seq_idx" in present:
            _check_seq_idx(present["seq_idx"], documents, size, seq_len)
        left_padded = any(row.first > 0 for row in rows)
        stop = rows[0].stop if mask is None and rows[0].stop < seq_len else None
        return cls(present, size, seq_len, left_padded, Packing(documents), stop)

    @property
    def documents(self) -> tuple[Borders, ...]:
        """Cumulative borders, one tuple for all rows or one each; () without any."""
        return self.packing.documents

    @property
    def largest_position(self) -> Tensor | int:
        """The largest position of any token, padding too."""
        positions = self.arguments.get("position_ids")
        return self.seq_len - 1 if positions is None else positions.max()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the call, which must be equal on the ranks of a mesh."""
        return {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}

    def layout(self, mesh: SequenceMesh, kind: str) -> TokenLayout:
        """The layout of this batch; ``auto`` is ``balanced`` where all rows have the same two or
        more documents, else ``zigzag``.

        Raises:
            LayoutError: fewer tokens than the ranks need, or an unknown kind.
        """
        # Zigzag balances the causal work of one long document. Of several, a rank's two pieces may
        # be in documents of different lengths: tokens are dealt out by their work, where all rows
        # have the same documents. No layout balances rows of different ones.
        rows_agree = len({*zip_longest(self.documents, self.packing.parents)}) == 1
        shared = self.documents[0] if rows_agree else ()
        if kind == AUTO_LAYOUT:
            kind = "balanced" if len(shared) > 2 else TokenLayout.LOADERS_KIND
        documents: Any = shared
        if shared and self.packing.parents:
            documents = Packing((shared,), self.packing.parents[:1]).causal_mask
        return mesh.layout(kind, self.seq_len, documents if kind == "balanced" else ())

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, start and end of each document but padding, row by row; waits for a GPU."""
        mask = self.arguments.get("attention_mask")
        real = None if mask is None else (mask != 0).cpu()
        for row in range(self.size):
            documents = self.documents or ((0, self.seq_len),)
            for start, stop in pairwise(documents[row % len(documents)]):
                if real is None or real[row, start]:
                    yield row, start, stop

    def shifted_labels(self) -> Tensor | None:
        """Labels as a causal model compares them, of each next token; None without labels."""
        shifted: Tensor | None = self.arguments.get("shift_labels")
        labels: Tensor | None = self.arguments.get("labels")
        if shifted is not None or labels is None:
            return shifted
        return next_token_labels(labels)

    def check_targets(self, targets: Tensor | None) -> None:
        """Refuse labels of padding, whose outputs differ between kernels.

        Args:
            targets: what the outputs of every token are compared with; None without labels.

        Raises:
            LayoutError: another shape than the batch has.
            DataError: the rows in which padding is compared with a label.
        """
        if targets is None:
            return
        if tuple(targets.shape) != (self.size, self.seq_len):
            raise LayoutError(
                f"labels {list(targets.shape)} must be [{self.size}, {self.seq_len}], as the "
                "tokens are"
            )
        mask = self.arguments.get("attention_mask")
        if mask is None and self.stop is not None:
            mask = torch.arange(self.seq_len, device=targets.device)[None] < self.stop
        if mask is None:
            return
        wrong = (targets != IGNORE_INDEX) & (mask == 0).to(targets.device)
        rows = wrong.any(dim=1).nonzero().flatten().tolist()
        if rows:
            raise DataError(
                f"labels of rows {rows[:8]} would be predicted from padding: set the labels of "
                "padding to -100 (labels[attention_mask == 0] = -100), and with padding on the "
                "left the label of the first real token too, or pad on the right "
                "(tokenizer.padding_side='right'); what comes after the last of cu_seq_lens_q is "
                "padding"
            )

    def check_tokens(
        self, vocabulary: int | None, targets: Tensor | None, outputs: int | None
    ) -> None:
        """Refuse tokens without an embedding or an output: only the rank that has one would fail.

        Args:
            vocabulary, outputs: number of input and of output embeddings; None: not known.
            targets: labels of every token; None: without, or not of a vocabulary.

        Raises:
            DataError: the token and the number of embeddings.
        """
        ids = self.arguments.get("input_ids")
        checks = [("input_ids", ids, vocabulary), ("labels", targets, outputs)]
        limited = [
            (name, x, limit)
            for name, x, limit in checks
            if x is not None and limit and not x.is_meta  # a trial without weights
        ]
        bounds = [torch.stack([x.min(), x.max()]).cpu() for _, x, _ in limited]
        for (name, _, limit), bound in zip(limited, bounds, strict=True):
            low, high = bound.tolist()
            if low < (IGNORE_INDEX if name == "labels" else 0) or high >= limit:
                wrong = high if high >= limit else low
                raise DataError(
                    f"{name} contain {wrong}, and the model has {limit} embeddings, 0 to "
                    f"{limit - 1}: use the model's own tokenizer, or resize_token_embeddings "
                    "before enable"
                )

    def unsharded(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Whole arguments of a model whose text model's inputs are sharded: ``arguments``, of which
        this batch was read, without ``PACKING``."""
        out = {name: x for name, x in arguments.items() if x is not None and name not in PACKING}
        # With a mask transformers looks for no documents in positions: the layers know them.
        device = next(iter(self.tensors.values())).device
        mask = self.arguments.get(PADDING)
        if mask is None:
            mask = torch.ones((self.size, self.seq_len), dtype=torch.long, device=device)
        return {**out, PADDING: mask, "use_cache": False}

    def handed_to_text(self, handed: Mapping[str, Any], model: str) -> WholeArguments:
        """This batch with what a model hands its text model.

        Args:
            model: its name.

        Raises:
            UnsupportedAttentionError: tensors that are not known to have one value for each token.
        """
        arguments = {name: x for name, x in handed.items() if x is not None}
        tokens = arguments.get("inputs_embeds", arguments.get("input_ids"))
        served = {*TOKEN_DIM, *PLACED_DIM, "deepstack_visual_embeds", "attention_mask"}
        refused = [name for name, x in arguments.items() if name not in served and holds_tensor(x)]
        if refused or tokens is None or tuple(tokens.shape[:2]) != (self.size, self.seq_len):
            raise UnsupportedAttentionError(
                f"{model} hands its text model "
                f"{', '.join(refused) or 'embeddings of other tokens than it was given'}, and no "
                f"rank has all tokens: served are {', '.join(sorted(served))}"
            )
        self._check_mask(arguments.get("attention_mask"), model)
        return replace(self, arguments=arguments)

    def _check_mask(self, mask: Any, model: str) -> None:
        """UnsupportedAttentionError for a mask tensor that says other than the batch's."""
        whole_mask = self.arguments.get("attention_mask")
        if not isinstance(mask, Tensor) or mask is whole_mask:
            return
        is_whole_mask = tuple(mask.shape) == (self.size, self.seq_len) and bool(
            mask.bool().all() if whole_mask is None else torch.equal(mask != 0, whole_mask != 0)
        )
        if not is_whole_mask:
            raise UnsupportedAttentionError(
                f"{model} hands its text model a mask of its own {list(mask.shape)}: masks are "
                "served as transformers' mask functions make them, not as tensors"
            )

    def shard(self, layout: TokenLayout, rank: int) -> dict[str, Any]:
        """The arguments of this rank without ``PACKING``, with positions and a mask of ones."""
        out = {name: x for name, x in self.arguments.items() if name not in PACKING}
        device = next(iter(self.tensors.values())).device
        if "position_ids" not in out:
            out["position_ids"] = torch.arange(self.seq_len, device=device)[None]
        if "deepstack_visual_embeds" in out:
            out["deepstack_visual_embeds"] = self._of_images(out, layout, rank)
        for name, dim in {**TOKEN_DIM, **PLACED_DIM}.items():
            if name in out:
                out[name] = layout.shard(out[name], dim, rank)
        # With a mask transformers looks for no documents in the positions of a shard, which jump.
        # Models ask whether it masks anything: in a trial without values it has some.
        out["attention_mask"] = torch.ones(
            (self.size, layout.length(rank)),
            dtype=torch.bool,
            device="cpu" if device.type == "meta" else device,
        )
        return out

    def _of_images(self, handed: Mapping[str, Any], layout: TokenLayout, rank: int) -> list[Tensor]:
        # A row for each token of an image, in the order of the sequence (Qwen3-VL's DeepStack).
        is_image: Tensor = handed["visual_pos_masks"]
        rows = (is_image.flatten().cumsum(0) - 1).view_as(is_image)
        local_rows = layout.shard(rows, 1, rank)[layout.shard(is_image, 1, rank)]
        return [x[local_rows.to(x.device)] for x in handed["deepstack_visual_embeds"]]


# Of the arguments of a pass those that rows are made a tree of; others may be no tensors.
_OF_ROWS = frozenset({"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"})
_OF_ROWS |= {LOSS_WEIGHTS, "num_items_in_batch", *PACKING}


@dataclass(frozen=True)
class RowsAsTree:
    """A batch whose rows, or packed documents, share prefixes, as one row with a tree.

    Args:
        arguments: of the pass of the tree.
        index: of each token of the rows the token of the tree that stands for it, ``[b, s]``; 0 for
            padding.
        is_real, is_labeled: the tokens that are no padding, and those with a label, ``[b, s]``.
        counts: for how many rows each token of the tree stands, ``[1, tokens]``.
        num_items: labels of the rows, or what was given for it.
        drops_last: outputs of labels have none for the last token of a row.
        left_padded: a row begins with padding.
        largest_position: of the rows, padding too.
    """

    arguments: dict[str, Any]
    index: Tensor
    is_real: Tensor
    is_labeled: Tensor
    counts: Tensor
    num_items: Tensor | int
    drops_last: bool
    left_padded: bool
    largest_position: Tensor | int

    @classmethod
    def read(
        cls, arguments: Mapping[str, Any], *, min_tokens: int, in_fused_head: bool
    ) -> RowsAsTree | None:
        """The tree of a batch; None where no rows share a prefix, or they are a tree already.

        Args:
            min_tokens: a tree of fewer could not be sharded, and the rows stay rows.
            in_fused_head: the pass returns the labels' log-probabilities, of each row.

        Raises:
            DataError, LayoutError: as :meth:`WholeArguments.read`; labels that are not the next
                tokens.
            UnsupportedAttentionError: an argument that is not known to belong to tokens.
        """
        batch = WholeArguments.read(arguments)
        if TREE in batch.arguments:
            return None
        positions = batch.arguments.get("position_ids")
        refused = sorted(x for x in batch.tensors if x not in _OF_ROWS)
        refused += ["position_ids"] if positions is not None and positions.ndim != 2 else []
        if refused or "input_ids" not in batch.arguments:
            raise UnsupportedAttentionError(
                f"share_prefixes: the batch has {', '.join(refused) or 'no input_ids'}, and rows "
                f"are compared by their tokens: served are {', '.join(sorted(_OF_ROWS))}. Enable "
                "the model without share_prefixes"
            )
        ids = batch.arguments["input_ids"]
        runs = list(batch.runs())
        firsts = [start for _, start, _ in runs]  # positions of the runs' first tokens
        if positions is not None:
            host = positions.cpu()
            firsts = [int(host[row % len(host), start]) for row, start, _ in runs]

        def of_runs(x: Tensor) -> list[Tensor]:
            host = x.cpu()
            return [host[row, start:stop] for row, start, stop in runs]

        shared = SharedPrefixes.of(of_runs(ids), firsts)
        if shared.tokens == shared.row_tokens or shared.tokens < min_tokens:
            return None
        index = torch.zeros(ids.shape, dtype=torch.long)
        is_real = torch.zeros(ids.shape, dtype=torch.bool)
        for (row, start, stop), place in zip(runs, shared.places, strict=True):
            index[row, start:stop], is_real[row, start:stop] = place, True
        is_labeled = torch.zeros_like(is_real)
        out = {name: x for name, x in batch.arguments.items() if name not in {*_OF_ROWS, *PACKING}}
        row_positions = [
            torch.arange(first, first + len(x))
            for first, x in zip(firsts, shared.places, strict=True)
        ]
        out["input_ids"] = shared.gather_from(of_runs(ids))[None].to(ids.device)
        out["position_ids"] = shared.gather_from(row_positions)[None].to(ids.device)
        out[TREE] = shared.segments
        targets, count = batch.shifted_labels(), batch.arguments.get("num_items_in_batch")
        if targets is not None:
            batch.check_targets(targets)
            is_labeled = (targets != IGNORE_INDEX).cpu()
            weights = batch.arguments.get(LOSS_WEIGHTS, torch.ones(ids.shape))
            labels, total = shared.labels(of_runs(targets), of_runs(weights))
            out["labels"] = out["shift_labels"] = labels[None].to(ids.device)
            if not in_fused_head and bool((total[labels != IGNORE_INDEX] != 1).any()):
                out[LOSS_WEIGHTS] = total.float()[None].to(ids.device)
            if count is not None:
                out["num_items_in_batch"] = count
        return cls(
            out,
            index,
            is_real,
            is_labeled,
            counts=index[is_real].bincount()[None],
            num_items=is_labeled.sum().clamp(min=1) if count is None else count,
            drops_last="shift_labels" not in batch.arguments,
            left_padded=batch.left_padded,
            largest_position=batch.largest_position,
        )

    def of_rows(self, x: Tensor, kept: Tensor) -> Tensor:
        """The rows' values ``[b, s, ...]`` of a tree's ``[1, tokens, ...]``; 0 where not ``kept``,
        ``[b, s]``. Differentiable: a token of several rows gets the sum of their gradients."""
        rows = x[0][self.index.to(x.device)]
        dropped = ~kept.to(x.device)
        return rows.masked_fill(dropped.view(*dropped.shape, *[1] * (rows.ndim - 2)), 0)


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or holds one."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return any(holds_tensor(x) for x in value)
    return isinstance(value, Tensor)


def check_layout_kind(kind: str) -> None:
    """LayoutError for a layout that does not exist."""
    if kind != AUTO_LAYOUT and kind not in KINDS:
        raise LayoutError(f"unknown token layout {kind!r}; there are auto, {', '.join(KINDS)}")


def _check_dims(name: str, x: Any) -> None:
    dims = {"inputs_embeds": (3,), "position_ids": (2, 3)}.get(name, (2,))
    if not isinstance(x, Tensor) or x.ndim not in dims or 0 in x.shape:
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        expected = "[batch, tokens, hidden]" if dims == (3,) else "[batch, tokens]"
        raise DataError(f"{name} {shape} must be a tensor {expected}, of one row or more")
    if name == "inputs_embeds":
        if not x.is_floating_point():
            raise DataError(f"inputs_embeds are {x.dtype}: give embeddings, or tokens as input_ids")
    elif name != LOSS_WEIGHTS:
        check_whole_numbers(name, x)


def _real_tokens(mask: Any, size: int, seq_len: int) -> list[RealTokens]:
    """The real tokens of each row, one run or none, by a mask of 0, 1 or numbers of documents."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UnsupportedAttentionError(
            f"attention_mask {list(getattr(mask, 'shape', [])) or type(mask).__name__} must be "
            "[batch, tokens] of 0 and 1: masks of tokens x tokens are not served. Packed documents "
            "are given by position_ids that start anew"
        )
    if tuple(mask.shape) != (size, seq_len):
        raise LayoutError(
            f"attention_mask {list(mask.shape)} must be [{size}, {seq_len}], as the tokens are"
        )
    rows = real_tokens(mask)
    for row, real in enumerate(rows):
        gap = real.stop - real.first - real.num
        if gap:
            raise UnsupportedAttentionError(
                f"attention_mask of row {row} has {gap} zeros between real tokens: padding must be "
                "at the ends of a row"
            )
    return rows


def _documents(
    arguments: Mapping[str, Any],
    mask: Tensor | None,
    mask_documents: tuple[Borders, ...],
    rows: list[RealTokens],
    seq_len: int,
) -> tuple[tuple[Borders, ...], list[RealTokens]]:
    """Cumulative borders of the documents, padding being one of its own, and the real tokens:
    ``rows``, or without a mask those before the end of cumulative lengths."""
    size = len(rows)
    steps = _steps(arguments.get("position_ids"), size)
    stated: dict[str, Sequence[Borders]] = {}
    for name in (x for x in _LENGTHS if x in arguments):
        if stated and arguments[name] is arguments[_LENGTHS[0]]:  # as collators give them
            continue
        borders = read_borders(name, arguments[name])
        if size != 1 or len(borders) > 1:
            raise DataError(
                f"{name} are borders of one row; the batch has {size} rows: give position_ids that "
                "start anew in each document"
            )
        if mask is None:  # what comes after the last document is padding
            rows = [RealTokens(0, min(borders[0][-1], seq_len), seq_len, 0)]
        stated[name] = [borders_within(name, borders[0], rows[0], seq_len, 0)]
    if any(row.num_others for row in rows):
        stated[PADDING] = mask_documents or [(0, seq_len)] * size
    if stated:
        return tuple(agreed_documents(stated, steps, rows)), rows
    documents = []
    for row, (real, row_steps) in enumerate(zip(rows, steps or [{}] * size, strict=True)):
        inside = [x for x in row_steps if real.first < x < real.stop]
        jumps = [x for x in inside if row_steps[x] > 1]
        if jumps and mask is not None:
            raise DataError(
                f"position_ids of row {row} jump forward by {row_steps[jumps[0]]} at token "
                f"{jumps[0]}, where a document would begin, and an attention_mask is given, by "
                "which none does. Leave attention_mask out if one does; of one document whose "
                "positions jump give cu_seq_lens_q and cu_seq_lens_k, [0, tokens]"
            )
        documents.append(borders_through((real.first, *inside, real.stop), seq_len))
    return (() if set(documents) == {(0, seq_len)} else tuple(documents)), rows


def _check_seq_idx(
    seq_idx: Tensor, documents: tuple[Borders, ...], size: int, seq_len: int
) -> None:
    """DataError where seq_idx, which Mamba layers go by, numbers others than the ``documents``."""
    if not isinstance(seq_idx, Tensor):
        raise DataError(f"seq_idx={seq_idx!r} must be a tensor [{size}, {seq_len}], as the tokens")
    if tuple(seq_idx.shape) not in ((size, seq_len), (1, seq_len)):
        raise DataError(f"seq_idx {list(seq_idx.shape)} must be [{size}, {seq_len}], as the tokens")
    begins = [row.nonzero().flatten() + 1 for row in seq_idx[:, 1:] != seq_idx[:, :-1]]
    row_borders = [borders_through(row.tolist(), seq_len) for row in begins]
    rows = list(documents or [(0, seq_len)]) * (size if len(documents) <= 1 else 1)
    numbered = row_borders * (size // len(begins))
    for row, (borders, expected) in enumerate(zip(numbered, rows, strict=True)):
        if borders != expected:
            raise DataError(
                f"seq_idx of row {row} has {len(borders) - 1} documents, the rest of the batch "
                f"{len(expected) - 1} or other ones: give position_ids that start anew in each "
                "document, beside seq_idx or in its place"
            )


def _steps(positions: Tensor | None, size: int) -> list[dict[int, int]]:
    """:func:`position_steps` of each row; [] without positions, or with those of time, height and
    width alone, of which transformers reads no documents."""
    if positions is None or (positions.ndim == 3 and len(positions) < 4):
        return []
    text = positions if positions.ndim == 2 else positions[0]  # of several kinds the first
    rows = position_steps(text)
    return rows if len(rows) == size else rows * size
