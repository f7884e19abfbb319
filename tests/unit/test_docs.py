"""Every link and every path that a Markdown file of the project names exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import reference_pages

ROOT = reference_pages.ROOT
RESULTS = ROOT / "scripts" / "bench" / "results"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# A path in the repository: it begins with one of these folders and holds no placeholder.
FOLDERS = "docs|ds_usp|megatron_patches|examples_deepspeed|scripts|tests"
REPOSITORY_PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*[\w/]")
RESULT_FILE = re.compile(r"[\w-]+\.(?:csv|svg|jsonl?)")
# Files of results that a command or a program writes, not of this repository.
OUTPUTS = {
    "cluster.json", "communication.csv", "communication_timeline.json", "config.json",
    "documents.csv", "ds_config.json", "F.csv",
    "links.csv", "loss.svg", "memory.csv", "memory.svg", "metrics.jsonl", "moments.csv", "runs.csv",
    "validation.csv",
}  # fmt: skip


def markdown_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    names = listed.stdout.split() or [str(p) for p in ROOT.rglob("*.md") if ".venv" not in p.parts]
    return sorted(path for name in names if (path := ROOT / name).is_file())


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings of a file."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def missing(path: Path, text: str) -> list[str]:
    """What a file refers to and does not exist."""
    wrong = []
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            wrong.append(target)
            continue
        if anchor and anchor not in anchors(file.read_text(encoding="utf-8") if name else text):
            wrong.append(target)
    for code in CODE.findall(FENCED.sub("", text)):
        wrong += [
            name
            for name in REPOSITORY_PATH.findall(code)
            if code.startswith(name) and not (ROOT / name).exists()
        ]
        if RESULT_FILE.fullmatch(code) and code not in OUTPUTS:
            wrong += [] if (RESULTS / code).exists() or (path.parent / code).exists() else [code]
    return wrong


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(path: Path) -> None:
    assert missing(path, path.read_text(encoding="utf-8")) == []


def test_a_missing_file_anchor_and_path_are_found() -> None:
    text = "# One thing\n[a](no.md) [b](#one-thing) [c](#two) `ds_usp/no.py` `docs/` `no.csv`"
    assert missing(ROOT / "README.md", text) == ["no.md", "#two", "ds_usp/no.py", "no.csv"]


@pytest.mark.parametrize(
    ("name", "lines", "words"), [("README.md", 150, 1300), ("ARCHITECTURE.md", 150, 1500)]
)
def test_the_first_pages_are_short(name: str, lines: int, words: int) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines and len(text.split()) <= words


def test_every_result_is_in_the_index() -> None:
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in RESULTS.iterdir()} - {"README.md"}
    listed = re.findall(r"`([\w.]+\.(?:csv|svg|jsonl?|txt))`", index.partition("|---")[2])
    assert names == set(listed)


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_reference_pages_are_current(name: str) -> None:
    if name == "api.md":
        pytest.importorskip("diffusers")  # which needs Python 3.11
    text = reference_pages.PAGES[name]()
    assert reference_pages.is_current(name, text), "run python scripts/reference_pages.py"


def strings(path: Path) -> str:
    """All string literals of a module, in order, f-strings' parts among them."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    ordered = sorted(texts, key=lambda n: (n.lineno, n.col_offset))
    return " ".join("".join(str(n.value) for n in ordered).split())


def test_messages_in_troubleshooting_are_raised_somewhere() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## Error messages")[2].partition("## Questions")[0]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    sources = [
        strings(path)
        for folder in ("ds_usp", "megatron_patches")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(messages) > 15
    for message in messages:
        parts = [part.strip() for part in message.split("...")]
        assert any(all(part in source for part in parts) for source in sources), message
