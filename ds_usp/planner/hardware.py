"""Clusters: how fast they compute, how much they hold, how their GPUs reach each other; and the
rows that a profile has measured on one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import exp, log
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import (
    Collective,
    Count,
    Finite,
    Fraction,
    Gpus,
    LaunchSeconds,
    NonNegative,
    Positive,
    ZeroStage,
    read_json,
    violations,
)
from ds_usp.planner.models import ModelShape

# ------------------------------------------------------------------ rows of a profile
# What was measured, and how a time between the rows is read off them. A layer's rows are measured
# in the framework that runs it: its norms, activation functions and tensor-parallel collectives are
# part of the time, and need no formula.


Row = TypeVar("Row")


@dataclass(frozen=True)
class MeasuredLayer:
    """Seconds of one transformer layer without its attention core, on one rank.

    Args:
        hidden, ffn, q_width, kv_width, gated: of the unsharded layer (:class:`ModelShape`).
        tp: ranks that share it; their collectives are part of the time.
        tokens: of one rank.
        forward_s, backward_s: of the GPU, each direction.
        forward_host_s, backward_host_s: of the CPU to launch it; 0: not known.
    """

    hidden: Count
    ffn: Count
    q_width: Count
    kv_width: Count
    gated: bool
    tp: Count
    tokens: Count
    forward_s: Positive
    backward_s: Positive
    forward_host_s: LaunchSeconds = 0.0
    backward_host_s: LaunchSeconds = 0.0


@dataclass(frozen=True)
class MeasuredAttention:
    """Seconds of one attention call, causal zigzag, its exchanges included.

    Args:
        seq_len: tokens of the global sequence; one sequence.
        heads, kv_heads, head_dim: of a tensor-parallel rank, before the Ulysses all-to-all.
        forward_s, backward_s, forward_host_s, backward_host_s: as of a layer.
    """

    ulysses: Count
    ring: Count
    seq_len: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    forward_s: Positive
    backward_s: Positive
    forward_host_s: LaunchSeconds = 0.0
    backward_host_s: LaunchSeconds = 0.0


@dataclass(frozen=True)
class MeasuredEmbeddingHead:
    """Seconds of embedding, last norm, output head and loss, forward and backward together.

    Args:
        seconds: of the GPU.
        host_s: of the CPU to launch it; 0: not known.
    """

    hidden: Count
    vocab: Count
    tp: Count
    tokens: Count
    seconds: Positive
    host_s: LaunchSeconds = 0.0


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds from the last backward to the next forward: gradient reduction and optimizer.

    Args:
        elements: parameters of a rank, before ZeRO shards them.
        zero, zero_ranks: ZeRO stage, and the ranks of dp x sp.
    """

    elements: Count
    zero: ZeroStage
    zero_ranks: Count
    seconds: Positive


@dataclass(frozen=True)
class MeasuredExchange:
    """Seconds of one collective inside a node, all groups of its size at once.

    Args:
        ranks: of each group, contiguous.
        sent_bytes: by every rank.
    """

    collective: Collective
    ranks: Count
    sent_bytes: Count
    seconds: Positive


def select_rows(rows: Iterable[Row], by: str, **wanted: object) -> list[Row]:
    """The rows whose fields have these values, ascending by the field ``by``."""
    items = wanted.items()
    matching = (row for row in rows if all(getattr(row, name) == v for name, v in items))
    return sorted(matching, key=attrgetter(by))


def layer_rows(
    rows: Iterable[MeasuredLayer], model: ModelShape, tp: int | None = None
) -> list[MeasuredLayer]:
    """The rows of a model's layers by tokens; ``tp`` None: of every degree. None are of layers
    that are more than attention and one MLP."""
    if not model.is_plain:
        return []
    shape = {name: getattr(model, name) for name in ("hidden", "ffn", "q_width", "kv_width")}
    degree = {} if tp is None else {"tp": tp}
    return select_rows(rows, "tokens", gated=model.gated, **shape, **degree)


