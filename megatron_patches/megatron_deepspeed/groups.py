"""Megatron-DeepSpeed's process groups, from one table over one grid of ranks: created once a start,
from validated arguments, by all ranks. Nothing else here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

import ds_usp
from ds_usp.errors import ConfigError
from megatron_patches.megatron_deepspeed.arguments import layer_memory
from megatron_patches.megatron_deepspeed.state import (
    FrameworkState,
    get_state,
    is_active,
    set_state,
)

Ranks = tuple[int, ...]

# Megatron-DeepSpeed's variable -> the axes along which the ranks of its group differ.
_GROUP_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "_TENSOR_MODEL_PARALLEL_GROUP": ("tp",),
        "_ULYSSES_PARALLEL_GROUP": ("ulysses",),
        "_RING_PARALLEL_GROUP": ("ring",),
        "_SEQUENCE_PARALLEL_GROUP": ("ulysses", "ring"),
        "_DATA_PARALLEL_GROUP": ("dp",),
        "_SEQUENCE_DATA_PARALLEL_GROUP": ("ulysses", "ring", "dp"),
        "_PIPELINE_MODEL_PARALLEL_GROUP": ("pp",),
        "_MODEL_PARALLEL_GROUP": ("tp", "pp"),
        "_AMAX_REDUCTION_GROUP": ("tp", "ulysses", "ring", "dp"),
    }
)
# Variables that destroy_model_parallel leaves set: the added ones, and some of its own.
_CLEARED = (
    "_ULYSSES_PARALLEL_GROUP",
    "_RING_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_GLOO",
    "_DATA_PARALLEL_GLOBAL_RANKS",
    "_PIPELINE_GLOBAL_RANKS",
    "_SEQUENCE_PARALLEL_WORLD_SIZE",
    "_SEQUENCE_PARALLEL_RANK",
    "_SEQUENCE_DATA_PARALLEL_WORLD_SIZE",
    "_SEQUENCE_DATA_PARALLEL_RANK",
)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    use_fp8: bool = False,
    use_distributed_optimizer: bool = False,
) -> None:
    """Create every process group, the mesh and the state, of validated arguments. Collective over
    the world.

    Raises:
        ConfigError: degrees that do not multiply to the world, that differ between ranks, or an
            interleaved pipeline.
    """
    from megatron import get_args
    from megatron.core import parallel_state

    args = get_args()
    config = ds_usp.USPConfig.from_args(args)
    if config.sp_degree != sequence_parallel_size or virtual_pipeline_model_parallel_size:
        raise ConfigError(
            f"initialize_model_parallel was called with sequence_parallel_size="
            f"{sequence_parallel_size} and virtual_pipeline_model_parallel_size="
            f"{virtual_pipeline_model_parallel_size}; --ds-sequence-parallel-size is "
            f"{config.sp_degree}, and DeepSpeed's pipeline engine has no interleaved schedule"
        )
    degrees: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(degrees, (config.ulysses, config.ring))
    if len(set(degrees)) > 1:  # new_group() would deadlock
        raise ConfigError(
            f"ranks have different --ulysses-degree and ring degrees: {degrees}. Give the degree "
            "as a number instead of auto"
        )
    grid = make_grid(
        dist.get_world_size(),
        tp=tensor_model_parallel_size,
        ulysses=config.ulysses,
        ring=config.ring,
        pp=pipeline_model_parallel_size,
    )
    rank, split = dist.get_rank(), pipeline_model_parallel_split_rank
    group_by_ranks: dict[tuple[Ranks, ...], dist.ProcessGroup | None] = {}
    for name, groups in group_table(grid, split, use_fp8).items():
        if groups not in group_by_ranks:  # one process group for variables with equal ranks
            group_by_ranks[groups] = _new_group(groups)
        setattr(parallel_state, name, group_by_ranks[groups])
    if use_distributed_optimizer:
        parallel_state._DATA_PARALLEL_GROUP_GLOO = _new_group(grid.groups("dp"), backend="gloo")
    pipeline = grid.group_of(rank, "pp")
    parallel_state._DATA_PARALLEL_GLOBAL_RANKS = grid.group_of(rank, "dp")
    parallel_state._PIPELINE_GLOBAL_RANKS = pipeline
    parallel_state._PIPELINE_MODEL_PARALLEL_SPLIT_RANK = split
    parallel_state._EMBEDDING_GLOBAL_RANKS = word_embedding_ranks(pipeline, split)
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = position_embedding_ranks(pipeline, split)
    parallel_state._set_global_memory_buffer()
    mesh = ds_usp.SequenceMesh.from_group(
        parallel_state._SEQUENCE_PARALLEL_GROUP, config.ulysses, config.order
    )
    layout = mesh.layout(config.layout, args.seq_length)
    active, memory = is_active(args), layer_memory(args)
    set_state(FrameworkState(grid, mesh, layout, config.kernel, active=active, memory=memory))


def make_grid(world_size: int, *, tp: int, ulysses: int, ring: int, pp: int) -> ds_usp.RankGrid:
    """The grid of a world, innermost axis first (Ulysses before ring, as in ``USPConfig.order``);
    data parallelism takes what the other axes leave.

    Raises:
        ConfigError: the other axes do not divide the world.
    """
    degrees = ds_usp.Degrees(
        sp=ulysses * ring, ulysses=ulysses, ring=ring, tp=tp, pp=pp, world=world_size
    ).check(ds_usp.Degrees.FLAGS)
    sizes = {"tp": tp, "ulysses": ulysses, "ring": ring, "dp": degrees.dp, "pp": pp}
    return ds_usp.RankGrid(sizes)


def group_table(
    grid: ds_usp.RankGrid, split: int | None = None, use_fp8: bool = False
) -> dict[str, tuple[Ranks, ...]]:
    """The global ranks of all groups of the world, by Megatron-DeepSpeed's variable.

    Args:
        split: the pipeline stage at which a decoder begins; None: no decoder.
        use_fp8: with the groups that reduce the maxima of fp8 tensors.
    """
    table = {name: grid.groups(*axes) for name, axes in _GROUP_AXES.items()}
    if not use_fp8:
        del table["_AMAX_REDUCTION_GROUP"]
    pipelines = grid.groups("pp")
    table["_EMBEDDING_GROUP"] = tuple(
        word_embedding_ranks(pipeline, split) for pipeline in pipelines
    )
    table["_POSITION_EMBEDDING_GROUP"] = tuple(
        position_embedding_ranks(pipeline, split) for pipeline in pipelines
    )
    return table


def word_embedding_ranks(pipeline: Ranks, split: int | None) -> Ranks:
    """The ranks of a pipeline that hold the word embedding: first, decoder's first, last."""
    return tuple(dict.fromkeys((*position_embedding_ranks(pipeline, split), pipeline[-1])))


