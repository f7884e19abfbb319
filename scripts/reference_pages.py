"""The reference: pages of every public name and every flag, and the list that freezes them.

    python scripts/reference_pages.py               # docs/reference/generated: api.md from
                                                    # docstrings, command-line.md from --help,
                                                    # settings.md from ds_usp/settings.py
    python scripts/reference_pages.py --signatures  # tests/data/public_api.txt

The pages are for readers, built where they are wanted and not committed. The list is committed and
compared by a test: who removes a public name, an argument or a flag, or changes a default, writes
the list anew, and says so in CHANGELOG.md.
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
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import ForwardRef

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "reference" / "generated"
SIGNATURES = ROOT / "tests" / "data" / "public_api.txt"
sys.path.insert(0, str(ROOT))

from ds_usp.settings import table  # noqa: E402

MODULES = {
    "ds_usp": "attention, meshes, layouts, masks, errors",
    "ds_usp.training": "batches, loss, DeepSpeed",
    "ds_usp.memory": "recomputation and offload",
    "ds_usp.profiling.exposed": "where a step's time goes",
    "ds_usp.integrations.transformers": "models of Hugging Face transformers",
    "ds_usp.compat.flash_attention_forward": "the function that trainers replace in transformers",
    "ds_usp.integrations.diffusers": "diffusion transformers and pipelines of diffusers",
    "ds_usp.planner": "memory, time and degrees from formulas",
    "megatron_patches": "patches of Megatron-DeepSpeed, megatron-core and DeepSpeed",
}
TRAINER = "examples_deepspeed/sequence_parallel/pretrain_gpt_usp.py"
COMMANDS = (
    *(f"ds-usp {name}" for name in ("", "env", "verify", "report-communication")),
    *(f"ds-usp {name}" for name in ("plan", "memory", "max-length", "comm", "explain", "profile")),
    "python -m ds_usp.integrations.transformers",
    "python -m megatron_patches",
    f"python {TRAINER}",
)
LINE = 96
LISTS = ("Arg", "Attribute", "Raise")
LITERAL_BLOCK = re.compile(r"::\n\n((?: {4}.*\n|\n)+)")
FLAG = re.compile(r"^  +(?:-\w[^-\n]*, )?(--[\w-]+)", re.MULTILINE)
SECTION = re.compile(r"(Arg|Attribute|Return|Raise|Shape|Yield|Source|Example)s?:\s*(.*)$")


# ------------------------------------------------------------------ API


def api_page() -> str:
    """The public names of each module: signature and docstring."""
    lines = ["# API", "", "Written from docstrings by `python scripts/reference_pages.py`.", ""]
    lines += ["| module | |", "|---|---|"]
    for name, topic in MODULES.items():
        lines.append(f"| [`{name}`](#{name.replace('.', '')}) | {topic} |")
    for name in MODULES:
        lines += ["", f"## {name}"]
        for public, member in members(name):
            lines += ["", f"### {public}", "", *described(public, member)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def members(module: str) -> list[tuple[str, object]]:
    """The public names of a module, in alphabetical order, and what they are."""
    loaded = importlib.import_module(module)
    names = sorted(loaded.__all__, key=str.lower)
    return [(name, getattr(loaded, name)) for name in names if not name.startswith("__")]


def described(name: str, member: object) -> Iterator[str]:
    """Signature, docstring and public methods of a member, as Markdown."""
    if not callable(member):
        if isinstance(member, Mapping):
            yield f"A mapping with the keys {', '.join(f'`{key}`' for key in member)}."
        else:
            yield f"A constant: `{member!r}`."
        return
    is_error = inspect.isclass(member) and issubclass(member, BaseException)
    if not is_error:
        yield from ("```text", f"{name}{signature(member)}", "```", "")
    yield from markdown(inspect.getdoc(member) or "")
    if not inspect.isclass(member) or is_error or issubclass(member, Enum):
        return
    methods = [m for m in vars(member) if not m.startswith("_") and m != "forward"]
    for method in methods:
        raw = inspect.getattr_static(member, method)
        function = getattr(member, method) if not isinstance(raw, property) else raw.fget
        doc = inspect.getdoc(raw)
        if doc and (callable(function) or isinstance(raw, property)):
            shown = "" if isinstance(raw, property) else " ".join(signature(function).split())
            shown = shown.replace("( ", "(").replace(", )", ")")
            yield f"- `.{method}{shown}`: {inline(doc.partition(chr(10) * 2)[0])}"


class Shown:
    """Stands for a default or an annotation in a signature, with this repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(function: object) -> str:
    """Parameters and the return type, one a line where one line is too short for all."""
    try:
        parsed = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        p.replace(annotation=shown_annotation(p.annotation), default=shown_default(p.default))
        for p in parsed.parameters.values()
        if p.name != "self"
    ]
    result = shown_annotation(parsed.return_annotation)
    text = str(parsed.replace(parameters=parameters, return_annotation=result))
    if len(text) <= LINE:
        return text
    lines = [str(inspect.Signature([p]))[1:-1] for p in parameters]
    if any(p.kind is p.KEYWORD_ONLY for p in parameters):
        first = next(i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY)
        keywords = [line.removeprefix("*, ") for line in lines[first:]]
        lines = [*lines[:first], *([] if has_varargs(parameters) else ["*"]), *keywords]
    returned = "" if result is inspect.Signature.empty else f" -> {result!r}"
    return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){returned}"


