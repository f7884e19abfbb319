"""The wheel, the links of the docs, the fast tier of the tests."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.version import Version
from programs import python

from ds_usp import _version

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "USP_NO_INSTALL": "1"} | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(*command: str, cwd: Path) -> str:
    who = {f"GIT_{x}_{y}": "x@y" for x in ("AUTHOR", "COMMITTER") for y in ("NAME", "EMAIL")}
    return run("git", *command, cwd=cwd, **who).strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is here, committed or not, as one commit of a repository of its own: a source
    distribution has none."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed: nothing is committed here, and nothing is released")
    copy = tmp_path_factory.mktemp("checkout") / "one"
    skip = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=skip)
    for name in ("PKG-INFO", "setup.cfg", f"ds_usp/{_version.COMMIT_FILE}"):
        (copy / name).unlink(missing_ok=True)  # of a source distribution
    git("init", "-q", cwd=copy)
    git("add", "--all", cwd=copy)
    git("commit", "-q", "-m", "All", cwd=copy)
    return copy


@pytest.fixture(scope="module")
def release(checkout: Path) -> Path:
    """The folder of what ``scripts/release.sh`` builds."""
    run("bash", "scripts/release.sh", cwd=checkout)
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    (path,) = release.glob("*.whl")
    return path


def test_a_release_has_the_same_bytes_wherever_it_is_built(checkout, release, tmp_path):
    """In another folder, under another umask, clock and time zone, beside files of one's own."""
    again = tmp_path / "another"
    git("clone", "-q", str(checkout), str(again), cwd=tmp_path)
    for path in (again, *again.rglob("*")):
        if ".git" not in path.parts:
            path.chmod(path.stat().st_mode & 0o700)
            os.utime(path, (1_500_000_000, 1_500_000_000))
    (again / "scripts" / "mine.py").write_text("1\n")
    (again / "ds_usp" / "mine.py").write_text("1\n")
    built = run("bash", "-c", "umask 077; bash scripts/release.sh out", cwd=again, TZ="Asia/Tokyo")
    assert built == (release / "SHA256SUMS").read_text()
    assert len(built.splitlines()) == 2
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=again / "out")


def test_the_wheel_says_its_commit_extras_and_program(checkout, wheel):
    sha = git("rev-parse", "HEAD", cwd=checkout)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        programs = archive.read(f"{folder}/entry_points.txt").decode()
        assert archive.read(f"ds_usp/{_version.COMMIT_FILE}").decode() == f"{sha}\n"
    assert metadata["Version"] == _version.version(sha)
    assert {"ds_usp/py.typed", "megatron_patches/py.typed", "ds_usp/__main__.py"} <= names
    assert "ds-usp = ds_usp.__main__:main" in programs
    assert "[verl.plugins]\nds_usp = ds_usp.compat.verl" in programs
    needed = metadata.get_all("Requires-Dist", [])
    assert [x for x in needed if x.startswith("tqdm")] == ['tqdm; extra == "trainer"']
    (flash4,) = (x for x in needed if "flash4" in x)
    assert flash4.startswith("flash-attn-4>=4.0.0b")  # a pre-release: pip takes it without --pre


def test_the_installed_wheel_runs(checkout, wheel, tmp_path):
    """From a folder that knows no checkout: env says what is there, verify's sweep is exact."""
    target, sha = tmp_path / "target", git("rev-parse", "HEAD", cwd=checkout)
    run(*PIP, "install", "--no-deps", "--no-compile", "--target", target, wheel, cwd=tmp_path)
    program = target / "bin/ds-usp"
    printed = run(program, "env", cwd=tmp_path, PYTHONPATH=str(target))
    assert f"version  {_version.version(sha)}" in printed
    assert f"folder   {target.resolve()}/ds_usp" in printed
    assert f"commit   {sha}" in printed and "changes  not a checkout" in printed
    assert "bugs to  the issue tracker" in printed
    printed = run(program, "verify", cwd=tmp_path, PYTHONPATH=str(target))
    assert printed.splitlines()[0].startswith(f"ds-usp {_version.version(sha)}, 4 ranks")
    assert printed.splitlines()[-1] == "EXACT (18 exact, 0 WRONG, 0 refused)"


def test_the_source_distribution_holds_a_checkout(checkout, release):
    """All that is committed, so that what a checkout runs runs from it; and its commit."""
    (path,) = release.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {x.name.partition("/")[2] for x in archive.getmembers() if x.isfile()}
    committed = set(git("ls-files", cwd=checkout).splitlines())
    made = {x for x in names - committed if not x.startswith("ds_usp.egg-info/")}
    assert committed <= names
    assert made == {"PKG-INFO", "setup.cfg", f"ds_usp/{_version.COMMIT_FILE}"}


def test_the_version_is_the_changelogs():
    """A release has a dated section; what comes after it, a version between releases."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    released = [re.fullmatch(r"\[([\d.]+)\] - \d{4}-\d\d-\d\d", x) for x in sections]
    assert first == "[Unreleased]" and all(released), sections
    unreleased = text.partition(f"## {first}")[2].partition("\n## ")[0].strip()
    base, newest = Version(_version.BASE), Version(released[0][1])
    assert base > newest if base.is_devrelease else base == newest, (base, newest)
    assert base.is_devrelease or not unreleased, (
        f"changes after {newest}: BASE in ds_usp/_version.py is the next version's .dev0 then"
    )


RESULTS = ROOT / "scripts" / "bench" / "results"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# A path in the repository: it begins with one of these folders and holds no placeholder.
FOLDERS = "docs|ds_usp|megatron_patches|examples_deepspeed|scripts|tests"
REPOSITORY_PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*[\w/]")
COMMIT = re.compile(r"\b[0-9a-f]{8}\b")
HISTORY = ("CHANGELOG.md", "decisions.md")  # name what has left
RESULT_FILE = re.compile(r"[\w-]+\.(?:csv|svg|jsonl?)")
# Files of results that a command or a program writes, not of this repository.
OUTPUTS = {
    "cluster.json", "config.json", "ds_config.json", "F.csv", "loss.svg", "memory.csv",
    "memory.svg", "metrics.jsonl", "moments.csv", "runs.csv", "validation.csv",
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
    lines = FENCED.sub("", text).splitlines()
    if path.name in HISTORY:
        return wrong
    # A line that names a commit says where its files are.
    for code in CODE.findall("\n".join(line for line in lines if not COMMIT.search(line))):
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


@pytest.mark.parametrize(
    ("name", "lines", "words"), [("README.md", 120, 1200), ("ARCHITECTURE.md", 150, 1500)]
)
def test_the_first_pages_are_short(name, lines, words):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines and len(text.split()) <= words


def test_every_result_is_in_the_index():
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in RESULTS.iterdir()} - {"README.md"}
    listed = re.findall(r"`([\w.]+\.(?:csv|svg|jsonl?|txt))`", index.partition("|---")[2])
    assert names == set(listed)


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