def position_embedding_ranks(pipeline: Ranks, split: int | None) -> Ranks:
    """The ranks of a pipeline that hold the position embedding: first, decoder's first."""
    stages = (0,) if split is None or len(pipeline) == 1 else (0, split)
    return tuple(pipeline[stage] for stage in dict.fromkeys(stages))


def _new_group(groups: Sequence[Ranks], backend: str | None = None) -> dist.ProcessGroup | None:
    """Create all groups, which is collective; return the one that holds this rank, or None."""
    rank, own_group = dist.get_rank(), None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend=backend)
        own_group = group if rank in ranks else own_group
    return own_group


def destroy_model_parallel(original: Callable[[], None]) -> None:
    """``destroy_model_parallel``, which clears all variables and the state."""
    from megatron.core import parallel_state

    original()
    for name in _CLEARED:
        setattr(parallel_state, name, None)
    set_state(None)


def get_sequence_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's sequence-parallel group."""
    return get_state().grid.group_of(dist.get_rank(), "ulysses", "ring")[0]


def getter(variable: str, query: Callable[[Any], Any]) -> Callable[[], Any]:
    """A getter that ``patch_table.py`` adds to ``parallel_state``: ``query`` of the group that is
    in ``variable`` when it is called."""

    def get() -> Any:
        from megatron.core import parallel_state

        return query(getattr(parallel_state, variable))

    return get
