"""What others may lean on: names, signatures, an import without side effects, the site of them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import subprocess
from difflib import ndiff

import pytest
import reference_pages
from programs import python

import ds_usp
import megatron_patches
from ds_usp import TokenLayout, errors

ROOT = reference_pages.ROOT

NAMES = set(ds_usp.__all__)
# The token order of a patched framework by default: of the caller's shards, or of the patches' own.
ORDERS = {
    "deepspeed": None,
    "megatron_core": "context_parallel",
    "megatron_deepspeed": TokenLayout.LOADERS_KIND,
    "megatron_lm": "context_parallel",
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


def test_every_error_is_public_and_a_value_error():
    own = {n: e for n, e in vars(errors).items() if getattr(e, "__module__", "") == errors.__name__}
    kinds = {n: e for n, e in own.items() if isinstance(e, type)}
    assert set(kinds) == {name for name in NAMES if name.endswith("Error")}
    assert ds_usp.USPError.__bases__ == (ValueError,)
    assert all(issubclass(kind, ds_usp.USPError) for kind in kinds.values())


def test_a_framework_has_one_default_order():
    """Those of functions are in the frozen lines."""
    modules = {name: f"megatron_patches.{name}" for name in megatron_patches.frameworks()}
    orders = {k: importlib.import_module(v).Settings().layout for k, v in modules.items()}
    assert orders == ORDERS
    assert (TokenLayout.CALLERS_KIND, TokenLayout.LOADERS_KIND) == ("contiguous", "zigzag")


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
modules = ["memory", "planner", "training"]
print([getattr(ds_usp, name).__name__ for name in modules if name in dir(ds_usp)])
print(ds_usp.training.chunked_weighted_loss.__name__, ds_usp.Tuning())
"""


def test_import_has_no_side_effects_and_needs_no_framework():
    """And submodules are there without an import of their own."""
    done = python("-W", "error::DeprecationWarning:ds_usp", "-c", PROBE)
    assert done.returncode == 0, done.stderr
    submodules = [f"ds_usp.{name}" for name in ("memory", "planner", "training")]
    assert done.stdout.splitlines()[:3] == ["[]", "[]", str(submodules)]
    assert done.stdout.splitlines()[3].startswith("chunked_weighted_loss Tuning(")


def test_names_that_need_torch_are_imported_on_access():
    probe = "import sys, ds_usp; print('torch' in sys.modules, dir(ds_usp))"
    done = python("-c", probe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False ") and all(name in done.stdout for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'uspattention'"):
        ds_usp.uspattention  # noqa: B018


# ------------------------------------------------------------------ the site


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """Strict: every link, every anchor, every page in the navigation."""
    pytest.importorskip("diffusers")  # as above
    build_site = pytest.importorskip("build_site", exc_type=ModuleNotFoundError)
    folder = tmp_path_factory.mktemp("site")
    build_site.write_pages(folder / "pages")
    build_site.build_site(folder / "pages", folder / "html")
    return folder / "html"


def test_the_site_has_every_name_and_command(html):
    import build_site

    for module, names in build_site.public_names().items():
        page = (html / "reference" / "api" / f"{module}.html").read_text(encoding="utf-8")
        assert names and [name for name in names if f'id="{module}.{name}"' not in page] == []
    page = (html / "reference" / "command-line.html").read_text(encoding="utf-8")
    headings = re.findall(r'<h2 id="[^"]+">([^<]+)', page)
    assert headings == [command.strip() for command in reference_pages.COMMANDS]
    # Nothing is fetched from elsewhere; the version, code and first heading of README are there.
    home = (html / "index.html").read_text(encoding="utf-8")
    shown = f"ds_usp {ds_usp.__version__.partition('+')[0]}", "highlight", '<h1 id="ds_usp"'
    assert [text for text in shown if text not in home] == []
    assert not re.search(r"""(?:src|<link[^>]+href)=["']?(?:https?:)?//""", home)


# What users type, and the page that answers.
SEARCHES = {
    "out of memory": "troubleshooting.html#out-of-memory",
    "loss differs": "troubleshooting.html#the-loss-differs-from-that-of-one-gpu",
    "hang": "troubleshooting.html#ranks-hang",
    "DPO": "usage/transformers.html#which-call-for-which-program",
    "A100": "usage/python.html#kernels",
    "install": "index.html#install",
    "attach": "reference/api/ds_usp.integrations.transformers.html"
    "#ds_usp.integrations.transformers.attach",
}


def test_a_search_finds_the_page_that_answers(html):
    """By the site's own script; without the weights of pages, others would be first."""
    if not shutil.which("node"):
        pytest.skip("needs node, which runs the script that searches")
    script = ROOT / "tests" / "data" / "site_search.js"
    command = ["node", str(script), str(html), *SEARCHES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found, unweighed = json.loads(done.stdout)
    assert dict(zip(SEARCHES, found, strict=True)) == SEARCHES
    assert sum(a != b for a, b in zip(found, unweighed, strict=True)) >= 3, unweighed


def test_a_broken_link_fails_the_build(tmp_path, caplog):
    build_site = pytest.importorskip("build_site", exc_type=ModuleNotFoundError)
    from mkdocs.exceptions import Abort

    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "README.md").write_text("# One\n\n[a](no.md) [b](#no)\n", encoding="utf-8")
    with pytest.raises(Abort):
        build_site.build_site(pages, tmp_path / "html", nav=["README.md"], extra_css=[])
    assert "no.md" in caplog.text and "#no" in caplog.text
