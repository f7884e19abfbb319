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

SITE = ROOT / "build" / "site"
DOCS = PurePosixPath("docs")
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
    """Where a file of the repository is in the site."""
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
    names = "\n".join(f"::: {module}.{name}" for name in public_names()[module])
    return f"# {module}\n\n{topic[0].upper()}{topic[1:]}.\n\n{names}\n"


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


def build_site(pages: Path, html: Path, **changes: Any) -> None:
    """Build a folder of pages by mkdocs.yml, with changes of its settings.

    Raises:
        mkdocs.exceptions.Abort: a broken link or anchor, a page that is not in the navigation.
    """
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # Material's, of its successor
    folders = {"docs_dir": str(pages), "site_dir": str(html)}
    config = load_config(str(ROOT / "mkdocs.yml"), **folders, **changes)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()


def main(argv: list[str]) -> int:
    """Build; with ``serve``, show it too. Returns the exit code."""
    if argv not in ([], ["serve"]):
        print(__doc__, file=sys.stderr)
        return 2
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
