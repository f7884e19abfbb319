"""Code blocks of README, docs and examples: Python runs, commands exist and accept their flags.

A block that cannot be run says why in a comment above it, ``<!-- not run: reason -->``.
"""

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RankContext, WorkerPool
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_usp.__main__ import main as ds_usp_main

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"^```(\w*)\s*$")
SEQ_LEN = 4112


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` is set if the line above marks it as not run."""

    path: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The Markdown files whose blocks are run."""
    return [
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("examples_deepspeed/**/*.md")),
    ]


def blocks(path: Path) -> Iterator[Block]:
    """The blocks of a file, in order."""
    lines, start, language, above = path.read_text(encoding="utf-8").splitlines(), 0, "", ""
    inside: list[str] | None = None
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside, start, language = [], number, fence[1]
        elif inside is not None and line == "```":
            mark = NOT_RUN.search(above)
            text = "\n".join(inside)
            yield Block(path, start, language, text, mark[1] if mark else None)
            inside, above = None, ""
        elif inside is not None:
            inside.append(line)
        elif line:
            above = line


# ------------------------------------------------------------------ Python


class Causal(nn.Module):
    """The local attention that a block wraps."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def namespace(ctx: RankContext) -> dict[str, Any]:
    """Names that blocks may use without defining them: a group, tensors, modules."""
    tokens = torch.randint(100, (2, 64))
    full_q, full_k, full_v = torch.randn(3, 1, SEQ_LEN, 4, 8).unbind()
    q, k, v = torch.randn(3, 2, 16, 4, 8).unbind()
    import ds_usp

    return {
        "ds_usp": ds_usp,
        "torch": torch,
        "checkpoint": checkpoint,
        "local_attention": Causal(),
        "sequence_group": ctx.group,
        "group": ctx.group,
        "mesh": ds_usp.SequenceMesh.from_group(ctx.group, 2),
        "S": SEQ_LEN,
        "q": q,
        "k": k,
        "v": v,
        "full_q": full_q,
        "full_k": full_k,
        "full_v": full_v,
        "full_sequences": [{"input_ids": tokens}],
        "embedding": nn.Embedding(100, 32),
        "positions": nn.Embedding(64, 32),
        "qkv": nn.Linear(32, 96),
        "output": nn.Linear(32, 100),
        "cross_entropy": lambda logits, labels: F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ),
        "device": torch.device("cpu"),
        "layer": nn.Linear(32, 32),
        "layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
        "norm": nn.LayerNorm(32),
        "linear": nn.Linear(32, 32),
        "mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        "x": torch.randn(2, 16, 32),
        "labels": torch.randint(100, (2, 16)),
        "weights": torch.ones(2, 16),
    }


def run_python(ctx: RankContext, *, page: list[Block], folder: str) -> list[str]:
    """Run the blocks of a page in order in one namespace; the first failed doctest, if any.

    Blocks that start and end ``torch.distributed`` run in the groups that the ranks have.
    """
    space = namespace(ctx)
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # Accelerate asks for them
    with (
        patch.dict(os.environ, launched),
        patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT),
    ):
        before = os.getcwd()
        os.chdir(folder)  # a trainer makes its output folder
        try:
            return run_blocks(page, space)
        finally:
            os.chdir(before)


def run_blocks(page: list[Block], space: dict[str, Any]) -> list[str]:
    """:func:`run_python` in a namespace."""
    for block in page:
        try:
            if block.text.startswith(">>> "):
                failure = failed_doctest(block, space)
                if failure:
                    return [f"{block}\n{failure}"]
            else:
                # Padded, so that a traceback names the line of the file.
                text = "\n" * block.line + block.text
                exec(compile(text, str(block.path), "exec"), space)
        except Exception as error:
            raise RuntimeError(f"{block}: {type(error).__name__}: {error}") from error
    return []


def failed_doctest(block: Block, space: dict[str, Any]) -> str:
    """The difference between the output of a block with prompts and the one it shows."""
    output: list[str] = []
    parsed = doctest.DocTestParser().get_doctest(
        block.text + "\n", space, str(block), str(block.path), block.line
    )
    doctest.DocTestRunner(verbose=False).run(parsed, out=output.append)
    return "".join(output)


# ------------------------------------------------------------------ the shell


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block as words, without comments and variable assignments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"^\w+=", words[0]):
            words.pop(0)
        if words:
            yield words[: words.index("...")] if "..." in words else words


WORLD = 4
SHELLS = ("bash", "sh", "")
# Programs of others: their flags are not checked.
OTHERS = {
    ".",
    "accelerate",
    "cd",
    "curl",
    "deepspeed",
    "echo",
    "export",
    "git",
    "pip",
    "pytest",
    "sbatch",
    "scancel",
    "srun",
}
# Blocks marked as not run: Megatron-LM, a server, trainers of others; a new one is a decision.
MARKED = 8

ALL = [block for path in pages() for block in blocks(path)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_blocks_that_are_not_run_are_counted():
    marked = [f"{block}: {block.reason}" for block in ALL if block.reason]
    assert len(marked) == MARKED, "\n".join(marked)
    assert any(block.language == "python" for block in ALL)


def test_the_diffs_of_readme_are_python_and_name_what_there_is():
    public = (ROOT / "tests" / "data" / "public_api.txt").read_text(encoding="utf-8")
    diffs = [block.text for block in blocks(ROOT / "README.md") if block.language == "diff"]
    assert len(diffs) == 2
    for text in diffs:
        lines = [line[1:] for line in text.splitlines() if not line.startswith("-")]
        nodes = list(ast.walk(ast.parse("\n".join(lines))))
        names = [
            f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        called = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert names and all(f"\n{name}(" in public for name in names), names
        assert {name.rpartition(".")[2] for name in names} <= called, text


def python_of(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.language == "python" and not block.reason]


def imports(path: Path, package: str) -> bool:
    return any(f"import {package}" in block.text for block in python_of(path))


def needs_transformers(path: Path) -> bool:
    return imports(path, "transformers") or imports(path, "diffusers")


def run_page(path: Path, pool: WorkerPool, folder: Path) -> None:
    for failures in pool.run(run_python, WORLD, page=python_of(path), folder=str(folder)):
        assert failures == []


@pytest.mark.parametrize(
    "path", [p for p in pages() if python_of(p) and not needs_transformers(p)], ids=relative
)
def test_python_runs_on_four_ranks(path, pool, tmp_path):
    run_page(path, pool, tmp_path)


@pytest.mark.transformers
@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("path", [*filter(needs_transformers, pages())], ids=relative)
def test_python_with_transformers_runs_on_four_ranks(path, pool, tmp_path):
    if imports(path, "diffusers"):
        pytest.importorskip("diffusers")
    run_page(path, pool, tmp_path)


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language in SHELLS and not block.reason], ids=str
)
def test_commands_exist_and_take_their_flags(block):
    if block.language:
        done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    for words in commands(block):
        check_command(block, words)


# Commands of ds-usp that need torch, a GPU, files or time: their flags are checked, the others run.
NOT_STARTED = ("env", "profile", "report-communication", "verify")
STARTERS = ("python", "torchrun")


def check_command(block: Block, words: list[str]) -> None:
    """Check that what a command starts exists and has the flags; run the planner's commands."""
    program, rest = words[0], words[1:]
    if program in OTHERS:
        return
    if program == "bash":
        assert resolve(block, rest[0]).exists(), f"{block}: no {rest[0]}"
        return
    if program in STARTERS:  # an interpreter's own flags, then a script, or a module behind -m
        while rest[0].startswith("-") and rest[0] != "-m":
            flag = rest.pop(0)
            if "=" not in flag and flag not in ("--standalone", "-c"):
                rest.pop(0)
        program = rest.pop(0)
        if program == "-m":
            program = rest.pop(0)
            spec = find_spec(program)
            assert spec and spec.origin, f"{block}: no module {program}"
            path = Path(spec.origin)
        else:
            path = resolve(block, program)
        assert path.is_file(), f"{block}: no {program}"
    if program in ("ds-usp", "ds_usp", "ds_usp.planner"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if rest[0] not in NOT_STARTED:
                assert ds_usp_main(rest) == 0, f"{block}: {rest}"
                return
            with contextlib.suppress(SystemExit):
                ds_usp_main([rest[0], "--help"])
        known = out.getvalue()
    else:
        assert words[0] in STARTERS, f"{block}: unknown program {words[0]!r}: check or mark it"
        known = "".join(p.read_text(encoding="utf-8") for p in path.parent.rglob("*.py"))
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    if program == "megatron_patches.run":  # the other flags are the framework's
        flags = {flag for flag in flags if flag.startswith(("--usp", "--ulysses"))}
    wrong = {flag for flag in flags if not re.search(rf"{flag}(?![\w-])", known)}
    assert not wrong, f"{block}: no flags {wrong}"


def resolve(block: Block, path: str) -> Path:
    """A path of a command, relative to the file that shows it or to the repository."""
    beside = block.path.parent / path
    return beside if beside.exists() else ROOT / path
