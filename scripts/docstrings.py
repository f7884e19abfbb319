"""Counts docstrings that break a rule of CONTRIBUTING, and names them; exit code 1 if any do.

    python scripts/docstrings.py

A first line begins with no preposition, "what" or the like: it is a sentence, or names what is
returned. Each field of a dataclass or NamedTuple has a word: its class names it in the docstring,
or a comment stands beside it. Each handler of a pass of attention has a line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ds_usp", "megatron_patches")
NO_BEGINNING = re.compile(
    "(about|above|across|after|against|along|among|around|as|at|before|behind|below|besides?"
    "|between|beyond|by|during|for|from|if|in|inside|into|of|on|outside|over|per|since|through|to"
    r"|under|until|upon|what|when|where|which|while|whose|with|within|without)\b",
    re.IGNORECASE,
)
WITH_FIELDS = {"dataclass", "NamedTuple"}


def broken_rules(path: str, text: str) -> Iterator[str]:
    """Yield a line for each docstring of a file that breaks a rule."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node) or ""
            line = getattr(node, "lineno", 1)
            if first := NO_BEGINNING.match(docstring):
                yield f'{path}:{line}: begins with "{first[0]}"'
            if isinstance(node, ast.ClassDef) and docstring:
                for name, at in undescribed_fields(node, docstring, lines):
                    yield f"{path}:{at}: {node.name}.{name} has no word"
            if isinstance(node, ast.FunctionDef) and not docstring and is_handler(path, node):
                yield f"{path}:{line}: the handler {node.name} has no line"


def undescribed_fields(
    node: ast.ClassDef, docstring: str, lines: list[str]
) -> Iterator[tuple[str, int]]:
    """Yield name and line of fields that neither the docstring nor a comment names."""
    marks = {*map(ast.unparse, node.bases), *(ast.unparse(x) for x in node.decorator_list)}
    kinds = {mark.partition("(")[0].rpartition(".")[2] for mark in marks}
    if kinds.isdisjoint(WITH_FIELDS) or not re.search(r"^(Args|Attributes):", docstring, re.M):
        return
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            beside = lines[field.lineno - 2 : field.end_lineno]
            name = field.target.id
            described = re.search(rf"\b{name}\b", docstring) or any("#" in x for x in beside)
            if name[0] != "_" and not described and "ClassVar" not in ast.unparse(field.annotation):
                yield name, field.lineno


def is_handler(path: str, node: ast.FunctionDef) -> bool:
    """Return whether a function runs an instruction of attention's schedule."""
    return path.endswith("attention/passes.py") and "instr" in [x.arg for x in node.args.args]


def main() -> int:
    """Print what breaks a rule, and the count; returns the exit code."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    broken = [
        line for path in paths for line in broken_rules(path, (ROOT / path).read_text("utf-8"))
    ]
    print(*broken, f"{len(broken)} docstrings break a rule", sep="\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
