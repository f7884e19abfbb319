"""The version of the ds-usp distribution. It needs neither torch nor git; setup.py runs it as well.

The commit is read from the file that a build leaves in the package (``commit.txt``), else from the
``.git`` of the checkout that holds the package.
"""

from __future__ import annotations

import re
from pathlib import Path

BASE = "0.2.0"
COMMIT_FILE = "commit.txt"  # written by setup.py into wheels and source distributions
_PACKAGE = Path(__file__).resolve().parent
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # SHA-1 or SHA-256


def commit(package: Path = _PACKAGE) -> str | None:
    """The full hash of the commit from which the package was made; None if it is unknown."""
    for read in (_built, _checked_out):
        try:
            text = read(package)
        except OSError:  # no such file, or one that may not be read
            continue
        if _SHA.fullmatch(text):
            return text
    return None


def version(sha: str | None) -> str:
    """The version as in PEP 440; between releases with the commit as its local part, if known.

    A release is one commit, which its tag names: its version says no more. Indexes of packages
    take no local part.
    """
    return BASE if sha is None or ".dev" not in BASE else f"{BASE}+g{sha[:9]}"


def _built(package: Path) -> str:
    return (package / COMMIT_FILE).read_text(encoding="ascii").strip()


def _checked_out(package: Path) -> str:
    """The commit to which HEAD of the checkout around the package points; "" where its branch is in
    no file.

    Raises:
        OSError: the folder above the package is no checkout.
    """
    root = package.parent
    git = root / ".git"
    if git.is_file():  # a worktree or submodule: "gitdir: PATH"
        git = root / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    ref = head.partition("ref:")[2].strip()
    shared = git  # branches of a worktree are in the repository that it belongs to
    if (git / "commondir").is_file():
        shared = git / (git / "commondir").read_text(encoding="utf-8").strip()
    if (shared / ref).is_file():
        return (shared / ref).read_text(encoding="utf-8").strip()
    for line in (shared / "packed-refs").read_text(encoding="utf-8").splitlines():
        sha, _, name = line.partition(" ")
        if name == ref:
            return sha
    return ""


__version__ = version(commit())
