"""Why a plan is the best one, and what would help where none fits: from numbers, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_usp.planner.attention_time import double_ring
from ds_usp.planner.layer_time import layer_time
from ds_usp.planner.memory import logits_bytes, memory
from ds_usp.planner.parallel_config import Split, impossible
from ds_usp.planner.search import GIB, Found, Plan
from ds_usp.planner.topology import group_of


def explain(found: Found) -> list[str]:
    """One line for each choice of the best plan: the best other value, and what it would cost."""
    if not found.plans:
        return why_nothing_fits(found)
    best = found.plans[0]
    lines = [f"{best.split}: {best.mfu:.1%} MFU, {best.memory.total / GIB:.1f} GiB of each GPU"]
    lines += [line for axis in ("tp", "pp", "dp") for line in _choice(found, best, axis)]
    lines += list(_sequence(found, best))
    lines += [line for axis in ("zero", "recompute") for line in _choice(found, best, axis)]
    if best.split.offload_ratio:
        lines.append(
            f"offload {best.split.offload_ratio:.0%}: as much as it takes to fit; "
            f"{best.memory.offloaded / GIB:.1f} GiB of each GPU's activations go to the host"
        )
    if best.split.fused_loss and not found.loss_given:
        size = logits_bytes(found.work, best.split.but(fused_loss=False)) / GIB
        lines.append(f"loss in chunks: all logits at once would take {size:.1f} GiB of each GPU")
    lines += list(_faster_but_too_large(found, best))
    return list(dict.fromkeys(lines))  # plans that differ in what no line says are one line


def _choice(found: Found, best: Plan, axis: str) -> Iterator[str]:
    """A value of the best plan against the best plan with another one, where it was free."""
    if axis in found.given:
        return
    mine = getattr(best.split, axis)
    others = [
        (value, plan)
        for (name, value), plan in found.best_with.items()
        if name == axis and value != mine
    ]
    if others:
        value, plan = max(others, key=lambda other: other[1].mfu)
        yield f"{axis} {mine}, because {axis} {value} {_against(found, best, plan)} ({plan.split})"
    elif mine != 1 and axis in ("tp", "pp", "dp"):
        yield f"{axis} {mine}: nothing else fits"


def _against(found: Found, best: Plan, other: Plan) -> str:
    """What another plan reaches, and where it loses most."""
    if other.mfu >= best.mfu - 5e-5:
        return "is as fast and less simple"
    worst, more = max(_losses(found, best, other).items(), key=lambda item: item[1])
    return f"reaches {other.mfu:.1%} MFU: {more:.2f} s more for {_NAMES[worst]}"


def _losses(found: Found, best: Plan, other: Plan) -> dict[str, float]:
    """Seconds of a step that each part takes more, the layers' time divided into its own parts."""
    sums: list[dict[str, float]] = []
    for plan in (best, other):
        layer = layer_time(found.cluster, found.work, plan.split)
        times = plan.time.layers / layer.total
        parts = {name: value for name, value in plan.time.parts().items() if name != "layers"}
        inside = ("matrices", "attention", "elementwise", "tp", "sp", "recompute")
        sums.append(parts | {name: times * getattr(layer, name) for name in inside})
    ours, theirs = sums
    return {name: theirs[name] - ours[name] for name in ours}


_NAMES: Mapping[str, str] = {
    "matrices": "matrix products",
    "attention": "attention kernels",
    "elementwise": "norms, activation functions and sums over blocks",
    "tp": "tensor-parallel exchanges that nothing hides",
    "sp": "sequence-parallel exchanges that nothing hides",
    "recompute": "what is computed again",
    "head": "the output head",
    "host": "waiting for the host",
    "bubble": "the pipeline's bubble",
    "pipeline": "sending between stages",
    "gradients": "gradients and parameters",
    "offload": "copies to the host",
    "optimizer": "the optimizer",
}


