"""What the planner says: tables for people, dictionaries for programs."""

from __future__ import annotations

from collections.abc import Sequence

from ds_usp.planner.explain import helps, why_nothing_fits
from ds_usp.planner.formulas import hardware_flop_per_token, model_flop_per_token
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.longest import Longest
from ds_usp.planner.measured import (
    MeasuredAttention,
    MeasuredLayer,
    layer_rows,
    nearest_tp,
)
from ds_usp.planner.memory import Memory
from ds_usp.planner.models import ModelShape
from ds_usp.planner.search import GIB, Found, Plan
from ds_usp.planner.split import Split, Workload
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
    found |= {f"{name}_bytes": round(size) for name, size in needs.parts().items()}
    found |= {"formula_bytes": round(needs.formula), "offloaded_bytes": round(needs.offloaded)}
    return found | {"pipeline_stage": needs.stage}


def memory_text(needs: Memory) -> str:
    """The parts of one GPU's memory."""
    rows = [(name, f"{size / GIB:.2f}") for name, size in needs.parts().items() if size]
    rows.append(("total", f"{needs.total / GIB:.2f}"))
    text = table((f"rank of pipeline stage {needs.stage}", "GiB"), rows)
    if needs.offloaded:
        text += f"\non the host: {needs.offloaded / GIB:.2f} GiB a GPU"
    return text


_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "exchange", "transient")


def longest_json(end: Longest) -> Json:
    """One way to keep less: how far it goes, what it needs there, and what ends it."""
    found: Json = {
        "recompute": end.split.recompute,
        "offload_ratio": end.split.offload_ratio,
        "seq_len": end.seq_len,
        "limit": end.limit,
    }
    return found | memory_json(end.needs)


def longest_text(
    model: ModelShape, cluster: Cluster, budget_bytes: float, found: Sequence[Longest]
) -> str:
    """The ways by how far they go, each with its memory at the end, in GiB."""
    parts = [name for name in _PARTS if any(end.needs.parts()[name] for end in found)]
    rows = [
        (
            end.split.recompute,
            f"{end.split.offload_ratio:.0%}",
            f"{end.seq_len:,}" if end.seq_len else "none",
            *(f"{end.needs.parts()[name] / GIB:.1f}" for name in parts),
            f"{end.needs.total / GIB:.1f}",
            f"{end.needs.offloaded / GIB:.1f}",
            end.limit,
        )
        for end in sorted(found, key=lambda end: end.seq_len)
    ]
    split = found[0].split
    degrees = f"tp {split.tp}, ulysses {split.ulysses}, ring {split.ring}, pp {split.pp}"
    head = ("recompute", "offload", "tokens", *parts, "GPU", "host", "ends with")
    return (
        f"{model.name} on {split.gpus} x {cluster.name} ({degrees}, dp {split.dp}, "
        f"ZeRO-{split.zero}), {budget_bytes / GIB:.1f} GiB each; GiB of a GPU at the longest "
        f"sequence\n{table(head, rows)}"
    )


# ------------------------------------------------------------------ communication


def comm_json(work: Workload, split: Split, ranks: Sequence[AttentionBytes]) -> Json:
    """What attention sends per rank and layer, to the byte, and what other axes do in the mean."""
    mean = layer_traffic(work, split)
    step = step_traffic(work, split)
    return {
        "model": work.model.name,
        "seq_len": work.seq_len,
        "tp": split.tp,
        "ulysses": split.ulysses,
        "ring": split.ring,
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
        "stage_boundary_bytes": round(stage_boundary_bytes(work, split)) if split.pp > 1 else 0,
        "gradients_per_step_bytes": round(step.gradients),
        "parameters_per_step_bytes": round(step.parameters),
    }


def comm_text(work: Workload, split: Split, ranks: Sequence[AttentionBytes]) -> str:
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
    mean = layer_traffic(work, split)
    lines = [
        f"{work.model.name}, {work.seq_len} tokens, tp {split.tp}, ulysses {split.ulysses} x ring "
        f"{split.ring}: MiB that a rank sends in one layer for one micro batch",
        table((*head, "all"), rows),
    ]
    if split.tp > 1:
        there, back = (sent / 2**20 for sent in (mean.tp_forward, mean.tp_backward))
        lines.append(f"tp: {there:.2f} MiB forward, {back:.2f} MiB backward")
    return "\n".join(lines)


# ------------------------------------------------------------------ plans


def tokens_per_s(found: Found, plan: Plan) -> float:
    """Of one GPU."""
    work = found.work
    return work.global_batch * work.seq_len / plan.split.gpus / plan.time.total


def plan_json(found: Found, plan: Plan) -> Json:
    """One plan."""
    split, model = plan.split, found.work.model
    return {
        "tp": split.tp,
        "ulysses": split.ulysses,
        "ring": split.ring,
        "order": split.order,
        "pp": split.pp,
        "virtual_stages": split.virtual_stages(model),
        "layers_per_virtual_stage": split.chunk_layers(model),
        "dp": split.dp,
        "zero": split.zero,
        "recompute": split.recompute,
        "offload_ratio": split.offload_ratio,
        "micro_batch": split.micro_batch,
        "micro_batches": split.micro_batches(found.work.global_batch),
        "mfu": plan.mfu,
        "step_s": plan.time.total,
        "tokens_per_s_per_gpu": tokens_per_s(found, plan),
        "time_s": plan.time.parts(),
        "memory": memory_json(plan.memory),
        "lacks_bytes": round(plan.lacks_bytes),
    }


