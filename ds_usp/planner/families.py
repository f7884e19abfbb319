"""The degrees into which so many GPUs can be divided, and why others cannot be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.planner.frameworks import Engine
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import Split, Workload, impossible

_T = TypeVar("_T")


def families(
    cluster: Cluster,
    work: Workload,
    gpus: int,
    how: Engine,
    fixed: Mapping[str, object],
    base: Split,
    refused: Counter[str],
) -> Iterator[Split]:
    """Degrees that multiply to the GPUs, with what decides a layer's time.

    Args:
        fixed: axes that are given; none but tp, ulysses, ring, pp and dp count here.
        base: the other settings.
        refused: reason -> how many it refused, to which those of this call are added.

    Raises:
        ConfigError: no degrees have what is given.
    """
    model = work.model
    plain = base.but(
        grad_bytes=how.grad_bytes,
        whole_reduction=how.whole_reduction,
        tp_sequence=how.tp_sequence,
    )
    for tp, ulysses, ring, pp, dp in degrees(gpus, fixed):
        split = plain.but(tp=tp, ulysses=ulysses, ring=ring)
        why = "tp beyond a node" if tp > cluster.gpus_per_node else refusal(work, split)
        if why:
            refused[why] += 1
        elif model.layers % pp:
            refused["layers do not divide into stages"] += 1
        elif work.global_batch % dp:
            refused["the global batch does not divide among dp"] += 1
        else:
            yield split.but(pp=pp, dp=dp, overlap_gradients=pp == 1)


def degrees(gpus: int, fixed: Mapping[str, object]) -> list[tuple[int, ...]]:
    """(tp, ulysses, ring, pp, dp) whose product is the number of GPUs.

    Raises:
        ConfigError: there are none with those that are given.
    """
    some: list[tuple[int, ...]] = [()]
    for axis in ("tp", "ulysses", "ring", "pp"):
        some = [
            (*part, degree)
            for part in some
            for degree in values_of(fixed, axis, divisors(gpus // math.prod(part)))
        ]
    every = [(*part, gpus // math.prod(part)) for part in some]
    every = [one for one in every if fixed.get("dp") in (None, one[-1])]
    if not every:
        raise ConfigError(
            f"no configuration of {gpus} GPUs has {asked_for(fixed)}: degrees multiply to the "
            "number of GPUs; leave one out"
        )
    return every


def asked_for(given: Mapping[str, object]) -> str:
    """The axes that are given, for a message."""
    return ", ".join(f"{axis} {value}" for axis, value in given.items())


def refusal(work: Workload, split: Split) -> str | None:
    """The same as ``impossible`` says of tp, ulysses and ring, as a short heading."""
    model = work.model
    if model.heads % split.tp or model.kv_heads % split.tp:
        return "tp does not divide the heads"
    if model.ffn % split.tp:
        return "tp does not divide the MLP"
    if model.heads // split.tp < split.ulysses:
        return "ulysses beyond the heads of a tensor-parallel rank"
    if model.heads // split.tp % split.ulysses:
        return "ulysses leaves ranks with unequal heads"
    return "too few tokens for a rank" if impossible(work, split) else None


def values_of(fixed: Mapping[str, object], axis: str, values: Iterable[_T]) -> list[_T]:
    """The values of an axis, or the one that is given."""
    return [value for value in values if fixed.get(axis) in (None, value)]
