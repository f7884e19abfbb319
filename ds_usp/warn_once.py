"""Warnings to the user: each line once a process, on one rank."""

from __future__ import annotations

import logging
from functools import cache


def warn_once(text: str, *, rank: int) -> None:
    """Log a line as a warning of the logger ``ds_usp``, the first time that rank 0 passes it.

    Args:
        text: the line.
        rank: of the caller among those that pass the same line.
    """
    if rank == 0:
        _emit_once(text)


@cache
def _emit_once(text: str) -> None:
    logging.getLogger("ds_usp").warning("%s", text)
