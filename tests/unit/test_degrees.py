"""Degrees: exactly those that divide are taken, and every refusal has the number and the fix."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import ConfigError, Degrees

ROOT = Path(__file__).resolve().parents[2]
SMALL = st.integers(1, 12)
SMOOTH = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])  # many divide many


@given(*[SMOOTH] * 3, *[st.none() | SMOOTH] * 5)
@examples(500)
def test_degrees_are_taken_exactly_where_everything_divides(
    tp: int,
    sp: int,
    pp: int,
    ulysses: int | None,
    ring: int | None,
    world: int | None,
    heads: int | None,
    kv_heads: int | None,
) -> None:
    degrees = Degrees(
        sp=sp, ulysses=ulysses, ring=ring, tp=tp, pp=pp, world=world, heads=heads, kv_heads=kv_heads
    )
    # A ring alone leaves the other ranks to Ulysses.
    implied = sp // ring if ring and ulysses is None else ulysses
    fits = (
        (ulysses is None or sp % ulysses == 0)
        and (ring is None or sp % ring == 0)
        and (ulysses is None or ring is None or ulysses * ring == sp)
        and (world is None or world % (tp * sp * pp) == 0)
        and (heads is None or heads % tp == 0)
        and (heads is None or implied is None or heads >= tp * implied)
        and (heads is None or kv_heads is None or heads % kv_heads == kv_heads % tp == 0)
    )
    assert (degrees.refusal() is None) == fits, degrees.refusal()
    if fits:
        assert degrees.check() is degrees
        assert implied is None or implied in degrees.valid_ulysses()
        assert ring is None or degrees.valid_ulysses() == [sp // ring]
        assert world is None or degrees.dp * tp * sp * pp == world


@given(SMALL, SMALL, st.integers(1, 48))
@examples(200)
def test_every_degree_that_a_refusal_proposes_is_taken(sp: int, ulysses: int, heads: int) -> None:
    refusal = Degrees(sp=sp, ulysses=ulysses, heads=heads).refusal()
    if refusal:
        proposed = re.findall(r"(\d+) \(ring (\d+)\)", refusal.message)
        for degree, ring in proposed:
            Degrees(sp=sp, ulysses=int(degree), ring=int(ring), heads=heads).check()
        valid = [u for u in range(sp, 0, -1) if sp % u == 0 and u <= heads]
        assert [int(degree) for degree, _ in proposed] == valid


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sp": 0}, "sp=0 must be a whole number of 1 or more"),
    ({"sp": None}, "sp=None must be"),
    ({"sp": 2, "ulysses": 2.0}, "u=2.0 must be"),
    ({"sp": 2, "tp": True}, "--tp True must be"),
    ({"sp": 4, "ulysses": 3}, "u=3 does not divide sp=4. Use one of 4 (ring 1), 2 (ring 2), 1"),
    ({"sp": 4, "ring": 3}, "the 3 rings does not divide sp=4. Use one of 1, 2, 4"),
    ({"sp": 4, "ulysses": 2, "ring": 4}, "u=2 x the 4 rings = 8 is not sp=4: leave one"),
    (
        {"sp": 8, "ring": 2, "heads": 3},
        "the 2 rings of sp=8 leaves 4 Ulysses ranks, which need at least 4 query heads on each "
        "tensor-parallel rank, there are 3. Use one of 2 (ring 4), 1 (ring 8)",
    ),
    ({"sp": 1, "heads": 0}, "0 query heads: there must be 1 or more"),
    ({"sp": 1, "heads": 6, "kv_heads": 4}, "6 query heads cannot share 4 key/value heads"),
    ({"sp": 1, "heads": 6, "kv_heads": 0}, "6 query heads cannot share 0 key/value heads"),
    (
        {"sp": 1, "heads": 8, "kv_heads": 4, "tp": 8},
        "--tp 8 must divide the 8 query heads and the 4 key/value heads. Use one of 1, 2, 4",
    ),
    ({"sp": 1, "heads": 9, "tp": 2}, "--tp 2 must divide the 9 query heads. Use one of 1, 3, 9"),
    (
        {"sp": 1, "heads": 8, "ffn": 20, "tp": 8},
        "--tp 8 must divide the MLP's width of 20. Use one of 1, 2, 4",
    ),
    (
        {"sp": 8, "ulysses": 4, "heads": 6, "tp": 2},
        "u=4 needs at least 4 query heads on each tensor-parallel rank, there are 3 (6 heads, "
        "--tp 2). Use one of 2 (ring 4), 1 (ring 8)",
    ),
    (
        {"sp": 4, "tp": 2, "world": 12},
        "12 ranks cannot hold --tp 2 x sp=4 x pp=1 = 8 ranks. Use a multiple of 8 ranks",
    ),
]


@pytest.mark.parametrize(("degrees", "message"), REFUSED, ids=str)
def test_a_refusal_has_the_users_names_the_numbers_and_the_fix(
    degrees: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Degrees(**degrees).check({"ulysses": "u", "tp": "--tp", "ring": "the {} rings"})


def test_shell_scripts_ask_for_the_degrees() -> None:
    def ask(flags: str) -> tuple[int, str, str]:
        call = [sys.executable, "-m", "ds_usp.geometry", *flags.split()]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert ask("--sp 8 --heads 12 --tp 3 --world 48") == (0, "4 2\n", "")
    assert ask("--sp 8 --heads 12 --ulysses 2 --world 8") == (0, "2 1\n", "")
    assert ask("--sp 8 --heads 32 --ring 4 --world 8") == (0, "2 1\n", "")
    error = "error: ULYSSES_DEGREE=3 does not divide SP_SIZE=4. Use one of 4 (ring 1)"
    code, printed, message = ask("--sp 4 --ulysses 3")
    assert (code, printed) == (2, "") and message.startswith(error)
