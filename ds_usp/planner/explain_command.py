"""``ds-usp explain``: what one rank does in one attention call, in which order, and when; and what
a step of a model communicates."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from ds_usp.errors import ConfigError
from ds_usp.geometry.heads import HeadChunk
from ds_usp.geometry.layout import KINDS, TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.pipeline_schedule import (
    CHANNELS,
    Schedule,
    exchange_order,
    render,
    staging_slots,
)
from ds_usp.geometry.pipeline_timeline import Timeline
from ds_usp.geometry.ring_schedule import RingSchedule
from ds_usp.planner.arguments import flag
from ds_usp.planner.attention_call import AttentionCall
from ds_usp.planner.attention_schedule import OFF
from ds_usp.planner.command_flags import (
    BYTES,
    DTYPES,
    ClusterFlags,
    Command,
    print_json,
)
from ds_usp.planner.field_checks import Count, CountOrZero
from ds_usp.planner.parallel_config import ParallelConfig
from ds_usp.planner.plot import draw_timelines
from ds_usp.planner.step_command_flags import SHARED_FLAGS, StepFlags

# A balanced layout is of documents, which this command has none of.
_LAYOUTS = tuple(kind for kind in KINDS if kind != "balanced")
_GATHER: Mapping[str, bool | None] = {"auto": None, "yes": True, "no": False}
_LEGEND = """\
CHUNK operation NUMBER: 1kv0 posts the first KV exchange of chunk 1, 1kv0? waits for it
a2a  all-to-all, sequence to heads            slice  the chunk's heads, without Ulysses
kv, dkv  KV of ring ranks; its gradients      outerkv, outerdkv  the same across nodes
attn2.0  first kernel call of ring step 2     end  merges partial results, frees KV
ret  all-to-all, heads to sequence            store  results to the outputs, without Ulysses"""


_PRODUCTS_LEGEND = """\
mmqkv, mmout  products that make the chunk's Q, K and V; the output
mmdout, mmdx, mmw...  gradients of the attention output; of the input; of rows of the weights
first  all-to-all of what backward projects again"""


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(StepFlags, ClusterFlags, Command):
    """what one rank does in one attention call: head chunks, ring steps, the order of exchanges and
    kernel calls, and a simulation of both passes; with --model: what one step communicates, by
    kind, what of it is exposed, and what other settings would cost"""

    removed_flags: ClassVar[tuple[str, ...]] = ("--tp-shard-tokens",)
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

    def run(self) -> int:
        """Print the call, and draw it if ``--plot`` is given; with ``--model`` print the step."""
        cluster, name = self.load_cluster()
        self._refuse_mixed_flags()
        if self.model is not None:
            lines, content = self.explain_step(cluster)
            if self.json:
                return print_json(content)
            print("\n".join([name, *lines]))
            return 0
        if self.plot and self.plot.suffix not in (".svg", ".png"):
            raise ConfigError(f"--plot {self.plot} must end in .svg or .png")
        config = ParallelConfig(
            ulysses=self.ulysses_degree,
            ring=self.ring_degree,
            order=self.order,
            micro_batch=self.batch,
            param_bytes=BYTES[self.dtype],
        )
        call = AttentionCall(
            cluster,
            TokenLayout(
                self.layout, self.seq_len, self.ulysses_degree, self.ring_degree, self.order
            ),
            self._mask_spec(),
            self.heads or 0,
            self.kv_heads or self.heads or 0,
            self.head_dim,
            config,
            rank=self.rank,
            chunks=self.chunks,
            gather=_GATHER[self.gather],
            inner=self.inner_ring,
            projections=self.projections,
        )
        passes = {
            "backward" if backward else "forward": backward
            for backward in (False, True)
            if (self.backward if backward else self.forward) or self.forward == self.backward
        }
        timelines = {title: call.simulate(backward=x) for title, x in passes.items()}
        schedules = {title: call.schedule(backward=x).schedule for title, x in passes.items()}
        if self.plot:
            self._draw(call, timelines)
        if self.json:
            return print_json(_json(call, schedules, timelines))
        lines = [name, *_call_lines(call)]
        if self.schedule:
            lines += ["", *_ring_lines(call, [*passes])]
            lines += [x for title in passes for x in _schedule_lines(call, title, schedules[title])]
            lines += ["", *_LEGEND.splitlines()]
            lines += [] if self.projections == OFF else _PRODUCTS_LEGEND.splitlines()
        lines += ["", *(_timeline_line(title, timelines[title]) for title in passes)]
        print("\n".join(lines))
        if self.plot:
            print(f"wrote {self.plot}")
        return 0

    def _refuse_mixed_flags(self) -> None:
        """Refuse flags of a step beside those of a call, which would be ignored.

        Raises:
            ConfigError: it names them; or neither ``--heads`` nor ``--model`` is given.
        """
        if (self.heads is None) == (self.model is None):
            raise ConfigError("give --heads of one attention call, or --model of a step")
        of_step = {f.name for f in fields(StepFlags)} - SHARED_FLAGS
        of_call = {f.name for f in fields(self)} - of_step - SHARED_FLAGS - {"cluster", "json"}
        ignored = of_step if self.model is None else of_call
        given = [
            f for f in fields(self) if f.name in ignored and getattr(self, f.name) != f.default
        ]
        if given:
            names = ", ".join(f"--{f.name.replace('_', '-')}" for f in given)
            kinds = ("a step", "an attention call")
            kind, other = kinds if self.model is None else kinds[::-1]
            raise ConfigError(f"flags of {kind}, not of {other}: {names}; leave them out")

    def _mask_spec(self) -> MaskSpec:
        """The mask.

        Raises:
            ConfigError: a window without its tokens, or tokens without a window.
        """
        if (self.mask == "window") != (self.window is not None):
            raise ConfigError(
                f"--mask {self.mask} with --window {self.window}: give --mask window --window "
                "TOKENS, or neither"
            )
        if self.mask == "full":
            return MaskSpec.full()
        return MaskSpec.causal() if self.window is None else MaskSpec.window(self.window)

    def _draw(self, call: AttentionCall, timelines: Mapping[str, Timeline]) -> None:
        """Write the plot.

        Raises:
            ConfigError: a file that cannot be written.
        """
        path = self.plot or Path()
        try:
            draw_timelines(timelines, _title(call), path)
        except OSError as error:
            raise ConfigError(f"cannot write --plot {path}: {error.strerror}") from error


def _title(call: AttentionCall) -> str:
    """The call in one line."""
    layout = call.layout
    return (
        f"{layout.seq_len} tokens, {layout.kind}, {call.mask}, {call.heads}/{call.kv_heads} heads "
        f"of {call.head_dim}, ulysses {layout.ulysses} x ring {layout.ring}, rank {call.rank}, "
        f"{call.cluster.name}"
    )


def _call_lines(call: AttentionCall) -> Iterator[str]:
    """The call, and what was chosen for it."""
    ulysses_rank, ring_rank = call.layout.coords(call.rank)
    yield f"{_title(call)} (ulysses rank {ulysses_rank}, ring rank {ring_rank})"
    chunks = call.head_chunks
    sizes = " ".join(_heads(chunk, ulysses_rank) for chunk in chunks)
    text = "1 head chunk" if len(chunks) == 1 else f"{len(chunks)} head chunks"
    yield f"{text} of {sizes} query/KV heads" + (
        ", KV with the first of their group"
        if any(x.kv_chunk != i for i, x in enumerate(chunks))
        else ""
    )
    if call.layout.ring > 1:
        mode = "all-gathered" if call.gathers_kv else "stepwise"
        inner = f", double ring of {call.inner_ring} ranks in a node" if call.inner_ring else ""
        yield f"KV {mode}{inner}"


def _heads(chunk: HeadChunk, ulysses_rank: int) -> str:
    queries, keys = (
        stop - start for start, stop in (chunk.queries[ulysses_rank], chunk.keys[ulysses_rank])
    )
    return f"{queries}/{keys}"


def _ring_lines(call: AttentionCall, passes: list[str]) -> Iterator[str]:
    """The ring steps of each pass, once for chunks with equal ones."""
    for title in passes:
        numbered = enumerate(call.ring_schedules)
        for steps, chunks in groupby(numbered, key=lambda x: _steps(x[1], title)):
            numbers = [index for index, _ in chunks]
            span = f"chunk {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
            yield f"{title}, ring steps of {span}:"
            yield from (f"  {index} {step}" for index, step in enumerate(steps))


def _steps(schedule: RingSchedule, title: str) -> tuple[str, ...]:
    steps = schedule.backward_steps if title == "backward" else schedule.steps
    return tuple(map(str, steps))


def _schedule_lines(call: AttentionCall, title: str, schedule: Schedule) -> Iterator[str]:
    """A pass's instructions, wrapped, with exchange order and staging slots."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns)

    def wrapped(head: str, text: str) -> Iterator[str]:
        yield from textwrap.wrap(
            f"{head}: {text}", width, subsequent_indent="  ", break_long_words=False
        )

    yield ""
    yield from wrapped(f"{title}, {len(schedule)} instructions", render(schedule))
    order = exchange_order(schedule)
    yield from wrapped("posted in this order on every rank", order or "nothing")
    slots = _pairs(_slots(call, schedule), "{}") or "none"
    yield from wrapped("staging slots, if copy engines are used", slots)


