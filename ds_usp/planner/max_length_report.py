"""How long a sequence may be, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from ds_usp.planner.hardware import Cluster
from ds_usp.planner.max_length import MaxLength, needs_at
from ds_usp.planner.models import ModelShape
from ds_usp.planner.report import LENGTH_FIELDS, Json, attributes, degree_cells, memory_json, table
from ds_usp.planner.search import GIB


def max_length_json(row: MaxLength) -> Json:
    """One way to save memory: its longest sequence, what that needs, and what ends it."""
    config = attributes(row.config, "tp ulysses ring pp dp recompute offload_ratio fused_loss")
    config |= attributes(row.config, LENGTH_FIELDS) | ({"added": row.added} if row.added else {})
    return config | attributes(row, "seq_len limit") | memory_json(row.memory_needed)


def max_length_text(
    model: ModelShape, cluster: str, budget_bytes: float, rows: Sequence[MaxLength], searched: bool
) -> str:
    """A row for each way to save memory by its longest sequence; components in GiB.

    Args:
        cluster: its name.
        searched: each row has degrees of its own.
    """
    config = rows[0].config
    degrees = f"tp {config.tp}, ulysses {config.ulysses}, ring {config.ring}, pp {config.pp}"
    if searched:
        degrees = "each row with the degrees that go furthest"
    ascending = sorted(rows, key=lambda row: row.seq_len)
    first = [
        {
            "recompute": row.config.recompute,
            "offload": f"{row.config.offload_ratio:.0%}",
            **(degree_cells(row.config) if searched else {}),
        }
        for row in ascending
    ]
    cells = [more | end for more, end in zip(first, _end_cells(ascending), strict=True)]
    return (
        f"{model.name} on {config.gpus} x {cluster} ({degrees}, dp {config.dp}, "
        f"ZeRO-{config.zero}), {budget_bytes / GIB:.1f} GiB each; GiB of a GPU at the longest "
        f"sequence\n{table(cells)}"
    )


def _end_cells(rows: Sequence[MaxLength]) -> list[Json]:
    """The columns of each row about its longest sequence; components that are in none are left
    out."""
    components = [row.memory_needed.components() for row in rows]
    shown = [n for n in components[0] if n != "workspace" and any(row[n] for row in components)]
    return [
        {
            "tokens": f"{row.seq_len:,}" if row.seq_len else "none",
            **{name: f"{row.memory_needed.components()[name] / GIB:.1f}" for name in shown},
            "GPU": f"{row.memory_needed.total / GIB:.1f}",
            "host": f"{row.memory_needed.host / GIB:.1f}",
            "ends with": row.limit,
        }
        for row in rows
    ]


def length_steps_text(
    model: ModelShape,
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
    steps: Sequence[MaxLength],
) -> str:
    """The settings that make the longest sequence longer, one more in each row, and what twice the
    length of the last one would take."""
    last = steps[-1]
    if not last.seq_len:
        return ""
    ends = _end_cells(steps)
    cells = [{"+ setting": row.added} | end for row, end in zip(steps, ends, strict=True)]
    config, twice = last.config, 2 * last.seq_len
    needs = needs_at(model, last, twice, workspace_bytes)
    host = cluster.host_budget_bytes(config.gpus)
    loss = ", loss in chunks" if config.fused_loss else ""
    return (
        f"\nsettings that make it longer, each kept in the rows below it\n{table(cells)}\n"
        f"the last row is {config}{loss}\n{last.limit} ends it: {twice:,} tokens would take "
        f"{needs.total / GIB:.1f} GiB of a GPU that has {budget_bytes / GIB:.1f}, and "
        f"{needs.host / GIB:.1f} GiB of host memory for each GPU, which has {host / GIB:.1f}"
    )
