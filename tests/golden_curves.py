"""Curves of 20 steps that were recorded once, one for each program that trains.

Other tests compare a mesh with one rank of the same commit: an error that both have passes there.
Here losses and gradient norms are those of ``data/golden_curves.json``, so that numbers change by a
commit that changes that file.
"""

import fcntl
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("data") / "golden_curves.json"
STEPS = 20
LIMIT = 1e-6  # relative, in fp32
PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "accelerate", "trl", "diffusers")
TO_WRITE = (
    "If the change is meant, write the new curve with this test and --write-golden, and say in the "
    "commit why the numbers changed."
)


class GoldenCurves:
    """The recorded curves, compared or written anew."""

    def __init__(self, write: bool) -> None:
        self.write = write

    def check(self, program: str, losses: Sequence[float], norms: Sequence[float] = ()) -> None:
        """Fail at the first step whose numbers are not the recorded ones.

        Args:
            program: the curve's name.
            losses: of ``STEPS`` steps.
            norms: of the gradients, where the program reports them.
        """
        assert len(losses) == STEPS and len(norms) in (0, STEPS), (program, losses, norms)
        if self.write:
            rewrite(program, losses, norms)
            return
        expected = recorded(program)
        assert len(norms) == len(expected["norms"]), (program, TO_WRITE)
        if difference := first_difference(losses, norms, expected):
            made = ", ".join(f"{name} {number}" for name, number in expected["made_with"].items())
            pytest.fail(f"{program}: {difference}. Recorded with {made}. {TO_WRITE}", pytrace=False)


def recorded(program: str) -> dict[str, Any]:
    """Its curve, and what made it."""
    curves = json.loads(FILE.read_text())
    if program not in curves:
        pytest.fail(f"{FILE.name} has no curve of {program!r}. {TO_WRITE}", pytrace=False)
    return curves[program]


def first_difference(
    losses: Sequence[float], norms: Sequence[float], expected: Mapping[str, Sequence[float]]
) -> str:
    """The first step that differs, with its numbers; "" if none does."""
    pairs = ("loss", losses, expected["losses"]), ("gradient norm", norms, expected["norms"])
    for step in range(len(losses)):
        for what, values, wanted in pairs:
            if wanted:
                error = abs(values[step] - wanted[step]) / abs(wanted[step])
                if not error <= LIMIT:
                    return (
                        f"step {step}: {what} {values[step]:.9g}, recorded {wanted[step]:.9g}, "
                        f"relative difference {error:.1e}, limit {LIMIT:.0e}"
                    )
    return ""


def rewrite(program: str, losses: Sequence[float], norms: Sequence[float]) -> None:
    """Put a curve into the file, and what made it."""
    made_with = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            made_with[name] = version(name)
        except PackageNotFoundError:
            continue
    with open(FILE, "a+") as file:  # other processes write theirs
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        curves = json.loads(file.read() or "{}")
        curves[program] = {"losses": list(losses), "norms": list(norms), "made_with": made_with}
        file.truncate(0)
        file.write(json.dumps(dict(sorted(curves.items())), indent=1) + "\n")
