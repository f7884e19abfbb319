"""Runs a profile on this process, or on the ranks that torchrun started."""

from __future__ import annotations

import datetime
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ds_usp.config import torchrun_env
from ds_usp.errors import ConfigError
from ds_usp.planner.choose_degree import cluster_name
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.profiling.problem_sizes import ProblemSizes
from ds_usp.profiling.profile import profile

_UNKNOWN_GPU = "a100"  # its assumptions are used for a GPU that is not in clusters.json


def run(
    out: Path,
    models: Sequence[ModelShape] | None,
    *,
    device: str,
    seconds: float,
    print_line: Callable[[str], None],
) -> Cluster | None:
    """Join torchrun's ranks, measure the machine, and write the cluster file on rank 0. Collective.

    Args:
        out: the file to write, a ``*.json`` in a folder that exists.
        models: whose layers are measured; None: those of ``ProblemSizes`` for the device.
        device: auto | cuda | cpu.
        seconds: time budget of all measurements together; see :func:`profile`.
        print_line: function that prints one line of progress; called on rank 0 only.

    Returns:
        The cluster as the planner reads it on rank 0, None on the other ranks.

    Raises:
        ConfigError: no GPU where one is requested, a folder that does not exist, or ranks that do
            not fill nodes.
    """
    env = torchrun_env()
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    torch_device = torch.device(kind, env.local_rank) if kind == "cuda" else torch.device(kind)
    if models is None:
        models = [load_model(name) for name in ProblemSizes.of(torch_device).models]
    if kind == "cuda":
        torch.cuda.set_device(torch_device)
    if env.world > 1:
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    name = torch.cuda.get_device_name(torch_device) if kind == "cuda" else ""
    # the built-in cluster with this GPU, None if there is none: its peak FLOP/s is then not known
    base = cluster_name(name)
    try:
        with warnings.catch_warnings():  # torch is about to rename collectives
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
            content = profile(
                device=torch_device,
                models=models,
                budget_s=seconds,
                gpus_per_node=env.local_world,
                base=base or _UNKNOWN_GPU,
                known=base is not None and kind == "cuda",
                name=out.stem,
                print_line=print_line if env.rank == 0 else _discard,
            )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if env.rank:
        return None
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return load_cluster(str(out))


def _discard(line: str) -> None:
    """Print nothing: for all ranks but rank 0."""
