"""Reasons of plans, and ``ds-usp explain``: why a plan is the best one; what a step communicates
and what other settings would cost; what one rank does in one attention call, and when.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from ds_usp.errors import ConfigError
from ds_usp.geometry.heads import HeadChunk
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, KINDS, ORDERS, TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import CHANNELS, exchange_order, render, staging_slots
from ds_usp.planner.arguments import (
    BYTES,
    DTYPES,
    TOKENS,
    Count,
    CountOrZero,
    Gpus,
    ZeroStage,
    flag,
    tokens,
)
from ds_usp.planner.attention_time import AttentionCall
from ds_usp.planner.formulas import bucket_elements
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import logits_bytes
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import (
    FRAMEWORKS,
    RECOMPUTE,
    ParallelConfig,
    Workload,
    framework_caps,
    infeasible_reason,
    require_feasible,
)
from ds_usp.planner.pipeline_timeline import Timeline
from ds_usp.planner.plot import draw_timelines
from ds_usp.planner.report import (
    MIB,
    Cell,
    ClusterFlags,
    Command,
    Json,
    Result,
    Table,
    infeasibility_report,
    number,
)
from ds_usp.planner.search import GIB, Plan, SearchResult
from ds_usp.planner.step_time import (
    layer_time,
    reduces_under_backward,
    step_communication,
    step_time,
)
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
    if result.length_flags:
        settings = ", ".join(best.config.length_settings())
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
    "host": "GPU idle time on kernel launches",
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


# ------------------------------------------------------------------ a step
# What it communicates, what of that is exposed, and what other settings would cost.


def step_rows(cluster: Cluster, work: Workload, config: ParallelConfig) -> Json:
    """Predicted seconds of a step, and a row for each kind of its communication."""
    step = step_time(cluster, work, config)
    rows = [
        {
            "kind": row.kind,
            "sent_bytes": round(row.sent_bytes),
            "seconds": row.seconds,
            "hidden_s": row.hidden,
            "exposed_s": row.exposed,
        }
        for row in step_communication(cluster, work, config, step)
    ]
    return {"step_s": step.total, "kinds": rows}


def step_table(step: Json) -> Table:
    """A row for each kind: bytes that a rank sends, and milliseconds."""
    total_s, kinds = step["step_s"], step["kinds"]
    exposed = {"kind": "all exposed", "exposed_s": sum(row["exposed_s"] for row in kinds)}
    rows = [{**row, "part": f"{row['exposed_s'] / total_s:.1%}"} for row in (*kinds, exposed)]
    columns: dict[str, Cell] = {
        "communication of a step, forecast": "{kind}",
        "MiB": number("sent_bytes", MIB),
        "busy ms": number("seconds", 1e-3, 2),
        "hidden": number("hidden_s", 1e-3, 2),
        "exposed": number("exposed_s", 1e-3, 2),
        "of step": "{part}",
    }
    return Table([*rows, {"kind": "step", "exposed_s": total_s, "part": ""}], columns, rule=False)


def settings_lines(cluster: Cluster, work: Workload, config: ParallelConfig) -> Iterator[str]:
    """Other settings of the same degrees, by their price."""
    step_s = step_time(cluster, work, config).total
    if config.zero_ranks > 1 and config.zero in (1, 2):
        if reduces_under_backward(config):
            elements = bucket_elements(work.model, config.tp, config.zero)
            yield f"gradients are reduced under backward, in buckets of {elements} elements"
        else:
            yield "gradients are reduced at the end of backward: nothing hides them"
        other = config.replace(zero=3 - config.zero, overlap_gradients=config.pp == 1)
        if infeasible_reason(work, other) is None:
            more = step_time(cluster, work, other).total / step_s - 1
            yield f"ZeRO-{other.zero} instead of ZeRO-{config.zero}: step {more:+.1%}"


# ------------------------------------------------------------------ the command


# Of a step and of an attention call.
_SHARED_FLAGS = frozenset({"seq_len", "batch", "order", "ulysses_degree", "ring_degree"})
# A balanced layout is of documents, which this command has none of.
_LAYOUTS = tuple(kind for kind in KINDS if kind != "balanced")
_GATHER: Mapping[str, bool | None] = {"auto": None, "yes": True, "no": False}
_LEGEND = """\
CHUNK operation NUMBER: 1kv0 posts the first KV exchange of chunk 1, 1kv0? waits for it
a2a  all-to-all, sequence to heads            slice  the chunk's heads, without Ulysses
kv, dkv  KV of ring ranks; its gradients      outerkv, outerdkv  the same across nodes
attn2.0  first kernel call of ring step 2     end  merges partial results, frees KV
ret  all-to-all, heads to sequence            store  results to the outputs, without Ulysses"""


@dataclass(frozen=True, kw_only=True)
class _StepFlags:
    """A model and its degrees; those that an attention call has too, and those of a step alone."""

    seq_len: int = flag(f"of one sequence, {TOKENS}", type=tokens)
    batch: Count = flag("sequences of a micro batch", 1)
    order: str = flag("whose ranks are contiguous", DEFAULT_SP_ORDER, choices=ORDERS)
    ulysses_degree: Gpus = flag("Ulysses degree", 1)
    ring_degree: Gpus = flag("ring degree", 1)
    model: str | None = flag(
        "explain a step of it: built-in name, FILE.json:NAME, HuggingFace config.json", None
    )
    tp: Gpus = flag("tensor-parallel degree of a step", 1)
    pp: Gpus = flag("pipeline-parallel degree of a step", 1)
    dp: Gpus = flag("data-parallel degree of a step", 1)
    zero: ZeroStage = flag("ZeRO stage of a step", 1)
    recompute: str = flag("what backward recomputes in a step", "none", choices=RECOMPUTE)
    global_batch: Count | None = flag("sequences of a step (default: one micro batch each)", None)
    engine: str = flag(
        "whose reduction of gradients a step has",
        "megatron-deepspeed",
        choices=[caps.name for caps in FRAMEWORKS],
    )


_MOST_STEPS = 2**9  # ring ranks are compared pairwise


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(_StepFlags, ClusterFlags, Command):
    """what one rank does in one attention call: head chunks, ring steps, the order of exchanges and
    kernel calls, and a simulation of both passes; with --model: what one step communicates, by
    kind, what of it is exposed, and what other settings would cost"""

    schedule: bool = flag("print the ring steps, the instructions, exchange order, slots", False)
    heads: Count | None = flag("query heads; not with --model", None)
    kv_heads: Count | None = flag("key/value heads (default: as many as query heads)", None)
    head_dim: Count = flag("features of a head", 128)
    dtype: str = flag("of q, k, v", "bf16", choices=DTYPES)
    layout: str = flag("which rank holds which token", "zigzag", choices=_LAYOUTS)
    mask: str = flag("which pairs attend", "causal", choices=("causal", "full", "window"))
    window: CountOrZero | None = flag("tokens before a query that it sees: --mask window", None)
    rank: CountOrZero = flag("of the sequence-parallel group", 0)
    chunks: Count | None = flag("head chunks (default: as the call chooses)", None)
    gather: str = flag("KV all-gathered, not stepwise", "auto", choices=tuple(_GATHER))
    inner_ring: Count | None = flag(
        "ring ranks of a node, in a double ring, experimental (default: a plain ring)", None
    )
    forward: bool = flag("only the forward pass", False)
    backward: bool = flag("only the backward pass", False)
    plot: Path | None = flag("draw the simulated timelines: FILE.svg or FILE.png", None)

    def result(self) -> Result:
        """The step of ``--model``, else the call of ``--heads``."""
        cluster, name = self.load_cluster()
        self._refuse_mixed_flags()
        return self._call(cluster, name) if self.model is None else self._step(cluster, name)

    def _refuse_mixed_flags(self) -> None:
        if (self.heads is None) == (self.model is None):
            raise ConfigError("give --heads of one attention call, or --model of a step")
        of_step = {f.name for f in fields(_StepFlags)} - _SHARED_FLAGS
        of_call = {f.name for f in fields(self)} - of_step - _SHARED_FLAGS - {"cluster", "json"}
        ignored = of_step if self.model is None else of_call
        given = [
            f for f in fields(self) if f.name in ignored and getattr(self, f.name) != f.default
        ]
        if given:
            names = ", ".join(f"--{f.name.replace('_', '-')}" for f in given)
            kinds = ("a step", "an attention call")
            kind, other = kinds if self.model is None else kinds[::-1]
            raise ConfigError(f"flags of {kind}, not of {other}: {names}; leave them out")

    def _step(self, cluster: Cluster, name: str) -> Result:
        caps = framework_caps(self.engine)
        config = ParallelConfig(
            tp=self.tp,
            ulysses=self.ulysses_degree,
            ring=self.ring_degree,
            pp=self.pp,
            dp=self.dp,
            order=self.order,
            zero=self.zero,
            recompute=self.recompute,
            micro_batch=self.batch,
            tp_sequence=caps.tp_sequence,
            schedule=caps.schedule if self.pp > 1 else "1f1b",
            overlap_gradients=self.pp == 1,
            grad_bytes=caps.grad_bytes,
            unsharded_grad_reduce=caps.unsharded_grad_reduce,
        )
        sequences = self.global_batch or self.batch * self.dp * self.pp
        work = Workload(load_model(self.model or ""), self.seq_len, sequences)
        caps.for_model(work.model)
        require_feasible(work, config)
        step = step_rows(cluster, work, config)
        settings = [*settings_lines(cluster, work, config)]
        return Result(step | {"settings": settings}, [name, step_table(step), *settings])

    def _call(self, cluster: Cluster, name: str) -> Result:
        if self.plot and self.plot.suffix not in (".svg", ".png"):
            raise ConfigError(f"--plot {self.plot} must end in .svg or .png")
        chunks = self.chunks or 1
        if self.ulysses_degree * self.ring_degree * chunks > _MOST_STEPS:
            raise ConfigError(
                f"--ulysses-degree {self.ulysses_degree} x --ring-degree {self.ring_degree} x "
                f"--chunks {chunks} are more than the {_MOST_STEPS:,} steps that are simulated"
            )
        degrees = self.ulysses_degree, self.ring_degree, self.order
        config = ParallelConfig(
            ulysses=self.ulysses_degree,
            ring=self.ring_degree,
            order=self.order,
            micro_batch=self.batch,
            param_bytes=BYTES[self.dtype],
        )
        call = AttentionCall(
            cluster,
            TokenLayout(self.layout, self.seq_len, *degrees),
            self._mask_spec(),
            self.heads or 0,
            self.kv_heads or self.heads or 0,
            self.head_dim,
            config,
            rank=self.rank,
            chunks=self.chunks,
            gather=_GATHER[self.gather],
            inner=self.inner_ring,
        )
        both = self.forward == self.backward
        wanted = {"forward": self.forward or both, "backward": self.backward or both}
        titles = [title for title, is_wanted in wanted.items() if is_wanted]
        timelines = {title: call.simulate(backward=title == "backward") for title in titles}
        if self.plot:
            try:
                draw_timelines(timelines, _title(call), self.plot)
            except OSError as error:
                raise ConfigError(f"cannot write --plot {self.plot}: {error.strerror}") from error
        ulysses_rank, _ = call.layout.coords(call.rank)
        content: Json = {
            "cluster": cluster.name,
            "chunks": [_heads(chunk, ulysses_rank) for chunk in call.head_chunks],
            "gather": call.gathers_kv,
            "inner_ring": call.inner_ring,
        }
        passes = {title: _pass_row(call, title, timelines[title]) for title in titles}
        return Result(content | passes, self._call_text(call, content, passes, name))

    def _mask_spec(self) -> MaskSpec:
        if (self.mask == "window") != (self.window is not None):
            raise ConfigError(
                f"--mask {self.mask} with --window {self.window}: give --mask window --window "
                "TOKENS, or neither"
            )
        if self.mask == "full":
            return MaskSpec.full()
        return MaskSpec.causal() if self.window is None else MaskSpec.window(self.window)

    def _call_text(
        self, call: AttentionCall, content: Json, passes: Mapping[str, Json], name: str
    ) -> Iterator[str]:
        """The call, what was chosen for it, its schedules, and what of its passes is exposed."""
        yield name
        ulysses_rank, ring_rank = call.layout.coords(call.rank)
        yield f"{_title(call)} (ulysses rank {ulysses_rank}, ring rank {ring_rank})"
        chunks = content["chunks"]
        text = "1 head chunk" if len(chunks) == 1 else f"{len(chunks)} head chunks"
        grouped = any(chunk.kv_chunk != i for i, chunk in enumerate(call.head_chunks))
        yield f"{text} of {' '.join(chunks)} query/KV heads" + (
            ", KV with the first of their group" if grouped else ""
        )
        if call.layout.ring > 1:
            mode = "all-gathered" if call.gathers_kv else "stepwise"
            inner = f", double ring of {call.inner_ring} ranks in a node" if call.inner_ring else ""
            yield f"KV {mode}{inner}"
        yield ""
        if self.schedule:
            yield from (line for x in passes.items() for line in _ring_lines(*x))
            yield from (line for x in passes.items() for line in _schedule_lines(*x))
            yield f"\n{_LEGEND}"
            yield ""
        for title, row in passes.items():
            exposed = {lane: 1e3 * seconds for lane, seconds in sorted(row["exposed_s"].items())}
            yield (
                f"{title}: {1e3 * row['total_s']:.3f} ms simulated, {1e3 * row['compute_s']:.3f} "
                f"of kernels and packing; exposed: {_pairs(exposed, '{:.3f}') or 'nothing'}"
            )
        if self.plot:
            yield f"wrote {self.plot}"


def _title(call: AttentionCall) -> str:
    layout = call.layout
    return (
        f"{layout.seq_len} tokens, {layout.kind}, {call.mask}, {call.heads}/{call.kv_heads} heads "
        f"of {call.head_dim}, ulysses {layout.ulysses} x ring {layout.ring}, rank {call.rank}, "
        f"{call.cluster.name}"
    )


def _heads(chunk: HeadChunk, ulysses_rank: int) -> str:
    spans = chunk.queries[ulysses_rank], chunk.keys[ulysses_rank]
    return "/".join(str(stop - start) for start, stop in spans)


def _pass_row(call: AttentionCall, title: str, timeline: Timeline) -> Json:
    backward = title == "backward"
    schedule = call.schedule(backward=backward).schedule
    return {
        "ring_steps": [
            tuple(map(str, ring.backward_steps if backward else ring.steps))
            for ring in call.ring_schedules
        ],
        "schedule": render(schedule),
        "exchange_order": exchange_order(schedule),
        # None in a double ring, which is relayed by NCCL.
        "staging_slots": {
            kind: staging_slots(schedule, kind)
            for kind in CHANNELS
            if not call.inner_ring and any(instr.op.channel == kind for instr in schedule)
        },
        "total_s": timeline.total,
        "compute_s": timeline.compute,
        "exposed_s": dict(timeline.exposed),
        "events": [
            {"lane": lane, "instruction": str(instr), "start_s": start, "stop_s": stop}
            for lane, instr, start, stop in timeline.events
        ],
    }


def _ring_lines(title: str, row: Json) -> Iterator[str]:
    for steps, chunks in groupby(enumerate(row["ring_steps"]), key=itemgetter(1)):
        numbers = [index for index, _ in chunks]
        span = f"chunk {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
        yield f"{title}, ring steps of {span}:"
        yield from (f"  {index} {step}" for index, step in enumerate(steps))


def _schedule_lines(title: str, row: Json) -> Iterator[str]:
    """A pass's instructions, wrapped, with exchange order and staging slots."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    schedule = row["schedule"]
    yield ""
    for head, text in (
        (f"{title}, {len(schedule.split())} instructions", schedule),
        ("posted in this order on every rank", row["exchange_order"] or "nothing"),
        ("staging slots, if copy engines are used", _pairs(row["staging_slots"], "{}") or "none"),
    ):
        yield from textwrap.wrap(
            f"{head}: {text}", width, subsequent_indent="  ", break_long_words=False
        )


def _pairs(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())
