"""The wheel, the links of the docs, the fast tier of the tests."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import fast_tier
import pytest
from programs import python

from ds_usp import _version

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"
SOURCES = (
    "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt",
    "mkdocs.yml",
)  # fmt: skip
VERSION = f"{_version.BASE}+g{SHA[:9]}"


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, at a commit of its own; git itself is not asked."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("ds_usp", "megatron_patches", "examples_deepspeed", "scripts", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=skip)
    (copy / ".git").mkdir()
    (copy / ".git/HEAD").write_text(f"{SHA}\n")
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ".", cwd=checkout)
    (path,) = folder.glob("*.whl")
    yield path


def test_the_wheel_says_its_commit_extras_and_program(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        programs = archive.read(f"{folder}/entry_points.txt").decode()
        assert archive.read(f"ds_usp/{_version.COMMIT_FILE}").decode() == f"{SHA}\n"
    assert metadata["Version"] == VERSION
    assert {"ds_usp/py.typed", "megatron_patches/py.typed", "ds_usp/__main__.py"} <= names
    assert "ds-usp = ds_usp.__main__:main" in programs
    assert "[verl.plugins]\nds_usp = ds_usp.compat.verl" in programs
    extras = set(metadata.get_all("Provides-Extra", []))
    plain = {"flash", "flash4", "megatron", "deepspeed", "plots", "trainer", "test", "docs"}
    assert extras == plain | {"transformers", "diffusers", "recurrence"}
    assert metadata["Keywords"] and metadata.get_all("Classifier")
    needed = metadata.get_all("Requires-Dist", [])
    assert [x for x in needed if x.startswith("tqdm")] == ['tqdm; extra == "trainer"']
    (flash4,) = (x for x in needed if "flash4" in x)
    assert flash4.startswith("flash-attn-4>=4.0.0b")  # a pre-release: pip takes it without --pre


def test_the_installed_wheel_runs(wheel, tmp_path):
    """From a folder that knows no checkout: env says what is there, verify's sweep is exact."""
    target = tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    run(*pip, "install", "--no-deps", "--no-compile", "--target", target, wheel, cwd=tmp_path)
    program = target / "bin/ds-usp"
    printed = run(program, "env", cwd=tmp_path, PYTHONPATH=str(target))
    assert f"version  {VERSION}" in printed and f"folder   {target.resolve()}/ds_usp" in printed
    assert f"commit   {SHA}" in printed and "changes  not a checkout" in printed
    printed = run(program, "verify", cwd=tmp_path, PYTHONPATH=str(target))
    assert printed.splitlines()[0].startswith(f"ds-usp {VERSION}, 4 ranks")
    assert printed.splitlines()[-1] == "EXACT (18 exact, 0 WRONG, 0 refused)"


def test_the_source_distribution_holds_a_checkout(checkout, tmp_path):
    """It builds the same wheel without git: it says its commit itself."""
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=checkout)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        member = f"{path.name.removesuffix('.tar.gz')}/ds_usp/{_version.COMMIT_FILE}"
        file = archive.extractfile(member)
        assert file is not None and file.read().decode() == f"{SHA}\n"
    for name in (
        "constraints.txt",
        "scripts/env.sh",
        "scripts/bench/bench_memory.py",
        "examples_deepspeed/sequence_parallel/pretrain_gpt_usp.py",
        "megatron_patches/README.md",
        "docs/usage/python.md",
        "mkdocs.yml",
    ):
        assert name in names, name
    assert not any("__pycache__" in name or name.endswith(".log") for name in names)
    assert not (checkout / "ds_usp" / _version.COMMIT_FILE).exists()


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
    "cluster.json", "communication.csv", "communication_timeline.json",
    "config.json", "ds_config.json", "F.csv", "loss.svg", "memory.csv", "memory.svg",
    "metrics.jsonl", "moments.csv", "runs.csv", "validation.csv",
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
def test_links_and_paths_exist(path):
    assert missing(path, path.read_text(encoding="utf-8")) == []


def test_a_missing_file_anchor_and_path_are_found():
    text = "# One thing\n[a](no.md) [b](#one-thing) [c](#two) `ds_usp/no.py` `docs/` `no.csv`"
    assert missing(ROOT / "README.md", text) == ["no.md", "#two", "ds_usp/no.py", "no.csv"]


@pytest.mark.parametrize(
    ("name", "lines", "words"), [("README.md", 150, 1300), ("ARCHITECTURE.md", 150, 1500)]
)
def test_the_first_pages_are_short(name, lines, words):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines and len(text.split()) <= words


def test_every_result_is_in_the_index():
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in RESULTS.iterdir()} - {"README.md"}
    listed = re.findall(r"`([\w.]+\.(?:csv|svg|jsonl?|txt))`", index.partition("|---")[2])
    assert names == set(listed)


def strings(path: Path) -> str:
    """All string literals of a module, in order, f-strings' parts among them."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    ordered = sorted(texts, key=lambda n: (n.lineno, n.col_offset))
    return " ".join("".join(str(n.value) for n in ordered).split())


def test_messages_in_troubleshooting_are_raised_somewhere():
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


def test_cases_are_spread_over_their_function():
    assert fast_tier.spread(10, 3) == {0, 3, 6}
    assert fast_tier.spread(2, 5) == {0, 1}
    assert fast_tier.function_of("tests/unit/test_x.py::test_y[a[0]]") == "unit/test_x.py::test_y"


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("transformers", ("test_weights.py", "test_diffusers_pipelines.py")),
        ("diffusers", ("test_diffusers_pipelines.py",)),
    ],
)
def test_files_whose_library_is_absent_are_skips_with_a_count(library, names):
    """They must not vanish from a run without a line."""
    hide = (
        "import importlib.util as util, sys, pytest; found = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: name != {library!r} and found(name, *rest) or None\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    folder = Path(__file__).parents[1] / "integrations"
    flags = ("-q", "-p", "no:cacheprovider", *(str(folder / name) for name in names))
    done = python("-c", hide, *flags)
    for name in names:
        tests = (folder / name).read_text().count("\ndef test_")
        assert f"{library} is not installed: {tests} tests of {name} do not run" in done.stdout
    assert f"{len(names)} skipped" in done.stdout
