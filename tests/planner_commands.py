"""The snapshot of the planner's command line: commands and what they print, numbers as JSON and one
text of each kind.

python tests/planner_commands.py     # writes it anew; read the difference before you commit
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from ds_usp.planner.__main__ import main

FILE = Path(__file__).resolve().parent / "data" / "planner" / "commands.txt"


def read() -> Iterator[tuple[str, str]]:
    """(command line, what it printed)."""
    for block in FILE.read_text(encoding="utf-8").split("\n$ ")[1:]:
        line, _, printed = block.partition("\n")
        yield line, printed.strip("\n")


def run(line: str) -> str:
    """What a command prints on both streams, JSON as one line, and an exit code other than 0."""
    out, err = io.StringIO(), io.StringIO()
    columns = mock.patch.dict(os.environ, COLUMNS="100")  # of a terminal
    with columns, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line.split())
    text = out.getvalue()
    if "--json" in line and text:
        text = json.dumps(json.loads(text))
    parts = [text, err.getvalue(), f"[exit {status}]" if status else ""]
    return "\n".join(part.strip("\n") for part in parts if part)


if __name__ == "__main__":
    blocks = [f"\n$ {line}\n{run(line)}\n" for line, _ in list(read())]
    FILE.write_text("".join(blocks), encoding="utf-8")
