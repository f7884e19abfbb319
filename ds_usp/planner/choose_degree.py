"""``--ulysses-degree auto``: the degree of a run whose other degrees are fixed. Programs ask once a
start, on each rank, while they check their arguments (``megatron_patches/flags.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_usp.config import num_ranks_on_node
from ds_usp.errors import ConfigError
from ds_usp.planner.answer import answer
from ds_usp.planner.hardware import CLUSTERS, OWN_CLUSTER, Cluster, load_cluster
from ds_usp.planner.parallel_config import FrameworkCaps, ParallelConfig, Workload
from ds_usp.planner.search import search

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds what was chosen.

    Args:
        ulysses: the degree; the ring takes the rest.
        why: lines for the user.
    """

    ulysses: int
    why: tuple[str, ...]


def degree_or_auto(text: str) -> int | str:
    """Parse the value of ``--ulysses-degree``: a degree, or ``auto``."""
    return AUTO if text == AUTO else int(text)


def cluster_of(
    requested: str | None, device: str, ranks: int, memory_bytes: float = 0.0
) -> Cluster:
    """The cluster that the user names, else the built-in one of a device's name.

    Args:
        requested: a built-in name, or a JSON file.
        device: as torch calls the GPU; empty: CPUs.
        ranks: of the program or of this node: the GPUs of a node, unless the launcher's variables
            say that it has started fewer on this one.
        memory_bytes: of this GPU; 0: the built-in cluster's.

    Raises:
        ConfigError: a cluster that is none, or a device that the table does not have.
    """
    gpus_per_node = num_ranks_on_node(ranks)
    if requested:
        return load_cluster(requested).with_gpus_per_node(gpus_per_node)
    words = re.split(r"[^a-z0-9]+", device.lower()) if device else ["cpu"]
    name = next((built_in for built_in in CLUSTERS if built_in in words), None)
    if name is None:
        raise ConfigError(
            f"--ulysses-degree auto: no built-in cluster has a {device}; there are "
            f"{', '.join(CLUSTERS)}. Name the closest one with --usp-cluster, or a JSON file: "
            f"{OWN_CLUSTER}"
        )
    cluster = load_cluster(name).with_gpus_per_node(gpus_per_node)
    return replace(cluster, memory_bytes=memory_bytes) if memory_bytes else cluster


def choose_ulysses(
    cluster: Cluster, work: Workload, framework: FrameworkCaps, config: ParallelConfig, gpus: int
) -> Choice:
    """The Ulysses and ring degree that the search recommends for a run: of the plans within the
    formulas' error of the fastest one, those of the first by ``preference`` of ``search.py``.

    Args:
        config: the other degrees, and the settings; what the degrees leave of ``gpus`` shares a
            sequence.

    Raises:
        ConfigError: no degree is possible, or with none does the run fit.
    """
    if gpus == config.tp * config.pp * config.dp:
        return Choice(1, ("planner: ulysses 1 x ring 1, each rank has full sequences",))
    axes = ("tp", "pp", "dp", "recompute", "micro_batch", "zero")
    fixed: Mapping[str, object] = {axis: getattr(config, axis) for axis in axes}
    # The run's own settings are kept: the search switches none on.
    framework = replace(
        framework, zero=(config.zero,), chunks_loss=False, fsdp2=False, length_settings=()
    )
    result = search(cluster, work, gpus, framework, fixed=fixed, base=config)
    if not result.plans:
        raise ConfigError(
            "--ulysses-degree auto: " + "; ".join(answer(result).why) + ". A fixed degree is "
            "taken without the planner"
        )
    best = result.plans[0]
    # The fastest plan of each Ulysses x ring.
    pairs = [plan for (axis, _), plan in result.best_with.items() if axis == "split"]
    pairs.sort(key=lambda plan: plan.time.total)
    times = ", ".join(f"{p.config.ulysses} x {p.config.ring} {p.time.total:.3g} s" for p in pairs)
    ulysses, ring = best.config.ulysses, best.config.ring
    # Tensor parallel ranks lie next to each other, a Ulysses group over them, a ring outside.
    place = "inside a node" if best.config.tp * ulysses <= cluster.gpus_per_node else "across nodes"
    first = f"planner: ulysses {ulysses} x ring {ring} on {cluster.name} (predicted step of ulysses"
    first += f" x ring: {times}), ulysses {ulysses} {place}"
    return Choice(ulysses, (first, *(f"planner: {line}" for line in answer(result).why)))
