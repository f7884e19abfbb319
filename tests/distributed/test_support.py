"""The support matrix in the docs is what these runs find.

scripts/test.sh dist -k support --write-support-table     # write it anew
"""

from pathlib import Path

from support import EXACT, MESHES, REFUSED, ROWS, WORLD, probe_rows, render

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "support-matrix.md"
BEGIN, END = "<!-- support table: written by tests -->", "<!-- end of support table -->"


def test_the_support_matrix_lists_what_is_exact_and_what_is_refused(pool, pytestconfig):
    cells: dict[str, list[str]] = {}
    for name, ulysses in MESHES.items():
        by_rank = pool.run(probe_rows, WORLD, ulysses=ulysses)
        assert all(ranks == by_rank[0] for ranks in by_rank), f"{name}: ranks differ: {by_rank}"
        bad = [
            f"{row.group} {row.label}: {cell}"
            for row, cell in zip(ROWS, by_rank[0], strict=True)
            if cell not in (EXACT, REFUSED)
        ]
        assert not bad, f"{name}: neither exact nor refused: {bad}"
        cells[name] = by_rank[0]
    table = render(cells)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    shown, after = rest.split(END)
    if pytestconfig.getoption("--write-support-table"):
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    else:
        assert shown.strip() == table, (
            "the table in docs/reference/support-matrix.md is out of date; write it anew with "
            "scripts/test.sh dist -k support --write-support-table"
        )
