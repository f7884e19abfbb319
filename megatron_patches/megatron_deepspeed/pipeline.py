"""DeepSpeed's pipeline, which knows no sequence axis: it is folded into its data axis.

Its rank order is pipe, data, model, so with data = dp x ring x ulysses the ranks coincide with
ours. For averages, batch sizes and ZeRO it asks its grid, which answers as the host's mpu does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.megatron_deepspeed.state import find_state, get_state

_AXES = ("data_parallel", "sequence_parallel", "sequence_data_parallel")
_GETTERS = ("group", "rank", "world_size")


def _is_sequence_parallel() -> bool:
    """Whether sequences are spread; also asked where DeepSpeed runs without the host."""
    state = find_state()
    return state is not None and state.is_sequence_parallel


def fold_topology(
    original: Callable[..., None], topology: Any, num_pp: int, num_mp: int, num_dp: int
) -> None:
    """``PipeModelDataParallelTopology.__init__`` with all ranks that hold different tokens."""
    folded = get_state().mesh.sp_degree if _is_sequence_parallel() else 1
    original(topology, num_pp, num_mp, num_dp * folded)


def build_grid(original: Callable[..., None], grid: Any, *args: Any, **kwargs: Any) -> None:
    """``PipelineParallelGrid.__init__``: the folded axis inside, the host's answers outside."""
    from megatron.core import parallel_state

    original(grid, *args, **kwargs)
    if _is_sequence_parallel():
        for axis in _AXES:
            for getter in _GETTERS:
                name = f"get_{axis}_{getter}"
                setattr(grid, name, getattr(parallel_state, name))


def build_engine(original: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """``PipelineEngine.__init__``, which compares batch sizes with the size of the data axis.

    Before and after it the folded size counts: for tied weights, and for who writes checkpoints.
    """
    if not _is_sequence_parallel():
        original(engine, *args, **kwargs)
        return
    grid = kwargs["model"]._grid
    folded = grid.data_parallel_size
    grid.data_parallel_size = grid.get_data_parallel_world_size()
    try:
        original(engine, *args, **kwargs)
    finally:
        grid.data_parallel_size = folded
