"""The shell scripts parse, work from any directory, and refuse what they do not know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("examples_deepspeed/**/*.sh")])


def bash(*command: str | Path, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, **settings}
    return subprocess.run(
        ["bash", *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=180
    )


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci/run"], ids=lambda path: path.name)
def test_the_script_parses(script, tmp_path):
    done = bash("-n", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_unknown_groups_of_tests_are_refused(tmp_path):
    done = bash(ROOT / "scripts/test.sh", "everything", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "[fast|unit|dist|megatron|transformers|compat|verl|bridge|versions|gpu|all]" in done.stderr
    )
    done = bash(ROOT / "scripts/test.sh", "versions-jax", cwd=tmp_path, USP_NO_INSTALL="1")
    assert done.returncode == 2
    assert "no overlay versions-jax" in done.stderr and "versions-torch-2.9\n" in done.stderr


# Answers for python: with an exit code for pytest, whose arguments it prints, and for xdist.
PYTEST_OF_TESTS = """#!/usr/bin/env bash
case "$*" in
  "-m pytest "*) printf 'pytest %s\\n' "$*"; exit "$PYTEST_EXIT_CODE" ;;
  *cuda.is_available*) exit 1 ;;
  *sched_getaffinity*) echo 2 ;;
esac
"""


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        ("fast", "tests/unit tests/distributed tests/examples -m fast"),
        ("dist -k ring", "tests/distributed -k ring"),
        ("gpu", ""),
        ("", "tests"),
        ("tests/unit/test_a.py -q", "tests/unit/test_a.py -q"),
    ],
)
def test_test_sh_names_the_tests_and_passes_pytests_exit_code_on(arguments, tests, tmp_path):
    python = tmp_path / "python"
    python.write_text(PYTEST_OF_TESTS)
    python.chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "USP_NO_INSTALL": "1"}
    for code in (0, 1, 5) if not arguments else (0,):
        settings["PYTEST_EXIT_CODE"] = str(code)
        done = bash(ROOT / "scripts/test.sh", *arguments.split(), cwd=tmp_path, **settings)
        assert done.returncode == code, done.stderr
        workers = "" if arguments.startswith("tests/") else "-n 2 --dist loadfile "
        flags = f"{workers}--no-loadscope-reorder " if workers else ""
        assert done.stdout == (f"pytest -m pytest {flags}{tests}\n" if tests else "")
        assert ("NO NVIDIA GPU HERE" in done.stderr) == (tests.split(" -")[0] in ("", "tests"))


def test_env_sh_without_a_usable_python_says_so(tmp_path):
    copy = tmp_path / "clone"
    (copy / "scripts").mkdir(parents=True)
    (copy / "scripts/env.sh").write_bytes((ROOT / "scripts/env.sh").read_bytes())
    for name in ("constraints.txt", "setup.py"):
        (copy / name).write_text("")
    done = bash(
        "-c",
        f'. "{copy}/scripts/env.sh"; echo $?',
        cwd=tmp_path,
        USP_PYTHON="no-python",
        USP_NO_INSTALL="0",
    )
    assert done.stdout == "1\n"
    assert "no usable interpreter among: no-python" in done.stderr
    assert not (copy / ".venv").exists()
