"""The rules of the house, read off the syntax tree.

A rule is a function from one source file to `line: message` strings; no module is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("ds_usp", "megatron_patches", "examples_deepspeed")

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60  # without the docstring

# Which parts of ds_usp a part may import. `__init__` gathers the public names from all of them.
_BASE = {"errors", "warn_once", "_version"}
_FLOOR_1 = _BASE | {"geometry", "strided_copy", "triton_launch"}
_FLOOR_2 = _FLOOR_1 | {"planner", "kernels", "comm", "config", "memory"}
FLOORS = {
    "_version": set(),
    "errors": set(),
    "warn_once": set(),
    "strided_copy": set(),
    "triton_launch": set(),
    "geometry": _BASE | {"geometry"},
    "config": _FLOOR_1,
    "planner": _FLOOR_1 | {"planner"},
    "kernels": _FLOOR_1 | {"kernels"},
    "comm": _FLOOR_1 | {"comm"},
    "memory": _BASE | {"memory"},
    "attention": _FLOOR_2 | {"attention"},
    "training": _FLOOR_2 | {"training"},
    "profiling": _FLOOR_2 | {"attention", "profiling"},
    "cli": _FLOOR_2 | {"attention", "cli", ""},  # "": ds_usp itself, as its users import it
    "__main__": _BASE | {"cli", "planner"},
}
STDLIB_ONLY = {"_version", "errors", "warn_once", "geometry", "config"}
NO_GROUPS = {"kernels", "memory"}
OPTIONAL = {"deepspeed", "megatron", "transformer_engine", "flash_attn", "flash_attn_interface"}
PUBLIC_MODULES = {
    "ds_usp",
    "ds_usp.errors",
    "ds_usp.memory",
    "ds_usp.planner",
    "ds_usp.training",
}
ORACLES = ("tests/oracle.py", "ds_usp/cli/oracle.py")
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict"}
CONSTANT_TYPES = {"Final", "Mapping", "Sequence", "tuple"}


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is dotted, `level` says whether it runs when the module loads."""

    line: int
    target: str
    at_load: bool
    for_types: bool


@dataclass(frozen=True)
class Source:
    """A file: its path from the repository's root, and its text."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def part(self) -> str:
        """The part of ds_usp that owns the file, "" elsewhere: ds_usp/comm/channel.py -> comm"""
        if self.path.parts[0] != "ds_usp":
            return ""
        return self.path.parts[1].removesuffix(".py")

    @property
    def in_product(self) -> bool:
        return self.path.parts[0] in PRODUCT

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, at_load=True, for_types=False))

    def _imports(self, node: ast.AST, at_load: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(child.lineno, alias.name, at_load, for_types)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    target = f"{self._origin(child)}.{alias.name}"
                    yield Import(child.lineno, target, at_load, for_types)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from self._imports(child, False, for_types)
            else:
                typing_block = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from self._imports(child, at_load, for_types or typing_block)

    def _origin(self, node: ast.ImportFrom) -> str:
        """The absolute module of `from X import`, relative ones resolved."""
        if not node.level:
            return node.module or ""
        package = self.path.parts[: len(self.path.parts) - node.level]
        return ".".join([*package, *([node.module] if node.module else [])])


def within(target: str, package: str) -> bool:
    """Whether a dotted name is the package or something in it."""
    return target == package or target.startswith(package + ".")


def nodes(source: Source, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(source.tree) if isinstance(node, kinds))


# ------------------------------------------------------------------ the rules


def floors(source: Source) -> Iterator[str]:
    """A part of ds_usp imports lower floors only, and floor 1's parts never each other."""
    if not source.part or source.part == "__init__":
        return
    if source.part not in FLOORS:
        yield f"1: ds_usp/{source.part} stands on no floor; add it to FLOORS"
        return
    for item in source.imports:
        if within(item.target, "ds_usp"):
            if source.path.name == "__main__.py" and not item.at_load:
                continue  # a program stands on top of its part: what one command needs, it fetches
            part = item.target.split(".")[1] if "." in item.target else ""
            if part not in FLOORS[source.part]:
                yield f"{item.line}: {source.part} may not import {item.target}"
        elif any(within(item.target, host) for host in PRODUCT):
            yield f"{item.line}: ds_usp may not import {item.target}"


def external_imports(source: Source) -> Iterator[str]:
    """Geometry and the like: stdlib only. Planner: no torch. Kernels, memory: no process groups."""
    for item in source.imports:
        root = item.target.split(".")[0]
        if item.for_types or root == "ds_usp":
            continue
        if source.part in STDLIB_ONLY and root not in sys.stdlib_module_names:
            yield f"{item.line}: {source.part} imports only the standard library, not {root}"
        elif source.part == "planner" and root in {"torch", *OPTIONAL}:
            yield f"{item.line}: the planner does without {root}"
        elif source.part in NO_GROUPS and within(item.target, "torch.distributed"):
            yield f"{item.line}: {source.part} knows no process groups"
    if source.part in NO_GROUPS:
        for node in nodes(source, ast.Attribute):
            if ast.unparse(node) == "torch.distributed":
                yield f"{node.lineno}: {source.part} knows no process groups"


