"""The site: the pages of docs, what they link to in the repository, and the reference.

    bash scripts/docs.sh          # build/site/html; strict: a broken link or anchor fails, and a
                                  # page that mkdocs.yml does not name
    bash scripts/docs.sh serve    # the same, and shows it

MkDocs reads one folder. Pages of docs link to other files of the repository, as GitHub shows both:
those are copied beside them. The reference is written from the sources.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import inspect
import json
import logging
import os
import posixpath
import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
import reference_pages
from mkdocs.commands.build import build
from mkdocs.config import load_config
from reference_pages import MODULES, ROOT

from ds_usp._version import BASE

SITE = ROOT / "build" / "site"
DOCS = PurePosixPath("docs")
# The README has the first screen: install, code, numbers. The README of docs is a list of pages.
HOME = {
    PurePosixPath("README.md"): PurePosixPath("README.md"),
    DOCS / "README.md": PurePosixPath("all-pages.md"),
}
# On a page of the API these come first, as a program meets them; errors come last.
FIRST = {
    "ds_usp": "usp_attention SequenceMesh USPAttention TokenLayout MaskSpec Scores "
    "usp_joint_attention Tuning one_line_errors Degrees CommLedger",
    "ds_usp.training": "SequenceParallelDataLoader ShardedBatch SequenceBatch shard_batch "
    "mean_loss weighted_loss loss_token_weight global_gradient_norm "
    "initialize_deepspeed prepare_deepspeed",
    "ds_usp.memory": "recompute_before keep_attention Offload in_chunks",
    "ds_usp.integrations.transformers": "enable attach replicate_batches share_batches "
    "patch_accelerate EnabledModel",
    "ds_usp.integrations.diffusers": "enable enable_vae EnabledTransformer EnabledVAE",
    "ds_usp.planner": "answer Answer search Plan SearchResult Workload load_model load_cluster",
    "megatron_patches": "apply",
}
# What a name of one page is looked for on another one.
SEE_TOO = {"ds_usp": ("ds_usp.integrations.transformers", ("enable", "attach"))}
# A page, and the headings in it whose first programs are the example of a module.
EXAMPLES = {
    "ds_usp": ("usage/python.md", ("## The mesh", "## Batches", "## Model and attention")),
    "ds_usp.integrations.transformers": ("usage/transformers.md", ("# Models of",)),
    "ds_usp.integrations.diffusers": ("usage/diffusers.md", ("## First program",)),
    "ds_usp.compat.flash_attention_forward": ("usage/flash-attention-forward.md", ("# The",)),
    "ds_usp.compat.ring_flash_attn": ("usage/ring-flash-attn.md", ("# Programs",)),
}
# A search multiplies what it finds on a page by the weight of the longest beginning of its address:
# who searches has a program that does not do what it should.
SEARCH_WEIGHTS = {
    "": 1.0,
    "index": 1.5,
    "index.html#install": 2.5,
    "troubleshooting": 4.0,
    "tutorials/": 2.0,
    "usage/": 2.0,
    "which-degrees": 2.0,
    "all-pages": 0.3,
    "benchmarks": 0.5,
    "design/": 0.1,
    "reference/api/": 0.3,
    "repository/": 0.1,
    "repository/examples_deepspeed/": 1.0,
    "repository/megatron_patches/": 1.0,
}
NAME_WEIGHT, MEMBER_WEIGHT = (
    1.0,
    0.1,
)  # on pages of the API: a public name, a method or field of one
STYLE = ROOT / "scripts" / "site.css"
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
ROLE = re.compile(r":\w+:`~?([^`]+)`")
# An argument of a docstring, or several that share a text.
TOGETHER = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)


# ------------------------------------------------------------------ pages


def copy_pages(pages: Path) -> None:
    """Write all of docs and what it links to, and so on, with links that fit there."""
    waiting = [path.relative_to(ROOT) for path in (ROOT / DOCS).rglob("*") if path.is_file()]
    seen = {PurePosixPath(path) for path in waiting}
    queue = sorted(seen)
    for source in queue:
        target = pages / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(ROOT / source, target)
            continue
        text, linked = relinked(source)
        target.write_text(text, encoding="utf-8")
        queue += sorted(linked - seen)
        seen |= linked


def place(source: PurePosixPath) -> PurePosixPath:
    """Where a file of the repository is in the site, whose home is the README of the repository."""
    if source in HOME:
        return HOME[source]
    return source.relative_to(DOCS) if DOCS in source.parents else "repository" / source


def relinked(source: PurePosixPath) -> tuple[str, set[PurePosixPath]]:
    """The text of a page with links between places in the site, and the files it links to."""
    linked = set()

    def moved(link: re.Match[str]) -> str:
        path = PurePosixPath(posixpath.normpath(source.parent / link[1]))
        if "://" in link[1] or not (ROOT / path).is_file():
            return link[1]  # MkDocs names what does not exist
        linked.add(path)
        return posixpath.relpath(place(path), place(source).parent)

    parts = FENCED.split((ROOT / source).read_text(encoding="utf-8"))
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts), linked


def api_page(module: str) -> str:
    """The public names of a module; mkdocstrings writes them from their docstrings."""
    topic = MODULES[module]
    names = in_order_of_use(module)
    other, seen_too = SEE_TOO.get(module, ("", ()))
    rows = [(module, name) for name in names]
    rows[3:3] = [(other, name) for name in seen_too]
    lines = [f"# {module}", "", f"{topic[0].upper()}{topic[1:]}.", "", "| name | |", "|---|---|"]
    for home, name in rows:
        link = f"#{module}.{name}" if home == module else f"{home}.md#{home}.{name}"
        lines.append(f"| [`{name}`]({link}) | {first_sentence(home, name)} |")
    return "\n".join([*lines, *example(module), *(f"::: {module}.{name}" for name in names)]) + "\n"


def example(module: str) -> list[str]:
    """The lines of a module's example, from a page whose programs tests run."""
    if module not in EXAMPLES:
        return [""]
    page, headings = EXAMPLES[module]
    text = "\n" + (ROOT / DOCS / page).read_text(encoding="utf-8")
    behind = [text[text.index(f"\n{heading}") :] for heading in headings]
    blocks = [FENCED.search(x[x.index("\n```python") :]) for x in behind]
    programs = [
        block[0].removeprefix("```python\n").removesuffix("```") for block in blocks if block
    ]
    code = ["```python", "\n".join(programs).rstrip(), "```"]
    return ["", f"An example, which [this page](../../{page}) explains:", "", *code, ""]


