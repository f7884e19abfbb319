"""``ds-usp`` and ``python -m ds_usp``: its own commands, and those of the planner."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from ds_usp._version import __version__, commit
from ds_usp.config import is_first_on_node
from ds_usp.errors import USPError

_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "env": "versions, GPUs and links, usable kernels, copy engines: for a bug report",
        "verify": "run attention as you configure it, here, against a dense reference in fp64",
        "report-communication": "what of a traced program's communication no kernel hides",
    }
)
_PLANNER: Mapping[str, str] = MappingProxyType(
    {
        "plan": "the fastest parallel configurations that fit",
        "memory": "bytes that one GPU needs",
        "max-length": "the longest sequence that fits (also: longest)",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; user errors are one line on stderr and the exit code 2.

    Args:
        argv: the arguments without the program's name; None: those of this process.
    """
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command in ("-V", "--version"):
        print(f"ds-usp {__version__} (commit {commit() or 'unknown'})")
        return 0
    if command in (*_PLANNER, "longest"):
        from ds_usp.planner.__main__ import main as planner

        return planner([command, *rest], prog="ds-usp")
    if command not in _COMMANDS:
        print(_unknown(command), file=sys.stderr)
        return 2
    try:
        return _run(command, rest)
    except USPError as error:
        if is_first_on_node():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(command: str, argv: list[str]) -> int:
    if command == "env":
        from ds_usp.cli.environment import main as environment

        return environment(argv, _print_line)
    if command == "report-communication":
        from ds_usp.cli.report_communication import main as report_communication

        return report_communication(argv, _print_line)
    from ds_usp.cli.verify import main as verify

    return verify(argv, _print_line)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _help() -> str:
    width = max(map(len, [*_COMMANDS, *_PLANNER]))
    lines = [
        "usage: ds-usp COMMAND [arguments]      ds-usp COMMAND --help      ds-usp --version",
        "",
        *(f"  {name:{width}}  {text}" for name, text in _COMMANDS.items()),
        "",
        "the planner, which needs neither torch nor a GPU:",
        *(f"  {name:{width}}  {text}" for name, text in _PLANNER.items()),
    ]
    return "\n".join(lines)


def _unknown(command: str) -> str:
    """The error's line for an unknown command, with the closest known one."""
    commands = [*_COMMANDS, *_PLANNER]
    near = get_close_matches(command, commands, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"error: unknown command {command!r}{hint}; there are {', '.join(commands)}"


if __name__ == "__main__":
    sys.exit(main())
