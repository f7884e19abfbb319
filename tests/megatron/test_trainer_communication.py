"""``--usp-report-communication`` of the trainer: calls and bytes of a step."""

from __future__ import annotations

import csv
from pathlib import Path

from harness import RankContext, fork_world
from trainer_runs import PLAIN_SGD, degrees, start

from ds_usp import CommLedger


def reported(ctx: RankContext, *, flags: str, output_dir: str) -> dict[str, int]:
    """The bytes in the ledger after the second step, which is reported."""
    loop = start(flags, output_dir)
    loop.step()
    ledger: CommLedger = loop.mesh.ledger
    ledger.reset()
    loop.reported_step()
    return dict(ledger.bytes)


def test_a_reported_step_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    flags = degrees(sp=2, u=1, tp=2, zero=1) + PLAIN_SGD + " --seq-length 64 --quiet"
    ledgers = fork_world(reported, 4, flags=flags, output_dir=str(tmp_path))
    lines = (tmp_path / "communication.csv").read_text().splitlines()
    assert lines[0] == "# communication of step 2"
    rows = {(int(r["rank"]), r["kind"]): r for r in csv.DictReader(lines[1:])}
    kinds = {kind for rank, kind in rows if rank == 0}
    assert kinds == {"ring", "gradient reduction", "parameter gather", "tensor parallel",
                     "other collectives"}  # fmt: skip
    for rank, ledger in enumerate(ledgers):
        ring = sum(size for kind, size in ledger.items() if kind.startswith("ring"))
        assert int(rows[rank, "ring"]["sent_bytes"]) == ring > 0
        for kind in ("gradient reduction", "parameter gather", "tensor parallel"):
            assert int(rows[rank, kind]["sent_bytes"]) > 0
        assert rows[rank, "ring"]["exposed_ms"] == ""  # no GPU
