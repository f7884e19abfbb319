"""The tables of README and docs/benchmarks.md are those of the results files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

import tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_up_to_date(name: str) -> None:
    text = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert tables.rewritten(text) == text, "run python scripts/bench/tables.py"


def test_a_changed_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = (tables.ROOT / "README.md").read_text(encoding="utf-8").replace("| 15.7 |", "| 14.7 |")
    (tmp_path / "README.md").write_text(stale, encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ("README.md",))
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
