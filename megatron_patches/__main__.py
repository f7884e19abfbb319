"""Lists the patches of a framework, or checks that they fit its code."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import megatron_patches
from ds_usp.errors import ConfigError, USPError


def main(argv: list[str] | None = None) -> int:
    """Print the table of a framework, or whether a checkout matches it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_patches", description=__doc__)
    parser.add_argument(
        "--framework", default="megatron_deepspeed", choices=megatron_patches.frameworks()
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--table", action="store_true", help="what is changed, why, against what")
    action.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="PATH",
        help="whether the framework matches; PATH: a checkout of Megatron-DeepSpeed or Megatron-LM "
        "(default: $MEGATRON_DEEPSPEED_PATH, $MEGATRON_LM_PATH); other frameworks as they are "
        "installed",
    )
    args = parser.parse_args(argv)
    try:
        if args.table:
            print(megatron_patches.table(args.framework))
        else:
            print(megatron_patches.check(args.framework, _checkout(args.framework, args.check)))
    except USPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _checkout(framework: str, path: str) -> Path | None:
    """The checkout to compare: the path, else the framework's environment variable; None: neither.
    ConfigError for a variable that names no folder."""
    checkout = megatron_patches.checkout_of(framework)
    variable = checkout.variable if checkout else ""
    from_environment = os.environ.get(variable, "")
    if not path and from_environment and not Path(from_environment).is_dir():
        raise ConfigError(
            f"{variable}={from_environment} is no folder; set it to a checkout, or give a path"
        )
    return Path(path or from_environment) if path or from_environment else None


if __name__ == "__main__":
    sys.exit(main())
