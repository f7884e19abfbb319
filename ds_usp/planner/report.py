"""The planner's results: tables for people, dictionaries for programs, and what columns mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ds_usp.planner.explain import infeasibility_report, what_would_help
from ds_usp.planner.formulas import hardware_flop_per_token, model_flop_per_token
from ds_usp.planner.hardware import (
    MeasuredAttention,
    MeasuredLayer,
    embedding_head_rows,
    layer_rows,
)
from ds_usp.planner.memory import Memory
from ds_usp.planner.parallel_config import LENGTH_FLAGS, ParallelConfig, Workload
from ds_usp.planner.search import GIB, Plan, SearchResult
from ds_usp.planner.traffic import (
    AttentionBytes,
    layer_traffic,
    stage_boundary_bytes,
    step_traffic,
)

Json = dict[str, object]
MIB = 2**20
LENGTH_FIELDS = " ".join(LENGTH_FLAGS)

_MEMORY_LEGEND = """\
components of a GPU's memory at its peak (names in tables and in --json):
  weights, gradients, optimizer  after ZeRO has sharded them
  activations  what all layers in flight save for backward, less what is offloaded
  logits       of the last stage, with the loss's fp32 copy; none where a layer's backward is worse
  exchange     send and receive buffers of one attention call (all-to-all and ring)
  transient    while one layer is computed: recomputed activations, weights that ZeRO-3 gathers
  workspace    what no formula counts: libraries, fragmentation (fitted once to published runs)"""
LEGENDS: Mapping[str, str] = MappingProxyType(
    {
        "memory": _MEMORY_LEGEND,
        "max-length": f"""\
columns of the table, beside the components of memory:
  offload    fraction of the saved activations in host memory: as much as the longest sequence needs
  tokens     the longest sequence, in steps of 1024
  GPU, host  GiB of one GPU; GiB of its node's CPU memory for each GPU
  ends with  what limits a longer sequence: GPU memory, host memory, or a rule that it breaks

{_MEMORY_LEGEND}""",
        "plan": f"""\
columns of the table:
  ulysses x ring  ranks that exchange heads x ranks that exchange keys and values; (ring inside):
                  contiguous ranks are those of the ring
  tp, pp, dp      tensor-, pipeline- (x virtual stages) and data-parallel ranks
  mb              micro batch: sequences of a replica at a time
  loss            whole: the full logits are in memory; chunks: never (--usp-loss-chunks)
  recompute       what backward recomputes: gemm-last: norms and activation functions;
                  attention-only: the attention core; attention: all but attention; full: all
  offload         fraction of the saved activations in host memory
  MFU             model FLOP utilization, predicted; rows that end in = are a tie with the best:
                  closer to it than the planner's own error, 6 % from formulas and 3 % from a
                  profile with the model's layers
  step s          predicted seconds of one optimizer step
  GiB             of one GPU, at its peak

