"""The answer to "how do I run this?": one plan, why it and not another, and the lines that run it.

What is recommended, marked in a table and written as lines is one object: ``ds-usp plan`` prints
it, and ``choose_degree.py`` its reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import counted
from ds_usp.planner.degree_rule import RULE, rule_degrees
from ds_usp.planner.emit import emit
from ds_usp.planner.formulas import model_flop_per_token
from ds_usp.planner.memory import memory
from ds_usp.planner.parallel_config import infeasible_reason
from ds_usp.planner.report import PLANS, Json, Table, degree_columns, plan_row
from ds_usp.planner.search import (
    GIB,
    OUTCOMES,
    PREFERENCES,
    STATED_ERROR,
    Plan,
    SearchResult,
    preference,
)
from ds_usp.planner.step_time import layer_time


@dataclass(frozen=True)
class Answer:
    """One recommended plan.

    Args:
        plan: None: nothing fits, and ``why`` says what would help.
        why: lines: the degrees, and at most three alternatives that differ in kind.
        twice: what would have to change for twice the length; "" if it was not asked.
        lines: of the program that runs it; or why there are none.
    """

    result: SearchResult  # of the request
    plan: Plan | None
    why: tuple[str, ...]
    twice: str = ""
    lines: str = ""


def answer(result: SearchResult, longer: SearchResult | None = None) -> Answer:
    """The recommended plan of a search.

    Args:
        longer: the same search with sequences of twice the length.
    """
    if not result.plans:
        return Answer(result, None, tuple(infeasibility(result)))
    plan, framework = result.plans[0], result.framework  # the search has put it first
    why = (*_degrees(result, plan), *_alternatives(result, plan))
    try:
        framework.with_settings_of(plan.config)  # those of a caller's base are not searched
        lines = emit(framework.name, result.work, plan.config)
    except ConfigError as error:
        lines = f"no lines of {framework.name}: {error}"
    return Answer(result, plan, why, _twice(plan, longer) if longer else "", lines)


# ------------------------------------------------------------------ why


def _degrees(result: SearchResult, plan: Plan) -> Iterator[str]:
    """Say which ulysses x ring the rule takes, and why the plan has another one."""
    config, model = plan.config, result.work.model
    if config.sp == 1:
        yield f"whole sequences: {RULE[0]}, and one holds it"
        return
    per_node, of_rule = result.cluster.gpus_per_node, _rule_of(result, plan)
    heads, node = counted(model.kv_heads, "KV head"), counted(per_node, "GPU")
    numbers = f"{config.sp} GPUs a sequence, {heads}, {node} a node"
    if config.split == of_rule:
        yield f"{RULE[1]}, {RULE[2]} ({numbers})"
        return
    split = f"Ulysses {of_rule[0]} x ring {of_rule[1]}"
    near = [each for each in result.plans if each.config.split == of_rule]
    best = min(near, key=lambda each: preference(result.cluster, model, each), default=None)
    best = best or result.best_with.get(("split", of_rule))
    why = "does not fit"
    if best:
        why = f"would be {_against(result, plan, best)}"
    elif result.fixed.keys() & {"ulysses", "ring"}:
        why = "is not what was asked for"
    yield f"{split}, which the rule takes ({numbers}), {why}"


def _rule_of(result: SearchResult, plan: Plan) -> tuple[int, int]:
    config, cluster = plan.config, result.cluster
    return rule_degrees(config.sp, result.work.model.kv_heads, cluster.gpus_per_node, config.tp)


def _alternatives(result: SearchResult, plan: Plan) -> Iterator[str]:
    """A line for each of at most three plans that differ in kind: one that is faster and does not
    fit; and of each kind of choice the one that differs in least else, the fastest first."""
    choices, lines = plan.config.parts(), []
    for large in result.over_memory[:1]:
        if large.mfu > plan.mfu:
            lines.append(
                f"not {_difference(plan, large)}: {large.mfu / plan.mfu - 1:.1%} faster, but "
                f"{large.over_budget_bytes / GIB:.1f} GiB too large"
            )
    found: dict[str, tuple[tuple[float, float], Plan]] = {}
    rule = _rule_of(result, plan)
    for other in (*result.plans[1:], *result.best_with.values()):
        if other.config.split == rule != plan.config.split:
            continue  # the line about the rule has said it
        parts = other.config.parts()
        kinds = [kind for kind in {**choices, **parts} if choices.get(kind) != parts.get(kind)]
        key = len(kinds), -other.mfu
        for kind in kinds:
            if kind not in found or key < found[kind][0]:
                found[kind] = key, other
    for _, other in sorted(found.values(), key=lambda item: item[0]):
        lines.append(f"not {_difference(plan, other)}: {_against(result, plan, other)}")
    yield from list(dict.fromkeys(lines))[:3]


def _difference(plan: Plan, other: Plan) -> str:
    """Name the settings that another plan has and this one has not."""
    choices, others = plan.config.parts(), other.config.parts()
    words = [text for kind, text in others.items() if choices.get(kind) != text]
    words += [f"{_WITHOUT.get(kind, 'no')} {kind}" for kind in choices if kind not in others]
    return ", ".join(words) or str(other.config)


_WITHOUT: Mapping[str, str] = MappingProxyType(
    {"loss in chunks": "not the", "micro batch": "a smaller", "setting for length": "no"}
)


def _against(result: SearchResult, plan: Plan, other: Plan) -> str:
    """Say how fast another plan is, and why it is not taken."""
    ratio = other.time.total / plan.time.total - 1
    speed = f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}"
    speed = "as fast" if abs(ratio) < 5e-4 else speed
    if other.mfu >= result.fastest.mfu * (1 - STATED_ERROR):
        one, two = (preference(result.cluster, result.work.model, x) for x in (plan, other))
        pairs = zip(PREFERENCES, one, two, strict=True)
        reason = next(words for words, taken, left in pairs if taken < left)
        less = f"{speed}, less than the formulas' error of {STATED_ERROR:.0%}"
        return f"{speed if speed == 'as fast' else less}; taken is {reason}"
    seconds, others = (_component_seconds(result, x) for x in (plan, other))
    worst, more = max(((x, others[x] - seconds[x]) for x in seconds), key=lambda item: item[1])
    if ratio < STATED_ERROR:
        behind = other.time.total / result.fastest.time.total - 1
        speed += f", and {behind:.1%} slower than the fastest"
    return f"{speed}: {more:.2f} s more for {_NAMES[worst]}"


def _component_seconds(result: SearchResult, plan: Plan) -> dict[str, float]:
    """Seconds of a step by the keys of ``_NAMES``: those of layers in the layers' proportions."""
    layer, step = layer_time(result.cluster, result.work, plan.config), plan.time.components()
    scale = step.pop("layers") / layer.total
    return step | {name: scale * seconds for name, seconds in layer.components().items()}


