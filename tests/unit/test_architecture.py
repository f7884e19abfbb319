"""Rules that no linter knows, read off the syntax tree.

Layers and the oracle's independence are contracts of import-linter; the environment, ``assert`` and
optional libraries are rules of ruff: both in ``pyproject.toml``, run by ``scripts/lint.sh``.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import docstrings
import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("ds_usp", "megatron_patches", "examples_deepspeed")
NO_PROCESS_GROUPS = ("ds_usp/kernels/", "ds_usp/memory/")
PUBLIC_MODULES = {
    "ds_usp",
    "ds_usp.compat.flash_attention_forward",
    "ds_usp.errors",
    "ds_usp.integrations.diffusers",
    "ds_usp.integrations.transformers",
    "ds_usp.memory",
    "ds_usp.planner",
    "ds_usp.recurrence",
    "ds_usp.settings",
    "ds_usp.training",
}
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONSTANT_TYPES = {"Final", "Mapping", "Sequence", "tuple"}


class Source(NamedTuple):
    """A file of the product."""

    path: str
    text: str
    tree: ast.Module

    def of(self, *folders: str) -> bool:
        return self.path.startswith(tuple(f"{folder}/" for folder in folders))


def source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text))


@cache
def project() -> tuple[Source, ...]:
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(
        source(PurePosixPath(f.relative_to(ROOT)).as_posix(), f.read_text(encoding="utf-8"))
        for f in files
    )


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, origin + alias.name) for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def no_process_groups(file: Source) -> Iterator[str]:
    """Kernels and memory run on one rank."""
    if file.path.startswith(NO_PROCESS_GROUPS):
        for line, name in imports(file.tree):
            if within(name, "torch.distributed"):
                yield f"{line}: {name}"
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                yield f"{node.lineno}: torch.distributed"


def is_public(name: str) -> bool:
    """Whether a dotted name below ds_usp is a public module or exported by one."""
    module, _, attribute = name.rpartition(".")
    if name in PUBLIC_MODULES:
        return True
    loaded = import_module(module) if module in PUBLIC_MODULES else None
    return attribute in getattr(loaded, "__all__", dir(loaded) if loaded else ())


def public_names(file: Source) -> Iterator[str]:
    """The patches and the examples use public names of ds_usp only.

    A kernel of one's own implements the kernels' protocol: its example imports that too.
    """
    protocol = "ds_usp.kernels" if file.path.endswith("plain_torch/own_kernel.py") else None
    if file.of("megatron_patches", "examples_deepspeed"):
        for line, name in imports(file.tree):
            if protocol is not None and within(name, protocol):
                continue
            if within(name, "ds_usp") and not is_public(name):
                yield f"{line}: {name} is not public"
        for node in ast.walk(file.tree):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name.rpartition(".")[0] in PUBLIC_MODULES and not is_public(name):
                yield f"{node.lineno}: {name} is not public"


def module_statements(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is loaded, outside classes and functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from module_statements(child)


def no_mutable_globals(file: Source) -> Iterator[str]:
    """Tables of modules are tuples or mapping proxies, or constants that are annotated as such."""
    for node in module_statements(file.tree) if file.of(*PRODUCT) else ():
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        called = isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
        if not isinstance(node.value, MUTABLE) and not (
            called and called.rpartition(".")[2] in MUTABLE_CALLS
        ):
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        types = {n.id for n in ast.walk(getattr(node, "annotation", node)) if hasattr(n, "id")}
        constant = isinstance(node, ast.AnnAssign) and name.isupper() and types & CONSTANT_TYPES
        if name != "__all__" and not constant:
            yield f"{node.lineno}: {name} is mutable"


@pytest.fixture(scope="module", autouse=True)
def parsed_project() -> None:
    """Parse all files once, outside of any case's time."""
    project()


RULES = (no_process_groups, public_names, no_mutable_globals)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule):
    broken = [f"{file.path}:{message}" for file in project() for message in rule(file)]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


UNDOCUMENTED = '''"""What a module is."""
class Call(NamedTuple):
    """Holds a call.

    Args:
        size: of it.
    """

    size: int
    kind: str
    number: int  # of the call

def post_kv(self, chunk, instr): ...
'''


def test_docstrings_that_break_a_rule_are_named():
    """scripts/lint.sh counts them in all files."""
    found = list(docstrings.broken_rules("ds_usp/attention/passes.py", UNDOCUMENTED))
    assert [re.split(r"[: ]", line)[1] for line in found] == ["1", "10", "13"], found


def test_packages_keep_to_their_budget_of_lines():
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    budgets = re.findall(r"^\| \d \| `([\w/]+)/` \| ([\d,]+) \|", table, re.MULTILINE)
    assert len(budgets) == 13
    for package, budget in budgets:
        lines = sum(file.text.count("\n") for file in project() if file.of(package))
        assert lines <= int(budget.replace(",", "")), (package, lines)


HOT = [f"ds_usp/{name}" for name in ("attention", "comm", "kernels", "memory", "recurrence")]
READS = {"item", "tolist", "cpu", "synchronize", "nonzero"}
READ_AS_NUMBERS = re.compile(r"(bool|int|float)\(.*\.(any|all|max|min|sum)\(\)\)")


def host_waits(node: ast.AST, function: str = "") -> Iterator[str]:
    """Name the functions that read a tensor on the host, or wait for a GPU."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else function
        if isinstance(child, ast.Call):
            reads = isinstance(child.func, ast.Attribute) and child.func.attr in READS
            if reads or READ_AS_NUMBERS.fullmatch(ast.unparse(child)):
                yield function
        yield from host_waits(child, inside)


def test_the_design_page_has_every_place_where_the_host_waits():
    planted = source(
        "a.py", "def f(x):\n    y = x.item()\ndef g(x):\n    return bool((x > 0).any())"
    )
    assert [*host_waits(planted.tree)] == ["f", "g"]
    page = (ROOT / "docs" / "design" / "schedule.md").read_text(encoding="utf-8")
    found = {(x.path, name) for x in project() if x.of(*HOT) for name in host_waits(x.tree)}
    listed = re.findall(r"^\| `([\w/.]+): (\w+)` \|", page, re.MULTILINE)
    assert found == {(f"ds_usp/{path}", name) for path, name in listed}
