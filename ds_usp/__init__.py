"""Unified Sequence Parallel: Ring Attention x DeepSpeed-Ulysses, exact or refused."""

from ds_usp._version import __version__
from ds_usp.attention.functional import usp_attention
from ds_usp.attention.joint import usp_joint_attention
from ds_usp.attention.module import USPAttention
from ds_usp.attention.scores import Scores
from ds_usp.attention.tuning import Tuning
from ds_usp.comm.ledger import CommLedger
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import USPConfig
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
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ranks import RankGrid

__all__ = [
    "CheckpointError",
    "CommLedger",
    "ConfigError",
    "DataError",
    "LayoutError",
    "MaskSpec",
    "MeshError",
    "PatchError",
    "RankGrid",
    "RecomputeError",
    "Scores",
    "SequenceMesh",
    "TokenLayout",
    "Tuning",
    "USPAttention",
    "USPConfig",
    "USPError",
    "UnsupportedAttentionError",
    "__version__",
    "usp_attention",
    "usp_joint_attention",
]
