"""``python -m megatron_patches --host NAME --table | --check [PATH]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import megatron_patches
from ds_usp.errors import USPError


def main(argv: list[str] | None = None) -> int:
    """Print the table of a host, or whether a checkout matches it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_patches", description=__doc__)
    parser.add_argument("--host", default="megatron_deepspeed", choices=megatron_patches.hosts())
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--table", action="store_true", help="what is changed, why, against what")
    action.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="PATH",
        help="whether the host matches; PATH: a checkout of it, without one the installed one",
    )
    args = parser.parse_args(argv)
    try:
        if args.table:
            print(megatron_patches.table(args.host))
        else:
            print(megatron_patches.check(args.host, Path(args.check) if args.check else None))
    except USPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
