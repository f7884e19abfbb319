"""Seconds of attention with its projections: multiplied before and after it, or under its
exchanges; and where the latter pays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ds_usp.planner.attention_schedule import OFF, ON
from ds_usp.planner.attention_time import product_seconds, simulated_pass
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.step_time import layer_time

LEAST_GAIN = 0.01  # of a layer's time, below which the plain path is taken


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of attention and its projections on one rank, forward and backward.

    Args:
        total: all of it.
        exposed: of it, waits for exchanges.
    """

    total: float
    exposed: float


def block_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, projections: str
) -> BlockTime:
    """One micro batch, by formula alone: no row of a profile is of such a block.

    Args:
        projections: one of ``PROJECTIONS``.
    """
    if projections != OFF:
        return _block_time(cluster, work, config.of_attention(), projections)
    return _plain_time(cluster, work, config.of_attention())


@dataclass(frozen=True, slots=True)
class ProjectionChoice:
    """Whether products around attention are made under its exchanges.

    Args:
        overlap: they are.
        gain: what it saves, as a fraction of a layer's time; negative: what it costs.
        why: a sentence with the numbers.
    """

    overlap: bool
    gain: float
    why: str


def choose_projections(
    cluster: Cluster, work: Workload, config: ParallelConfig
) -> ProjectionChoice:
    """Whether the forecast of a layer is shorter by at least :data:`LEAST_GAIN` with its
    projections under the exchanges, forward and backward."""
    if config.sp == 1:
        return ProjectionChoice(False, 0.0, "a sequence has one rank: attention exchanges nothing")
    gain = projection_gain(cluster, work, config, ON)
    plain, under = (block_time(cluster, work, config, mode) for mode in (OFF, ON))
    overlap = gain > LEAST_GAIN
    why = (
        f"the forecast of a layer is {abs(gain):.1%} {'shorter' if gain > 0 else 'longer'} with "
        f"projections under the exchanges on {cluster.name}, ulysses {config.ulysses} x ring "
        f"{config.ring}: attention with them {1e3 * plain.total:.2f} -> {1e3 * under.total:.2f} "
        f"ms, of which waits {1e3 * plain.exposed:.2f} -> {1e3 * under.exposed:.2f} ms; "
        f"{'on' if overlap else 'off'} (on where it is more than {LEAST_GAIN:.0%} shorter)"
    )
    return ProjectionChoice(overlap, gain, why)


def projection_gain(
    cluster: Cluster, work: Workload, config: ParallelConfig, projections: str
) -> float:
    """What a way to multiply the projections saves of a layer's time, forward and backward."""
    plain, under = (block_time(cluster, work, config, x).total for x in (OFF, projections))
    return (plain - under) / layer_time(cluster, work, config).total


@lru_cache(maxsize=1024)
def _plain_time(cluster: Cluster, work: Workload, config: ParallelConfig) -> BlockTime:
    passes = [simulated_pass(cluster, work, config, backward=x).timeline for x in (False, True)]
    products = product_seconds(cluster, work, config, in_parts=False)
    total = 3 * (products.queries + products.keys + products.out) + sum(x.total for x in passes)
    return BlockTime(total, sum(x.waits for x in passes))


@lru_cache(maxsize=1024)
def _block_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, projections: str
) -> BlockTime:
    passes = [
        simulated_pass(cluster, work, config, backward=backward, projections=projections).timeline
        for backward in (False, True)
    ]
    return BlockTime(sum(x.total for x in passes), sum(x.waits for x in passes))
