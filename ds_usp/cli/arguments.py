"""The spelling of masks and documents."""

from __future__ import annotations

from argparse import ArgumentTypeError

from ds_usp.planner.arguments import tokens


def mask(text: str) -> tuple[int | None, int | None, int]:
    """``(left, right, prefix)`` of causal | full | window:LEFT | window:LEFT,RIGHT | prefix:N."""
    name, _, numbers = text.partition(":")
    if text in ("causal", "full"):
        return None, 0 if text == "causal" else None, 0
    try:
        sizes = [_count(number) for number in numbers.split(",")]
    except ArgumentTypeError:
        sizes = []
    if name == "window" and len(sizes) in (1, 2):
        return sizes[0], sizes[1] if len(sizes) == 2 else 0, 0
    if name == "prefix" and len(sizes) == 1:
        return None, 0, sizes[0]
    raise ArgumentTypeError(
        f"{text!r} must be causal, full, window:LEFT, window:LEFT,RIGHT or prefix:N, in tokens"
    )


def _count(text: str) -> int:
    return 0 if text == "0" else tokens(text)


def documents(text: str) -> tuple[tuple[int, ...], ...]:
    """Lengths of packed documents, with commas; with slashes those of each sample."""
    return tuple(
        tuple(tokens(length) for length in sample.split(",")) for sample in text.split("/")
    )
