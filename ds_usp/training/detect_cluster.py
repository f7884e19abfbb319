"""The cluster that a program runs on, as the planner knows it."""

from __future__ import annotations

import torch

from ds_usp.planner.choose_degree import cluster_of
from ds_usp.planner.hardware import Cluster


def this_cluster(given: str | None, ranks: int, *, on_gpu: bool) -> Cluster:
    """The cluster that the user names, else the built-in one of the GPU here; with the GPUs of this
    host and their memory.

    Args:
        given: a built-in name, or a profile; None: neither.
        ranks: of the program.
        on_gpu: they compute on GPUs, else on CPUs, all on one host.

    Raises:
        ConfigError: a cluster that is none, or a GPU that the planner's table does not have.
    """
    if not on_gpu:
        return cluster_of(given, "", ranks)
    memory = float(torch.cuda.get_device_properties().total_memory)
    here = min(ranks, torch.cuda.device_count())
    return cluster_of(given, torch.cuda.get_device_name(), here, memory)
