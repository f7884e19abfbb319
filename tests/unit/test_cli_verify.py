"""``ds-usp verify`` as a user starts it finds an error that is planted in a copy of the package.

It finds none where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest
from programs import forked

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--seq-len", "32", "--heads", "4", "--head-dim", "8")
RING, ULYSSES = ("--ulysses", "1", "--ring", "2"), ("--ulysses", "2", "--ring", "1")
# What is changed in a copy of the package: file, text, its replacement, who is found wrong, and
# the mesh.
PLANTED = {
    "causal mask off by one": (
        "ds_usp/geometry/masks.py",
        "_END, self.left, self.right)",
        "_END, self.left, None if self.right is None else self.right + 1)",
        "limit 1.00e-05  WRONG",
        RING,
    ),
    "query heads of other ranks": (
        "ds_usp/geometry/heads.py",
        "        if self.kv_heads >= self.ulysses:\n            return first * group",
        "        first, last = self.kv_range(self.ulysses - 1 - rank)\n"
        "        if self.kv_heads >= self.ulysses:\n            return first * group",
        "limit 1.00e-05  WRONG",
        ULYSSES,
    ),
}


PROGRAM = """
import runpy

sys.argv[:] = ["ds_usp", "verify", *{flags}]
runpy.run_module("ds_usp", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def verified(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, subprocess.CompletedProcess[str]]:
    """``ds-usp verify`` with each planted error, "exact" without one, and "refused": of a call that
    is refused."""
    programs, names = {}, {}
    for name in (*PLANTED, "exact", "refused"):
        folder = tmp_path_factory.mktemp("copy")
        names[folder] = name
        shutil.copytree(ROOT / "ds_usp", folder / "ds_usp")
        flags = (*TINY, "--ulysses", "2", "--heads", "1")
        if name in PLANTED:
            file, text, replacement, _, degrees = PLANTED[name]
            source = (folder / file).read_text(encoding="utf-8")
            assert source.count(text) == 1, f"{file} has changed: plant this error elsewhere"
            (folder / file).write_text(source.replace(text, replacement), encoding="utf-8")
            flags = *TINY, *degrees
        elif name == "exact":
            flags = *TINY, *RING
        programs[folder] = PROGRAM.format(flags=flags)
    done = forked("import torch._dynamo", programs)
    return {names[folder]: each for folder, each in done.items()}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name, verified):
    message, done = PLANTED[name][3], verified[name]
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stdout and done.stdout.splitlines()[-1].startswith("WRONG")


def test_an_unchanged_package_is_exact(verified):
    done = verified["exact"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "EXACT (1 exact, 0 WRONG, 0 refused)"


def test_a_call_that_the_package_refuses_exits_with_2(verified):
    done = verified["refused"]
    assert done.returncode == 2, done.stdout + done.stderr
    assert "needs at least 2 query heads" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("REFUSED")
