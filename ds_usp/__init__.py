"""Unified Sequence Parallel: Ring Attention x DeepSpeed-Ulysses, exact or refused.

Names that need torch are imported on first access (PEP 562): the planner starts without torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from ds_usp._version import __version__
from ds_usp.config import USPConfig, allocator_variables
from ds_usp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    MeshError,
    PatchError,
    RecomputeError,
    UnsupportedAttentionError,
    USPError,
)
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ranks import RankGrid
from ds_usp.removed_names import answer_imports

answer_imports()

if TYPE_CHECKING:
    from ds_usp import memory as memory
    from ds_usp import planner as planner
    from ds_usp import training as training
    from ds_usp.attention.functional import usp_attention, usp_joint_attention
    from ds_usp.attention.module import USPAttention
    from ds_usp.attention.scores import Scores
    from ds_usp.attention.tuning import Tuning
    from ds_usp.comm.channel import CommLedger
    from ds_usp.comm.mesh import SequenceMesh
    from ds_usp.comm.process_groups import one_line_errors
    from ds_usp.recurrence.conv import causal_conv
    from ds_usp.recurrence.scan import PieceMap, PieceMaps, Recurrence, affine_scan
else:
    _LAZY = MappingProxyType(
        {
            "CommLedger": "ds_usp.comm.channel",
            "PieceMap": "ds_usp.recurrence.scan",
            "PieceMaps": "ds_usp.recurrence.scan",
            "Recurrence": "ds_usp.recurrence.scan",
            "Scores": "ds_usp.attention.scores",
            "SequenceMesh": "ds_usp.comm.mesh",
            "Tuning": "ds_usp.attention.tuning",
            "USPAttention": "ds_usp.attention.module",
            "affine_scan": "ds_usp.recurrence.scan",
            "causal_conv": "ds_usp.recurrence.conv",
            "one_line_errors": "ds_usp.comm.process_groups",
            "usp_attention": "ds_usp.attention.functional",
            "usp_joint_attention": "ds_usp.attention.functional",
        }
    )

    # Submodules that `import ds_usp` is enough for.
    _SUBMODULES = ("memory", "planner", "training")

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return import_module(f"ds_usp.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY, *_SUBMODULES})


__all__ = [
    "CheckpointError",
    "CommLedger",
    "ConfigError",
    "DataError",
    "Degrees",
    "LayoutError",
    "MaskSpec",
    "MeshError",
    "PatchError",
    "PieceMap",
    "PieceMaps",
    "RankGrid",
    "RecomputeError",
    "Recurrence",
    "Scores",
    "SequenceMesh",
    "TokenLayout",
    "Tuning",
    "USPAttention",
    "USPConfig",
    "USPError",
    "UnsupportedAttentionError",
    "__version__",
    "affine_scan",
    "allocator_variables",
    "causal_conv",
    "one_line_errors",
    "usp_attention",
    "usp_joint_attention",
]
