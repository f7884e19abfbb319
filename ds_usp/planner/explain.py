"""Why a plan is the best one: of each choice the best alternative, and what it would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_usp.planner.memory import logits_bytes
from ds_usp.planner.parallel_config import ParallelConfig
from ds_usp.planner.report import infeasibility_report
from ds_usp.planner.search import GIB, Plan, SearchResult
from ds_usp.planner.step_time import layer_time
from ds_usp.planner.traffic import group_of


def explain(result: SearchResult) -> list[str]:
    """Why the best plan is the best: for each axis the best alternative, and what it would cost."""
    if not result.plans:
        return infeasibility_report(result)
    best = result.plans[0]
    lines = [f"{best.config}: {best.mfu:.1%} MFU, {best.memory.total / GIB:.1f} GiB of each GPU"]
    lines += [line for axis in ("tp", "pp", "dp") for line in _choice(result, best, axis)]
    lines += list(_sequence_parallel_lines(result, best))
    lines += [line for axis in ("zero", "recompute") for line in _choice(result, best, axis)]
    if best.config.offload_ratio:
        lines.append(
            f"offload {best.config.offload_ratio:.0%}: as much as it takes to fit; "
            f"{best.memory.offloaded / GIB:.1f} GiB of each GPU's activations go to host memory"
        )
    if best.config.fused_loss and not result.fused_loss_fixed:
        size = logits_bytes(result.work, best.config.replace(fused_loss=False)) / GIB
        lines.append(f"chunked loss: the full logits would take {size:.1f} GiB of each GPU")
    if result.added_length_settings:
        settings = ", ".join(best.config.length_words())
        lines.append(
            f"{settings}: nothing fits without; {best.memory.host / GIB:.1f} GiB of each GPU's "
            "states and activations wait in host memory"
        )
    lines += list(_faster_over_memory(result, best))
    return list(dict.fromkeys(lines))  # plans may differ in what no line names


def _choice(result: SearchResult, best: Plan, axis: str) -> Iterator[str]:
    """A value of the best plan against the best plan with another one, where it was free."""
    if axis in result.fixed:
        return
    chosen = getattr(best.config, axis)
    alternatives = [
        (value, plan)
        for (name, value), plan in result.best_with.items()
        if name == axis and value != chosen
    ]
    if alternatives:
        value, plan = max(alternatives, key=lambda alternative: alternative[1].mfu)
        why = f"{_against(result, best, plan)} ({plan.config})"
        yield f"{axis} {chosen}, because {axis} {value} {why}"
    elif chosen != 1 and axis in ("tp", "pp", "dp"):
        yield f"{axis} {chosen}: nothing else fits"


def _against(result: SearchResult, best: Plan, alternative: Plan) -> str:
    """The alternative's MFU, and the component that takes it most time more than the best plan."""
    if alternative.mfu >= best.mfu - 5e-5:
        return "is as fast and less simple"
    best_s, other_s = (_component_seconds(result, plan) for plan in (best, alternative))
    worst, more = max(((x, other_s[x] - best_s[x]) for x in best_s), key=lambda item: item[1])
    return f"reaches {alternative.mfu:.1%} MFU: {more:.2f} s more for {_NAMES[worst]}"


def _component_seconds(result: SearchResult, plan: Plan) -> dict[str, float]:
    layer, step = layer_time(result.cluster, result.work, plan.config), plan.time.components()
    scale = step.pop("layers") / layer.total
    return step | {name: scale * seconds for name, seconds in layer.components().items()}


_NAMES: Mapping[str, str] = {
    "matrices": "matrix products",
    "attention": "attention kernels",
    "recurrence": "kernels that carry a state",
    "elementwise": "norms, activation functions and merges of partial attention",
    "tp": "exposed tensor-parallel exchanges",
    "sp": "exposed sequence-parallel exchanges",
    "recompute": "recomputation",
    "head": "the output head",
    "bubble": "the pipeline bubble",
    "pipeline": "transfers between stages",
    "gradients": "gradient and parameter exchanges",
    "offload": "copies to host memory",
    "optimizer": "the optimizer",
}


def _sequence_parallel_lines(result: SearchResult, best: Plan) -> Iterator[str]:
    """Ulysses and ring: where they run, what limits them, what the next best pair reaches."""
    config, cluster = best.config, result.cluster
    if config.sp == 1:
        yield "no sequence parallelism: dp alone uses the GPUs, attention exchanges nothing"
        return
    for axis in ("ulysses", "ring"):
        degree = getattr(config, axis)
        if degree == 1:
            continue
        group = group_of(config, axis)
        span = (group.size - 1) * group.stride + 1
        where = "inside a node" if span <= cluster.gpus_per_node else "across nodes"
        yield f"{axis} {degree} {where}" + _limit(result, config, axis)
    for axis in ("ulysses", "ring", "order"):
        yield from _choice(result, best, axis)


def _limit(result: SearchResult, config: ParallelConfig, axis: str) -> str:
    """A clause about the limit that the model's heads set to a degree; "" if they set none."""
    model = result.work.model
    heads, kv = model.heads // config.tp, model.kv_heads // config.tp
    if axis == "ulysses" and config.ulysses == heads:
        return f": all {heads} heads of a tensor-parallel rank"
    if axis == "ring" and config.ulysses >= kv:
        return (
            f" because {model.kv_heads} KV heads / tp {config.tp} leave ulysses {kv}; beyond that "
            "KV heads are sent to several ranks"
        )
    return ""


def _faster_over_memory(result: SearchResult, best: Plan) -> Iterator[str]:
    """A line for each of the two fastest plans that do not fit, if faster than the best plan."""
    for plan in result.over_memory[:2]:
        if plan.mfu > best.mfu:
            yield (
                f"{plan.mfu:.1%} MFU with {plan.config} would need "
                f"{plan.over_budget_bytes / GIB:.1f} GiB more"
            )
