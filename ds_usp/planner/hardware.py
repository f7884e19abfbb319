"""Clusters: how fast they compute, how much they hold, how their GPUs reach each other; from
``clusters.json`` or a user's file, read once a command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import (
    Finite,
    Fraction,
    Gpus,
    NonNegative,
    Positive,
    counted,
    read_json,
    violations,
)

# A file of a cluster that is not built in, for messages.
OWN_CLUSTER = '{"base": "h200", "peak_flop_per_s": ..., "memory_bytes": ...}'
ORIGINS = ("datasheet", "measured", "assumed", "given")  # of a number in a file
HBM_FRACTION = 0.8  # of the memory bandwidth that elementwise kernels and copies reach
Curve = tuple[tuple[float, float], ...]


# clusters.json: name -> field -> [value, origin, source]. Peaks, memory and links are the vendors'
# datasheets (dense bf16, one direction); what a transfer reaches of a link and a kernel of the peak
# is measured where it says so, else assumed.
_FILE: Any = json.loads(Path(__file__).with_name("clusters.json").read_text(encoding="utf-8"))
CLUSTERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        name: MappingProxyType({**_FILE["common"], **rows})
        for name, rows in _FILE["clusters"].items()
    }
)


@dataclass(frozen=True)
class Level:
    """GPUs that share something: a PCIe switch, a socket, a node.

    Args:
        gpus: of one domain; domains are contiguous ranks.
        port_bytes_per_s: what one GPU sends to others of its domain.
        uplink_bytes_per_s: what all GPUs of a domain together send out of it; 0: no limit.
        latency_s: of one exchange inside the domain.
    """

    name: str  # as errors name it
    gpus: Gpus
    port_bytes_per_s: Positive
    uplink_bytes_per_s: NonNegative
    latency_s: NonNegative


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes of one kind. Numbers are bytes, seconds and FLOP of dense bf16 (fp32 on CPUs).

    Args:
        peak_flop_per_s: of one GPU; MFU is relative to it.
        memory_bytes: of one GPU.
        hbm_bytes_per_s: memory bandwidth of one GPU.
        gpus_per_node: GPUs of a node.
        levels: domains inside a node, the smallest first; the last one is the node, and its
            uplink are all of its NICs.
        nics: of a node. A group whose ranks lie unevenly on nodes gets one of them.
        network_latency_s: of an exchange between nodes.
        host_bytes_per_s: between a GPU and host memory, each direction, all GPUs at once.
        host_memory_bytes: of a node.
        gemm_efficiency: (tokens of a rank, fraction of the peak), log-linear between.
        attention_efficiency: (tokens of the longer side of a call, fraction of the peak).
        contention: fraction of a hidden exchange's time that the computation loses.
        workspace_bytes: what no formula counts: libraries, fragmentation, temporaries.
    """

    name: str  # of ``--cluster``
    peak_flop_per_s: Positive
    memory_bytes: Positive
    hbm_bytes_per_s: Positive
    gpus_per_node: Gpus
    levels: tuple[Level, ...]
    nics: NonNegative
    network_latency_s: NonNegative
    host_bytes_per_s: NonNegative
    host_memory_bytes: NonNegative
    gemm_efficiency: Curve
    attention_efficiency: Curve
    contention: Fraction
    workspace_bytes: Finite

    def __post_init__(self) -> None:
        for wrong in violations(self):
            raise ConfigError(f"cluster {self.name}: {wrong}")
        if not self.host_bytes_per_s:
            raise ConfigError(f"cluster {self.name}: host_bytes_per_s=0 copies nothing, ever")
        for name in ("gemm_efficiency", "attention_efficiency"):
            _check_curve(f"cluster {self.name}: {name}", getattr(self, name))
        if not self.levels or self.levels[-1].gpus != self.gpus_per_node:
            raise ConfigError(
                f"cluster {self.name}: the last of its levels must be the node of "
                f"{counted(self.gpus_per_node, 'GPU')}"
            )
        for level in self.levels:
            for wrong in violations(level):
                raise ConfigError(f"cluster {self.name}: level {level.name}: {wrong}")
            if self.gpus_per_node % level.gpus:
                raise ConfigError(
                    f"cluster {self.name}: level {level.name} of {level.gpus} GPUs does not "
                    f"divide the {self.gpus_per_node} of a node"
                )

    @property
    def node(self) -> Level:
        """The level of a full node."""
        return self.levels[-1]

    @property
    def nic_bytes_per_s(self) -> float:
        """Bandwidth of one NIC, each direction."""
        return self.node.uplink_bytes_per_s / max(self.nics, 1)

    @property
    def budget_bytes(self) -> float:
        """The part of a GPU's memory that a plan may fill."""
        return 0.96 * self.memory_bytes

    def host_budget_bytes(self, gpus: int) -> float:
        """The part of host memory that a plan may fill for each of so many GPUs."""
        return 0.8 * self.host_memory_bytes / min(self.gpus_per_node, gpus)

    def host_memory_fits(self, bytes_a_gpu: float, gpus: int) -> bool:
        """Whether the nodes' host memory holds so many bytes of each of so many GPUs."""
        return bytes_a_gpu <= self.host_budget_bytes(gpus)

    def with_gpus_per_node(self, gpus: int) -> Cluster:
        """The cluster with another number of GPUs in a node; NICs and uplinks scale with the GPUs.

        Raises:
            ConfigError: fewer than one.
        """
        if gpus == self.gpus_per_node:
            return self
        if gpus < 1:
            raise ConfigError(f"--gpus-per-node {gpus} must be 1 or more")
        ratio = gpus / self.gpus_per_node
        inner = (x for x in self.levels[:-1] if x.gpus < gpus and gpus % x.gpus == 0)
        uplink = self.node.uplink_bytes_per_s * ratio
        levels = (*inner, replace(self.node, gpus=gpus, uplink_bytes_per_s=uplink))
        nics = max(1, round(self.nics * ratio))
        return replace(self, gpus_per_node=gpus, levels=levels, nics=nics)