# Of the fields of LayerTime and StepTime.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
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
)


# ------------------------------------------------------------------ twice the length, nothing fits


def _twice(plan: Plan, longer: SearchResult) -> str:
    """Say with which settings twice the length fits, or what it lacks."""
    tokens = f"{longer.work.seq_len:,} tokens"
    if not longer.plans:
        first, *_ = infeasibility(longer)
        return f"{tokens}: {first}"
    other = longer.plans[0]
    changed = str(other.config) != str(plan.config)
    change = f"with {_difference(plan, other)}" if changed else "with the same settings"
    return (
        f"{tokens} fit {change}: {other.time.total:.2f} s a step, "
        f"{other.memory.total / GIB:.1f} GiB"
    )


def infeasibility(result: SearchResult) -> Sequence[str]:
    """Say of a search without plans what the one closest to fitting lacks, and how many GPUs hold
    it; or which rules have refused all."""
    closest = result.closest_to_fitting
    if closest is None:
        rules = ", ".join(f"{rule} ({count})" for rule, count in result.outcomes.most_common(3))
        return [f"no configuration of {counted(result.gpus, 'GPU')} is possible: {rules}"]
    lines = [
        f"nothing fits into {result.budget_bytes / GIB:.1f} GiB a GPU. The nearest plan lacks "
        f"{closest.over_budget_bytes / GIB:.1f} GiB: {closest.config}"
    ]
    host, cluster = closest.memory.host, result.cluster
    if host and not cluster.host_memory_fits(host, result.gpus):
        lines.append(
            f"nor does host memory hold the {host / GIB:.1f} GiB that a GPU offloads: "
            f"{cluster.host_budget_bytes(result.gpus) / GIB:.1f} GiB a GPU"
        )
    for times in (2, 4, 8, 16, 32):
        config = closest.config.replace(ring=times * closest.config.ring)
        needs = memory(result.work, config, cluster.workspace_bytes)
        if needs.total <= result.budget_bytes and infeasible_reason(result.work, config) is None:
            lines.append(
                f"on {times * result.gpus} GPUs, with ring {config.ring}, this plan needs "
                f"{needs.total / GIB:.1f} GiB a GPU, and {needs.host / GIB:.1f} of host memory"
            )
            break
    return lines


