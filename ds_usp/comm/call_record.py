"""Records by which a rank declares its next operation, as bytes to compare and as fields to show;
and the error when they differ. ``consistency.py`` encodes one for each comparison and decodes them
only where bytes differ, ``model_comparison.py`` makes some for its error; nothing is sent here."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ds_usp.errors import MeshError
from ds_usp.geometry.layout import KINDS

# Why a record has the fields and not a digest of them: whoever finds a difference must be able to
# say in what, on which ranks, without another exchange: the others may be waiting for something
# else already. Equal is equal bytes. The texts are for people: code finds one by its beginning or
# as the last field, and has what else it must know (kinds and lengths of layouts) in numbers. A
# record has one size, for slots of shared memory and all-gathers; a longer one ends with a digest.
RECORD_BYTES = 2048
# kind, aborted passes, exchanges, deferred, number of layouts
_HEADER = struct.Struct("<BIQ?B")
_LAYOUT = struct.Struct("<BQ")  # number of its kind, tokens
_SEPARATOR = "\x1f"  # of fields: ASCII's unit separator, which no field has
_MAX_VALUES = 4  # shown of a field; 64 ranks may have 64
MAIN_THREAD = "MainThread"  # as Python names it
THREAD_FIELD = "thread "  # begins the field of a call in another thread
ONE_THREAD = (
    "A mesh belongs to the thread that first computes with it, until that ends: ranks would pair "
    "calls of different threads: use an executor of one worker, or give each thread a mesh over a "
    "group of its own, SequenceMesh.from_group(dist.new_group(ranks), ...). It has one name on all "
    "ranks: set threading.current_thread().name before its first call, "
    f"{MAIN_THREAD!r} where other ranks call in their main thread"
)
NUMBERS_FIELD = "numbers of "  # begins the field of tensors that are no shards
_ONE_TENSOR = (
    "These are no shards: every rank gives the same numbers. Make them equal, or broadcast them: "
    "torch.distributed.broadcast(x.data, group=mesh.sp_group, group_src=0)"
)
_MAX_CHARACTERS = 320  # shown of one group of ranks, where nothing is in common


class Signature(NamedTuple):
    """Says what a rank is about to do: all fields are compared, an error shows those that differ.

    Attributes:
        fields: texts for people, of which code reads no more than how they begin.
        layouts: kind and length in tokens of its token layouts, for code that must know them.
    """

    fields: tuple[str, ...]
    layouts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, *parts: str | Signature) -> Signature:
        """A signature of several parts: fields, or signatures with fields and layouts."""
        fields, layouts = list[str](), list[tuple[str, int]]()
        for part in parts:
            if isinstance(part, str):
                fields.append(part)
            else:
                fields += part.fields
                layouts += part.layouts
        return cls(tuple(fields), tuple(layouts))

    @classmethod
    def of_text(cls, text: str) -> Signature:
        """The signature of a text: ``", "`` is between its fields, but not in brackets."""
        fields, depth = list[str](), 0
        for piece in text.split(", "):  # by piece: texts of a forward pass's arguments are long
            if depth > 0:
                fields[-1] += f", {piece}"
            else:
                fields.append(piece)
            depth += sum(map(piece.count, "([{")) - sum(map(piece.count, ")]}"))
        return cls(tuple(fields))

    def __str__(self) -> str:
        return ", ".join(self.fields)


class Kind(IntEnum):
    """The operation that a record declares."""

    CALL = 0
    BACKWARD = 1
    ERROR = 2  # the rank refuses the call, and waits until all ranks know
    LEFT = 3  # an error has taken the rank out of a pass after the comparison before


class CallRecord(NamedTuple):
    """One rank's declaration. Ranks are consistent if their encoded records are equal bytes.

    Attributes:
        signature: the operation; for ``Kind.ERROR`` and ``Kind.LEFT`` one field, the error.
        kind: what the record declares.
        aborted_passes: passes of attention that an error has ended on this rank.
        exchanges: how many exchanges the rank had started when the last of them ended.
        deferred: the rank starts the operation before it knows whether the others declare it too.
    """

    signature: Signature
    kind: Kind = Kind.CALL
    aborted_passes: int = 0
    exchanges: int = 0
    deferred: bool = False

    def encode(self) -> bytes:
        """Return at most ``RECORD_BYTES``: longer texts are cut off and end with their digest."""
        fields, layouts = self.signature
        header = _HEADER.pack(*self[1:], len(layouts))
        for kind, tokens in layouts:
            header += _LAYOUT.pack(KINDS.index(kind), tokens)
        text, limit = _SEPARATOR.join(fields).encode(errors="replace"), RECORD_BYTES - len(header)
        if len(text) > limit:
            digest = f"... (sha256 {hashlib.sha256(text).hexdigest()[:16]})".encode()
            text = text[: limit - len(digest)] + digest
        return header + text

    @classmethod
    def decode(cls, data: bytes | bytearray) -> CallRecord:
        kind, *header, num_layouts = _HEADER.unpack_from(data)
        start = _HEADER.size + num_layouts * _LAYOUT.size
        numbers = _LAYOUT.iter_unpack(data[_HEADER.size : start])
        layouts = tuple((KINDS[number], tokens) for number, tokens in numbers)
        text = bytes(data[start:]).rstrip(b"\0").decode(errors="replace")
        return cls(Signature(tuple(text.split(_SEPARATOR)), layouts), Kind(kind), *header)


def mismatch_error(records: Sequence[CallRecord], earlier: Sequence[str] = ()) -> MeshError:
    """Return the error that shows in which fields records differ (``kind`` and ``deferred`` never
    do alone). Of its ``signatures`` model_comparison.py reads beginnings; mesh.py its ``layouts``.

    Args:
        earlier: texts of calls before whose tensors, in a NUMBERS_FIELD here, differ; () if none.
    """
    by_rank = dict(enumerate(records))
    texts = tuple(str(record.signature) for record in records)
    layouts = tuple(record.signature.layouts for record in records)
    errors = {rank: x for rank, x in by_rank.items() if x.kind in (Kind.ERROR, Kind.LEFT)}
    if errors:
        lines = [f"{name_ranks(group)}: {x.signature}" for x, group in _group_equal(errors)]
        has_left = any(record.kind is Kind.LEFT for record in errors.values())
        verb = "left alone" if has_left else "refused"
        header = f"the call is {verb} by ranks of the sequence-parallel group:"
        return MeshError("\n  ".join([header, *lines]), texts, layouts)
    groups = _group_equal(by_rank)
    aborted = any(record.aborted_passes for record in records)
    fields = [_fields(record, aborted=aborted) for record, _ in groups]
    common = [field for field in fields[0] if all(field in others for others in fields[1:])]
    differing = [[field for field in row if field not in common] for row in fields]
    if len(set(map(len, differing))) > 1:  # a rank that has no such tensor differs in that
        differing = [[x for x in row if not x.startswith(NUMBERS_FIELD)] for row in differing]
    group_ranks = [group for _, group in groups]
    if len({len(row) for row in differing}) == 1 and (common or len(differing[0]) == 1):
        lines = [_compare_field(values, group_ranks) for values in zip(*differing, strict=True)]
    else:
        lines = [
            f"{name_ranks(group)}: {_shorten(', '.join(row) or 'no field')}"
            for group, row in zip(group_ranks[:_MAX_VALUES], differing, strict=False)
        ]
        lines += _remaining(group_ranks)
    header = "the ranks of the sequence-parallel group disagree. They differ in"
    message = "\n  ".join([header, *lines])
    if earlier:
        message += "".join(f"\nin {_shorten(text)}" for text in earlier)
    elif common:
        message += f"\nequal on all ranks: {_shorten(', '.join(common))}"
    if any(record.kind is Kind.BACKWARD for record in records):
        message += (
            "\nAll ranks must run the backward passes of a mesh in one order, each as often as "
            "the others do: gradients would be wrong otherwise"
        )
    if any(field.startswith(THREAD_FIELD) for row in differing for field in row):
        message += f"\n{ONE_THREAD}"
    if any(field.startswith(NUMBERS_FIELD) for row in differing for field in row):
        message += f"\n{_ONE_TENSOR}"
    return MeshError(message, texts, layouts)


def _group_equal(records: dict[int, CallRecord]) -> list[tuple[CallRecord, list[int]]]:
    """Every record once, with its ranks; that of most ranks first."""
    groups: dict[CallRecord, list[int]] = {}
    for rank, record in records.items():
        groups.setdefault(record, []).append(rank)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _fields(record: CallRecord, *, aborted: bool) -> list[str]:
    """The fields of a record, with those of aborted passes where any rank has some."""
    fields = list(record.signature.fields)
    if aborted:
        last = f", the last after {record.exchanges} exchanges" if record.aborted_passes else ""
        fields.append(f"aborted passes: {record.aborted_passes}{last}")
    return fields


def _compare_field(values: Sequence[str], groups: list[list[int]]) -> str:
    """The text of one field that differs: first the words with which all values begin and end, then
    what is left of each value, which is that of one of the ``groups`` of ranks."""
    words = [value.split(" ") for value in values]
    max_shared = min(map(len, words)) - 1  # each value keeps a word
    head = 0
    while head < max_shared and len({row[head] for row in words}) == 1:
        head += 1
    tail = 0
    while tail < max_shared - head and len({row[-1 - tail] for row in words}) == 1:
        tail += 1
    name = " ".join(words[0][:head] + words[0][len(words[0]) - tail :])
    if any(bracket in name for bracket in "()[]{}"):  # what brackets hold is not cut apart
        name, head, tail = "", 0, 0
    ranks_by_value: dict[str, list[int]] = {}
    for row, group in zip(words, groups, strict=True):
        value = " ".join(row[head : len(row) - tail])
        ranks_by_value[value] = sorted(ranks_by_value.get(value, []) + group)
    shown = [f"{_shorten(value)} on {name_ranks(group)}" for value, group in ranks_by_value.items()]
    values_shown = shown[:_MAX_VALUES] + _remaining(list(ranks_by_value.values()))
    return (f"{name.removesuffix(':')}: " if name else "") + ", ".join(values_shown)


def _remaining(groups: list[list[int]]) -> list[str]:
    ranks = sorted(rank for group in groups[_MAX_VALUES:] for rank in group)
    return [f"others on {name_ranks(ranks)}"] if ranks else []


def name_ranks(ranks: Sequence[int]) -> str:
    """Ascending rank numbers as text, consecutive ones joined: ``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {names}"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return text[: _MAX_CHARACTERS // 2] + " ... " + text[-_MAX_CHARACTERS // 2 :]
