"""Answers to imports of names that left after 0.1.0: what to write instead. It goes with 0.3."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import MappingProxyType
from typing import Any

INSTEAD = MappingProxyType(
    {
        "ds_usp.attention.score_mod": "ds_usp.Scores has soft caps and sinks",
        "ds_usp.comm.watchdog": "docs/design/rank-consistency.md says what a failed rank raises",
        "ds_usp.experimental": "Ulysses inside a node, a ring across nodes, packed rows",
        "ds_usp.kernels.rotary_triton": "ds_usp.training.rotate_projected",
        "ds_usp.kernels.score_mod": "ds_usp.kernels.sinks; a kernel's with_softcap(cap)",
        "ds_usp.planner.explain": "ds_usp.planner.answer",
        "ds_usp.planner.sample_cost": "ds-usp plan prices packed rows",
        "ds_usp.planner.SampleTime": "ds-usp plan prices packed rows",
        "ds_usp.profiling": "a torch.profiler trace: docs/usage/where-does-my-step-go.md",
        "ds_usp.training.solved_ratio": "ds_usp.planner.offload_needed",
        "ds_usp.training.this_cluster": "ds_usp.planner.cluster_of",
    }
)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname in INSTEAD:
            text = f"{fullname} left after ds_usp 0.1.0. Use {INSTEAD[fullname]}"
            # With a name, `from package import name` would hide the text.
            raise ModuleNotFoundError(text)


def answer_imports() -> None:
    """Let imports of modules that left raise what to write instead, from ``import ds_usp`` on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First: else a folder with nothing but bytecode of such a module would be a package.
        sys.meta_path.insert(0, _Finder())