def in_order_of_use(module: str) -> list[str]:
    """The public names of a module: those of FIRST, others as they are frozen, errors."""
    first, names = FIRST.get(module, "").split(), public_names()[module]
    rest = [name for name in names if name not in first]
    return [*first, *sorted(rest, key=lambda name: name.endswith("Error"))]


def first_sentence(module: str, name: str) -> str:
    """What the docstring of a public name begins with, for a cell of a table."""
    member = getattr(importlib.import_module(module), name)
    if not callable(member):
        return "constant"
    paragraph = (inspect.getdoc(member) or "").partition("\n\n")[0]
    return ROLE.sub(r"`\1`", " ".join(paragraph.split())).replace("|", "\\|")


@functools.cache
def public_names() -> dict[str, list[str]]:
    """By module, of the list that a test compares with the sources."""
    names: dict[str, list[str]] = {module: [] for module in MODULES}
    for line in reference_pages.SIGNATURES.read_text(encoding="utf-8").splitlines():
        module, _, name = re.split(r"[(:= ]", line)[0].rpartition(".")
        if module in names:
            names[module].append(name)
    return names


class Docstrings(griffe.Extension):
    """What mkdocstrings does not know of our docstrings and modules."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Sphinx's roles are code, `::` begins a block, arguments with one text have it each."""
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = TOGETHER.sub(
                lambda entry: "\n".join(
                    f"{entry['indent']}{name}: {entry['text']}"
                    for name in entry["names"].split(", ")
                ),
                text,
            )

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Names that a module fetches on access, of a layer above its own."""
        for module, names in public_names().items():
            package, _, rest = module.partition(".")
            if package != pkg.name:
                continue
            found = pkg[rest] if rest else pkg
            for name in (name for name in names if name not in found.members):
                home = getattr(importlib.import_module(module), name).__module__
                found.set_member(name, griffe.Alias(name, f"{home}.{name}", parent=found))


# ------------------------------------------------------------------ the site


def write_pages(pages: Path) -> None:
    """Write all pages and their style sheet."""
    copy_pages(pages)
    shutil.copyfile(STYLE, pages / STYLE.name)
    texts = {f"api/{module}.md": api_page(module) for module in MODULES}
    texts |= {name: page() for name, page in reference_pages.PAGES.items()}
    for name, text in texts.items():
        path = pages / "reference" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def weigh_search(index: Path) -> None:
    """Give each entry of the search its weight, and leave source code out of it."""
    found = json.loads(index.read_text(encoding="utf-8"))
    names = {f"{module}.{name}" for module, names in public_names().items() for name in names}
    for entry in found["docs"]:
        page, _, anchor = entry["location"].partition("#")
        starts = (start for start in SEARCH_WEIGHTS if entry["location"].startswith(start))
        start = max(starts, key=len)
        entry["boost"] = SEARCH_WEIGHTS[start]
        if page.startswith("reference/api/") and anchor:
            entry["boost"] = NAME_WEIGHT if anchor in names else MEMBER_WEIGHT
            entry["text"] = entry["text"].partition(" Source code in <code>")[0]
    index.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")


def build_site(pages: Path, html: Path, **changes: Any) -> None:
    """Build a folder of pages by mkdocs.yml, with changes of its settings.

    Raises:
        mkdocs.exceptions.Abort: a broken link or anchor, a page that is not in the navigation.
    """
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # Material's, of its successor
    fixed = {"docs_dir": str(pages), "site_dir": str(html), "site_name": f"ds_usp {BASE}"}
    config = load_config(str(ROOT / "mkdocs.yml"), **fixed, **changes)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    weigh_search(html / "search" / "search_index.json")


def main(argv: list[str]) -> int:
    """Build; with ``serve``, show it too. Returns the exit code."""
    if argv not in ([], ["serve"]):
        print(__doc__, file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # why a build failed
    pages, html = SITE / "pages", SITE / "html"
    shutil.rmtree(SITE, ignore_errors=True)
    write_pages(pages)
    build_site(pages, html)
    print(html / "index.html")
    if argv:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=html)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
            print("http://127.0.0.1:8000  (Ctrl-C ends it)", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
