"""The tables of README and docs/benchmarks.md are those of the results files; README's picture."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

import mesh_picture
import tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_up_to_date(name):
    text = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert tables.rewritten(text) == text, "run python scripts/bench/tables.py"


def test_a_changed_number_is_found(tmp_path, monkeypatch):
    text = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    stale = text.replace("| 13.9 ms", "| 14.9 ms")
    assert stale != text
    (tmp_path / "README.md").write_text(stale, encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ("README.md",))
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0


def test_a_comparison_names_the_ratio_of_the_fastest(tmp_path, capsys):
    path = tmp_path / "short.csv"
    rows = [
        '8K 32/8 d128,"one GPU, flash4",2.5,1,1,0',
        '8K 32/8 d128,"ds_usp 1x2, flash4",3.5,1,1,0',
        '8K 32/8 d128,"ds_usp 2x1, flash4",3.0,1,1,0',
        '8K 32/8 d128,"DeepSpeed ulysses, flash4",3.3,1,1,0',
        '8K 32/8 d128,"plain all-to-all, flash4",3.15,1,1,0',
        '8K 32/8 d128,"ds_usp 2x1, cudnn",2.0,1,1,0',
    ]
    path.write_text("\n".join(["# a run", "shape,contender,ms,a,b,c", *rows]), encoding="utf-8")
    assert tables.main(["--compare", str(path)]) == 0
    head, _, flash4, cudnn, *_ = capsys.readouterr().out.splitlines()
    names = ["ds_usp 2x1", "ds_usp 1x2", "DeepSpeed ulysses", "plain all-to-all", "kernel alone"]
    assert [cell.strip() for cell in head.split("|")][3:8] == names
    assert flash4.endswith("| 3.000 | 3.500 | 3.300 | 3.150 | 2.500 | 1.050 |")
    assert cudnn.endswith("| cuDNN | 2.000 |  |  |  |  |  |")


def test_headlines_compare_the_fastest_mesh_with_the_fastest_other_method(tmp_path, monkeypatch):
    rows = [
        '16K,"stock, TransformerEngine\'s layers",400.0',
        '16K,"TE p2p, TransformerEngine\'s layers",560.0',
        '16K,"ds_usp 2x1, TransformerEngine\'s layers",500.0',
        '16K,"ds_usp 1x2, TransformerEngine\'s layers",499.0',
        '16K,"ds_usp 1x2, local layers",450.0',
        '32K,"TE a2a, TransformerEngine\'s layers",100.0',
    ]
    (tmp_path / "steps.csv").write_text("\n".join(["workload,contender,ms", *rows]))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    *_, line = tables.headline_table([("a", "steps.csv", "16K", tables.TE_LAYERS)]).splitlines()
    assert line == "| a | 499.0 ms, 1 x 2 | 560.0 ms, TransformerEngine `p2p` | 1.122 |"


def test_methods_of_transformers_compare_medians_under_one_engine(tmp_path, monkeypatch):
    measured = [
        ("ds_usp 2x1, FSDP2", 0, 100.0),
        ("ds_usp 2x1, FSDP2", 1, 120.0),
        ("ds_usp 1x2, ZeRO-3", 0, 90.0),
        ("ALST, ZeRO-3", 0, 60.0),
    ]
    rows = [
        {"workload": "w", "case": case, "round": n, "tokens_per_s_per_gpu": rate}
        | {"seconds": [9.0, 1e2 / rate, 0.1], "peak_gib": 5.0 + n}
        for case, n, rate in measured
    ]
    rows.append({"workload": "w", "case": "one rank", "refused": "OutOfMemoryError: CUDA"})
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.transformers_table([("8K", "steps.jsonl", "w")]).splitlines()
    assert "| ds_usp 2 x 1, FSDP2 | 110; 6.0 GiB |" in lines
    assert "| one rank | out of memory |" in lines
    assert lines[-2:] == [
        "| best ds_usp / ALST, ZeRO-3 | 1.500 |",
        "| best ds_usp / Accelerate context parallel, FSDP2 |  |",
    ]
    *_, line = tables.headline_table([("a", "steps.jsonl", "w", "ZeRO-3")]).splitlines()
    assert line == "| a | 1111.1 ms, 1 x 2 | 1666.7 ms, ALST | 1.500 |"


def test_rows_that_a_run_wrote_anew_count_once(tmp_path, monkeypatch):
    row = {"workload": "wan:forward", "case": "one GPU, cudnn"}
    anew = [{**row, "run_id": run, "ms": ms} for run, ms in (("1", [9]), ("2", [8]), ("1", [9, 7]))]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [row, row, *anew])), encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.json_lines("rows.jsonl") == [row, row, anew[2], anew[1]]


def test_the_picture_of_the_mesh_is_that_of_the_geometry():
    assert mesh_picture.FILE.read_text(encoding="utf-8") == mesh_picture.picture()
