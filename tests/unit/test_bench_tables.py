"""The tables of README and docs/benchmarks.md are those of the results files."""

import json
import re

import pytest
import tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_up_to_date(name):
    text = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert tables.rewritten(text) == text, "run python scripts/bench/tables.py"


def test_a_changed_number_is_found(tmp_path, monkeypatch):
    text = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    stale = re.sub(r"\| \d+\.\d+ ms, ", "| 0.07 ms, ", text, count=1)
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
    slower = '16K 32/8 d128,"ds_usp 2x1, flash4",4.0,,,\n16K 32/8 d128,"plain, flash4",3.0,,,\n'
    path.write_text(path.read_text(encoding="utf-8") + "\n" + slower, encoding="utf-8")
    *_, line = tables.ratio_table({str(path): "two lengths"}).splitlines()
    assert line.endswith("| 2 | 0.75 | 0.90 | 1.05 | 1 |")


def test_headlines_compare_the_fastest_mesh_with_the_fastest_other_method(tmp_path, monkeypatch):
    rows = [
        '16K,"stock, TransformerEngine\'s layers",400.0',
        '16K,"TE p2p, TransformerEngine\'s layers",560.0',
        '16K,"ds_usp 2x1 cudnn, TransformerEngine\'s layers",500.0',
        '16K,"ds_usp 1x2 cudnn, TransformerEngine\'s layers",499.0',
        '16K,"ds_usp 1x2 flash4, TransformerEngine\'s layers",480.0',
        '16K,"ds_usp 1x2 cudnn, local layers",450.0',
        '32K,"TE a2a, TransformerEngine\'s layers",100.0',
    ]
    (tmp_path / "steps.csv").write_text("\n".join(["workload,contender,ms", *rows]))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    case, layers = ("a", "steps.csv", "16K"), tables.TE_LAYERS
    cases = [(*case, f"{kernel}, {layers}") for kernel in ("cudnn", "flash4")]
    *_, cudnn, flash4 = tables.headline_table(cases).splitlines()
    assert cudnn == "| a | 499.0 ms, 1 x 2 | 560.0 ms, TransformerEngine `p2p` | 1.122 |"
    assert flash4 == "| a | 480.0 ms, 1 x 2 | 560.0 ms, TransformerEngine `p2p` | 1.167 |"


def test_each_kernel_of_a_run_is_a_line_beside_the_same_peers(tmp_path, monkeypatch):
    rates = {"TE p2p": 900, "TE a2a": 1000, "stock": 9000, "ds_usp 2x1 cudnn": 1010}
    rates |= {"ds_usp 1x2 cudnn": 990, "ds_usp 2x1 flash4": 1100}
    rows = [f'gpt-1.3b 24 layers 16K x 2,"{name}, b\'s layers",{x}' for name, x in rates.items()]
    head = "workload,contender,tokens_per_s_per_gpu"
    (tmp_path / "steps.csv").write_text("\n".join([head, *rows]))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.training_table([("2 H100", "steps.csv")], "b's layers").splitlines()
    assert table[2:] == [
        "| GPT 1.3B, 16K, 2 | 2 H100 | cuDNN | 1,010 | 990 | 900 | 1,000 | 1.010 |",
        "| GPT 1.3B, 16K, 2 | 2 H100 | FlashAttention-4 | 1,100 |  | 900 | 1,000 | 1.100 |",
    ]


def test_backward_is_the_rest_of_both_passes(tmp_path, monkeypatch):
    """By hand: 2 TFLOP of 7 are forward. Shapes with documents are another table."""
    rows = [
        ("0", "ds_usp 2x1, flash4", 14, 500),
        ("0 forward", "ds_usp 2x1, flash4", 4, 500),
        ("1", "ds_usp 2x1, flash4", 20, 350),
        ("1 forward", "ds_usp 2x1, flash4", 10, 200),
        ("0", "TransformerEngine p2p, cudnn", 28, 250),
        ("0 forward", "TransformerEngine p2p, cudnn", 10, 200),
        ("1", "TransformerEngine p2p, cudnn", 28, 250),
        ("1 forward", "TransformerEngine p2p, cudnn", 10, 200),
        ("documents magi-0", "ds_usp 2x1, flash4", 7, 1000),
        ("documents magi-0 forward", "ds_usp 2x1, flash4", 2, 1000),
    ]
    lines = [f'32K {shape},"{name}",{ms},{rate}' for shape, name, ms, rate in rows]
    head = "shape,contender,ms,tflop_per_s_per_gpu"
    (tmp_path / "magi.csv").write_text("\n".join([head, *lines]))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    *_, ours, te = tables.passes_table("magi.csv", packed=False).splitlines()
    assert ours == "| ds_usp 2 x 1 | FlashAttention-4 | 350 | 500 | 425 | 1.70 |"
    assert te == "| TransformerEngine `p2p` | cuDNN | 200 | 278 | 250 |  |"


def test_packed_documents_compare_the_fastest_of_each_kernel(tmp_path, monkeypatch):
    times = {"ds_usp 2x1, flash4": 4, "ds_usp 1x2, flash4": 5, "ds_usp 2x1, cudnn": 9}
    times |= {"ds_usp 1x2, cudnn": 8, "ds_usp 1x2, flash2": 7, "one GPU, cudnn": 1}
    times |= {"TransformerEngine p2p, cudnn": 6, "TransformerEngine a2a, cudnn": 7}
    rows = [f'16K documents,"{name}",{ms}' for name, ms in times.items()]
    (tmp_path / "packed.csv").write_text("\n".join(["shape,contender,ms", *rows]))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    *_, line = tables.packed_table("packed.csv").splitlines()
    ours = "4.00, 2 x 1 | 8.00, 1 x 2 | 7.00, 1 x 2"
    assert line == f"| 16K documents | {ours} | 7.00 | 6.00 | 0.750 | 1.500 |"


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


def test_curves_are_compared_with_one_rank_and_said_to_be_cut(tmp_path, monkeypatch):
    names = {"trainer-1x1": 0.0, "hf-2x1": 0.25, "mds-2x1": -0.5, "trainer-long": 0.125}
    lengths = {"trainer-1x1": 1000, "hf-2x1": 1000, "mds-2x1": 300, "trainer-long": 2000}
    head = "".join(f"# {name}: of {name}; 2 GPUs: H100\n" for name in names)
    for kind, first in (("training", 1), ("validation", 100)):
        lines = [",".join(["step", *names])]
        for step in range(first, 2001, first):
            losses = (
                str(step + gap * (1 + (step > 20))) if step <= lengths[n] else ""
                for n, gap in names.items()
            )
            lines.append(",".join([str(step), *losses]))
        (tmp_path / f"long_run_{kind}_by_step.csv").write_text(head + "\n".join(lines))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.long_run_table().splitlines()[2:] == [
        "| of trainer-1x1 | 1,000 |  | 1000.000 |  |  |",
        "| of hf-2x1 | 1,000 | 0.25000 | 1000.500 | 0.500 | 0.500 |",
        "| of mds-2x1 | 300 | 0.50000 | not reached | 1.000 | 1.000 |",
        "| of trainer-long | 2,000 | 0.12500 | 2000.250 |  |  |",
    ]
