"""A picture of plans: memory, the time of a step and of one layer, as stacked bars in one SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ds_usp.planner.layer_time import layer_time
from ds_usp.planner.search import GIB, Plan, SearchResult

_COLORS = ("#1558d6", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490", "#a16207", "#777777")
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP, _LEGEND = 960, 250, 90, 20, 10, 40, 44


@dataclass(frozen=True)
class _Panel:
    """Bars with one scale: name of a bar -> name of a part -> its size."""

    title: str
    unit: str
    bars: Sequence[tuple[str, Mapping[str, float]]]
    limit: float = 0.0

    @property
    def height(self) -> int:
        """Pixels."""
        return _TOP + len(self.bars) * (_BAR + _GAP) + _LEGEND


def picture(result: SearchResult, top: int) -> str:
    """The best plans; what lies to the right of the line would not fit."""
    plans = result.plans[:top]
    names = [_name(plan) for plan in plans]
    memory = [{k: v / GIB for k, v in plan.memory.components().items() if v} for plan in plans]
    step = [{k: v for k, v in plan.time.components().items() if v > 0} for plan in plans]
    layer = [_layer_ms(result, plan) for plan in plans]
    panels = (
        _Panel(
            "memory of one GPU",
            "GiB",
            list(zip(names, memory, strict=True)),
            result.budget_bytes / GIB,
        ),
        _Panel("one step", "s", list(zip(names, step, strict=True))),
        _Panel(
            "one layer and micro batch, forward and backward",
            "ms",
            list(zip(names, layer, strict=True)),
        ),
    )
    work = result.work
    title = f"{work.model.name}, {work.seq_len} tokens, {result.gpus} x {result.cluster.name}"
    parts, at = [_text(_LEFT, 24, title, "16")], 34
    for panel in panels:
        parts += _draw(panel, at)
        at += panel.height
    size = f'width="{_WIDTH}" height="{at}" viewBox="0 0 {_WIDTH} {at}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    ground = f'<rect width="{_WIDTH}" height="{at}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def _layer_ms(result: SearchResult, plan: Plan) -> dict[str, float]:
    """A layer's parts, and its share of what the step waits for the host."""
    time, work, config = (
        layer_time(result.cluster, result.work, plan.config),
        result.work,
        plan.config,
    )
    names = ("matrices", "attention", "elementwise", "tp", "sp", "recompute")
    sizes = {name: getattr(time, name) * 1e3 for name in names}
    times = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    sizes["host"] = plan.time.host / times * 1e3
    return {name: size for name, size in sizes.items() if size > 0}


def _name(plan: Plan) -> str:
    config = plan.config
    degrees = [f"u{config.ulysses} r{config.ring}"]
    degrees += [
        f"{axis}{getattr(config, axis)}" for axis in ("tp", "pp", "dp") if getattr(config, axis) > 1
    ]
    degrees.append(f"z{config.zero}")
    degrees += [config.recompute] if config.recompute != "none" else []
    return f"{' '.join(degrees)}: {plan.mfu:.1%}"


def _draw(panel: _Panel, top: int) -> list[str]:
    colors: dict[str, str] = {}
    for _, sizes in panel.bars:
        for part in sizes:
            colors.setdefault(part, _COLORS[len(colors) % len(_COLORS)])
    most = max([panel.limit, *(sum(sizes.values()) for _, sizes in panel.bars)])
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    parts = [_text(_LEFT, top + 26, f"{panel.title}, {panel.unit}", "13")]
    for number, (name, sizes) in enumerate(panel.bars):
        x, y = float(_LEFT), top + _TOP + number * (_BAR + _GAP)
        parts.append(_text(_LEFT - 8, y + 15, name, "12", 'text-anchor="end"'))
        for part, size in sizes.items():
            hint = f"<title>{escape(part)}: {size:.3g} {panel.unit}</title>"
            box = f'x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{_BAR}"'
            parts.append(f'<rect {box} fill="{colors[part]}">{hint}</rect>')
            x += size * scale
        parts.append(_text(x + 6, y + 15, f"{sum(sizes.values()):.3g}", "12"))
    bottom = top + _TOP + len(panel.bars) * (_BAR + _GAP)
    if panel.limit:
        x = _LEFT + panel.limit * scale
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top + _TOP - 6}" y2="{bottom}"'
        parts.append(f'<line {ends} stroke="black" stroke-dasharray="4 3"/>')
    return parts + _legend(colors, bottom + 14)


def _legend(colors: Mapping[str, str], y: int) -> list[str]:
    parts, x = [], 40
    for part, color in colors.items():
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 14, y, part, "11"))
        x += 24 + 7 * len(part)
    return parts


def _text(x: float, y: float, content: str, size: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}"'
    return f"<text {place} {more}>{escape(content)}</text>"
