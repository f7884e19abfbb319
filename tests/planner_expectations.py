"""Published runs, read from tests/data/planner, as the planner's own values."""

import csv
from dataclasses import replace
from pathlib import Path

from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload

FOLDER = Path(__file__).resolve().parent / "data" / "planner"
RESULTS = Path(__file__).resolve().parents[1] / "scripts" / "bench" / "results"
RECOMPUTE = {"no": "none", "ours": "gemm-last"}


def rows(name: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    """The lines of a table, without those that say where it is from."""
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def memory_runs() -> list[tuple[Workload, ParallelConfig, float]]:
    """Llama-65B on 256 H800, with the bytes of rank 0 (Megatron-Kwai, figure 7)."""
    work, runs = Workload(load_model("65B"), 8192, 256), []
    for row in rows("kwai_fig7_memory_llama65b.csv"):
        columns = {"none": "no_recompute_bytes", "gemm-last": "gemm_last_bytes"}
        for recompute, column in columns.items():
            if row[column]:
                config = ParallelConfig(
                    tp=2,
                    ring=2,
                    pp=8,
                    dp=8,
                    layers_per_virtual_stage=2,
                    recompute=recompute,
                    offload_ratio=float(row["alpha"]),
                )
                runs.append((work, config, float(row[column])))
    return runs


def throughput_runs() -> list[tuple[Workload, ParallelConfig, float]]:
    """Llama-65B on H800, with the seconds of a step (Megatron-Kwai, figure 9)."""
    runs = []
    for row in rows("kwai_fig9_throughput_llama65b.csv"):
        batch, seq_len = int(row["global_batch"]), int(row["seq_len"])
        tp, cp, pp = (int(row[name]) for name in ("tp", "cp", "pp"))
        config = ParallelConfig(
            tp=tp,
            ring=cp,
            pp=pp,
            dp=int(row["gpus"]) // (tp * cp * pp),
            layers_per_virtual_stage=int(row["layers_per_virtual_stage"]),
            recompute=RECOMPUTE[row["recompute"]],
            offload_ratio=float(row["offload_alpha"]),
        )
        work = Workload(load_model(row["model"].lower()), seq_len, batch)
        runs.append((work, config, batch * seq_len / float(row["tokens_per_s"])))
    return runs


def own_attention_runs(kernel: str) -> list[tuple[Workload, ParallelConfig, float]]:
    """This package on 4 H200, with the seconds of attention forward and backward."""
    runs = []
    for row in rows("attention_peers.csv", RESULTS):
        name, _, used = row["contender"].rpartition(", ")
        if not name.startswith("ds_usp") or used != kernel:
            continue
        length, heads, dim = row["shape"].split(" ")
        q_heads, kv_heads = map(int, heads.split("/"))
        width = q_heads * int(dim[1:])
        shape = ModelShape("attention", 1, width, 4 * width, q_heads, kv_heads, 32000)
        ulysses, ring = map(int, name.split(" ")[1].split("x"))
        work = Workload(shape, int(length[:-1]) * 1024)
        runs.append((work, ParallelConfig(ulysses=ulysses, ring=ring), float(row["ms"]) / 1e3))
    return runs


def own_training_runs() -> list[tuple[Workload, ParallelConfig, float]]:
    """GPT 1.3B under Megatron-DeepSpeed on 4 H200, with the seconds of an iteration."""
    runs = []
    for row in rows("megatron_deepspeed_meshes.csv", RESULTS):
        config = ParallelConfig(
            tp=int(row["tensor"]),
            ulysses=int(row["ulysses"]),
            ring=int(row["ring"]),
            recompute="full" if row["activation_checkpointing"] == "true" else "none",
            tp_sequence=False,
        )
        seconds = float(row["ms_per_iteration"]) / 1e3
        runs.append((Workload(load_model("gpt-1.3b"), 32768, 2), config, seconds))
    return runs


def own_trainer_runs() -> list[tuple[Workload, ParallelConfig, float, int]]:
    """8 layers of GPT 1.3B and 4 of 6.7B under the trainer on 4 H200 (one sequence a step, ZeRO-1,
    bf16), with the seconds of a step and the bytes of its peak."""
    runs = []
    for row in rows("planner_runs.csv", RESULTS):
        config = ParallelConfig(
            tp=int(row["tp"]),
            ulysses=int(row["ulysses"]),
            ring=int(row["ring"]),
            recompute=row["recompute"],
            tp_sequence=False,
            unsharded_grad_reduce=True,
        )
        model = replace(load_model(row["model"]), layers=int(row["layers"]))
        work = Workload(model, int(row["seq_len"]))
        runs.append((work, config, float(row["seconds"]), int(row["memory_bytes"])))
    return runs
