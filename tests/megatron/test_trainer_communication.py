"""``--usp-report-communication`` of the trainer: calls and bytes of a step."""

import csv

from harness import RankContext, fork_world
from trainer_runs import PLAIN_SGD, degrees, start

from ds_usp import CommLedger

GRIDS = {"tensor parallel": {"tp": 2}, "pipeline": {"pp": 2}}


def reported(ctx: RankContext, *, runs: dict[str, str]) -> list[int]:
    """The ring's bytes in the ledger after the second step of each run, which is reported."""
    ring_bytes = []
    for folder, flags in runs.items():
        loop = start(flags, folder)
        loop.step()
        ledger: CommLedger = loop.mesh.ledger
        ledger.reset()
        loop.reported_step()
        assert {kind.partition("_")[0] for kind in ledger.bytes} == {"ring"}
        ring_bytes.append(sum(ledger.bytes.values()))
    return ring_bytes


def test_a_reported_step_counts_what_the_ledger_counts(tmp_path):
    runs = {
        str(tmp_path / kind): degrees(sp=2, u=1, zero=1, **grid) + PLAIN_SGD
        for kind, grid in GRIDS.items()
    }
    of_ranks = fork_world(reported, 4, runs=runs)
    for number, kind in enumerate(GRIDS):
        lines = (tmp_path / kind / "communication.csv").read_text().splitlines()
        assert lines[0] == "# communication of step 2"
        rows = {(row["rank"], row["kind"]): row for row in csv.DictReader(lines[1:])}
        kinds = ("ring", "gradient reduction", "parameter gather", kind, "other collectives")
        assert set(rows) == {(str(rank), name) for rank in range(4) for name in kinds}
        for rank, ring_bytes in enumerate(of_ranks):
            assert int(rows[str(rank), "ring"]["sent_bytes"]) == ring_bytes[number]
            for name in kinds[:3]:
                assert int(rows[str(rank), name]["sent_bytes"]) > 0
                assert rows[str(rank), name]["exposed_ms"] == ""  # no GPU