def optional_libraries(source: Source) -> Iterator[str]:
    """ds_usp imports without DeepSpeed, Megatron and the flash libraries."""
    for item in source.imports:
        root = item.target.split(".")[0]
        if source.part and item.at_load and not item.for_types and root in OPTIONAL:
            yield f"{item.line}: import {root} inside the function that needs it"


def public_names(source: Source) -> Iterator[str]:
    """megatron_patches and the examples use ds_usp's public names only."""
    if not source.in_product or source.part:
        return
    for item in source.imports:
        module, _, name = item.target.rpartition(".")
        if not within(item.target, "ds_usp") or item.target in PUBLIC_MODULES:
            continue
        if module not in PUBLIC_MODULES or name not in exported(module):
            yield f"{item.line}: {item.target} is not public"
    for node in nodes(source, ast.Attribute):
        base = ast.unparse(node.value)
        dotted = f"{base}.{node.attr}"
        if base not in PUBLIC_MODULES or dotted in PUBLIC_MODULES:
            continue
        if node.attr not in exported(base):
            yield f"{node.lineno}: {dotted} is not public"


def exported(module: str) -> set[str]:
    """What a public module's `__all__` says, or else the names that it binds at its top."""
    base = ROOT / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            if ast.unparse(node.targets[0]) == "__all__":
                return set(ast.literal_eval(node.value))
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def no_global(source: Source) -> Iterator[str]:
    """No state hides in modules."""
    if source.in_product:
        yield from (f"{node.lineno}: global" for node in nodes(source, ast.Global))


def no_assert(source: Source) -> Iterator[str]:
    """Bad input raises with -O too."""
    if source.in_product:
        yield from (f"{node.lineno}: assert" for node in nodes(source, ast.Assert))


def environment(source: Source) -> Iterator[str]:
    """One reader of the environment in ds_usp; in the trainer one without torch, one with it; and
    one for the checkout of a host."""
    readers = ("environment.py", "launch.py")
    of_trainer = source.path.parts[0] == "examples_deepspeed" and source.path.name in readers
    others = map(PurePosixPath, ("ds_usp/config.py", "megatron_patches/__main__.py"))
    if not source.in_product or of_trainer or source.path in others:
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in nodes(source, ast.Attribute):
        if node.attr in names and isinstance(node.value, ast.Name):
            yield f"{node.lineno}: {ast.unparse(node)}"
    for item in source.imports:
        if within(item.target, "os") and item.target.rpartition(".")[2] in names:
            yield f"{item.line}: {item.target}"


def no_print(source: Source) -> Iterator[str]:
    """The library is silent; only a `__main__` speaks."""
    if not source.part or source.path.name == "__main__.py":
        return
    mains = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in nodes(source, ast.If)
        if ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    for node in nodes(source, ast.Call):
        called = isinstance(node.func, ast.Name) and node.func.id == "print"
        if called and not any(node.lineno in lines for lines in mains):
            yield f"{node.lineno}: print"


def sizes(source: Source) -> Iterator[str]:
    """Modules and functions that fit into a head."""
    count = source.text.count("\n")
    if count > MAX_MODULE_LINES:
        yield f"{count}: more than {MAX_MODULE_LINES} lines"
    for node in nodes(source, ast.FunctionDef, ast.AsyncFunctionDef):
        length = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            length -= node.body[0].end_lineno - node.body[0].lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def no_mutable_globals(source: Source) -> Iterator[str]:
    """Tables of modules are tuples or mapping proxies, or constants that are typed as such."""
    if not source.in_product:
        return
    for node in at_load(source.tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not is_mutable(node.value):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        name = ast.unparse(targets[0])
        types = {n.id for n in ast.walk(getattr(node, "annotation", node)) if hasattr(n, "id")}
        constant = isinstance(node, ast.AnnAssign) and name.isupper() and types & CONSTANT_TYPES
        if name != "__all__" and not constant:
            yield f"{node.lineno}: {name} is mutable"


def at_load(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module that run when it loads, outside classes and functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from at_load(child)


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, kinds)


def ascii_only(source: Source) -> Iterator[str]:
    """Sources are ASCII."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            yield f"{number}: not ASCII"


def independent_oracle(source: Source) -> Iterator[str]:
    """The oracles share no code with what they judge."""
    if source.path.as_posix() in ORACLES:
        for item in source.imports:
            if any(within(item.target, package) for package in PRODUCT):
                yield f"{item.line}: {item.target}"


def autograd_functions(sources: list[Source]) -> list[str]:
    return [
        node.name
        for source in sources
        if source.part
        for node in nodes(source, ast.ClassDef)
        if any(ast.unparse(base).rpartition(".")[2] == "Function" for base in node.bases)
    ]


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    floors,
    external_imports,
    optional_libraries,
    public_names,
    no_global,
    no_assert,
    environment,
    no_print,
    sizes,
    no_mutable_globals,
    ascii_only,
    independent_oracle,
)


def project() -> list[Source]:
    files = [ROOT / "setup.py"]
    for folder in (*PRODUCT, "tests", "scripts"):
        files += sorted((ROOT / folder).rglob("*.py"))
    return [
        Source(PurePosixPath(f.relative_to(ROOT).as_posix()), f.read_text(encoding="utf-8"))
        for f in files
    ]
