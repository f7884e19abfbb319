"""What others may lean on: names, signatures, an import without side effects, the site of them."""

from __future__ import annotations

import importlib
import inspect
import re
from difflib import ndiff

import pytest
import reference_pages
from programs import python

import ds_usp
import megatron_patches
from ds_usp import TokenLayout, errors

ROOT = reference_pages.ROOT

NAMES = set(ds_usp.__all__)
# Entry points with a parameter that is a token order by default: its name -> the default. What a
# default order trains: tests/distributed/test_doors.py, and where a row says.
CALLER, LOADER = TokenLayout.CALLERS_KIND, TokenLayout.LOADERS_KIND
ORDERS = {
    "ds_usp.USPAttention": None,  # CALLER, compared with what a loader gave
    "ds_usp.USPConfig": LOADER,
    "ds_usp.training.SequenceParallelDataLoader": CALLER,
    # tests/compat/test_flash_attention_forward.py
    "ds_usp.compat.flash_attention_forward.flash_attention_forward": CALLER,
    "ds_usp.compat.flash_attention_forward.patch_flash_attention": CALLER,
    "apply('deepspeed')": None,
    # megatron-core's own batch slicing; tests/megatron/test_patched_megatron_core.py
    "apply('megatron_core')": "context_parallel",
    # the patches shard the batches; tests/megatron_deepspeed/test_mds_parity.py
    "apply('megatron_deepspeed')": LOADER,
    # Megatron-LM's own batch slicing; tests/megatron_lm
    "apply('megatron_lm')": "context_parallel",
}


def test_public_names_are_documented():
    """Not by what dataclass writes where there is no docstring."""
    pytest.importorskip("diffusers")  # which needs Python 3.11
    for module in reference_pages.MODULES:
        for name, member in reference_pages.members(module):
            if callable(member):
                doc = inspect.getdoc(member) or ""
                assert doc and not doc.startswith(f"{name}("), f"{module}.{name}"


def test_names_arguments_defaults_and_flags_are_frozen():
    pytest.importorskip("diffusers")  # which needs Python 3.11
    frozen = reference_pages.SIGNATURES.read_text(encoding="utf-8").splitlines()
    lines = reference_pages.signatures().splitlines()
    changed = [line for line in ndiff(frozen, lines) if line.startswith(("-", "+"))]
    assert lines == frozen, (
        "what users call has changed. New names: run `python scripts/reference_pages.py "
        f"--signatures`, which writes {reference_pages.SIGNATURES.relative_to(ROOT)}, and add a "
        "line to CHANGELOG.md. Removed or renamed ones, and other defaults: the old name stays "
        'with a warning for a minor version (CONTRIBUTING, "Versions and releases"); then the '
        "same\n" + "\n".join(changed)
    )


def test_a_frozen_line_has_what_a_caller_may_write():
    class Door:
        def __init__(self, mesh: object, *, layout: str = "zigzag") -> None: ...
        @classmethod
        def build(cls, grid: int) -> Door: ...
        @property
        def degree(self) -> int: ...
        def _hidden(self) -> None: ...

    lines = ["a.Door(mesh, *, layout='zigzag')", "a.Door.build(grid)", "a.Door.degree"]
    assert list(reference_pages.frozen("a.Door", Door)) == lines
    assert list(reference_pages.frozen("a.MeshError", ds_usp.MeshError)) == [
        "a.MeshError: USPError"
    ]
    assert list(reference_pages.frozen("a.N", -100)) == ["a.N = -100"]
    assert reference_pages.FLAG.findall("  -h, --help  shows\n  --out F, see --in\n") == [
        "--help",
        "--out",
    ]


def test_every_error_is_public_and_a_value_error():
    own = {n: e for n, e in vars(errors).items() if getattr(e, "__module__", "") == errors.__name__}
    kinds = {n: e for n, e in own.items() if isinstance(e, type)}
    assert set(kinds) == {name for name in NAMES if name.endswith("Error")}
    assert ds_usp.USPError.__bases__ == (ValueError,)
    assert all(issubclass(kind, ds_usp.USPError) for kind in kinds.values())


def default_of(entry: object, name: str) -> object:
    """The default of a parameter; ``Parameter.empty`` where there is none."""
    if not callable(entry) or (isinstance(entry, type) and issubclass(entry, Exception)):
        return inspect.Parameter.empty
    known = inspect.signature(entry).parameters
    return known[name].default if name in known else inspect.Parameter.empty


