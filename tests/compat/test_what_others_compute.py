"""The rows of ``docs/what-others-compute.md``: other packages and ds_usp on the same input.

A program is the text of ``what_others_compute.md``, run on ranks of its own, because the packages
patch each other.
"""

import contextlib
import functools
import io
import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import harness
import pytest
from harness import RankContext, RankError, fork_world

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/what-others-compute.md").read_text(encoding="utf-8")
TEXT = Path(__file__).with_name("what_others_compute.md").read_text(encoding="utf-8")
OURS = 1e-5
WRONG = 100 * OURS  # at least; below, the row goes
LINES = 20  # of a block, empty ones not counted; the head of all programs may have more
RESULT = re.compile(r"^(.+): peer (\S+), ds_usp (\S+)$", re.MULTILINE)

# Imported once by the server that ranks are forked from: a program alone needs 20 s for it.
harness.PRELOAD = (
    *harness.PRELOAD,
    "transformers.trainer",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.granitemoehybrid.modeling_granitemoehybrid",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "diffusers.models.transformers.transformer_qwenimage",
    "ds_usp.integrations.transformers",
    "ds_usp.integrations.diffusers",
)


@dataclass(frozen=True)
class Row:
    """A row of the page's table."""

    peer: str
    version: str
    error: float


ROWS = {
    program: Row(peer, number, float(of_peer))
    for program, peer, number, of_peer in re.findall(
        r"^\| (.+?) \| (\w+) ([\d.]+) \| .+? \| (\S+) \| \S+ \|$", PAGE, re.MULTILINE
    )
}


@dataclass(frozen=True)
class Program:
    """The head, the beginning of a section, and a block that reports."""

    section: str
    text: str
    lines: int

    def __str__(self) -> str:
        return self.section

    @property
    def missing(self) -> list[str]:
        """Packages that it imports and that are not installed; stand-ins are not imported."""
        names = re.findall(r"^(?:import|from) (\w+)", self.text, re.MULTILINE)
        return sorted({name for name in names if find_spec(name) is None})


def programs() -> list[Program]:
    head, found = "", []
    for section in TEXT.split("\n## ")[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        if not head:
            (head,) = blocks
            continue
        beginning = [block for block in blocks if "report(" not in block]
        for block in blocks:
            if block not in beginning:
                text = "".join([head, *beginning, block])
                lines = max(len(re.findall(r"^.", x, re.MULTILINE)) for x in (*beginning, block))
                found.append(Program(section.partition("\n")[0], text, lines))
    return found


PROGRAMS = programs()


def run(ctx: RankContext, *, text: str, folder: str) -> str:
    """What a program prints on this rank, as torchrun starts it."""
    os.chdir(folder)  # a trainer makes one for its output
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(ctx.world))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "what_others_compute.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@functools.cache
def results(program: Program, folder: str) -> list[tuple[str, float, float]]:
    """Of each row that a program reports: its name, the peer's error, that of ds_usp."""
    ranks = 4 if program.section.startswith("diffusers") else 2
    printed = fork_world(run, ranks, text=program.text, folder=folder)
    found = RESULT.findall(printed[0])
    return [(row, float(of_peer), float(ours)) for row, of_peer, ours in found]


def judge(program: str, of_peer: float, ours: float, installed: str) -> None:
    """Fail where a row does not say what was just seen."""
    row = ROWS[program]
    assert ours <= OURS, f"{program}: ds_usp is {ours:g} off one process"
    if of_peer <= WRONG:
        pytest.fail(f"{program}: mended in {row.peer} {installed}: delete this row")
    if installed == row.version:
        assert of_peer == pytest.approx(row.error, rel=0.2), f"{program}: write {of_peer:g}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_each_row_is_still_true(program, folder):
    if program.missing:
        pytest.skip(f"not installed: {', '.join(program.missing)}")
    try:
        found = results(program, folder)
    except RankError as error:
        pytest.fail(f"{program} raises; a peer that refuses now leaves the page:\n{error}")
    assert found, "it reports nothing"
    for row, of_peer, ours in found:
        judge(row, of_peer, ours, version(ROWS[row].peer))


def test_each_row_has_a_program(folder):
    run_here = [program for program in PROGRAMS if not program.missing]
    reported = [row for program in run_here for row, _, _ in results(program, folder)]
    installed = [name for name, row in ROWS.items() if find_spec(row.peer) is not None]
    assert sorted(reported) == sorted(installed)


def test_programs_are_short():
    assert max(program.lines for program in PROGRAMS) <= LINES


def test_the_table_has_the_versions_of_the_constraints():
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for row in ROWS.values():
        known = re.findall(rf"^{row.peer}==([\d.]+)", pinned, re.MULTILINE)
        assert not known or row.version in known, row


def test_a_mended_peer_and_a_wrong_number_are_found():
    name, row = next(iter(ROWS.items()))
    judge(name, row.error, 1e-7, row.version)
    with pytest.raises(pytest.fail.Exception, match=rf"mended in {row.peer} 99: delete this row"):
        judge(name, 1e-7, 1e-7, "99")
    with pytest.raises(AssertionError, match=r"ds_usp is 0\.001 off"):
        judge(name, row.error, 1e-3, row.version)
    with pytest.raises(AssertionError, match="write"):
        judge(name, 2 * row.error, 1e-7, row.version)
