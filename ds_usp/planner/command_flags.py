"""What commands of the planner have in common: their base class, and flags of several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ds_usp.planner.arguments import flag
from ds_usp.planner.hardware import Cluster, load_cluster

BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPES = tuple(BYTES)
DEFAULT_CLUSTER = "h800"
TOKENS = "in tokens: 131072, or 128K, or 1M (powers of 1024)"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command; its docstring is its help.

    Attributes:
        removed_flags: which it had, and refuses with the reason.
    """

    removed_flags: ClassVar[tuple[str, ...]] = ()

    json: bool = flag("print JSON, for programs", False)

    def run(self) -> int:
        """Print the result; the exit code."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """``--cluster``, of the commands that need the hardware's rates or memory."""

    cluster: str | None = flag(
        f"built-in name or a profile (JSON) (default: {DEFAULT_CLUSTER})", None
    )

    def load_cluster(self) -> tuple[Cluster, str]:
        """The cluster, and its name as reports print it."""
        cluster = load_cluster(self.cluster or DEFAULT_CLUSTER)
        return cluster, f"cluster {cluster.name}" + ("" if self.cluster else " (default)")


def print_json(content: object) -> int:
    """Print a document; the exit code."""
    print(json.dumps(content, indent=2))
    return 0