def test_one_rule_gives_the_default_order():
    orders = {}
    doors = "ds_usp", "ds_usp.training", "ds_usp.memory", "ds_usp.profiling.exposed"
    for module in (*doors, "ds_usp.compat.flash_attention_forward"):
        for name, entry in reference_pages.members(module):
            default = default_of(entry, "layout")
            if default is not inspect.Parameter.empty:
                orders[f"{module}.{name}"] = default
    for framework in megatron_patches.frameworks():
        settings = importlib.import_module(f"megatron_patches.{framework}").Settings
        orders[f"apply({framework!r})"] = settings().layout
    assert orders == ORDERS
    assert (CALLER, LOADER) == ("contiguous", "zigzag")


# Printed by a fresh interpreter: what the import of ds_usp left behind, beyond torch's own.
PROBE = """
import os, random, sys, threading
import torch
import torch.distributed
def state():
    return (dict(os.environ), random.getstate(), torch.initial_seed(), torch.get_default_dtype(),
            torch.get_num_threads(), torch.get_rng_state().tolist(), threading.active_count(),
            torch.distributed.is_initialized(), torch.cuda.is_initialized(), list(sys.path))
before = state()
import ds_usp
print([i for i, (a, b) in enumerate(zip(before, state())) if a != b])
heads = {name.split(".")[0] for name in sys.modules}
print(sorted(heads & {"deepspeed", "megatron", "flash_attn", "matplotlib", "einops"}))
"""


def test_import_has_no_side_effects_and_needs_no_framework():
    done = python("-W", "error::DeprecationWarning:ds_usp", "-c", PROBE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_names_that_need_torch_are_imported_on_access():
    """And submodules without an import of their own."""
    modules = ["memory", "planner", "profiling", "training"]
    probe = (
        "import sys, ds_usp; print('torch' in sys.modules, ds_usp.Tuning(), dir(ds_usp)); "
        f"print([getattr(ds_usp, name).__name__ for name in {modules} if name in dir(ds_usp)]); "
        "ds_usp.training.chunked_weighted_loss"
    )
    done = python("-c", probe)
    assert done.returncode == 0, done.stderr
    names, submodules = done.stdout.splitlines()
    assert names.startswith("False Tuning(") and all(name in names for name in NAMES)
    assert submodules == str([f"ds_usp.{name}" for name in modules])
    with pytest.raises(AttributeError, match="no attribute 'uspattention'"):
        ds_usp.uspattention  # noqa: B018


# ------------------------------------------------------------------ the site


def test_the_site_builds_and_has_every_name_and_command(tmp_path):
    """Strict: every link, every anchor, every page in the navigation."""
    pytest.importorskip("diffusers")  # as above
    build_site = pytest.importorskip("build_site", exc_type=ModuleNotFoundError)
    pages, html = tmp_path / "pages", tmp_path / "html"
    build_site.write_pages(pages)
    build_site.build_site(pages, html)
    for module, names in build_site.public_names().items():
        page = (html / "reference" / "api" / f"{module}.html").read_text(encoding="utf-8")
        assert names and [name for name in names if f'id="{module}.{name}"' not in page] == []
    page = (html / "reference" / "command-line.html").read_text(encoding="utf-8")
    headings = re.findall(r'<h2 id="[^"]+">([^<]+)', page)
    assert headings == [command.strip() for command in reference_pages.COMMANDS]
    # Nothing is fetched from elsewhere.
    home = (html / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|<link[^>]+href)=["']?(?:https?:)?//""", home)


WRONG_PAGES = {
    "a link": ("[a](no.md)", "'no.md', but the target is not found"),
    "an anchor": ("[a](#no)", "there is no such anchor"),
    "a page": ("", "not included in the"),
}


@pytest.mark.parametrize("wrong", WRONG_PAGES)
def test_a_broken_link_and_a_page_without_a_place_fail_the_build(wrong, tmp_path, caplog):
    build_site = pytest.importorskip("build_site", exc_type=ModuleNotFoundError)
    from mkdocs.exceptions import Abort

    text, message = WRONG_PAGES[wrong]
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "README.md").write_text(f"# One\n\n{text}\n", encoding="utf-8")
    (pages / "other.md").write_text("# Other\n", encoding="utf-8")
    names = ["README.md"] if wrong == "a page" else ["README.md", "other.md"]
    with pytest.raises(Abort):
        build_site.build_site(pages, tmp_path / "html", nav=names, extra_css=[])
    assert message in caplog.text
