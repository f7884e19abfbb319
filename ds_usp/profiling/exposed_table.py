"""A report of exposed communication as text and as a CSV file."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ds_usp.profiling.exposed_kinds import (
    ALL_TO_ALL,
    FROM_HOST,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    PIPELINE,
    RING,
    TENSOR,
    TO_HOST,
)
from ds_usp.profiling.exposed_step import KindTimes, StepTimes

_MIB, _MS = 2**20, 1e6
_HINT_SHARE = 0.02  # of the step, from which on a hint is printed
_NOTHING = KindTimes(0, 0)
_HINTS: tuple[tuple[str, str], ...] = (
    (ALL_TO_ALL, "longer sequences, more head chunks, or a ring over the slow link"),
    (RING, "longer sequences, or more Ulysses ranks"),
    (GRADIENTS, "overlap_comm of DeepSpeed's ZeRO-2, --overlap-grad-reduce of Megatron-LM"),
    (PARAMETERS, "--overlap-param-gather of Megatron-LM; larger prefetch buckets under ZeRO-3"),
    (TENSOR, "less tensor and more sequence parallelism"),
    (PIPELINE, "more micro batches a step"),
    (FROM_HOST, "pinned memory, a smaller offload ratio"),
    (TO_HOST, "a smaller offload ratio, fewer .item() calls in a step"),
)
COLUMNS = ("rank", "kind", "calls", "sent_bytes", "busy_ms", "hidden_ms", "exposed_ms", "of_step")


def table(
    ranks: Sequence[StepTimes], title: str = "", numbers: Sequence[int] = (), world_size: int = 0
) -> list[str]:
    """The lines of the report: means over ranks, and the rank that a kind is exposed longest on.

    Args:
        numbers: of the ranks; empty: 0, 1, 2 ...
        world_size: ranks of the program; 0: as many as are reported.
    """
    numbers = numbers or range(len(ranks))
    kinds = [kind for kind in KINDS if any(kind in times.kinds for times in ranks)]
    timed = any(times.step_ns for times in ranks)
    head = f"communication of {title or 'one step'}, {_ranks_text(len(ranks), world_size)}" + (
        "; milliseconds, means over ranks" if timed else "; calls and bytes are means over ranks"
    )
    lines = [head, _row("", "calls", "MiB", *_TIME_HEADS[: 5 if timed else 0])]
    for kind in kinds:
        rows = [times.kinds.get(kind, _NOTHING) for times in ranks]
        lines.append(_row(kind, *_counts(rows), *(_times(rows, ranks, numbers) if timed else ())))
    if not kinds:
        lines.append("  no communication was recorded")
    if any(row.sent_bytes is None for times in ranks for row in times.kinds.values()):
        lines.append("?: the trace does not hold the bytes of a call, such as one made by C++")
    if not timed:
        return [*lines, "times need a GPU: only calls and bytes are counted here"]
    step = _mean(ranks, lambda times: times.step_ns)
    return [*lines, *_totals(ranks, step), *_hints(ranks, kinds, step)]


_TIME_HEADS = ("busy", "hidden", "exposed", "of step", "most exposed")


def _row(name: str, *cells: str) -> str:
    return f"  {name:22}" + "".join(f"{cell:>13}" for cell in cells)


def _counts(rows: Sequence[KindTimes]) -> tuple[str, str]:
    calls = statistics.mean(row.calls for row in rows)
    sent = [row.sent_bytes for row in rows if row.sent_bytes is not None]
    mib = f"{statistics.mean(sent) / _MIB:,.2f}" if len(sent) == len(rows) else "?"
    return f"{calls:,.0f}", mib


def _ranks_text(count: int, world_size: int) -> str:
    of = f" of {world_size}" if world_size > count else ""
    return f"{count}{of} rank{'' if max(count, world_size) == 1 else 's'}"


def _times(
    rows: Sequence[KindTimes], ranks: Sequence[StepTimes], numbers: Sequence[int]
) -> tuple[str, ...]:
    step = _mean(ranks, lambda times: times.step_ns)
    means = [
        statistics.mean(getattr(row, name) for row in rows)
        for name in ("busy_ns", "hidden_ns", "exposed_ns")
    ]
    longest = max(range(len(rows)), key=lambda rank: rows[rank].exposed_ns)
    return (
        *(f"{mean / _MS:,.2f}" for mean in means),
        f"{means[-1] / step:.1%}",
        f"{rows[longest].exposed_ns / _MS:,.2f} r{numbers[longest]}",
    )


def _totals(ranks: Sequence[StepTimes], step: float) -> Iterator[str]:
    """Sums of all kinds, kernels, idle time and the step."""
    yield _row(
        "all communication", "", "",
        f"{_mean(ranks, lambda t: t.communication_ns) / _MS:,.2f}",
        f"{_mean(ranks, lambda t: t.communication_ns - t.exposed_ns) / _MS:,.2f}",
        f"{_mean(ranks, lambda t: t.exposed_ns) / _MS:,.2f}",
        f"{_mean(ranks, lambda t: t.exposed_ns) / step:.1%}",
    )  # fmt: skip
    for name, read in _TOTALS:
        mean = _mean(ranks, read)
        yield _row(name, "", "", f"{mean / _MS:,.2f}", "", "", f"{mean / step:.1%}")


_TOTALS: tuple[tuple[str, Callable[[StepTimes], float]], ...] = (
    ("kernels", lambda times: times.compute_ns),
    ("idle: for the CPU", lambda times: times.host_ns),
    ("idle: for other ranks", lambda times: times.ranks_ns),
    ("idle: other", lambda times: times.other_ns),
    ("step", lambda times: times.step_ns),
)


def _hints(ranks: Sequence[StepTimes], kinds: Sequence[str], step: float) -> Iterator[str]:
    """What to change about kinds that are exposed for long, longest first."""
    shares = {}
    for kind in kinds:
        rows = [times.kinds.get(kind, _NOTHING) for times in ranks]
        shares[kind] = statistics.mean(row.exposed_ns for row in rows) / step
    for kind, hint in sorted(_HINTS, key=lambda item: -shares.get(item[0], 0.0)):
        if shares.get(kind, 0.0) >= _HINT_SHARE:
            yield f"{kind}: {shares[kind]:.1%} of the step is exposed. Try {hint}"
    host = _mean(ranks, lambda times: times.host_ns) / step
    if host >= _HINT_SHARE:
        yield (
            f"the GPU waits for the CPU {host:.1%} of the step, which the profiler makes longer. "
            "Try longer sequences, larger micro batches or CUDA graphs"
        )


def _mean(ranks: Sequence[StepTimes], read: Callable[[StepTimes], float]) -> float:
    return statistics.mean(map(read, ranks))


def write_csv(
    path: Path,
    ranks: Sequence[StepTimes],
    title: str = "",
    numbers: Sequence[int] = (),
    world_size: int = 0,
) -> None:
    """One row for each rank and kind, then the rank's totals; times are empty without a GPU.

    Columns as :data:`COLUMNS`: bytes are empty where the trace has none; ``of_step`` is
    the exposed part of the step, of the other lines their part.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        few = f", {_ranks_text(len(ranks), world_size)}" if world_size > len(ranks) else ""
        file.write(f"# communication of {title or 'one step'}{few}\n")
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for rank, times in zip(numbers or range(len(ranks)), ranks, strict=True):
            for kind, row in times.kinds.items():
                cells = [row.busy_ns, row.hidden_ns, row.exposed_ns]
                writer.writerow(
                    [rank, kind, row.calls, row.sent_bytes, *_cells(cells, row.exposed_ns, times)]
                )
            for name, read in _TOTALS if times.step_ns else ():
                writer.writerow([rank, name, "", "", *_cells([read(times)], read(times), times)])


def _cells(nanoseconds: Sequence[float], part: float, times: StepTimes) -> list[str]:
    """Milliseconds of the three time columns and the share of the step."""
    if not times.step_ns:
        return ["", "", "", ""]
    cells = [f"{value / _MS:.4f}" for value in nanoseconds]
    return [*cells, *[""] * (3 - len(cells)), f"{part / times.step_ns:.5f}"]
