"""Which functions and lines of a checkout a run executes, and edited functions of a checkout."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MARK = "edited:"


@functools.cache
def functions(file: str) -> dict[int, str]:
    """Qualified names of a file's functions, by the first line of their code objects."""
    return {min(lines): name for name, lines in _function_lines(Path(file))}


def _function_lines(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                lines = (child.lineno, *(line.lineno for line in child.decorator_list))
                yield f"{prefix}{child.name}", lines
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), "")


class Trace:
    """The functions and lines of a checkout that run between enter and exit.

    What a function defines inside of itself counts as lines of it.
    """

    def __init__(self, checkout: str) -> None:
        self._checkout = f"{checkout}/"
        self._names: dict[CodeType, str] = {}
        self.lines: dict[str, set[int]] = {}

    def __enter__(self) -> Trace:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._checkout):
            return None
        if code not in self._names:
            self._names[code] = self._name(code)
        lines = self.lines.setdefault(self._names[code], set())

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    def _name(self, code: CodeType) -> str:
        """``package.module:Class.function``; the innermost function that has a name."""
        file = code.co_filename
        module = file.removeprefix(self._checkout).removesuffix(".py").replace("/", ".")
        known = functions(file)
        first = max((line for line in known if line <= code.co_firstlineno), default=0)
        return f"{module.removesuffix('.__init__')}:{known.get(first, '<module>')}"


def edit(name: str, checkout: Path, folder: Path) -> Path:
    """Change a loaded function as an edit of the checkout would.

    The edited file is written to ``folder``, for ``inspect.getsource``. Functions of the script
    change when that file runs instead.

    Args:
        name: ``package.module:Class.function``; :data:`MARK` and this name are raised at its head.

    Returns:
        The edited file.
    """
    module, _, path = name.partition(":")
    file = checkout / f"{module.replace('.', '/')}.py"
    if not file.exists():
        file = file.with_suffix("") / "__init__.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node: Any = tree
    for temporary in path.split("."):
        node = next(x for x in ast.walk(node) if getattr(x, "name", None) == temporary)
    node.body[:0] = ast.parse(f"raise RuntimeError('{MARK} {name}')").body
    edited = folder / file.name
    # All ranks write and read the same file: replaced as one, no rank reads half of it.
    temporary = edited.with_suffix(f".{os.getpid()}")
    temporary.write_text(ast.unparse(tree), encoding="utf-8")
    os.replace(temporary, edited)
    if module in sys.modules:
        sys.modules[module].__file__ = str(edited)
        target = functools.reduce(getattr, path.split("."), sys.modules[module])
        function = inspect.unwrap(target.fget if isinstance(target, property) else target)
        function = getattr(function, "__func__", function)
        function.__code__ = _code(edited, path)
    return edited


def _code(file: Path, name: str) -> CodeType:
    known = functions(str(file))

    def walk(code: CodeType) -> Iterator[CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield constant
                yield from walk(constant)

    module_code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    return next(
        code
        for code in walk(module_code)
        if known.get(code.co_firstlineno) == name and code.co_name == name.rpartition(".")[2]
    )
