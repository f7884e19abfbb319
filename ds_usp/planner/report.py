"""What the planner says of one configuration: tables for people, dictionaries for programs."""

from __future__ import annotations

from collections.abc import Sequence

from ds_usp.planner.max_length import MaxLength
from ds_usp.planner.memory import Memory
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.search import GIB
from ds_usp.planner.traffic import (
    AttentionBytes,
    layer_traffic,
    stage_boundary_bytes,
    step_traffic,
)

Json = dict[str, object]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(head))]
    lines = []
    for number, row in enumerate(cells):
        columns = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(columns).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


# ------------------------------------------------------------------ memory


def memory_json(needs: Memory) -> Json:
    """Bytes of each part, ``total_bytes`` and what is not in it."""
    found: Json = {"total_bytes": round(needs.total)}
    found |= {f"{name}_bytes": round(size) for name, size in needs.components().items()}
    found |= {"formula_bytes": round(needs.formula), "offloaded_bytes": round(needs.offloaded)}
    return found | {"pipeline_stage": needs.stage}


def memory_text(needs: Memory) -> str:
    """The parts of one GPU's memory."""
    rows = [(name, f"{size / GIB:.2f}") for name, size in needs.components().items() if size]
    rows.append(("total", f"{needs.total / GIB:.2f}"))
    text = table((f"rank of pipeline stage {needs.stage}", "GiB"), rows)
    if needs.offloaded:
        text += f"\non the host: {needs.offloaded / GIB:.2f} GiB a GPU"
    return text


_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "exchange", "transient")


def max_length_json(end: MaxLength) -> Json:
    """One way to keep less: how far it goes, what it needs there, and what ends it."""
    axes = ("tp", "ulysses", "ring", "pp", "dp")
    found: Json = {axis: getattr(end.config, axis) for axis in axes}
    found |= {
        "recompute": end.config.recompute,
        "offload_ratio": end.config.offload_ratio,
        "seq_len": end.seq_len,
        "limit": end.limit,
    }
    return found | memory_json(end.memory_needed)


def max_length_text(
    model: ModelShape, cluster: str, budget_bytes: float, found: Sequence[MaxLength], searched: bool
) -> str:
    """The ways by how far they go, each with its memory at the end, in GiB.

    Args:
        cluster: its name.
        searched: each way has degrees of its own.
    """
    parts = [name for name in _PARTS if any(end.memory_needed.components()[name] for end in found)]
    rows = [
        (
            end.config.recompute,
            f"{end.config.offload_ratio:.0%}",
            *(_degrees(end.config) if searched else ()),
            f"{end.seq_len:,}" if end.seq_len else "none",
            *(f"{end.memory_needed.components()[name] / GIB:.1f}" for name in parts),
            f"{end.memory_needed.total / GIB:.1f}",
            f"{end.memory_needed.offloaded / GIB:.1f}",
            end.limit,
        )
        for end in sorted(found, key=lambda end: end.seq_len)
    ]
    config = found[0].config
    degrees = f"tp {config.tp}, ulysses {config.ulysses}, ring {config.ring}, pp {config.pp}"
    if searched:
        degrees = "each row with the degrees that go furthest"
    columns = ("ulysses x ring", "tp", "pp") if searched else ()
    head = ("recompute", "offload", *columns, "tokens", *parts, "GPU", "host", "ends with")
    return (
        f"{model.name} on {config.gpus} x {cluster} ({degrees}, dp {config.dp}, "
        f"ZeRO-{config.zero}), {budget_bytes / GIB:.1f} GiB each; GiB of a GPU at the longest "
        f"sequence\n{table(head, rows)}"
    )


def _degrees(config: ParallelConfig) -> tuple[object, ...]:
    return f"{config.ulysses} x {config.ring}", config.tp, config.pp


# ------------------------------------------------------------------ communication


def comm_json(work: Workload, config: ParallelConfig, ranks: Sequence[AttentionBytes]) -> Json:
    """What attention sends per rank and layer, to the byte, and what other axes do in the mean."""
    mean = layer_traffic(work, config)
    step = step_traffic(work, config)
    return {
        "model": work.model.name,
        "seq_len": work.seq_len,
        "tp": config.tp,
        "ulysses": config.ulysses,
        "ring": config.ring,
        "ranks": [
            {
                "rank": rank,
                "forward_bytes": {
                    "all_to_all": sent.all_to_all_forward,
                    "ring_kv": sent.ring_kv_forward,
                    "ring_kv_outer": sent.ring_kv_outer,
                },
                "backward_bytes": {
                    "all_to_all": sent.all_to_all_backward,
                    "ring_kv": sent.ring_kv_backward,
                    "ring_dkv": sent.ring_dkv_backward,
                    "ring_kv_outer": sent.ring_kv_outer,
                    "ring_dkv_outer": sent.ring_dkv_outer,
                },
                "ledger_bytes": sent.ledger(),
                "total_bytes": sent.forward + sent.backward,
            }
            for rank, sent in enumerate(ranks)
        ],
        "tp_forward_bytes": round(mean.tp_forward),
        "tp_backward_bytes": round(mean.tp_backward),
        "stage_boundary_bytes": round(stage_boundary_bytes(work, config)) if config.pp > 1 else 0,
        "gradients_per_step_bytes": round(step.gradients),
        "parameters_per_step_bytes": round(step.parameters),
    }


def comm_text(work: Workload, config: ParallelConfig, ranks: Sequence[AttentionBytes]) -> str:
    """One line a rank, in MiB."""
    outer = any(sent.ring_kv_outer for sent in ranks)
    rows = [
        (
            rank,
            *(
                f"{sent_bytes / 2**20:.2f}"
                for sent_bytes in (
                    sent.all_to_all_forward,
                    sent.ring_kv_forward,
                    sent.all_to_all_backward,
                    sent.ring_kv_backward,
                    sent.ring_dkv_backward,
                    *((sent.ring_kv_outer, sent.ring_dkv_outer) if outer else ()),
                    sent.forward + sent.backward,
                )
            ),
        )
        for rank, sent in enumerate(ranks)
    ]
    head = (
        "rank",
        "fwd all-to-all",
        "fwd ring kv",
        "bwd all-to-all",
        "bwd ring kv",
        "bwd ring dkv",
        *(("each outer kv", "bwd outer dkv") if outer else ()),
    )
    mean = layer_traffic(work, config)
    lines = [
        f"{work.model.name}, {work.seq_len} tokens, tp {config.tp}, ulysses {config.ulysses} x "
        f"ring {config.ring}: MiB that a rank sends in one layer for one micro batch",
        table((*head, "all"), rows),
    ]
    if config.tp > 1:
        there, back = (sent / 2**20 for sent in (mean.tp_forward, mean.tp_backward))
        lines.append(f"tp: {there:.2f} MiB forward, {back:.2f} MiB backward")
    return "\n".join(lines)
