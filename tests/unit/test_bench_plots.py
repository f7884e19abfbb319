"""The plot of the attention benchmark: lines, labels, precedence of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
SAMPLE = """\
# torchrun --nproc-per-node 4 scripts/bench/bench_attention.py --out <made up>.csv
# 2026-11-20, 4 x <made up> & co, torch 2.11.0; bf16, causal, batch 1
shape,contender,ms,tflop_per_s_per_gpu,share_of_kernel,extra_gib
8K 32/32 d128,"one GPU, flash4",1,1,1.000,0.1
8K 32/32 d128,"ds_usp 4x1, flash4",1,1,0.512,0.1
8K 32/32 d128,"ds_usp 2x2, flash4",1,1,0.500,0.1
8K 32/32 d128,"DeepSpeed ulysses, cudnn",1,1,0.700,0.1
8K 32/32 d128,"DeepSpeed ulysses, flash4",1,1,nan,0.1
8K 32/8 d128,"ds_usp 1x4, flash4",1,1,0.400,0.1
128K 32/32 d128,"ds_usp 4x1, flash4",1,1,0.950,0.1
128K 32/32 d128,"ds_usp 2x2, flash4",1,1,1.010,0.1
"""


def drawn(tmp_path: Path, *texts: str) -> ElementTree.Element:
    paths = [tmp_path / f"{number}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    out = tmp_path / "out.svg"
    command = [sys.executable, BENCH / "plot.py", *paths, "--out", out]
    subprocess.run(command, check=True, timeout=180)
    return ElementTree.parse(out).getroot()


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.findall(".//{http://www.w3.org/2000/svg}text")]


def test_a_line_a_baseline(tmp_path: Path) -> None:
    """The legend: percentage at the longest sequence, fastest first, one entry a line."""
    shown = texts(drawn(tmp_path, SAMPLE))
    legend = [text for text in shown if " %  " in text]
    assert legend == ["101 %  ds_usp 2x2", "95 %  ds_usp 4x1", "70 %  DeepSpeed ulysses"]
    assert {"FlashAttention-4", "cuDNN", "8K", "128K"} <= set(shown)
    assert "FlashAttention-2" not in shown


def test_the_later_file_counts(tmp_path: Path) -> None:
    head = "".join(SAMPLE.splitlines(keepends=True)[:3])
    later = head + '128K 32/32 d128,"ds_usp 4x1, flash4",1,1,0.990,0.1\n'
    shown = texts(drawn(tmp_path, SAMPLE, later))
    assert "99 %  ds_usp 4x1" in shown
    assert not any(text.startswith("95 %") for text in shown)
