"""The project keeps the rules of the house, and each rule catches a violation shown to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest
from architecture import (
    FLOORS,
    MAX_FUNCTION_LINES,
    MAX_MODULE_LINES,
    RULES,
    Source,
    ascii_only,
    autograd_functions,
    environment,
    external_imports,
    floors,
    independent_oracle,
    no_assert,
    no_global,
    no_mutable_globals,
    no_print,
    optional_libraries,
    project,
    public_names,
    sizes,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    found = [f"{source.path}:{message}" for source in project() for message in rule(source)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


def test_every_part_is_looked_at() -> None:
    looked_at = {str(source.path) for source in project()}
    assert {"setup.py", "tests/harness.py"} < looked_at
    for part in FLOORS:
        assert any(path.startswith(f"ds_usp/{part}") for path in looked_at), part


def test_ds_usp_has_exactly_these_autograd_functions() -> None:
    attention = {"SeqAllToAll", "UnifiedAttention"}
    memory = {"AttachLeaf", "Replay"}
    loss = {"TokenLosses", "WeightedLoss"}
    rotary = {"Rotation"}
    assert set(autograd_functions(project())) == attention | memory | loss | rotary


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
CAUGHT = [
    (floors, "ds_usp/geometry/a.py", "from ds_usp.comm import mesh"),
    (floors, "ds_usp/geometry/a.py", "from ds_usp.config import USPConfig"),
    (floors, "ds_usp/kernels/a.py", "def f():\n    import ds_usp.comm.mesh"),
    (floors, "ds_usp/planner/a.py", "from ..kernels.api import KernelCaps"),
    (floors, "ds_usp/comm/a.py", "from ds_usp import TokenLayout"),
    (floors, "ds_usp/memory/a.py", "from ds_usp.comm.mesh import SequenceMesh"),
    (floors, "ds_usp/attention/a.py", "from ds_usp.training import loss"),
    (floors, "ds_usp/training/a.py", "from megatron_patches import megatron_core"),
    (floors, "ds_usp/helpers/a.py", ""),
    (floors, "ds_usp/planner/__main__.py", "from ds_usp.profiling import profile"),
    (floors, "ds_usp/planner/a.py", "def f():\n    from ds_usp.profiling import profile"),
    (floors, "ds_usp/profiling/a.py", "from ds_usp.training import loss"),
    (external_imports, "ds_usp/geometry/a.py", "import torch"),
    (external_imports, "ds_usp/geometry/a.py", "def f():\n    import numpy"),
    (external_imports, "ds_usp/errors.py", "import torch"),
    (external_imports, "ds_usp/planner/a.py", "from torch import nn"),
    (external_imports, "ds_usp/kernels/a.py", "import torch.distributed as dist"),
    (external_imports, "ds_usp/kernels/a.py", "from torch import distributed"),
    (external_imports, "ds_usp/memory/a.py", "import torch.distributed as dist"),
    (external_imports, "ds_usp/kernels/a.py", "import torch\ntorch.distributed.barrier()"),
    (optional_libraries, "ds_usp/attention/a.py", "import deepspeed"),
    (
        optional_libraries,
        "ds_usp/training/a.py",
        "try:\n    from megatron import core\nexcept E: 0",
    ),
    (optional_libraries, "ds_usp/kernels/a.py", "class C:\n    import flash_attn"),
    (public_names, "megatron_patches/a.py", "from ds_usp.comm.mesh import SequenceMesh"),
    (public_names, "megatron_patches/a.py", "from ds_usp import comm"),
    (public_names, "examples_deepspeed/x/a.py", "import ds_usp.geometry.layout"),
    (public_names, "examples_deepspeed/x/a.py", "import ds_usp\nds_usp.comm.mesh.SequenceMesh"),
    (public_names, "examples_deepspeed/x/a.py", "from ds_usp.errors import Missing"),
    (no_global, "ds_usp/comm/a.py", "def f():\n    global x"),
    (no_assert, "megatron_patches/a.py", "assert True"),
    (environment, "ds_usp/comm/a.py", "import os\nos.environ['X']"),
    (environment, "ds_usp/comm/a.py", "import os as o\no.getenv('X')"),
    (environment, "megatron_patches/a.py", "from os import environ"),
    (environment, "examples_deepspeed/x/data.py", "import os\nos.environ.get('X')"),
    (no_print, "ds_usp/comm/a.py", "print(1)"),
    (no_print, "ds_usp/comm/a.py", "if __name__ == '__main__':\n    f()\nprint(1)"),
    (sizes, "tests/a.py", "\n" * (MAX_MODULE_LINES + 1)),
    (sizes, "ds_usp/comm/a.py", LONG_FUNCTION),
    (no_mutable_globals, "ds_usp/comm/a.py", "cache = {}"),
    (no_mutable_globals, "ds_usp/comm/a.py", "NAMES = ['a']"),
    (no_mutable_globals, "ds_usp/comm/a.py", "NAMES: list[str] = ['a']"),
    (no_mutable_globals, "ds_usp/comm/a.py", "names: Sequence[str] = ['a']"),
    (no_mutable_globals, "ds_usp/comm/a.py", "if x:\n    seen = set()"),
    (no_mutable_globals, "ds_usp/comm/a.py", "table = collections.defaultdict(list)"),
    (ascii_only, "tests/a.py", "x = '\u00d7'"),
    (independent_oracle, "tests/oracle.py", "def f():\n    from ds_usp.geometry import tiles"),
    (independent_oracle, "ds_usp/cli/oracle.py", "from ds_usp.errors import USPError"),
]
ALLOWED = [
    (floors, "ds_usp/attention/a.py", "from ds_usp.comm.mesh import SequenceMesh\nimport torch"),
    (floors, "ds_usp/kernels/a.py", "from ..geometry.tiles import Tile\nfrom .api import Caps"),
    (floors, "ds_usp/planner/__main__.py", "def f():\n    from ds_usp.profiling import profile"),
    (floors, "ds_usp/__init__.py", "from ds_usp.attention.functional import usp_attention"),
    (external_imports, "ds_usp/geometry/a.py", "import math\nfrom ds_usp.errors import USPError"),
    (external_imports, "ds_usp/geometry/a.py", "if TYPE_CHECKING:\n    import torch"),
    (external_imports, "ds_usp/kernels/a.py", "import torch"),
    (optional_libraries, "ds_usp/training/a.py", "def f():\n    import deepspeed"),
    (optional_libraries, "examples_deepspeed/x/a.py", "import deepspeed"),
    (public_names, "megatron_patches/a.py", "import ds_usp\nds_usp.errors.MeshError"),
    (public_names, "megatron_patches/a.py", "from ds_usp.errors import MeshError"),
    (no_assert, "tests/a.py", "assert True"),
    (environment, "ds_usp/config.py", "import os\nos.environ['X']"),
    (environment, "examples_deepspeed/x/y/launch.py", "import os\nos.environ['X']"),
    (no_print, "ds_usp/planner/__main__.py", "print(1)"),
    (no_print, "ds_usp/comm/a.py", "if __name__ == '__main__':\n    print(1)"),
    (sizes, "ds_usp/a.py", LONG_FUNCTION.replace("x = 1", '"""\n    doc\n    """', 1)),
    (no_mutable_globals, "ds_usp/a.py", "__all__ = ['a']\nKINDS: Final = {'a': 1}\nT = (1,)"),
    (no_mutable_globals, "ds_usp/a.py", "def f():\n    x = []\nclass C:\n    def g(self): y = {}"),
]


def found_in(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> list[str]:
    return list(rule(Source(PurePosixPath(path), text)))


@pytest.mark.parametrize(("rule", "path", "text"), CAUGHT)
def test_a_violation_is_caught(
    rule: Callable[[Source], Iterator[str]], path: str, text: str
) -> None:
    assert len(found_in(rule, path, text)) == 1


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_what_is_allowed_passes(
    rule: Callable[[Source], Iterator[str]], path: str, text: str
) -> None:
    assert found_in(rule, path, text) == []


def test_every_rule_is_proved() -> None:
    assert {rule for rule, _, _ in CAUGHT} == set(RULES)
    two = Source(
        PurePosixPath("ds_usp/a.py"), "class A(Function): 0\nclass B(autograd.Function): 0"
    )
    assert autograd_functions([two]) == ["A", "B"]
