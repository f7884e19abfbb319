"""The degrees into which GPUs can be divided, and the rules that refuse others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.planner.frameworks import FrameworkCaps
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import ParallelConfig, Workload, degree_refusal

_T = TypeVar("_T")


def degree_configs(
    cluster: Cluster,
    work: Workload,
    gpus: int,
    framework: FrameworkCaps,
    fixed: Mapping[str, object],
    base: ParallelConfig,
    refused: Counter[str],
) -> Iterator[ParallelConfig]:
    """Configurations whose degrees multiply to the GPUs and fit the model and the batch.

    Args:
        fixed: values of tp, ulysses, ring, pp and dp that are not searched; others are ignored.
        base: the other settings.
        refused: rule -> how many it refused; updated.

    Raises:
        ConfigError: no degrees have the fixed values.
    """
    model = work.model
    defaults = base.replace(
        grad_bytes=framework.grad_bytes,
        unsharded_grad_reduce=framework.unsharded_grad_reduce,
        tp_sequence=framework.tp_sequence,
    )
    for tp, ulysses, ring, pp, dp in degrees(gpus, fixed):
        config = defaults.replace(tp=tp, ulysses=ulysses, ring=ring)
        reason = "tp beyond a node" if tp > cluster.gpus_per_node else refusal_rule(work, config)
        if reason:
            refused[reason] += 1
        elif model.layers % pp:
            refused["layers do not divide into stages"] += 1
        elif pp > 1 and framework.not_in_pipeline(work, base):
            refused[framework.not_in_pipeline(work, base)] += 1
        elif work.global_batch % dp:
            refused["the global batch does not divide among dp"] += 1
        else:
            yield config.replace(pp=pp, dp=dp, overlap_gradients=pp == 1)


def degrees(gpus: int, fixed: Mapping[str, object]) -> list[tuple[int, ...]]:
    """(tp, ulysses, ring, pp, dp) whose product is the number of GPUs.

    Raises:
        ConfigError: none has the fixed values.
    """
    prefixes: list[tuple[int, ...]] = [()]
    for axis in ("tp", "ulysses", "ring", "pp"):
        prefixes = [
            (*prefix, degree)
            for prefix in prefixes
            for degree in values_of(fixed, axis, divisors(gpus // math.prod(prefix)))
        ]
    combinations = [(*prefix, gpus // math.prod(prefix)) for prefix in prefixes]
    combinations = [
        combination for combination in combinations if fixed.get("dp") in (None, combination[-1])
    ]
    if not combinations:
        raise ConfigError(
            f"no configuration of {gpus} GPUs has {fixed_text(fixed)}: degrees multiply to the "
            "number of GPUs; leave one out"
        )
    return combinations


def fixed_text(fixed: Mapping[str, object], base: ParallelConfig | None = None) -> str:
    """The fixed axes, and the settings of ``base`` that trade time for length, for a message."""
    words = [f"{axis} {value}" for axis, value in fixed.items()]
    return ", ".join([*words, *(base.length_settings() if base else [])])


def refusal_rule(work: Workload, config: ParallelConfig) -> str | None:
    """Why tp, ulysses and ring are not searched, without numbers, to count by."""
    refusal = degree_refusal(work, config)
    if refusal:
        return refusal.rule
    unequal = work.model.heads // config.tp % config.ulysses
    return "ulysses leaves ranks with unequal heads" if unequal else None


def values_of(fixed: Mapping[str, object], axis: str, values: Iterable[_T]) -> list[_T]:
    """The values of an axis that ``fixed`` allows."""
    return [value for value in values if fixed.get(axis) in (None, value)]
