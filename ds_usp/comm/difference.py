"""What ranks are told when their descriptions of one call differ: the fields, grouped by ranks."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_VALUES = 4  # shown of a field; 64 ranks may have 64
_MOST_CHARACTERS = 320  # of what one group of ranks does, where nothing is in common
ERROR = "error: "  # begins what a rank says that cannot make the call
BACKWARD = "backward pass of call "


def describe(texts: Sequence[str], who: Sequence[int] | None = None) -> str:
    """The difference between what ranks say.

    Args:
        texts: of each rank: fields with ``", "`` between them, or an error.
        who: their ranks; None: all, in order.
    """
    said_by = dict(zip(who or range(len(texts)), texts, strict=True))
    errors = {rank: text for rank, text in said_by.items() if text.startswith(ERROR)}
    if errors:
        said = _by_value({rank: text.removeprefix(ERROR) for rank, text in errors.items()})
        lines = [f"{ranks_of(ranks)}: {text}" for text, ranks in said]
        return "\n  ".join(["the call is refused by ranks of the sequence-parallel group:", *lines])
    groups = _by_value(said_by)
    fields = [split_fields(text) for text, _ in groups]
    common = [x for x in fields[0] if all(x in each for each in fields[1:])]
    own = [[x for x in each if x not in common] for each in fields]
    ranks = [group for _, group in groups]
    if len({len(each) for each in own}) == 1 and (common or len(own[0]) == 1):
        lines = [_column(list(values), ranks) for values in zip(*own, strict=True)]
    else:
        each = zip(ranks[:_MOST_VALUES], own[:_MOST_VALUES], strict=True)
        lines = [f"{ranks_of(group)}: {_short(', '.join(x) or 'no field')}" for group, x in each]
        lines += _others(ranks)
    shown = ["the ranks of the sequence-parallel group disagree. They differ in", *lines]
    text = "\n  ".join(shown)
    if common:
        text += f"\nequal on all ranks: {_short(', '.join(common))}"
    if any(x.startswith(BACKWARD) for each in fields for x in each):
        text += (
            "\nAll ranks must run the backward passes of a mesh in one order, each as often as "
            "the others do: gradients would be wrong otherwise"
        )
    return text


def _by_value(texts: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Every text once, with its ranks; the one of most ranks first."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _column(values: list[str], ranks: list[list[int]]) -> str:
    """One field: what its values have in common once, then each value with its ranks."""
    words = [value.split(" ") for value in values]
    shortest = min(map(len, words)) - 1  # a value is never empty
    begin = 0
    while begin < shortest and len({each[begin] for each in words}) == 1:
        begin += 1
    end = 0
    while end < shortest - begin and len({each[-1 - end] for each in words}) == 1:
        end += 1
    name = " ".join(words[0][:begin] + words[0][len(words[0]) - end :])
    if any(bracket in name for bracket in "()[]{}"):
        name, begin, end = "", 0, 0
    merged: dict[str, list[int]] = {}
    for each, group in zip(words, ranks, strict=True):
        value = " ".join(each[begin : len(each) - end])
        merged[value] = sorted(merged.get(value, []) + group)
    shown = [f"{_short(value)} on {ranks_of(group)}" for value, group in merged.items()]
    rest = _others(list(merged.values()))
    return (f"{name}: " if name else "") + ", ".join(shown[:_MOST_VALUES] + rest)


def _others(groups: list[list[int]]) -> list[str]:
    rest = sorted(rank for group in groups[_MOST_VALUES:] for rank in group)
    return [f"others on {ranks_of(rest)}"] if rest else []


def split_fields(text: str) -> list[str]:
    """The fields of a description; commas in brackets divide none."""
    fields, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth <= 0 and text.startswith(", ", at):
            fields.append(text[start:at])
            start = at + 2
    return [*fields, text[start:]]


def ranks_of(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return text[: _MOST_CHARACTERS // 2] + " ... " + text[-_MOST_CHARACTERS // 2 :]
