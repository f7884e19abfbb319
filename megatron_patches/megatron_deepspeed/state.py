"""State of the patches in this process: grid of ranks, mesh, token layout, kernel, memory policy.

One value, set with Megatron-DeepSpeed's process groups (:mod:`.groups`) and on the same module:
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
    """One process of one run of Megatron-DeepSpeed.

    Args:
        grid: all ranks, along the axes tp, ulysses, ring, dp and pp.
        mesh: the ranks that share this rank's sequences.
        layout: which rank holds which token.
        kernel: the attention kernel.
        active: whether attention is computed by ds_usp (see :func:`is_active`).
        memory: what layers save for backward.
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
    """Whether ds_usp computes attention for these arguments.

    With one rank a sequence it does so where Megatron-DeepSpeed is wrong: for rotary positions (it
    applies the cosine twice) and grouped queries (it splits the projection into three equal
    chunks); and for ``--usp-recompute attention``.
    """
    return bool(
        args.ds_sequence_parallel_size > 1
        or args.use_rotary_position_embeddings
        or args.num_key_value_heads != args.num_attention_heads
        or args.usp_recompute == "attention"
    )


def find_state() -> FrameworkState | None:
    """The state, None before the groups exist."""
    return getattr(_holder(), _STATE, None)


def get_state() -> FrameworkState:
    """The state of this process.

    Raises:
        MeshError: the process groups do not exist yet.
    """
    state = find_state()
    if state is None:
        raise MeshError(
            "Megatron-DeepSpeed's groups do not exist yet: call initialize_model_parallel first"
        )
    return state


def set_state(state: FrameworkState | None) -> None:
    """Set the state and clear the mask; None: the groups were destroyed."""
    setattr(_holder(), _STATE, state)
    setattr(_holder(), _MASK, None)


def current_mask() -> ds_usp.MaskSpec:
    """The mask of the current micro batch, which all layers share; causal by default."""
    return getattr(_holder(), _MASK, None) or ds_usp.MaskSpec.causal()


def set_mask(mask: ds_usp.MaskSpec) -> None:
    """Set the mask of the next micro batch, for forward and backward."""
    setattr(_holder(), _MASK, mask)


def _holder() -> ModuleType:
    """The module that holds the state, as it holds the process groups."""
    from megatron.core import parallel_state

    return parallel_state
