"""Code blocks of README, docs and examples: Python runs, commands exist and accept their flags.

A block that cannot be run says why in a comment above it, ``<!-- not run: reason -->``.
"""

import contextlib
import io
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from code_blocks import ROOT, Block, blocks, commands, pages, run_python
from harness import WorkerPool

from ds_usp.__main__ import main as ds_usp_main

WORLD = 4
SHELLS = ("bash", "sh", "")
# Programs of others: their flags are not checked.
OTHERS = {
    ".",
    "cd",
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
MARKED = 1  # blocks marked as not run, of Megatron-LM; a new one is a decision

ALL = [block for path in pages() for block in blocks(path)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_blocks_that_are_not_run_are_counted():
    marked = [f"{block}: {block.reason}" for block in ALL if block.reason]
    assert len(marked) == MARKED, "\n".join(marked)
    assert any(block.language == "python" for block in ALL)


def python_of(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.language == "python" and not block.reason]


def imports(path: Path, package: str) -> bool:
    return any(f"import {package}" in block.text for block in python_of(path))


def needs_transformers(path: Path) -> bool:
    return imports(path, "transformers") or imports(path, "diffusers")


def run_page(path: Path, pool: WorkerPool) -> None:
    for failures in pool.run(run_python, WORLD, page=python_of(path)):
        assert failures == []


@pytest.mark.parametrize(
    "path", [p for p in pages() if python_of(p) and not needs_transformers(p)], ids=relative
)
def test_python_runs_on_four_ranks(path, pool):
    run_page(path, pool)


@pytest.mark.transformers
@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("path", [*filter(needs_transformers, pages())], ids=relative)
def test_python_with_transformers_runs_on_four_ranks(path, pool):
    if imports(path, "diffusers"):
        pytest.importorskip("diffusers")
    run_page(path, pool)


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


def check_command(block: Block, words: list[str]) -> None:
    """Check that what a command starts exists and has the flags."""
    program, rest = words[0], words[1:]
    if program in OTHERS:
        return
    if program == "bash":
        assert resolve(block, rest[0]).exists(), f"{block}: no {rest[0]}"
    elif program in ("python", "torchrun"):
        check_target(block, *target_of(rest))
    elif program == "ds-usp":
        check_target(block, "ds_usp", rest, is_module=True)
    else:
        pytest.fail(f"{block}: unknown program {program!r}: check it here, or mark the block")


def target_of(words: list[str]) -> tuple[str, list[str], bool]:
    """The module or script that an interpreter or torchrun starts, and its arguments."""
    words = list(words)
    while words and words[0].startswith("-") and words[0] != "-m":
        flag = words.pop(0)
        if "=" not in flag and flag not in ("--standalone", "-c"):
            words.pop(0)
    is_module = words[0] == "-m"
    target, rest = words[int(is_module)], words[int(is_module) + 1 :]
    return target, rest, is_module


def check_target(block: Block, target: str, rest: list[str], is_module: bool) -> None:
    """Check that a module or script exists and knows every flag; run the planner's commands."""
    if target in ("ds_usp", "ds_usp.planner"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if rest[0] not in NOT_STARTED:
                assert ds_usp_main(rest) == 0, f"{block}: {rest}"
                return
            with contextlib.suppress(SystemExit):
                ds_usp_main([rest[0], "--help"])
        flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
        assert set(flags) <= set(re.findall(r"--[\w-]+", out.getvalue())), f"{block}: {flags}"
        return
    if target == "megatron_patches.run":  # the other flags are the framework's
        rest = [word for word in rest if word.startswith(("--usp", "--ulysses"))]
    if is_module:
        spec = find_spec(target)
        assert spec is not None and spec.origin is not None, f"{block}: no module {target}"
        path = Path(spec.origin)
    else:
        path = resolve(block, target)
        assert path.is_file(), f"{block}: no {target}"
    sources = "".join(p.read_text(encoding="utf-8") for p in path.parent.rglob("*.py"))
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--"):
            assert f'"{flag}"' in sources or f"{flag} " in sources, f"{block}: no flag {flag}"


def resolve(block: Block, path: str) -> Path:
    """A path of a command, relative to the file that shows it or to the repository."""
    beside = block.path.parent / path
    return beside if beside.exists() else ROOT / path


def sample(language: str, text: str) -> Block:
    return Block(ROOT / "README.md", 7, language, text, None)


WRONG_COMMANDS = {
    "no such script": "torchrun --nproc-per-node 4 examples_deepspeed/plain_torch/dpp.py",
    "no such module": "python -m ds_usp.plannner table",
    "no such flag": "torchrun examples_deepspeed/plain_torch/ddp.py --ulises 2",
    "no such file": "bash scripts/quick.sh",
}


@pytest.mark.parametrize("text", WRONG_COMMANDS.values(), ids=WRONG_COMMANDS)
def test_a_wrong_command_is_found(text):
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        test_commands_exist_and_take_their_flags(sample("bash", text))


def test_a_wrong_python_block_is_found(pool):
    page = [sample("python", "x = 1"), sample("python", "y = x.z")]
    for error in pool.errors(run_python, WORLD, page=page):
        assert "README.md:7: AttributeError" in str(error)
    page = [sample("python", ">>> 1 + 1\n3")]
    (failure,) = pool.run(run_python, WORLD, page=page)[0]
    assert "Expected" in failure and "README.md:7" in failure
