"""What one step communicates, what of it is exposed, and what other settings would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_usp.planner.attention_schedule import OFF
from ds_usp.planner.data_parallel_time import reduces_under_backward
from ds_usp.planner.gradient_buckets import bucket_elements
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import ParallelConfig, Workload, infeasible_reason
from ds_usp.planner.step_communication import StepExchange, step_communication
from ds_usp.planner.step_time import step_time

MIB = 2**20
_COLUMNS = ("MiB", "busy ms", "hidden", "exposed", "of step")


def step_rows(
    cluster: Cluster, work: Workload, config: ParallelConfig, projections: str = OFF
) -> tuple[float, tuple[StepExchange, ...]]:
    """Predicted seconds of a step, and its communication by kind."""
    step = step_time(cluster, work, config)
    total = step.total
    if projections != OFF:  # the layers' time is the plain path's
        total -= step.layers * _recompute_gain(cluster, work, config)
    return total, step_communication(cluster, work, config, step, projections)


def step_table(total_s: float, rows: Sequence[StepExchange]) -> list[str]:
    """A line for each kind: bytes that a rank sends, and milliseconds."""
    cells = [
        (
            row.kind,
            f"{row.sent_bytes / MIB:.1f}",
            *(f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.hidden, row.exposed)),
            f"{row.exposed / total_s:.1%}",
        )
        for row in rows
    ]
    exposed = sum(row.exposed for row in rows)
    cells += [
        ("all exposed", "", "", "", f"{1e3 * exposed:.2f}", f"{exposed / total_s:.1%}"),
        ("step", "", "", "", f"{1e3 * total_s:.2f}", ""),
    ]
    lines = [("communication of a step, forecast", *_COLUMNS), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
        for first, *others in lines
    ]


def settings_lines(cluster: Cluster, work: Workload, config: ParallelConfig) -> Iterator[str]:
    """Other settings of the same degrees, by their price."""
    step_s = step_time(cluster, work, config).total
    if config.sp > 1:
        gain = _recompute_gain(cluster, work, config)
        yield (
            f"--usp-projection-overlap recompute: a layer {abs(gain):.1%} "
            f"{'shorter' if gain > 0 else 'longer'}, for less memory"
        )
    if config.zero_ranks > 1 and config.zero in (1, 2):
        yield from _reduction_lines(cluster, work, config, step_s)


def _recompute_gain(cluster: Cluster, work: Workload, config: ParallelConfig) -> float:
    from ds_usp.planner.projection_time import recompute_gain  # experimental: only where it is used

    return recompute_gain(cluster, work, config)


def _reduction_lines(
    cluster: Cluster, work: Workload, config: ParallelConfig, step_s: float
) -> Iterator[str]:
    """Where gradients are reduced, in which buckets; and under the other ZeRO stage."""
    if reduces_under_backward(config):
        elements = bucket_elements(work.model, config.tp, config.zero)
        yield f"gradients are reduced under backward, in buckets of {elements} elements"
    else:
        yield "gradients are reduced at the end of backward: nothing hides them"
    other = config.replace(zero=3 - config.zero, overlap_gradients=config.pp == 1)
    if infeasible_reason(work, other) is None:
        more = step_time(cluster, work, other).total / step_s - 1
        yield f"ZeRO-{other.zero} instead of ZeRO-{config.zero}: step {more:+.1%}"


def step_json(total_s: float, rows: Sequence[StepExchange]) -> dict[str, object]:
    """The table's numbers, in bytes and seconds."""
    return {
        "step_s": total_s,
        "kinds": [
            {
                "kind": row.kind,
                "sent_bytes": round(row.sent_bytes),
                "seconds": row.seconds,
                "hidden_s": row.hidden,
                "exposed_s": row.exposed,
            }
            for row in rows
        ],
    }


def explain_step(
    cluster: Cluster, work: Workload, config: ParallelConfig, projections: str = OFF
) -> list[str]:
    """The table of a step's communication, and its settings by their price."""
    rows = step_rows(cluster, work, config, projections)
    return [*step_table(*rows), *settings_lines(cluster, work, config)]
