"""``overlap="auto"`` of :class:`ds_usp.USPSelfAttention`: decided by the planner's forecast."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.planner import (
    ModelShape,
    ParallelConfig,
    Workload,
    choose_projections,
    cluster_of,
)


def overlap_pays(
    mesh: SequenceMesh, x: torch.Tensor, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> bool:
    """Whether the projections of a call are multiplied under its exchanges; the same on all ranks
    of nodes that are alike. The first rank logs the reason, once, at level INFO.

    A layer is taken to have an MLP of 4 times its width. Where there is no forecast, on CPUs and on
    a GPU that the planner's table does not have: where exchanges cross nodes.

    Args:
        x: the input ``[b, s_local, c]``.
        tokens: of one sequence.
    """
    if mesh.sp_degree == 1:
        return False
    gpu = torch.cuda.get_device_name(x.device) if x.is_cuda else ""
    sizes = tokens, x.shape[0], x.shape[2], heads, kv_heads, head_dim, x.element_size()
    nodes = mesh.ulysses_in_node, mesh.ring_ranks_per_node
    degrees = mesh.ulysses_degree, mesh.ring_degree, mesh.order
    overlap, why = _decided(gpu, *degrees, *nodes, *sizes)
    if mesh.rank == 0:
        _log_once(why)
    return overlap


@lru_cache(maxsize=1024)
def _decided(
    gpu: str,
    ulysses: int,
    ring: int,
    order: str,
    ulysses_in_node: bool,
    ring_ranks_per_node: int,
    tokens: int,
    batch: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> tuple[bool, str]:
    """Whether they are, and why."""
    crosses_nodes = not ulysses_in_node or ring_ranks_per_node < ring
    without = "under the exchanges where they cross nodes, as the planner has no forecast for "
    if not gpu:
        return crosses_nodes, f"projections are multiplied {without}CPUs"
    in_node = ring_ranks_per_node * (ulysses if ulysses_in_node else 1)
    if not ulysses_in_node:
        in_node = max(1, min(torch.cuda.device_count(), ulysses * ring // 2))
    try:
        cluster = cluster_of(None, gpu, in_node)
    except ConfigError:
        return crosses_nodes, f"projections are multiplied {without}{gpu}"
    model = ModelShape(
        "layer", 1, width, 4 * width, heads, kv_heads, 1, head_dim, gated=False, biases=True
    )
    config = ParallelConfig(
        ulysses=ulysses, ring=ring, order=order, micro_batch=batch, param_bytes=itemsize
    )
    choice = choose_projections(cluster, Workload(model, tokens), config)
    return choice.overlap, choice.why


@lru_cache(maxsize=1024)
def _log_once(why: str) -> None:
    logging.getLogger("ds_usp").info("%s", why)
