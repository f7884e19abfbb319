"""``python -m ds_usp.geometry --sp 8 --heads 32``: :class:`Degrees` for shell scripts.

Prints the Ulysses degree, by default the largest that fits, and the replicas of ``--world``.
Degrees that do not fit: the reason on stderr, exit status 2.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import MISSING, fields

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees


def main() -> int:
    """Read the flags, one for each field of :class:`Degrees`; the exit status."""
    parser = ArgumentParser(prog="python -m ds_usp.geometry", description=Degrees.__doc__)
    for field in fields(Degrees):
        flag, required = f"--{field.name.replace('_', '-')}", field.default is MISSING
        parser.add_argument(flag, type=int, default=field.default, required=required)
    try:
        degrees = Degrees(**vars(parser.parse_args())).check(Degrees.SETTINGS)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(degrees.ulysses or degrees.valid_ulysses()[0], degrees.dp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