def found_json(found: Found, top: int) -> Json:
    """A whole search."""
    work = found.work
    whole: Json = {
        "model": work.model.name,
        "seq_len": work.seq_len,
        "global_batch": work.global_batch,
        "gpus": found.gpus,
        "cluster": found.cluster.name,
        "budget_bytes": round(found.budget_bytes),
        "model_flop_per_token": model_flop_per_token(work.model, work.seq_len, work.documents),
        "warnings": _warnings(found),
        "considered": found.considered,
        "refused": dict(found.refused),
        "plans": [plan_json(found, plan) for plan in found.plans[:top]],
        "too_large": [plan_json(found, plan) for plan in found.too_large[:3]],
    }
    if not found.plans and found.nearest:
        whole["nearest"] = plan_json(found, found.nearest)
        whole["lacks_gib"] = found.nearest.lacks_bytes / GIB
        whole["would_help"] = [
            {"change": what, "saves_bytes": round(saved)}
            for what, saved in helps(found, found.nearest)
        ]
    return whole


def _plan_row(found: Found, plan: Plan) -> tuple[object, ...]:
    split, model = plan.split, found.work.model
    stages = split.virtual_stages(model)
    order = "" if split.order == "ulysses-ring" else " (ring inside)"
    return (
        f"{split.ulysses} x {split.ring}{order}",
        split.tp,
        f"{split.pp}" + (f" x {stages}" if stages > 1 else ""),
        split.dp,
        split.zero,
        split.micro_batch,
        split.recompute,
        f"{split.offload_ratio:.0%}",
        f"{plan.mfu:.1%}",
        f"{plan.time.total:.2f}",
        f"{tokens_per_s(found, plan):.0f}",
        f"{plan.memory.total / GIB:.1f}",
    )


_HEAD = (
    "ulysses x ring",
    "tp",
    "pp",
    "dp",
    "ZeRO",
    "mb",
    "recompute",
    "offload",
    "MFU",
    "step s",
    "tok/s/GPU",
    "GiB",
)


def plans_text(found: Found, top: int) -> str:
    """The best plans and the most instructive refused ones; the best one broken down."""
    if not found.plans:
        return "\n".join(why_nothing_fits(found))
    work, best = found.work, found.plans[0]
    lines = [
        f"{work.model.name}, {work.seq_len} tokens, global batch {work.global_batch}, "
        f"{found.gpus} x {found.cluster.name}, {found.budget_bytes / GIB:.1f} GiB each: "
        f"{found.considered} cuts looked at{_rows_text(found, top)}",
        *(f"warning: {line}" for line in _warnings(found)),
        table(_HEAD, [_plan_row(found, plan) for plan in found.plans[:top]]),
    ]
    larger = [plan for plan in found.too_large[:3] if plan.mfu > best.mfu]
    if larger:
        rows = [
            (*_plan_row(found, plan), f"{plan.lacks_bytes / GIB:.1f} too many") for plan in larger
        ]
        lines += ["", "faster, but too large:", table((*_HEAD, ""), rows)]
    why = ", ".join(f"{why} {count}" for why, count in found.refused.most_common())
    lines += ["", f"refused: {why or 'none'}", "", _breakdown(found, best)]
    return "\n".join(lines)


def _rows_text(found: Found, top: int) -> str:
    """What of the times comes from rows of a profile, and of which listed degrees it has none."""
    cluster, model = found.cluster, found.work.model
    attention = f"attention{_unmeasured(found, top)}"
    served = {
        "exchanges": bool(cluster.exchanges),
        attention: bool(cluster.calls),
        f"layers of {model.name}": nearest_tp(cluster.layers, model, 1) is not None,
        "its head": nearest_tp(cluster.ends, model, 1) is not None,
        "the step": bool(cluster.steps),
    }
    names = ", ".join(name for name, rows in served.items() if rows)
    return f"; measured: {names}" if names else ""


def _unmeasured(found: Found, top: int) -> str:
    """Pairs of the listed plans on which attention was not measured, if it was on any."""
    measured = {(row.ulysses, row.ring) for row in found.cluster.calls}
    listed = {(plan.split.ulysses, plan.split.ring) for plan in found.plans[:top]}
    pairs = ", ".join(f"{ulysses} x {ring}" for ulysses, ring in sorted(listed - measured))
    return f" (not on ulysses x ring {pairs})" if pairs else ""


def _warnings(found: Found) -> list[str]:
    """What a profile knows by half, so that plans are priced without it."""
    cluster, model = found.cluster, found.work.model
    layers = [row for row in cluster.layers if layer_rows([row], model, row.tp)]
    halves = {f"layers of {model.name}": _hosts_known(layers)}
    halves["attention"] = _hosts_known(cluster.calls)
    if len(set(halves.values())) == 1:
        return []
    there, missing = sorted(halves, key=lambda half: not halves[half])
    return [
        f"the profile has host times of {there}, but not of {missing}: what plans wait for their "
        "host is not counted"
    ]


def _hosts_known(rows: Sequence[MeasuredLayer] | Sequence[MeasuredAttention]) -> bool:
    return bool(rows) and all(min(row.forward_host_s, row.backward_host_s) > 0 for row in rows)


def _breakdown(found: Found, plan: Plan) -> str:
    total = plan.time.total
    times = [
        f"{name} {seconds:.3f} s ({seconds / total:.0%})"
        for name, seconds in plan.time.parts().items()
        if seconds > 0
    ]
    sizes = [
        f"{name} {size / GIB:.1f}" for name, size in plan.memory.parts().items() if size >= 2**20
    ]
    model, split = found.work.model, plan.split
    again = hardware_flop_per_token(
        model, found.work.seq_len, split.recompute, found.work.documents
    )
    more = again / model_flop_per_token(model, found.work.seq_len, found.work.documents)
    return "\n".join(
        (
            f"the best: time: {', '.join(times)}",
            f"          memory (GiB): {', '.join(sizes)}",
            f"          hardware FLOPs: {more:.2f} x those of the model",
        )
    )
