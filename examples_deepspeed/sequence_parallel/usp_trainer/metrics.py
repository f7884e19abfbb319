"""``metrics.jsonl``: one line per step, complete lines only even after a kill or a full disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EARLIER = "metrics.jsonl.old"


class MetricsFile:
    """The metrics file of one run, open for appending. Only rank 0 creates one.

    Args:
        folder: its folder.
        resumed_at: rows up to this step are kept; later steps were not saved and run again.
            None: the run starts anew, and an existing file is kept as ``metrics.jsonl.old``.

    Attributes:
        rows: the rows that were kept.
        notes: lines for the user about rows that were dropped and files that were renamed.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        if self._path.is_file():
            if resumed_at is None:
                os.replace(self._path, folder / EARLIER)
                self.notes.append(f"the earlier {METRICS} is kept as {folder / EARLIER}")
            else:
                self.rows = [row for row in self._read() if row["step"] <= resumed_at]
        new = folder / f"{METRICS}.new"
        new.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        os.replace(new, self._path)
        self._file = self._path.open("ab", buffering=0)

    def _read(self) -> list[dict[str, Any]]:
        """The rows that can be parsed; adds a note about those that cannot."""
        rows, dropped = [], []
        lines = self._path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            row = _parse_row(line)
            if row is None:
                dropped.append(number)
            else:
                rows.append(row)
        if dropped:
            numbers = ", ".join(map(str, dropped))
            self.notes.append(
                f"{self._path}: dropped line {numbers} of {len(lines)}, which cannot be read (a "
                "run was killed while it wrote, or the disk was full)"
            )
        return rows

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step.

        Raises:
            OSError: it could not be written; the file ends with the step before.
        """
        line = (json.dumps(row) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written != len(line):  # a partial write; the next call raises the reason
                self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(end)
            free = shutil.disk_usage(self._path.parent).free
            raise OSError(
                f"{self._path}: {error.strerror} at step {row['step']} ({free / 2**20:,.0f} MiB "
                "free there). Free space, then start again with --load"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parse_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