def embedding_head_rows(
    rows: Iterable[MeasuredEmbeddingHead], model: ModelShape, tp: int | None = None
) -> list[MeasuredEmbeddingHead]:
    """The rows of a model's embedding and head by tokens; ``tp`` None: of every degree."""
    degree = {} if tp is None else {"tp": tp}
    return select_rows(rows, "tokens", hidden=model.hidden, vocab=model.vocab, **degree)


def nearest_tp(rows: Iterable[Any], tp: int) -> int | None:
    """The tensor-parallel degree of the rows that is nearest to one; None without rows."""
    return min({row.tp for row in rows}, key=lambda other: abs(log(other / tp)), default=None)


def nearest_step(
    rows: Iterable[MeasuredStep], zero: int, zero_ranks: int
) -> tuple[int, int] | None:
    """The measured ZeRO stage and number of ranks nearest to these; None without rows."""
    return min(
        {(row.zero, row.zero_ranks) for row in rows},
        key=lambda other: (abs(other[0] - zero), abs(log(other[1] / zero_ranks))),
        default=None,
    )


def seconds_at(rows: Sequence[Any], by: str, seconds: str, size: float) -> float:
    """Seconds for a size: on the line through the two rows around it, or nearest to it.

    A time has a part that grows with the size and one that does not; the line through two points
    separates them, also beyond the points. Below the first row the time shrinks in proportion at
    most, and beyond the last row it does not shrink.

    Args:
        by, seconds: names of the rows' fields; the rows ascend by ``by``.
    """
    points = [(getattr(row, by), getattr(row, seconds)) for row in rows]
    first_size, first_s = points[0]
    in_proportion: float = first_s * (size / first_size)  # exact at a measured size
    if len(points) == 1:
        return in_proportion
    upper = next((i for i, (x, _) in enumerate(points) if i and x >= size), len(points) - 1)
    (low, low_s), (high, high_s) = points[upper - 1], points[upper]
    slope = (high_s - low_s) / (high - low)
    if size > high:
        return float(high_s + max(slope, 0.0) * (size - high))
    on_line = float(low_s + slope * (size - low))
    return max(on_line, in_proportion) if size < first_size else on_line


def launch_seconds(points: Sequence[tuple[float, float]], size: float) -> float:
    """CPU launch time between (size, seconds) points; 0 (not known) if one of them is 0."""
    return interpolate(points, size) if all(seconds > 0 for _, seconds in points) else 0.0


def interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """A value between ascending (size, value) points, log-log linear; constant outside of them."""
    if points[0][0] < size < points[-1][0]:
        return exp(interpolate_curve([(x, log(y)) for x, y in points], size))
    return points[0][1] if size <= points[0][0] else points[-1][1]


def interpolate_curve(points: Sequence[tuple[float, float]], size: float) -> float:
    """The curve's value at a size, linear in the size's logarithm and constant beyond both ends."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if size <= high:
            return first + (last - first) * log(size / low) / log(high / low)
    return points[-1][1]


# ------------------------------------------------------------------ clusters


VERSION = 1  # of the files
ORIGINS = ("datasheet", "measured", "assumed", "given")
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

    name: str
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
        origins: field -> (datasheet | measured | assumed | given, source).
        exchanges, layers, calls, embedding_heads, steps: measured rows; where rows match, they
            replace the formulas. ``profile`` writes all but ``steps``, which a user may measure.
            Files call ``embedding_heads`` ``ends``.
    """

    name: str
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
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    exchanges: tuple[MeasuredExchange, ...] = ()
    layers: tuple[MeasuredLayer, ...] = ()
    calls: tuple[MeasuredAttention, ...] = ()
    embedding_heads: tuple[MeasuredEmbeddingHead, ...] = ()
    steps: tuple[MeasuredStep, ...] = ()

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
                f"{self.gpus_per_node} GPUs"
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
    """Points ascend by size; a fraction of the peak above 1 is in another unit."""
    sizes = [size for size, _ in curve]
    if not curve or sizes != sorted(set(sizes)) or sizes[0] <= 0:
        raise ConfigError(f"{name} needs points (size, share) with sizes that ascend, got {sizes}")
    wrong = [share for _, share in curve if not 0 < share <= 1.1]
    if wrong:
        raise ConfigError(f"{name} has {wrong[0]:g}: a share of the peak lies between 0 and 1")


