"""``ds-usp``, ``python -m ds_usp.planner``: memory, max-length, plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ds_usp.config import is_first_on_node
from ds_usp.errors import USPError
from ds_usp.planner.arguments import OneDefault, OneLineParser, add_flags, command_from
from ds_usp.planner.commands import ALIASES, COMMANDS

PROG = "python -m ds_usp.planner"


def build_parser(prog: str = PROG) -> OneLineParser:
    """The command line, as ``prog`` starts it."""
    description = "Which degrees, how fast, will it fit: cost formulas, before a GPU is used."
    parser = OneLineParser(prog=prog, description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        text = " ".join((command.__doc__ or "").split())
        subparser = commands.add_parser(
            name,
            aliases=ALIASES.get(name, ()),
            help=text,
            description=text,
            formatter_class=OneDefault,
        )
        add_flags(subparser, command)
        subparser.set_defaults(command_class=command)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command; errors of the user are one line on stderr and the exit code 2.

    Args:
        argv: a command and its arguments; None: those of the process.
        prog: what the user typed before them, for usage and help.
    """
    try:
        args = build_parser(prog).parse(sys.argv[1:] if argv is None else argv)
        status: int = command_from(args, args.command_class).run()
        sys.stdout.flush()
        return status
    except USPError as error:
        if is_first_on_node():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