def _sequence(found: Found, best: Plan) -> Iterator[str]:
    """Ulysses and ring: where they run, what bounds them, what the next best pair reaches."""
    split, cluster = best.split, found.cluster
    if split.sp == 1:
        yield "no sequence parallelism: dp alone uses the GPUs, and nothing has to be exchanged"
        return
    for axis in ("ulysses", "ring"):
        degree = getattr(split, axis)
        if degree == 1:
            continue
        group = group_of(split, axis)
        span = (group.size - 1) * group.stride + 1
        where = "inside a node" if span <= cluster.gpus_per_node else "across nodes"
        inner = double_ring(cluster, found.work, split) if axis == "ring" else None
        once = f", a block once for the {inner} ring ranks of a node" if inner else ""
        yield f"{axis} {degree} {where}{once}" + _bound(found, split, axis)
    for axis in ("ulysses", "ring", "order"):
        yield from _choice(found, best, axis)


def _bound(found: Found, split: Split, axis: str) -> str:
    """What keeps a degree from being larger, if heads do."""
    model = found.work.model
    heads, kv = model.heads // split.tp, model.kv_heads // split.tp
    if axis == "ulysses" and split.ulysses == heads:
        return f": all {heads} heads of a tensor-parallel rank"
    if axis == "ring" and split.ulysses >= kv:
        return (
            f" because {model.kv_heads} KV heads / tp {split.tp} leave ulysses {kv}; beyond that "
            "KV heads are sent to several ranks"
        )
    return ""


def _faster_but_too_large(found: Found, best: Plan) -> Iterator[str]:
    for plan in found.too_large[:2]:
        if plan.mfu > best.mfu:
            yield (
                f"{plan.mfu:.1%} MFU with {plan.split} would need "
                f"{plan.lacks_bytes / GIB:.1f} GiB more"
            )


# ------------------------------------------------------------------ nothing fits


def why_nothing_fits(found: Found) -> list[str]:
    """The nearest plan, what it lacks, and what would help."""
    near = found.nearest
    if near is None:
        most = ", ".join(f"{why} ({count})" for why, count in found.refused.most_common(3))
        return [f"no configuration of {found.gpus} GPUs is possible: {most}"]
    budget = found.budget_bytes / GIB
    lines = [
        f"nothing fits into {budget:.1f} GiB a GPU. The nearest plan lacks "
        f"{near.lacks_bytes / GIB:.1f} GiB: {near.split}",
    ]
    on_hosts = near.memory.offloaded
    if on_hosts and not found.cluster.hosts_hold(on_hosts, found.gpus):
        lines.append(
            f"nor do the hosts hold the {on_hosts / GIB:.1f} GiB that each of its GPUs offloads"
        )
    for what, saved in helps(found, near):
        enough = "enough" if saved >= near.lacks_bytes else "not enough alone"
        lines.append(f"would help: {what} saves {saved / GIB:.1f} GiB ({enough})")
    return lines


def helps(found: Found, near: Plan) -> list[tuple[str, float]]:
    """Changes that save memory, with the bytes that each saves, the most helpful first."""
    split, work = near.split, found.work
    changes: list[tuple[str, Split]] = [
        (f"twice the GPUs, ring {2 * split.ring}", split.but(ring=2 * split.ring)),
        (f"four times the GPUs, ring {4 * split.ring}", split.but(ring=4 * split.ring)),
        ("offload of all activations", split.but(offload_ratio=1.0, offload_unit="layer")),
        ("full recomputation", split.but(recompute="full")),
        ("ZeRO-3", split.but(zero=3)),
        ("a loss that never holds all logits", split.but(fused_loss=True)),
        ("gradients in bf16", split.but(grad_bytes=2)),
    ]
    if split.micro_batch > 1:
        changes.append(("micro batch 1", split.but(micro_batch=1)))
    needs = near.memory.total
    saved = [
        (what, needs - memory(work, changed, found.cluster.workspace_bytes).total)
        for what, changed in changes
        if changed != split and impossible(work, changed) is None
    ]
    return sorted((item for item in saved if item[1] > 2**20), key=lambda item: -item[1])