{_MEMORY_LEGEND}""",
    }
)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of column -> cell as aligned text, the first column to the left."""
    columns = [[name, *(str(row[name]) for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def attributes(source: object, names: str) -> Json:
    """Name -> value, of names that blanks separate."""
    return {name: getattr(source, name) for name in names.split()}


def _gib(sizes: Mapping[str, float], digits: int, least: float = 1.0) -> dict[str, str]:
    return {name: f"{size / GIB:.{digits}f}" for name, size in sizes.items() if size >= least}


# ------------------------------------------------------------------ memory


def memory_json(memory: Memory) -> Json:
    """Bytes of each component, ``total_bytes`` and what is not in it."""
    sizes = {"total": memory.total, **memory.components()}
    sizes |= {"formula": memory.formula, "offloaded": memory.offloaded}
    sizes["host_states"] = memory.host_states
    rounded: Json = {f"{name}_bytes": round(size) for name, size in sizes.items()}
    return rounded | {"pipeline_stage": memory.stage}


def memory_text(memory: Memory) -> str:
    """The components of one GPU's memory."""
    title = f"rank of pipeline stage {memory.stage}"
    sizes = _gib(memory.components() | {"total": memory.total}, 2)
    text = table([{title: name, "GiB": size} for name, size in sizes.items()])
    if memory.host:
        text += f"\nin host memory: {memory.host / GIB:.2f} GiB a GPU"
    if memory.host_states:
        text += f", {memory.host_states / GIB:.2f} GiB of them optimizer states"
    return text


def degree_cells(config: ParallelConfig, stages: int = 1) -> Json:
    """The table's columns of sequence, tensor and pipeline parallelism.

    Args:
        stages: virtual pipeline stages of a rank.
    """
    order = " (ring inside)" if config.order == "ring-ulysses" else ""
    return {
        "ulysses x ring": f"{config.ulysses} x {config.ring}{order}",
        "tp": config.tp,
        "pp": f"{config.pp}" + (f" x {stages}" if stages > 1 else ""),
    }


# ------------------------------------------------------------------ communication


def comm_json(work: Workload, config: ParallelConfig, ranks: Sequence[AttentionBytes]) -> Json:
    """Bytes that attention sends by rank and layer, exactly; of the other axes in the mean."""
    mean, step = layer_traffic(work, config), step_traffic(work, config)
    rows = [
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
    ]
    return {
        "model": work.model.name,
        "seq_len": work.seq_len,
        **attributes(config, "tp ulysses ring"),
        "ranks": rows,
        "tp_forward_bytes": round(mean.tp_forward),
        "tp_backward_bytes": round(mean.tp_backward),
        "stage_boundary_bytes": round(stage_boundary_bytes(work, config)) if config.pp > 1 else 0,
        "gradients_per_step_bytes": round(step.gradients),
        "parameters_per_step_bytes": round(step.parameters),
    }


def comm_text(work: Workload, config: ParallelConfig, ranks: Sequence[AttentionBytes]) -> str:
    """The table of the bytes that attention sends: a row for each rank, in MiB."""
    double_ring = any(sent.ring_kv_outer for sent in ranks)
    rows = []
    for rank, sent in enumerate(ranks):
        sizes = {
            "fwd all-to-all": sent.all_to_all_forward,
            "fwd ring kv": sent.ring_kv_forward,
            "bwd all-to-all": sent.all_to_all_backward,
            "bwd ring kv": sent.ring_kv_backward,
            "bwd ring dkv": sent.ring_dkv_backward,
        }
        if double_ring:
            outer = {"each outer kv": sent.ring_kv_outer, "bwd outer dkv": sent.ring_dkv_outer}
            sizes |= outer
        sizes["all"] = sent.forward + sent.backward
        rows.append({"rank": rank, **{name: f"{size / MIB:.2f}" for name, size in sizes.items()}})
    text = (
        f"{work.model.name}, {work.seq_len} tokens, tp {config.tp}, ulysses {config.ulysses} x "
        f"ring {config.ring}: MiB that a rank sends in one layer for one micro batch\n{table(rows)}"
    )
    if config.tp > 1:
        mean = layer_traffic(work, config)
        forward, backward = mean.tp_forward / MIB, mean.tp_backward / MIB
        text += f"\ntp: {forward:.2f} MiB forward, {backward:.2f} MiB backward"
    return text


# ------------------------------------------------------------------ plans


def tokens_per_s(result: SearchResult, plan: Plan) -> float:
    """Predicted tokens per second of one GPU."""
    work = result.work
    return work.global_batch * work.seq_len / plan.config.gpus / plan.time.total


def plan_json(result: SearchResult, plan: Plan) -> Json:
    """One plan: its degrees and settings, predicted time, MFU and memory."""
    config, model = plan.config, result.work.model
    return {
        **attributes(config, "tp ulysses ring order pp"),
        "virtual_stages": config.virtual_stages(model),
        "layers_per_virtual_stage": config.chunk_layers(model),
        **attributes(config, "dp zero recompute offload_ratio fused_loss micro_batch"),
        **attributes(config, LENGTH_FIELDS),
        "micro_batches": config.micro_batches(result.work.global_batch),
        "mfu": plan.mfu,
        "step_s": plan.time.total,
        "tokens_per_s_per_gpu": tokens_per_s(result, plan),
        "time_s": plan.time.components(),
        "memory": memory_json(plan.memory),
        "lacks_bytes": round(plan.over_budget_bytes),
    }


def search_result_json(result: SearchResult, top: int) -> Json:
    """The workload, what was searched and refused, and the best plans."""
    work, closest = result.work, result.closest_to_fitting
    content: Json = {
        "model": work.model.name,
        **attributes(work, "seq_len global_batch"),
        "gpus": result.gpus,
        "cluster": result.cluster.name,
        "budget_bytes": round(result.budget_bytes),
        "model_flop_per_token": model_flop_per_token(work.model, work.seq_len, work.documents),
        "warnings": _warnings(result),
        "considered": result.considered,
        "refused": dict(result.refused),
        "tie_within": result.stated_error,
        "plans": [plan_json(result, plan) for plan in result.plans[:top]],
        "too_large": [plan_json(result, plan) for plan in result.over_memory[:3]],
    }
    if not result.plans and closest:
        changes = what_would_help(result, closest)
        content["nearest"] = plan_json(result, closest)
        content["lacks_gib"] = closest.over_budget_bytes / GIB
        content["would_help"] = [
            {"change": change, "saves_bytes": round(saved)} for change, saved in changes
        ]
    return content


def _plan_cells(result: SearchResult, plan: Plan, mark: str) -> Json:
    """A plan's row of the table, by column; ``mark`` is its last cell."""
    config = plan.config
    return {
        **degree_cells(config, config.virtual_stages(result.work.model)),
        "dp": config.dp,
        "ZeRO": config.zero,
        "mb": config.micro_batch,
        "loss": "chunks" if config.fused_loss else "whole",
        "recompute": config.recompute,
        "offload": f"{config.offload_ratio:.0%}",
        "MFU": f"{plan.mfu:.1%}",
        "step s": f"{plan.time.total:.2f}",
        "tok/s/GPU": f"{tokens_per_s(result, plan):.0f}",
        "GiB": f"{plan.memory.total / GIB:.1f}",
        "": mark,
    }


def plans_text(result: SearchResult, top: int) -> str:
    """The best plans and the fastest that do not fit; the best one by component."""
    if not result.plans:
        return "\n".join(infeasibility_report(result))
    work, best, plans = result.work, result.plans[0], result.plans[:top]
    ties = [result.is_tie(plan) for plan in plans]
    tied = sum(ties) > 1  # the best one alone is no tie
    lines = [
        f"{work.model.name}, {work.seq_len} tokens, global batch {work.global_batch}, "
        f"{result.gpus} x {result.cluster.name}, {result.budget_bytes / GIB:.1f} GiB each: "
        f"{result.considered} configurations considered{_profiled_text(result, top)}",
        *(f"warning: {line}" for line in _warnings(result)),
        table(
            [
                _plan_cells(result, plan, "=" if tie and tied else "")
                for plan, tie in zip(plans, ties, strict=True)
            ]
        ),
    ]
    if tied:
        lines.append(
            f"= {sum(ties)} of the {len(plans)} are a tie: less than {result.stated_error:.0%} "
            "apart, the planner's own error; measure them, or take the simplest"
        )
    over_memory = [plan for plan in result.over_memory[:3] if plan.mfu > best.mfu]
    if over_memory:
        cells = [
            _plan_cells(result, plan, f"{plan.over_budget_bytes / GIB:.1f} too many")
            for plan in over_memory
        ]
        lines += ["", "faster, but too large:", table(cells)]
    left_out = ", ".join(f"{rule} ({count})" for rule, count in result.refused.most_common())
    return "\n".join(
        [*lines, "", f"not listed: {left_out or 'none'}", "", _breakdown(result, best)]
    )


def _breakdown(result: SearchResult, plan: Plan) -> str:
    """The plan's step time and memory by component, and its FLOPs with recomputation."""
    work, total = result.work, plan.time.total
    times = (
        f"{name} {seconds:.3f} s ({seconds / total:.0%})"
        for name, seconds in plan.time.components().items()
        if seconds > 0
    )
    sizes = _gib(plan.memory.components(), 1, least=MIB)
    flop = model_flop_per_token(work.model, work.seq_len, work.documents)
    config = plan.config
    executed = hardware_flop_per_token(
        work.model,
        work.seq_len,
        config.recompute,
        work.documents,
        mlp_chunks=config.mlp_chunks,
        checkpoint_layers=config.checkpoint_layers,
    )
    return (
        f"the best: time: {', '.join(times)}\n"
        f"          memory (GiB): {', '.join(f'{name} {size}' for name, size in sizes.items())}\n"
        f"          hardware FLOPs: {executed / flop:.2f} x those of the model"
    )


def _profiled_text(result: SearchResult, top: int) -> str:
    """Which times come from a profile's rows, and listed ulysses x ring for which it has none."""
    cluster, model = result.cluster, result.work.model
    profiled = {(row.ulysses, row.ring) for row in cluster.calls}
    listed = {(plan.config.ulysses, plan.config.ring) for plan in result.plans[:top]}
    pairs = ", ".join(f"{ulysses} x {ring}" for ulysses, ring in sorted(listed - profiled))
    rows: dict[str, Sequence[object]] = {
        "exchanges": cluster.exchanges,
        "attention" + (f" (not on ulysses x ring {pairs})" if pairs else ""): cluster.calls,
        f"layers of {model.name}": layer_rows(cluster.layers, model),
        "its head": embedding_head_rows(cluster.embedding_heads, model),
        "the step": cluster.steps,
    }
    names = ", ".join(name for name, some in rows.items() if some)
    return f"; measured: {names}" if names else ""


def _warnings(result: SearchResult) -> list[str]:
    """Launch times that a profile has for layers or for attention alone, which are then unused."""
    model = result.work.model
    layers = f"layers of {model.name}", layer_rows(result.cluster.layers, model)
    attention = "attention", result.cluster.calls
    known = {name: _launch_times_known(rows) for name, rows in (layers, attention)}
    if len(set(known.values())) == 1:
        return []
    present, missing = sorted(known, key=lambda name: not known[name])
    return [
        f"the profile has launch times of {present}, but not of {missing}: GPU idle time on "
        "kernel launches is not counted"
    ]


def _launch_times_known(rows: Iterable[MeasuredLayer] | Iterable[MeasuredAttention]) -> bool:
    known = [min(row.forward_host_s, row.backward_host_s) > 0 for row in rows]
    return bool(known) and all(known)
