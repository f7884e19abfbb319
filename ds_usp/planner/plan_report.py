"""What the planner says of a search: a table for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence

from ds_usp.planner.explain import helps, why_nothing_fits
from ds_usp.planner.formulas import hardware_flop_per_token, model_flop_per_token
from ds_usp.planner.profile_rows import (
    MeasuredAttention,
    MeasuredLayer,
    layer_rows,
    nearest_tp,
)
from ds_usp.planner.report import Json, memory_json, table
from ds_usp.planner.search import GIB, Found, Plan
from ds_usp.planner.ties import stated_error, ties


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
        "fused_loss": split.fused_loss,
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
        "tie_within": stated_error(found),
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
        "chunks" if split.fused_loss else "whole",
        split.recompute,
        f"{split.offload_ratio:.0%}",
        f"{plan.mfu:.1%}",
        f"{plan.time.total:.2f}",
        f"{tokens_per_s(found, plan):.0f}",
        f"{plan.memory.total / GIB:.1f}",
    )


def _plan_rows(found: Found, top: int) -> list[tuple[object, ...]]:
    """The best plans; those that tie with the first one are marked."""
    plans = found.plans[:top]
    marks = [n > 0 and ties(found, plan) for n, plan in enumerate(plans)]
    marks[0] = any(marks)
    return [
        (*_plan_row(found, plan), "=" if tie else "")
        for plan, tie in zip(plans, marks, strict=True)
    ]


def _ties_text(found: Found, top: int) -> list[str]:
    """How many of the listed plans the planner cannot tell from the best one, and by what error."""
    listed, error = found.plans[:top], stated_error(found)
    equal = sum(ties(found, plan) for plan in listed)
    if equal < 2:
        return []
    return [
        f"= {equal} of the {len(listed)} are a tie: less than {error:.0%} apart, the planner's own "
        "error; measure them, or take the simplest"
    ]


_HEAD = (
    "ulysses x ring",
    "tp",
    "pp",
    "dp",
    "ZeRO",
    "mb",
    "loss",
    "recompute",
    "offload",
    "MFU",
    "step s",
    "tok/s/GPU",
    "GiB",
)


def plans_text(found: Found, top: int) -> str:
    """The best plans and the fastest that do not fit; the best one broken down."""
    if not found.plans:
        return "\n".join(why_nothing_fits(found))
    work, best = found.work, found.plans[0]
    lines = [
        f"{work.model.name}, {work.seq_len} tokens, global batch {work.global_batch}, "
        f"{found.gpus} x {found.cluster.name}, {found.budget_bytes / GIB:.1f} GiB each: "
        f"{found.considered} configurations looked at{_rows_text(found, top)}",
        *(f"warning: {line}" for line in _warnings(found)),
        table((*_HEAD, ""), _plan_rows(found, top)),
        *_ties_text(found, top),
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
