"""DeepSpeed's pipeline grid with the sequence axis folded into its data axis.

Its rank order is pipe, data, model, so with data = dp x ring x ulysses it is the grid of
:mod:`.groups`. For averages, batch sizes and ZeRO it uses getters, which are those of the mpu here.
Each rank calls the constructors once, when :mod:`.groups` has made its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.megatron_deepspeed.state import find_state, get_state

_AXES = ("data_parallel", "sequence_parallel", "sequence_data_parallel")
_GETTERS = ("group", "rank", "world_size")


def _is_sequence_parallel() -> bool:
    """Whether sequences are sharded; False where DeepSpeed runs without Megatron-DeepSpeed."""
    state = find_state()
    return state is not None and state.is_sequence_parallel


def fold_topology(
    original: Callable[..., None], topology: Any, num_pp: int, num_mp: int, num_dp: int
) -> None:
    """``PipeModelDataParallelTopology.__init__`` with data x sequence ranks as its data axis;
    ``num_dp`` is without the latter."""
    folded = get_state().mesh.sp_degree if _is_sequence_parallel() else 1
    original(topology, num_pp, num_mp, num_dp * folded)


def build_grid(original: Callable[..., None], grid: Any, *args: Any, **kwargs: Any) -> None:
    """``PipelineParallelGrid.__init__``, collective: folded groups, and the mpu's getters."""
    from megatron.core import parallel_state

    original(grid, *args, **kwargs)
    if _is_sequence_parallel():
        for axis in _AXES:
            for getter in _GETTERS:
                name = f"get_{axis}_{getter}"
                setattr(grid, name, getattr(parallel_state, name))


def build_engine(original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """``PipelineEngine.__init__``, which compares batch sizes with the size of the data axis."""
    if not _is_sequence_parallel():
        original(engine, *args, **kwargs)
        return
    grid = kwargs["model"]._grid  # deepspeed.initialize passes keywords alone
    folded = grid.data_parallel_size  # the module's: tied weights, which rank writes checkpoints
    grid.data_parallel_size = grid.get_data_parallel_world_size()
    try:
        original(engine, *args, **kwargs)
    finally:
        grid.data_parallel_size = folded
