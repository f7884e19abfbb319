"""Clusters: how fast they compute, how much they hold, how their GPUs reach each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import inf, log
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner.hardware_table import CLUSTERS
from ds_usp.planner.profile_rows import (
    MeasuredAttention,
    MeasuredEmbeddingHead,
    MeasuredExchange,
    MeasuredLayer,
    MeasuredStep,
)

VERSION = 1  # of the files
ORIGINS = ("datasheet", "measured", "assumed", "given")
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Level:
    """GPUs that share something: a PCIe switch, a socket, a node.

    Args:
        gpus: of one domain; domains are ranks next to each other.
        port_bytes_per_s: what one GPU sends to others of its domain.
        uplink_bytes_per_s: what all GPUs of a domain together send out of it; 0: no limit.
        latency_s: of one exchange inside the domain.
    """

    name: str
    gpus: int
    port_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float


_POSITIVE = ("peak_flop_per_s", "memory_bytes", "hbm_bytes_per_s", "gpus_per_node")


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes of one kind. Numbers are bytes, seconds and FLOP of dense bf16 (fp32 on CPUs).

    Args:
        peak_flop_per_s: of one GPU; what MFU is a share of.
        memory_bytes: of one GPU.
        hbm_bytes_per_s: memory bandwidth of one GPU.
        gpus_per_node: GPUs that share a host.
        levels: domains inside a node, the smallest first; the last one is the node, and its
            uplink are all of its NICs.
        nics: of a node. A group whose ranks lie unevenly on nodes gets one of them.
        network_latency_s: of an exchange between nodes.
        host_bytes_per_s: between a GPU and its host, each direction, all GPUs at once.
        host_memory_bytes: of a node.
        gemm_efficiency: (tokens that a rank multiplies, share of the peak), log-linear between.
        attention_efficiency: (tokens of the longer side of a call, share of the peak).
        contention: share of an exchange's time that the computation above it loses.
        workspace_bytes: what no formula sees: libraries, fragments, temporaries.
        origins: field -> (datasheet | measured | assumed | given, where from).
        exchanges, layers, calls, ends, steps: what ``profile`` measured as a whole; where there
            are rows that serve, they stand for the formulas.
    """

    name: str
    peak_flop_per_s: float
    memory_bytes: float
    hbm_bytes_per_s: float
    gpus_per_node: int
    levels: tuple[Level, ...]
    nics: int
    network_latency_s: float
    host_bytes_per_s: float
    host_memory_bytes: float
    gemm_efficiency: Curve
    attention_efficiency: Curve
    contention: float
    workspace_bytes: float
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    exchanges: tuple[MeasuredExchange, ...] = ()
    layers: tuple[MeasuredLayer, ...] = ()
    calls: tuple[MeasuredAttention, ...] = ()
    ends: tuple[MeasuredEmbeddingHead, ...] = ()
    steps: tuple[MeasuredStep, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"cluster {self.name}: {name} must be more than 0")
        for name in ("host_bytes_per_s", "host_memory_bytes", "network_latency_s", "nics"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"cluster {self.name}: {name} must be 0 or more")
        if not 0 <= self.contention <= 1:
            raise ConfigError(
                f"cluster {self.name}: contention={self.contention} must be a share between 0 and 1"
            )
        for name in ("gemm_efficiency", "attention_efficiency"):
            _check_curve(f"cluster {self.name}: {name}", getattr(self, name))
        if not self.levels or self.levels[-1].gpus != self.gpus_per_node:
            raise ConfigError(
                f"cluster {self.name}: the last of its levels must be the node of "
                f"{self.gpus_per_node} GPUs"
            )
        for level in self.levels:
            if level.port_bytes_per_s <= 0 or level.uplink_bytes_per_s < 0 or level.latency_s < 0:
                raise ConfigError(
                    f"cluster {self.name}: level {level.name}: what a GPU sends must be above 0, "
                    "uplink and latency not below"
                )
            if level.gpus < 1 or self.gpus_per_node % level.gpus:
                raise ConfigError(
                    f"cluster {self.name}: level {level.name} of {level.gpus} GPUs does not "
                    f"divide the {self.gpus_per_node} of a node"
                )

    @property
    def node(self) -> Level:
        """The level of a whole node."""
        return self.levels[-1]

    @property
    def nic_bytes_per_s(self) -> float:
        """One NIC, each direction."""
        return self.node.uplink_bytes_per_s / max(self.nics, 1)

    @property
    def budget_bytes(self) -> float:
        """Of a GPU's memory, what a plan may fill."""
        return 0.96 * self.memory_bytes

    def host_memory_fits(self, bytes_a_gpu: float, gpus: int) -> bool:
        """Whether the memory of the hosts has room for so much of each of so many GPUs."""
        return bytes_a_gpu * min(self.gpus_per_node, gpus) <= 0.8 * self.host_memory_bytes

    def with_gpus_per_node(self, gpus: int) -> Cluster:
        """The same machine with another number of GPUs in a node; NICs go with the GPUs.

        Raises:
            ConfigError: fewer than one.
        """
        if gpus == self.gpus_per_node:
            return self
        if gpus < 1:
            raise ConfigError(f"--gpus-per-node {gpus} must be 1 or more")
        share, node = gpus / self.gpus_per_node, self.node
        inner = tuple(x for x in self.levels[:-1] if x.gpus < gpus and gpus % x.gpus == 0)
        whole = Level(
            node.name, gpus, node.port_bytes_per_s, node.uplink_bytes_per_s * share, node.latency_s
        )
        changed = {
            "gpus_per_node": gpus,
            "levels": (*inner, whole),
            "nics": max(1, round(self.nics * share)),
        }
        return Cluster(**{**{f.name: getattr(self, f.name) for f in fields(self)}, **changed})


