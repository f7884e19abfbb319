"""Plots of plans and of timelines; how SVG files are written: the same bytes for the same data."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.geometry.pipeline_schedule import CHANNELS, Op
from ds_usp.planner.pipeline_timeline import COMPUTE, Timeline
from ds_usp.planner.search import GIB, Plan, SearchResult
from ds_usp.planner.step_time import layer_time

Panels = dict[str, list[Mapping[str, float]]]


def new_figure(width: float, height: float) -> Any:
    """A new matplotlib figure, its size in inches; it needs no display.

    Sets matplotlib's options for SVG files, so that :func:`save_svg` always writes the same bytes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            'plots need matplotlib, the extra "plots": pip install "ds-usp[plots]"'
        ) from error
    rcParams["svg.hashsalt"] = "ds_usp"  # element ids, else random, are the same in each run
    rcParams["svg.fonttype"] = "none"  # text is written as text, not as outlines
    return Figure(figsize=(width, height), layout="constrained")


def save_svg(figure: Any, path: Path) -> None:
    """Write without date and program, so that the file changes with the data alone."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # A point of a curve has a line of its own, thousands in a picture that nobody reads as text.
    lines = (line.strip() for line in text.getvalue().splitlines())
    path.write_text(" ".join(lines) + "\n", encoding="utf-8")


def panels(result: SearchResult, top: int) -> Panels:
    """Title -> of each of the best plans, component -> size."""
    plans = result.plans[:top]
    return {
        "memory of one GPU, GiB": [
            {name: size / GIB for name, size in plan.memory.components().items() if size}
            for plan in plans
        ],
        "one step, s": [
            {name: seconds for name, seconds in plan.time.components().items() if seconds > 0}
            for plan in plans
        ],
        "one layer and micro batch, forward and backward, ms": [
            _layer_ms(result, plan) for plan in plans
        ],
    }


def draw(result: SearchResult, top: int, path: Path) -> None:
    """The best plans as stacked bars; the dashed line is the memory budget of a GPU.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    names = [_name(plan) for plan in result.plans[:top]]
    figure = new_figure(11, 1.2 + 3 * (1.1 + 0.3 * len(names)))
    work = result.work
    figure.suptitle(
        f"{work.model.name}, {work.seq_len} tokens, {result.gpus} x {result.cluster.name}"
    )
    for axes, (title, bars) in zip(figure.subplots(3), panels(result, top).items(), strict=True):
        ends = [0.0] * len(names)
        for component in dict.fromkeys(name for bar in bars for name in bar):
            sizes = [bar.get(component, 0.0) for bar in bars]
            axes.barh(range(len(names)), sizes, left=ends, label=component)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for row, end in enumerate(ends):
            axes.text(end, row, f" {end:.3g}", va="center")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_title(title, loc="left")
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
        if title.startswith("memory"):
            axes.axvline(result.budget_bytes / GIB, color="black", linestyle="--")
    save_svg(figure, path)


def _layer_ms(result: SearchResult, plan: Plan) -> dict[str, float]:
    work, config = result.work, plan.config
    seconds = layer_time(result.cluster, work, config).components()
    layers = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    seconds["host"] = plan.time.host / layers
    return {name: value * 1e3 for name, value in seconds.items() if value > 0}


def _name(plan: Plan) -> str:
    config = plan.config
    degrees = [f"u{config.ulysses} r{config.ring}"]
    degrees += [f"{a}{getattr(config, a)}" for a in ("tp", "pp", "dp") if getattr(config, a) > 1]
    degrees.append(f"z{config.zero}")
    degrees += [config.recompute] if config.recompute != "none" else []
    return f"{' '.join(degrees)}: {plan.mfu:.1%}"


def draw_timelines(timelines: Mapping[str, Timeline], title: str, path: Path) -> None:
    """Passes of a call as lanes over time: kernels and exchanges in the colour of their chunk with
    its number, exposed waits hatched.

    Args:
        timelines: by the title of the pass.
        path: ends in .svg, else a PNG is written.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    lanes = {
        name: [
            COMPUTE,
            *(kind for kind in CHANNELS if any(e.lane == kind for e in timeline.events)),
        ]
        for name, timeline in timelines.items()
    }
    rows = sum(map(len, lanes.values()))
    figure = new_figure(12, 1.3 + 0.9 * len(lanes) + 0.5 * rows)
    note = "colour and number: head chunk; pale: packing, merges, returns; hatched: exposed waits"
    figure.suptitle(f"{title}\n{note}", fontsize="medium")
    heights = [len(names) for names in lanes.values()]
    panels_of = figure.subplots(len(lanes), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, timeline) in zip(panels_of, timelines.items(), strict=True):
        _draw_timeline(axes, timeline, lanes[name])
        exposed = 1e3 * (timeline.total - timeline.compute)
        axes.set_title(
            f"{name}: {1e3 * timeline.total:.3g} ms, of which {exposed:.3g} ms exposed: waits, and "
            "what exchanges slow kernels by",
            loc="left",
            fontsize="medium",
        )
        axes.set_xlabel("ms")
    if path.suffix == ".svg":
        save_svg(figure, path)
    else:
        figure.savefig(path, format="png", dpi=120)


def _draw_timeline(axes: Any, timeline: Timeline, lanes: list[str]) -> None:
    """One pass; a bar that is long enough has its chunk's number."""
    for event in timeline.events:
        row, start, width = lanes.index(event.lane), 1e3 * event.start, event.stop - event.start
        chunk = event.instr.chunk
        is_wide = width > 0.012 * timeline.total
        colour = f"C{chunk % 10}"  # a thin bar's edge too, or it would not be seen
        style: dict[str, Any] = {"color": colour, "linewidth": 0.6}
        style["edgecolor"] = "white" if is_wide else colour
        if event.is_wait:
            style = {"color": "white", "edgecolor": "black", "hatch": "////", "linewidth": 0.6}
        elif event.instr.op in (Op.RETURN_POST, Op.LSE_POST) or (
            event.lane == COMPUTE and event.instr.op is not Op.ATTN
        ):
            style["alpha"] = 0.5  # returns; packing and merges
        axes.barh(row, 1e3 * width, left=start, height=0.7, **style)
        if is_wide and not event.is_wait:
            axes.text(start + 500 * width, row, chunk, ha="center", va="center", fontsize="x-small")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, 1010 * timeline.total)