def _slots(call: AttentionCall, schedule: Schedule) -> dict[str, int]:
    """Staging slots of each kind of exchange that the schedule has; none in a double ring, which is
    relayed by NCCL."""
    if call.inner_ring:
        return {}
    return {
        kind: staging_slots(schedule, kind)
        for kind in CHANNELS
        if any(instr.op.channel == kind for instr in schedule)
    }


def _pairs(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())


def _timeline_line(title: str, timeline: Timeline) -> str:
    """The total of a pass, and what is exposed."""
    exposed = {name: 1e3 * seconds for name, seconds in sorted(timeline.exposed.items())}
    text = _pairs(exposed, "{:.3f}") or "nothing"
    return (
        f"{title}: {1e3 * timeline.total:.3f} ms simulated, {1e3 * timeline.compute:.3f} of "
        f"kernels and packing; exposed: {text}"
    )


def _json(
    call: AttentionCall, schedules: Mapping[str, Schedule], timelines: Mapping[str, Timeline]
) -> dict[str, object]:
    """The call, and both passes with the events of their timelines."""
    ulysses_rank, _ = call.layout.coords(call.rank)
    content: dict[str, object] = {
        "cluster": call.cluster.name,
        "chunks": [_heads(chunk, ulysses_rank) for chunk in call.head_chunks],
        "gather": call.gathers_kv,
        "inner_ring": call.inner_ring,
    }
    for title, timeline in timelines.items():
        schedule = schedules[title]
        content[title] = {
            "ring_steps": [_steps(ring, title) for ring in call.ring_schedules],
            "schedule": render(schedule),
            "exchange_order": exchange_order(schedule),
            "staging_slots": _slots(call, schedule),
            "total_s": timeline.total,
            "compute_s": timeline.compute,
            "exposed_s": dict(timeline.exposed),
            "events": [
                {"lane": lane, "instruction": str(instr), "start_s": start, "stop_s": stop}
                for lane, instr, start, stop in timeline.events
            ],
        }
    return content