def load_cluster(requested: str) -> Cluster:
    """A built-in name, or a JSON file as ``profile`` writes it.

    A file has the fields of :class:`Cluster`, each a number or ``{"value", "origin", "source"}``;
    with ``"base": NAME`` it needs only those in which it differs from a built-in one. ``version``
    is that of the file's format, 1 if it is left out.

    Raises:
        ConfigError: no such name, or a file that describes no cluster, or one of another version.
    """
    name = requested.strip().lower()
    if name in CLUSTERS:
        return _cluster(name, CLUSTERS[name], "the built-in table")
    if not requested.endswith(".json"):
        raise ConfigError(
            f"no cluster {requested!r}; there are {', '.join(CLUSTERS)}. Or give a JSON file"
        )
    content = read_json(Path(requested), "cluster")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{requested} must be an object with the fields of a cluster")
    content = dict(content)
    version, base = content.pop("version", VERSION), content.pop("base", None)
    if version != VERSION:
        raise ConfigError(
            f"{requested} is of version {version!r}, this planner reads version {VERSION}: "
            "profile anew"
        )
    if base is not None and base not in list(CLUSTERS):  # a list: it may be no text
        raise ConfigError(f"{requested}: base {base!r} is none of {', '.join(CLUSTERS)}")
    content = {**(CLUSTERS[base] if base else {}), **content}
    return _cluster(str(content.pop("name", Path(requested).stem)), content, requested)


# JSON key -> type of its rows.
_ROWS: Mapping[str, type] = MappingProxyType(
    {
        "exchanges": MeasuredExchange,
        "layers": MeasuredLayer,
        "calls": MeasuredAttention,
        "ends": MeasuredEmbeddingHead,
        "steps": MeasuredStep,
    }
)


def _cluster(name: str, content: Mapping[str, Any], where: str) -> Cluster:
    """A cluster from one entry of a JSON file; ``where``: the file, for error messages."""
    keys = {f.name for f in fields(Cluster)} - {"name", "origins", "embedding_heads"} | {"ends"}
    wrong = {"unknown": set(content) - keys, "missing": keys - set(content) - set(_ROWS)}
    if any(wrong.values()):
        texts = [f"{what} {', '.join(sorted(names))}" for what, names in wrong.items() if names]
        raise ConfigError(f"{where}: cluster {name} has {'; '.join(texts)}")
    values: dict[str, Any] = {}
    origins: dict[str, tuple[str, str]] = {}
    for key, entry in content.items():
        value, origin, source = _parse_number(entry)
        if origin not in ORIGINS:
            known = ", ".join(ORIGINS)
            raise ConfigError(f"{where}: origin {origin!r} of {key} is none of {known}")
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
        heads = values.pop("ends")
        return Cluster(name, origins=MappingProxyType(origins), embedding_heads=heads, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: cluster {name}: {error}") from error


def _check_rows(name: str, rows: Sequence[Any]) -> None:
    """Refuse wrong values, and two rows of the same sizes, through which no line can be drawn."""
    seen = set()
    for row in rows:
        for wrong in violations(row):
            raise ValueError(f"{name}: {wrong}")
        times = ("seconds", "_s")
        sizes = ((n, v) for n, v in vars(row).items() if not n.endswith(times))
        key = ", ".join(f"{name} {value}" for name, value in sizes)
        if key in seen:
            raise ValueError(f"{name}: two rows of {key}: leave one of them out")
        seen.add(key)


def _parse_number(entry: Any) -> tuple[Any, str, str]:
    """(value, origin, source) of an entry: an object, a row of the built-in table, or a value."""
    if isinstance(entry, Mapping) and "value" in entry:
        return entry["value"], str(entry.get("origin", "given")), str(entry.get("source", ""))
    if isinstance(entry, list) and len(entry) == 3 and entry[1] in ORIGINS:
        return entry[0], entry[1], entry[2]
    return entry, "given", ""
