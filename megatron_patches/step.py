"""Dropout seeds of ranks that hold different tokens, for one step of training."""

from __future__ import annotations

import hashlib


def dropout_seeds(seed: int, step: int, *, pp: int, dp: int, sp: int, tp: int) -> tuple[int, int]:
    """The seeds of one rank for one step, before which each rank asks for them.

    Args:
        seed: the program's.
        pp, dp, sp, tp: the rank's indices in its parallel groups.

    Returns:
        That of activations replicated over tensor-parallel ranks, equal on those ranks, and that
        of activations sharded over them.
    """
    return _hash_mix(seed, step, pp, dp, sp), _hash_mix(seed, step, pp, dp, sp, tp)


def _hash_mix(*numbers: int) -> int:
    """A seed of 63 bits, the same on all machines and in a resumed run."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
