"""``ds-usp report-communication``: where the time of a traced step went, of any torch program."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_usp.errors import ConfigError
from ds_usp.profiling.exposed import read_traces
from ds_usp.profiling.exposed_classify import ROLES


def main(argv: Sequence[str], print_line: Callable[..., None]) -> int:
    """Read traces, print the report and write it if asked; 0. ``ConfigError``: see
    :func:`~ds_usp.profiling.exposed.read_traces`."""
    args = _parser().parse_args(argv)
    report = read_traces(args.traces, groups=dict(map(_group, args.group)), step=args.step)
    print_line(report.table())
    for path in report.write(args.out) if args.out else ():
        print_line(f"written  {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-usp report-communication",
        description="Communication of a traced step by kind: bytes, time, and how much of it no "
        "kernel hides. Reads what torch.profiler's export_chrome_trace wrote, of any program.",
    )
    add = parser.add_argument
    text = "the .json or .json.gz of each rank"
    add("traces", nargs="+", type=Path, metavar="TRACE", help=text)
    text = (
        "what a process group is for: its 'Process Group Name' in the trace, and "
        f"{', '.join(ROLES)} (default: by its description, else by the collective)"
    )
    add("--group", action="append", default=[], metavar="NAME=ROLE", help=text)
    text = (
        "the CPU range that is the step, such as ProfilerStep#5 (default: that of a report of "
        "ds_usp, else the whole file)"
    )
    add("--step", metavar="RANGE", help=text)
    text = "for communication.csv and communication_timeline.json, which ui.perfetto.dev shows"
    add("--out", type=Path, metavar="DIR", help=text)
    return parser


def _group(text: str) -> tuple[str, str]:
    name, equals, role = text.partition("=")
    if not equals:
        raise ConfigError(f"--group {text} must be NAME=ROLE, such as --group 3=tensor")
    return name, role