def has_varargs(parameters: list[inspect.Parameter]) -> bool:
    """Whether ``*args`` stands before the keyword-only parameters."""
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)


def shown_annotation(annotation: object) -> object:
    """Postponed annotations are strings, or references in a NamedTuple: shown without quotes."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return Shown(annotation) if isinstance(annotation, str) else annotation


def shown_default(default: object) -> object:
    """Defaults whose repr is long or holds an address are shown as dots."""
    if default is inspect.Parameter.empty:
        return default
    hidden = dataclasses.is_dataclass(default) or " at 0x" in repr(default)
    return Shown("...") if hidden else default


def fenced(block: re.Match[str]) -> str:
    """A literal block of reStructuredText as fenced text: a fragment, which no test runs."""
    return f":\n\n```text\n{textwrap.dedent(block[1]).strip()}\n```\n\n"


def markdown(doc: str) -> Iterator[str]:
    """A Google-style docstring as Markdown: sections of names become lists."""
    section, in_code = "", False
    for line in LITERAL_BLOCK.sub(fenced, doc).splitlines():
        head = SECTION.match(line)
        in_code ^= line.startswith("```")
        if in_code or line == "```":
            yield line
        elif head:
            section = head[1]
            yield from ("", f"**{head[0].partition(':')[0]}:** {inline(head[2])}".rstrip(), "")
        elif section in LISTS and re.match(r" {4}\S", line):
            yield f"- {inline(line)}"
        elif section in LISTS and line.startswith("     "):
            yield f"  {inline(line)}"
        else:
            section = section if not line or line.startswith(" ") else ""
            yield inline(line)
    yield ""


def inline(text: str) -> str:
    """Sphinx roles and double backticks as Markdown code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


# ------------------------------------------------------------------ command line


def command_page() -> str:
    """The page of the programs' ``--help``, below the usage."""
    lines = ["# Command line", "", "Written from `--help` by `python scripts/reference_pages.py`."]
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


# ------------------------------------------------------------------ files


def settings_page() -> str:
    """The settings of all programs, from their rows."""
    programs = "Of Megatron's programs, transformers' `enable` and the planner."
    return f"# Settings\n\n{programs}\n\n{table()}\n"


PAGES = {"api.md": api_page, "command-line.md": command_page, "settings.md": settings_page}


def main(argv: list[str] | None = None) -> int:
    """Write what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--signatures", action="store_true", help=f"write {SIGNATURES.name} alone")
    if parser.parse_args(argv).signatures:
        texts = {SIGNATURES: signatures()}
    else:
        texts = {GENERATED / name: page() for name, page in PAGES.items()}
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