def _check_curve(name: str, curve: Curve) -> None:
    """Points in the order of their sizes; a share of the peak that is above 1 is another unit."""
    sizes = [size for size, _ in curve]
    if not curve or sizes != sorted(set(sizes)) or sizes[0] <= 0:
        raise ConfigError(f"{name} needs points (size, share) with sizes that ascend, got {sizes}")
    wrong = [share for _, share in curve if not 0 < share <= 1.1]
    if wrong:
        raise ConfigError(f"{name} has {wrong[0]:g}: a share of the peak lies between 0 and 1")


def interpolate_curve(curve: Curve, size: float) -> float:
    """Value of a curve between its points, linear in the logarithm of the size."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, first), (high, last) in pairwise(curve):
        if size <= high:
            return first + (last - first) * log(size / low) / log(high / low)
    return curve[-1][1]


def load_cluster(given: str) -> Cluster:
    """A built-in name, or a JSON file as ``profile`` writes it.

    A file has the fields of :class:`Cluster`, each a number or ``{"value", "origin", "source"}``;
    with ``"base": NAME`` it needs only those in which it differs from a built-in one. ``version``
    is that of the file's form, 1 if it is left out.

    Raises:
        ConfigError: nothing of that name, or a file that describes no cluster, or one of another
            version.
    """
    name = given.strip().lower()
    if name in CLUSTERS:
        return _cluster(name, CLUSTERS[name], "the built-in table")
    if not given.endswith(".json"):
        raise ConfigError(
            f"no cluster {given!r}; there are {', '.join(CLUSTERS)}. Or give a JSON file"
        )
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {given}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{given} is not JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{given} must be an object with the fields of a cluster")
    content = dict(content)
    version = content.pop("version", VERSION)
    if version != VERSION:
        raise ConfigError(
            f"{given} is of version {version!r}, this planner reads version {VERSION}: profile anew"
        )
    base = content.get("base")
    if base is not None and base not in CLUSTERS:
        raise ConfigError(f"{given}: base {base!r} is none of {', '.join(CLUSTERS)}")
    whole = {**(CLUSTERS[base] if base else {}), **content}
    whole.pop("base", None)
    return _cluster(str(whole.pop("name", Path(given).stem)), whole, given)


def _cluster(name: str, content: Mapping[str, Any], where: str) -> Cluster:
    known = {f.name for f in fields(Cluster)} - {"name", "origins"}
    unknown = sorted(set(content) - known)
    missing = sorted(known - set(content) - set(_ROWS))
    if unknown or missing:
        wrong = [f"unknown {', '.join(unknown)}"] if unknown else []
        wrong += [f"missing {', '.join(missing)}"] if missing else []
        raise ConfigError(f"{where}: cluster {name} has {'; '.join(wrong)}")
    values: dict[str, Any] = {}
    origins: dict[str, tuple[str, str]] = {}
    for key, given in content.items():
        value, origin, source = _figure(given)
        if origin not in ORIGINS:
            raise ConfigError(
                f"{where}: origin {origin!r} of {key} is none of {', '.join(ORIGINS)}"
            )
        values[key], origins[key] = value, (origin, source)
    try:
        values["levels"] = tuple(
            Level(**x) if isinstance(x, Mapping) else Level(*x) for x in values["levels"]
        )
        for rows, kind in _ROWS.items():
            values[rows] = tuple(kind(**row) for row in values.get(rows, ()))
            _check_rows(rows, values[rows])
        for curve in ("gemm_efficiency", "attention_efficiency"):
            values[curve] = tuple((float(size), float(share)) for size, share in values[curve])
        return Cluster(name=name, origins=MappingProxyType(origins), **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: cluster {name}: {error}") from error


_ROWS: Mapping[str, type] = MappingProxyType(
    {
        "exchanges": MeasuredExchange,
        "layers": MeasuredLayer,
        "calls": MeasuredAttention,
        "ends": MeasuredEmbeddingHead,
        "steps": MeasuredStep,
    }
)


_COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p")


def _check_rows(name: str, rows: Sequence[Any]) -> None:
    """Rows say in whole numbers what was measured, and in finite seconds how long it took.

    Two rows of the same would leave no line to draw through them.
    """
    seen = set()
    for row in rows:
        what = []
        for part in fields(row):
            value = getattr(row, part.name)
            wanted = _not_wanted(part.name, str(part.type), value)
            if wanted:
                raise ValueError(f"{name}: {part.name}={value!r} must be {wanted}")
            if part.type != "float":
                what.append(f"{part.name} {value}")
        key = ", ".join(what)
        if key in seen:
            raise ValueError(f"{name}: two rows of {key}: leave one of them out")
        seen.add(key)


def _not_wanted(name: str, kind: str, value: Any) -> str | None:
    """What a field of a row must be, where this value is not that."""
    if kind == "str":
        return None if value in _COLLECTIVES else f"one of {', '.join(_COLLECTIVES)}"
    if kind == "bool":
        return None if isinstance(value, bool) else "true or false"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "zero":
        return None if number and value in range(4) and isinstance(value, int) else "0, 1, 2 or 3"
    if kind == "int":
        whole = number and isinstance(value, int) and value > 0
        return None if whole else "a whole number above 0"
    if "host" in name:
        return None if number and 0 <= value < inf else "a finite number above 0, or 0: not known"
    return None if number and 0 < value < inf else "a finite number above 0"


def _figure(given: Any) -> tuple[Any, str, str]:
    if isinstance(given, Mapping) and "value" in given:
        return given["value"], str(given.get("origin", "given")), str(given.get("source", ""))
    if isinstance(given, tuple) and len(given) == 3 and given[1] in ORIGINS:
        return given
    return given, "given", ""
