"""What the planner says of a search: a table for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence

from ds_usp.planner.explain import infeasibility_report, what_would_help
from ds_usp.planner.formulas import hardware_flop_per_token, model_flop_per_token
from ds_usp.planner.profile_rows import (
    MeasuredAttention,
    MeasuredLayer,
    layer_rows,
    nearest_tp,
)
from ds_usp.planner.report import Json, memory_json, table
from ds_usp.planner.search import GIB, Plan, SearchResult
from ds_usp.planner.ties import stated_error, ties


def tokens_per_s(result: SearchResult, plan: Plan) -> float:
    """Of one GPU."""
    work = result.work
    return work.global_batch * work.seq_len / plan.config.gpus / plan.time.total


def plan_json(result: SearchResult, plan: Plan) -> Json:
    """One plan."""
    config, model = plan.config, result.work.model
    return {
        "tp": config.tp,
        "ulysses": config.ulysses,
        "ring": config.ring,
        "order": config.order,
        "pp": config.pp,
        "virtual_stages": config.virtual_stages(model),
        "layers_per_virtual_stage": config.chunk_layers(model),
        "dp": config.dp,
        "zero": config.zero,
        "recompute": config.recompute,
        "offload_ratio": config.offload_ratio,
        "fused_loss": config.fused_loss,
        "micro_batch": config.micro_batch,
        "micro_batches": config.micro_batches(result.work.global_batch),
        "mfu": plan.mfu,
        "step_s": plan.time.total,
        "tokens_per_s_per_gpu": tokens_per_s(result, plan),
        "time_s": plan.time.components(),
        "memory": memory_json(plan.memory),
        "lacks_bytes": round(plan.over_budget_bytes),
    }


def search_result_json(result: SearchResult, top: int) -> Json:
    """A whole search."""
    work = result.work
    whole: Json = {
        "model": work.model.name,
        "seq_len": work.seq_len,
        "global_batch": work.global_batch,
        "gpus": result.gpus,
        "cluster": result.cluster.name,
        "budget_bytes": round(result.budget_bytes),
        "model_flop_per_token": model_flop_per_token(work.model, work.seq_len, work.documents),
        "warnings": _warnings(result),
        "considered": result.considered,
        "refused": dict(result.refused),
        "tie_within": stated_error(result),
        "plans": [plan_json(result, plan) for plan in result.plans[:top]],
        "too_large": [plan_json(result, plan) for plan in result.over_memory[:3]],
    }
    if not result.plans and result.closest_to_fitting:
        whole["nearest"] = plan_json(result, result.closest_to_fitting)
        whole["lacks_gib"] = result.closest_to_fitting.over_budget_bytes / GIB
        whole["would_help"] = [
            {"change": what, "saves_bytes": round(saved)}
            for what, saved in what_would_help(result, result.closest_to_fitting)
        ]
    return whole


def _plan_row(result: SearchResult, plan: Plan) -> tuple[object, ...]:
    config, model = plan.config, result.work.model
    stages = config.virtual_stages(model)
    order = "" if config.order == "ulysses-ring" else " (ring inside)"
    return (
        f"{config.ulysses} x {config.ring}{order}",
        config.tp,
        f"{config.pp}" + (f" x {stages}" if stages > 1 else ""),
        config.dp,
        config.zero,
        config.micro_batch,
        "chunks" if config.fused_loss else "whole",
        config.recompute,
        f"{config.offload_ratio:.0%}",
        f"{plan.mfu:.1%}",
        f"{plan.time.total:.2f}",
        f"{tokens_per_s(result, plan):.0f}",
        f"{plan.memory.total / GIB:.1f}",
    )


def _plan_rows(result: SearchResult, top: int) -> list[tuple[object, ...]]:
    """The best plans; those that tie with the first one are marked."""
    plans = result.plans[:top]
    marks = [n > 0 and ties(result, plan) for n, plan in enumerate(plans)]
    marks[0] = any(marks)
    return [
        (*_plan_row(result, plan), "=" if tie else "")
        for plan, tie in zip(plans, marks, strict=True)
    ]


def _ties_text(result: SearchResult, top: int) -> list[str]:
    """How many of the listed plans the planner cannot tell from the best one, and by what error."""
    listed, error = result.plans[:top], stated_error(result)
    equal = sum(ties(result, plan) for plan in listed)
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


def plans_text(result: SearchResult, top: int) -> str:
    """The best plans and the fastest that do not fit; the best one broken down."""
    if not result.plans:
        return "\n".join(infeasibility_report(result))
    work, best = result.work, result.plans[0]
    lines = [
        f"{work.model.name}, {work.seq_len} tokens, global batch {work.global_batch}, "
        f"{result.gpus} x {result.cluster.name}, {result.budget_bytes / GIB:.1f} GiB each: "
        f"{result.considered} configurations looked at{_rows_text(result, top)}",
        *(f"warning: {line}" for line in _warnings(result)),
        table((*_HEAD, ""), _plan_rows(result, top)),
        *_ties_text(result, top),
    ]
    larger = [plan for plan in result.over_memory[:3] if plan.mfu > best.mfu]
    if larger:
        rows = [
            (*_plan_row(result, plan), f"{plan.over_budget_bytes / GIB:.1f} too many")
            for plan in larger
        ]
        lines += ["", "faster, but too large:", table((*_HEAD, ""), rows)]
    why = ", ".join(f"{why} {count}" for why, count in result.refused.most_common())
    lines += ["", f"refused: {why or 'none'}", "", _breakdown(result, best)]
    return "\n".join(lines)


def _rows_text(result: SearchResult, top: int) -> str:
    """What of the times comes from rows of a profile, and of which listed degrees it has none."""
    cluster, model = result.cluster, result.work.model
    attention = f"attention{_unmeasured(result, top)}"
    served = {
        "exchanges": bool(cluster.exchanges),
        attention: bool(cluster.calls),
        f"layers of {model.name}": nearest_tp(cluster.layers, model, 1) is not None,
        "its head": nearest_tp(cluster.ends, model, 1) is not None,
        "the step": bool(cluster.steps),
    }
    names = ", ".join(name for name, rows in served.items() if rows)
    return f"; measured: {names}" if names else ""


def _unmeasured(result: SearchResult, top: int) -> str:
    """Pairs of the listed plans on which attention was not measured, if it was on any."""
    measured = {(row.ulysses, row.ring) for row in result.cluster.calls}
    listed = {(plan.config.ulysses, plan.config.ring) for plan in result.plans[:top]}
    pairs = ", ".join(f"{ulysses} x {ring}" for ulysses, ring in sorted(listed - measured))
    return f" (not on ulysses x ring {pairs})" if pairs else ""


def _warnings(result: SearchResult) -> list[str]:
    """What a profile knows by half, so that plans are priced without it."""
    cluster, model = result.cluster, result.work.model
    layers = [row for row in cluster.layers if layer_rows([row], model, row.tp)]
    halves = {f"layers of {model.name}": _launch_times_known(layers)}
    halves["attention"] = _launch_times_known(cluster.calls)
    if len(set(halves.values())) == 1:
        return []
    there, missing = sorted(halves, key=lambda half: not halves[half])
    return [
        f"the profile has host times of {there}, but not of {missing}: what plans wait for their "
        "host is not counted"
    ]


def _launch_times_known(rows: Sequence[MeasuredLayer] | Sequence[MeasuredAttention]) -> bool:
    return bool(rows) and all(min(row.forward_host_s, row.backward_host_s) > 0 for row in rows)


def _breakdown(result: SearchResult, plan: Plan) -> str:
    total = plan.time.total
    times = [
        f"{name} {seconds:.3f} s ({seconds / total:.0%})"
        for name, seconds in plan.time.components().items()
        if seconds > 0
    ]
    sizes = [
        f"{name} {size / GIB:.1f}"
        for name, size in plan.memory.components().items()
        if size >= 2**20
    ]
    model, config = result.work.model, plan.config
    again = hardware_flop_per_token(
        model, result.work.seq_len, config.recompute, result.work.documents
    )
    more = again / model_flop_per_token(model, result.work.seq_len, result.work.documents)
    return "\n".join(
        (
            f"the best: time: {', '.join(times)}",
            f"          memory (GiB): {', '.join(sizes)}",
            f"          hardware FLOPs: {more:.2f} x those of the model",
        )
    )
