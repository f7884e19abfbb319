"""``--usp-report-communication``: one traced step of a patched framework."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_usp.profiling import exposed

# ------------------------------------------------------------------------------------------------
# Dropout seeds of ranks that hold different tokens, for one step of training.


def dropout_seeds(seed: int, step: int, *, pp: int, dp: int, sp: int, tp: int) -> tuple[int, int]:
    """The seeds of one rank for one step, from its coordinates.

    Returns:
        That of activations replicated over tensor-parallel ranks, equal on those ranks, and that
        of activations sharded over them.
    """
    return _hash_mix(seed, step, pp, dp, sp), _hash_mix(seed, step, pp, dp, sp, tp)


def _hash_mix(*numbers: int) -> int:
    """A seed of 63 bits, by a hash of the numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


FOLDER = "usp_communication"  # in --save, or where the program was started


def run_step(flags: Any, step: Callable[[], Any], roles: Callable[[], Mapping[str, Any]]) -> Any:
    """The result of ``step``, which is traced and reported if it is the one that was asked for.

    Args:
        flags: the framework's arguments.
        roles: makes the process groups of each role.
    """
    number = flags.curr_iteration + 1
    if number != flags.usp_report_communication:
        return step()
    folder = Path(flags.save or ".") / FOLDER
    with exposed.report(folder, groups=roles(), title=f"step {number}"):
        return step()
