"""The reference: pages of every flag and setting, and the list that freezes what users call.

    python scripts/reference_pages.py --signatures    # tests/data/public_api.txt

The pages are for the site (scripts/build_site.py) and not committed. The list is committed and
compared by a test: who removes a public name, an argument or a flag, or changes a default, writes
the list anew, and says so in CHANGELOG.md. The API of the site has the names of that list.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIGNATURES = ROOT / "tests" / "data" / "public_api.txt"
sys.path.insert(0, str(ROOT))

from ds_usp.settings import table  # noqa: E402

MODULES = {
    "ds_usp": "attention, meshes, layouts, masks, errors",
    "ds_usp.training": "batches, loss, DeepSpeed",
    "ds_usp.memory": "recomputation and offload",
    "ds_usp.integrations.transformers": "models of Hugging Face transformers",
    "ds_usp.compat.flash_attention_forward": "the function that trainers replace in transformers",
    "ds_usp.compat.ring_flash_attn": "the names of ring_flash_attn",
    "ds_usp.integrations.diffusers": "diffusion transformers and pipelines of diffusers",
    "ds_usp.planner": "memory, time and degrees from formulas",
    "megatron_patches": "patches of Megatron-DeepSpeed, megatron-core and DeepSpeed",
}
TRAINER = "examples_deepspeed/sequence_parallel/pretrain_gpt_usp.py"
COMMANDS = (
    *(f"ds-usp {name}" for name in ("", "env", "verify", "report-communication")),
    *(f"ds-usp {name}" for name in ("plan", "memory", "max-length")),
    "python -m ds_usp.integrations.transformers",
    "python -m megatron_patches",
    f"python {TRAINER}",
)
FLAG = re.compile(r"^  +(?:-\w[^-\n]*, )?(--[\w-]+)", re.MULTILINE)


# ------------------------------------------------------------------ command line


def command_page() -> str:
    """The page of the programs' ``--help``, below the usage."""
    lines = ["# Command line", "", "Written from `--help`."]
    for command in COMMANDS:
        lines += ["", f"## {command.strip()}", "", "```text", help_text(command), "```"]
    return "\n".join(lines) + "\n"


@functools.cache
def help_text(command: str) -> str:
    """The help of a program from its description on; the usage is laid out by Python's version."""
    first, *arguments = command.split()
    run = runpy.run_path
    if first == "ds-usp":
        run, program = runpy.run_module, "ds_usp"
    else:
        program = arguments.pop(0)
        if program == "-m":
            run, program = runpy.run_module, arguments.pop(0)
    printed = io.StringIO()
    process = alone(program, [*arguments, "--help"])
    with process, contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of a module that is imported
        try:
            run(program, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    usage, _, rest = printed.getvalue().partition("\n\n")
    return (rest if usage.startswith("usage:") else printed.getvalue()).strip("\n")


@contextlib.contextmanager
def alone(program: str, arguments: list[str]) -> Iterator[None]:
    """As a process would be that runs a program: programs share this one's imports of libraries."""
    before = sys.argv, sys.path.copy(), os.environ.get("COLUMNS"), Path.cwd()
    path = ROOT / program
    sys.argv = [program if path.is_file() else "__main__.py", *arguments]
    sys.path.insert(0, str(path.parent if path.is_file() else ROOT))
    os.environ["COLUMNS"] = "100"
    os.chdir(ROOT)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[:2]
        os.environ.pop("COLUMNS")
        if before[2] is not None:
            os.environ["COLUMNS"] = before[2]
        os.chdir(before[3])


# ------------------------------------------------------------------ what is frozen


def members(module: str) -> list[tuple[str, object]]:
    """The public names of a module, in alphabetical order, and what they are."""
    loaded = importlib.import_module(module)
    names = sorted(loaded.__all__, key=str.lower)
    return [(name, getattr(loaded, name)) for name in names if not name.startswith("__")]


def signatures() -> str:
    """A line for each public name, each public method of a class, and each command's flags."""
    lines = []
    for module in MODULES:
        for name, member in members(module):
            lines += frozen(f"{module}.{name}", member)
    for command in COMMANDS:
        flags = sorted(set(FLAG.findall(help_text(command))))
        lines.append(" ".join([f"$ {command.strip()}", *flags]))
    return "\n".join(lines) + "\n"


def frozen(name: str, member: object) -> Iterator[str]:
    """What callers lean on: order, names and defaults of arguments, the values of constants."""
    if not inspect.isclass(member):
        shown = repr(sorted(member)) if isinstance(member, Mapping) else repr(member)
        yield f"{name}{arguments_of(member)}" if callable(member) else f"{name} = {shown}"
        return
    if issubclass(member, BaseException):
        yield f"{name}: {', '.join(base.__name__ for base in member.__bases__)}"
        return
    if issubclass(member, Enum):
        yield f"{name}: {', '.join(member.__members__)}"
        return
    yield f"{name}{arguments_of(member)}"
    for method, raw in vars(member).items():
        if method.startswith("_"):
            continue
        if isinstance(raw, (property, functools.cached_property)):
            yield f"{name}.{method}"
        elif callable(getattr(member, method)) and not inspect.isclass(raw):
            yield f"{name}.{method}{arguments_of(getattr(member, method))}"


def arguments_of(function: object) -> str:
    """The parameters without their annotations."""
    try:
        parsed = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        p.replace(annotation=p.empty, default=shown_default(p.default))
        for p in parsed.parameters.values()
        if p.name != "self"
    ]
    return str(inspect.Signature(plain))


def shown_default(default: object) -> object:
    """Defaults whose repr is long or holds an address are shown as dots."""
    if default is inspect.Parameter.empty:
        return default
    hidden = dataclasses.is_dataclass(default) or " at 0x" in repr(default)
    return Shown("...") if hidden else default


class Shown:
    """Stands for a default in a signature, with this repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


# ------------------------------------------------------------------ files


def settings_page() -> str:
    """The settings of all programs, from their rows."""
    programs = "Megatron's programs, transformers' `enable` and the planner have these settings."
    return f"# Settings\n\n{programs}\n\n{table()}\n"


PAGES = {"command-line.md": command_page, "settings.md": settings_page}


def main() -> int:
    """Write the list; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = f"write {SIGNATURES.name}; pages: scripts/docs.sh"
    parser.add_argument("--signatures", action="store_true", required=True, help=what)
    parser.parse_args()
    SIGNATURES.write_text(signatures(), encoding="utf-8")
    print(SIGNATURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
