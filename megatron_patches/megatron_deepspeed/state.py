"""What the patches know about this process: settings, grid of ranks, mesh and token layout.

One value, made when the host makes its groups and kept where the host keeps them: on its module
``megatron.core.parallel_state``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ds_usp
from ds_usp.errors import MeshError
from ds_usp.memory import LayerMemory

_STATE, _MASK = "_USP_STATE", "_USP_MASK"


@dataclass(frozen=True)
class FrameworkState:
    """How this process takes part in one run of the host.

    Args:
        grid: all ranks, along the axes tp, ulysses, ring, dp and pp.
        mesh: the ranks that share this rank's sequences.
        layout: where each token of a sequence is.
        kernel: what computes attention.
        active: whether attention is ours: sequences are spread, or the host's own is wrong.
        memory: what layers keep for their backward pass.
    """

    grid: ds_usp.RankGrid
    mesh: ds_usp.SequenceMesh
    layout: ds_usp.TokenLayout
    kernel: str
    active: bool
    memory: LayerMemory = field(default_factory=LayerMemory)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether more than one rank holds a sequence."""
        return self.mesh.sp_degree > 1


def is_active(args: Any) -> bool:
    """Whether attention has to be ours for these arguments of the host.

    With one rank a sequence the host is left alone, but for rotary positions (it takes the cosine
    of a cosine) and for grouped queries (it cuts the projection into three equal parts). Only ours
    can be kept over an activation checkpoint.
    """
    return bool(
        args.ds_sequence_parallel_size > 1
        or args.use_rotary_position_embeddings
        or args.num_key_value_heads != args.num_attention_heads
        or args.usp_recompute == "attention"
    )


def find_state() -> FrameworkState | None:
    """The state, None before the groups exist."""
    state: FrameworkState | None = getattr(_holder(), _STATE, None)
    return state


def get_state() -> FrameworkState:
    """The state.

    Raises:
        MeshError: the host has not made its groups yet.
    """
    state = find_state()
    if state is None:
        raise MeshError(
            "Megatron-DeepSpeed's groups do not exist yet: call initialize_model_parallel first"
        )
    return state


def set_state(state: FrameworkState | None) -> None:
    """Keep the state beside the host's groups; None: they are gone."""
    setattr(_holder(), _STATE, state)


def current_mask() -> ds_usp.MaskSpec:
    """What attention of the micro batch that is computed sees; all layers share it."""
    return getattr(_holder(), _MASK, None) or ds_usp.MaskSpec.causal()


def set_mask(mask: ds_usp.MaskSpec) -> None:
    """Keep what attention sees of the micro batch that is computed next, to its backward pass."""
    setattr(_holder(), _MASK, mask)


def _holder() -> ModuleType:
    from megatron.core import parallel_state

    module: ModuleType = parallel_state
    return module
