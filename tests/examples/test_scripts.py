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
