"""The rank that a launcher made of this process, read without torch."""

from __future__ import annotations

import os


def under_launcher() -> bool:
    """Whether torchrun, srun or the deepspeed launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's rank; 0 without a launcher."""
    return _number("RANK", 0)


def world_size() -> int | None:
    """All ranks of the launcher; None without one."""
    return _number("WORLD_SIZE", 1) if under_launcher() else None


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
