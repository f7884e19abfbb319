"""Published runs, read from tests/data/planner, as the planner's own values."""

from __future__ import annotations

import csv
from pathlib import Path

from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.split import Split, Workload

FOLDER = Path(__file__).resolve().parent / "data" / "planner"
RECOMPUTE = {"no": "none", "ours": "gemm-last"}


def rows(name: str) -> list[dict[str, str]]:
    """The lines of a table, without those that say where it is from."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def memory_runs() -> list[tuple[Workload, Split, float]]:
    """Llama-65B on 256 H800, with the bytes of rank 0 (Megatron-Kwai, figure 7)."""
    work, found = Workload(load_model("65B"), 8192, 256), []
    for row in rows("kwai_fig7_memory_llama65b.csv"):
        columns = {"none": "no_recompute_bytes", "gemm-last": "gemm_last_bytes"}
        for recompute, column in columns.items():
            if row[column]:
                split = Split(
                    tp=2,
                    ring=2,
                    pp=8,
                    dp=8,
                    layers_per_virtual_stage=2,
                    recompute=recompute,
                    offload_ratio=float(row["alpha"]),
                )
                found.append((work, split, float(row[column])))
    return found


def throughput_runs() -> list[tuple[Workload, Split, float]]:
    """Llama-65B on H800, with the seconds of a step (Megatron-Kwai, figure 9)."""
    found = []
    for row in rows("kwai_fig9_throughput_llama65b.csv"):
        batch, seq_len = int(row["global_batch"]), int(row["seq_len"])
        tp, cp, pp = (int(row[name]) for name in ("tp", "cp", "pp"))
        split = Split(
            tp=tp,
            ring=cp,
            pp=pp,
            dp=int(row["gpus"]) // (tp * cp * pp),
            layers_per_virtual_stage=int(row["layers_per_virtual_stage"]),
            recompute=RECOMPUTE[row["recompute"]],
            offload_ratio=float(row["offload_alpha"]),
        )
        work = Workload(load_model(row["model"].lower()), seq_len, batch)
        found.append((work, split, batch * seq_len / float(row["tokens_per_s"])))
    return found


def attention_runs(machine: str) -> list[tuple[Workload, int, dict[tuple[int, int], float]]]:
    """One layer's attention on 8 GPUs, its batch, and iterations per second of each split."""
    found = []
    for row in rows("usp_attention_it_per_s.csv"):
        if row["machine"] != machine:
            continue
        heads, kv_heads, dim = (int(row[name]) for name in ("heads", "kv_heads", "head_dim"))
        shape = ModelShape("attention", 1, heads * dim, 4 * heads * dim, heads, kv_heads, 32000)
        rates = {(u, 8 // u): float(row[f"u{u}_r{8 // u}"]) for u in (8, 4, 2, 1)}
        work = Workload(shape, int(row["seq_len_k"]) * 1024)
        found.append((work, int(row["batch"] or 1), rates))
    return found
