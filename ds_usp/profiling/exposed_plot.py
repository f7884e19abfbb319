"""The timeline of a step as a picture: a lane for kernels, one for each kind of communication."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_usp.planner.plot import new_figure, save_svg
from ds_usp.profiling.exposed_classify import StepTrace
from ds_usp.profiling.exposed_kinds import COMPUTE, KINDS
from ds_usp.profiling.exposed_step import compute_of, idle, lanes_of
from ds_usp.profiling.intervals import Interval, subtract_intervals

_PIXELS = 3000  # of the width: shorter bars and pauses than a pixel are joined
_HIDDEN, _EXPOSED, _KERNELS, _IDLE = "#9db8d9", "#c2410c", "#15803d", "#777777"


def draw(trace: StepTrace, path: Path, title: str = "") -> None:
    """Draw one rank's step.

    Args:
        path: ends in .svg, else a PNG is written.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    lanes = lanes_of(trace)
    compute = compute_of(trace)
    names = [kind for kind in KINDS if kind in lanes]
    pauses = idle(trace)
    begin = min((event.start for event in trace.gpu), default=0)
    end = max((event.stop for event in trace.gpu), default=1)
    figure = new_figure(13, 1.6 + 0.45 * (len(names) + 2))
    axes = figure.subplots()
    _bars(axes, 0, compute, begin, end, _KERNELS)
    for row, kind in enumerate(names, start=1):
        _bars(axes, row, lanes[kind], begin, end, _HIDDEN)
        _bars(axes, row, subtract_intervals(lanes[kind], compute), begin, end, _EXPOSED)
    _bars(axes, len(names) + 1, pauses["host"], begin, end, _IDLE)
    axes.set_yticks(range(len(names) + 2), [COMPUTE, *names, "idle: for the CPU"])
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.set_xlabel("ms; pale: hidden under kernels, red: exposed")
    axes.set_title(title or "one step", loc="left", fontsize="medium")
    if path.suffix == ".svg":
        save_svg(figure, path)
    else:
        figure.savefig(path, format="png", dpi=150)


def _bars(
    axes: Any, row: int, intervals: Sequence[Interval], begin: int, end: int, color: str
) -> None:
    """The intervals as bars in milliseconds after ``begin``."""
    pixel = max(1, (end - begin) // _PIXELS)
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and start - joined[-1][1] < pixel and stop - joined[-1][0] < 8 * pixel:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    bars = [((start - begin) / 1e6, (stop - start) / 1e6) for start, stop in joined]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolors=color, linewidth=0.3)