def _check_curve(name: str, curve: Curve) -> None:
    """Refuse sizes that do not ascend, and a share of the peak above 1."""
    sizes = [size for size, _ in curve]
    if not curve or sizes != sorted(set(sizes)) or sizes[0] <= 0:
        raise ConfigError(f"{name} needs points (size, share) with sizes that ascend, got {sizes}")
    wrong = [share for _, share in curve if not 0 < share <= 1.1]
    if wrong:
        raise ConfigError(f"{name} has {wrong[0]:g}: a share of the peak lies between 0 and 1")


def interpolate_curve(points: Sequence[tuple[float, float]], size: float) -> float:
    """The curve's value at a size, linear in the size's logarithm and constant beyond both ends."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if size <= high:
            return first + (last - first) * log(size / low) / log(high / low)
    return points[-1][1]


def load_cluster(requested: str) -> Cluster:
    """A built-in name, or a JSON file.

    A file has the fields of :class:`Cluster`, each a number or ``[value, origin, source]``;
    with ``"base": NAME`` it needs only those in which it differs from a built-in one.

    Raises:
        ConfigError: no such name, or a file that describes no cluster.
    """
    name = requested.strip().lower()
    if name in CLUSTERS:
        return _cluster(name, CLUSTERS[name], "the built-in table")
    if not requested.endswith(".json"):
        raise ConfigError(
            f"no cluster {requested!r}; there are {', '.join(CLUSTERS)}. Or give a JSON file of "
            f"the closest one and of the numbers that differ: {OWN_CLUSTER}"
        )
    content = read_json(Path(requested), "cluster")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{requested} must be an object with the fields of a cluster")
    content = dict(content)
    base = content.pop("base", None)
    if base is not None and base not in list(CLUSTERS):  # a list: it may be no text
        raise ConfigError(f"{requested}: base {base!r} is none of {', '.join(CLUSTERS)}")
    content = {**(CLUSTERS[base] if base else {}), **content}
    return _cluster(str(content.pop("name", Path(requested).stem)), content, requested)


def _cluster(name: str, content: Mapping[str, Any], file: str) -> Cluster:
    """A cluster from one entry of a JSON file; ``file``: for messages."""
    keys = {f.name for f in fields(Cluster)} - {"name"}
    wrong = {"unknown": set(content) - keys, "missing": keys - set(content)}
    if any(wrong.values()):
        texts = [f"{kind} {', '.join(sorted(names))}" for kind, names in wrong.items() if names]
        raise ConfigError(f"{file}: cluster {name} has {'; '.join(texts)}")
    values = dict(content)
    for key, entry in content.items():  # with the origin and source of its number, or alone
        if isinstance(entry, list) and len(entry) == 3 and entry[1] in ORIGINS:
            values[key] = entry[0]
    try:
        values["levels"] = tuple(
            Level(**x) if isinstance(x, Mapping) else Level(*x) for x in values["levels"]
        )
        for curve in ("gemm_efficiency", "attention_efficiency"):
            values[curve] = tuple((float(size), float(share)) for size, share in values[curve])
        return Cluster(name, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: cluster {name}: {error}") from error
