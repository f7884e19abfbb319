"""The wheel: built without isolation, installed into an empty folder, used from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from ds_usp import _version

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
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


def test_the_wheel_says_its_commit_extras_and_program(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        programs = archive.read(f"{folder}/entry_points.txt").decode()
        assert archive.read(f"ds_usp/{_version.COMMIT_FILE}").decode() == f"{SHA}\n"
    assert metadata["Version"] == VERSION
    assert {"ds_usp/py.typed", "megatron_patches/py.typed", "ds_usp/__main__.py"} <= names
    assert "ds-usp = ds_usp.__main__:main" in programs
    extras = set(metadata.get_all("Provides-Extra", []))
    plain = {"flash", "flash4", "megatron", "deepspeed", "plots", "trainer", "test"}
    assert extras == plain | {"transformers", "diffusers"}
    assert metadata["Keywords"] and metadata.get_all("Classifier")
    needed = metadata.get_all("Requires-Dist", [])
    assert [x for x in needed if x.startswith("tqdm")] == ['tqdm; extra == "trainer"']
    (flash4,) = (x for x in needed if "flash4" in x)
    assert flash4.startswith("flash-attn-4>=4.0.0b")  # a pre-release: pip takes it without --pre


def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
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


def test_the_source_distribution_holds_a_checkout(checkout: Path, tmp_path: Path) -> None:
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
    ):
        assert name in names, name
    assert not any("__pycache__" in name or name.endswith(".log") for name in names)
    assert not (checkout / "ds_usp" / _version.COMMIT_FILE).exists()
