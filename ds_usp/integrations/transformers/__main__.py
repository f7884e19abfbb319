"""``python -m ds_usp.integrations.transformers MODEL``: is a model served, and if not, why.

The exit code is 0 for a model that is served, 1 for one that is refused, 2 for one that cannot be
decided. No weights are loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_usp.errors import ConfigError, USPError
from ds_usp.integrations.transformers.refusals import check_version
from ds_usp.integrations.transformers.trial import Verdict, judge

SERVED, REFUSED, UNKNOWN = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print whether a model is served.

    Args:
        argv: the arguments without the program's name; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ds_usp.integrations.transformers",
        description="Print whether enable() serves a model of transformers, and if not, why: from "
        "its configuration, on any machine, without its weights.",
        epilog="Exit codes: 0 served, 1 refused, 2 the configuration cannot be read.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a folder with config.json, that file, a model type (llama: its default "
        "configuration), or the name of a model on the Hugging Face Hub",
    )
    name = parser.parse_args(argv).model
    transformers.logging.set_verbosity_error()
    try:
        check_version()
        verdict = judge(read_config(name))
    except USPError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNKNOWN
    print("\n".join(report(verdict)))
    return REFUSED if verdict.reasons else SERVED


def read_config(name: str) -> PreTrainedConfig:
    """A configuration from a folder, a file, the hub, or the defaults of a model type.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        if name in CONFIG_MAPPING and not Path(name).exists():
            return CONFIG_MAPPING[name]()
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # of the hub, of JSON, of the configuration's own checks
        first = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(
            f"no configuration {name!r}: {type(error).__name__}: {first}. Give a folder with "
            "config.json, a model type such as llama, or the name of a model on the hub"
        ) from error


def report(verdict: Verdict) -> list[str]:
    """The lines to print."""
    title = f"{verdict.model} (transformers {transformers.__version__})"
    if verdict.reasons:
        return [f"{title}: refused", *(f"  {reason}" for reason in verdict.reasons)]
    lines = [f"{title}: served"]
    if verdict.needs_positions:
        lines.append("  where position_ids are given: it does not count positions from 0")
    if verdict.undecided:
        first = verdict.undecided.strip().split("\n")[0]
        lines.append(f"  by its configuration; it does not run without weights ({first[:80]}), ")
        lines[-1] += "so its first forward pass may still refuse"
    return lines


if __name__ == "__main__":
    sys.exit(main())