# ------------------------------------------------------------------ as text and as JSON


_INDENTED: Mapping[str, Any] = MappingProxyType(
    {"subsequent_indent": 10 * " ", "break_on_hyphens": False}
)


def in_order(outcomes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return what became of the configurations, each with its count: first those that could run."""
    first = {rule: outcomes.get(rule, 0) for rule in OUTCOMES}
    others = {f"refused: {rule}": count for rule, count in outcomes.items() if rule not in first}
    return [(rule, count) for rule, count in (first | others).items() if count]


def answer_text(answer: Answer, top: int, alone: bool) -> Iterator[object]:
    """The recommended plan, why it, twice the length, what was considered and the lines.

    Args:
        top: rows of the table of plans; 0: no table.
        alone: say that the batch is one sequence by default.
    """
    result, plan = answer.result, answer.plan
    work, cluster, budget = result.work, result.cluster, result.budget_bytes / GIB
    yield (
        f"{work.model.name}, {counted(work.seq_len, 'token')}, global batch {work.global_batch}, "
        f"{result.gpus} x {cluster.name}, {budget:.1f} GiB of each to fill, "
        f"{result.framework.name}"
    )
    if "towers for images or sounds" in work.model.other_facts:
        yield "the text model alone: images and sounds are outside the estimate"
    if plan is None:
        yield from answer.why
    else:
        sizes = sorted(plan.memory.components().items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes)
        rate = work.global_batch * work.seq_len / result.gpus / plan.time.total
        host = f", {plan.memory.host / GIB:.1f} GiB of host memory" if plan.memory.host else ""
        yield f"\ntake    {plan.config}"
        yield (
            f"step    {plan.time.total:.2f} s, {rate:,.0f} tokens/s a GPU, "
            f"{plan.mfu:.0%} of the peak (MFU)"
        )
        yield f"memory  {plan.memory.total / GIB:.1f} GiB a GPU{host}: {largest}"
        for number, line in enumerate(answer.why):
            yield fill(line, 100, initial_indent=f"{'' if number else 'why':8}", **_INDENTED)
        if answer.twice:
            yield fill(answer.twice, 100, initial_indent=f"{'twice':8}", **_INDENTED)
    counts = ", ".join(f"{count:,} {rule}" for rule, count in in_order(result.outcomes))
    yield ""
    yield fill(f"{counted(result.considered, 'configuration')} considered: {counts}", 100)
    if alone:
        yield (
            "one sequence a step, which all GPUs share, without data parallelism: --global-batch "
            "gives that of your run"
        )
    if plan and top:
        rows = [plan_row(result, each) | {"taken": "*" * (each is plan)} for each in result.plans]
        columns = degree_columns(each.config for each in result.plans[:top])
        yield f"\n{Table(rows[:top], {**columns, **PLANS})}"
    if answer.lines:
        yield f"\n{answer.lines}"


def answer_json(answer: Answer, top: int) -> Json:
    """The workload, the recommended plan, what was considered and the first plans."""
    result, plan = answer.result, answer.plan
    work = result.work
    content: Json = {
        "model": work.model.name,
        "seq_len": work.seq_len,
        "global_batch": work.global_batch,
        "gpus": result.gpus,
        "cluster": result.cluster.name,
        "engine": result.framework.name,
        "budget_bytes": round(result.budget_bytes),
        "model_flop_per_token": model_flop_per_token(
            work.model, work.seq_len, work.document_lengths
        ),
        "considered": result.considered,
        "outcomes": dict(in_order(result.outcomes)),
        "tie_within": STATED_ERROR,
        "why": list(answer.why),
        "plans": [plan_row(result, each) for each in result.plans[:top]],
        "too_large": [plan_row(result, each) for each in result.over_memory[:3]],
    }
    if plan:
        row = {"words": str(plan.config), **plan_row(result, plan)}
        return content | {"recommended": row, "twice": answer.twice, "lines": answer.lines}
    if closest := result.closest_to_fitting:
        content |= {"nearest": plan_row(result, closest)}
    return content
