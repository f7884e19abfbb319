"""Seconds of attention with its projections: multiplied before and after it, or chunk by chunk
under its exchanges, and in backward again (``--usp-projection-overlap recompute``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ds_usp.experimental.projected_schedule import (
    ProjectedOp,
    projected_backward,
    projected_forward,
)
from ds_usp.geometry.heads import HeadChunk
from ds_usp.geometry.pipeline_schedule import Instr, Op
from ds_usp.planner.attention_time import (
    OFF,
    RECOMPUTE,
    PassSeconds,
    RelativeCosts,
    product_seconds,
    simulated_pass,
)
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.pipeline_timeline import Cost
from ds_usp.planner.step_time import layer_time


@dataclass(frozen=True)
class ProjectedCosts(RelativeCosts):
    """The costs of a schedule with the products.

    Args:
        again: fraction of the key/value heads that backward projects again with each chunk; empty
            forward.
    """

    again: tuple[float, ...] = ()

    def cost(self, instr: Instr, seconds: PassSeconds) -> Cost:
        op, chunk, made = instr.op, instr.chunk, seconds.products
        queries, keys = self.heads[chunk], self.kv_heads[chunk]
        if op is ProjectedOp.AGAIN_POST:  # what returns of all chunks, as gradients
            of_queries, of_keys = seconds.sent[Op.RETURN_POST]
            return self.sending(instr, of_queries * queries + of_keys * self.again[chunk], seconds)
        if self.again and op is Op.A2A_POST:  # the output goes with its gradient
            return self.sending(instr, 2 * seconds.sent[op].queries * queries, seconds)
        if not isinstance(op, ProjectedOp) or op is ProjectedOp.AGAIN_WAIT:
            return super().cost(instr, seconds)
        if op is ProjectedOp.GRAD_OUT:
            return Cost(made.out * queries)
        if op in (ProjectedOp.PROJECT_OUT, ProjectedOp.GRAD_OUT_WEIGHT):
            return Cost(made.out)
        if op is ProjectedOp.GRAD_INPUT:
            queries = keys = 1.0
        elif op is ProjectedOp.PROJECT and self.again:
            keys = self.again[chunk]
        return Cost(made.queries * queries + made.keys * keys)


def with_projections(
    costs: RelativeCosts, heads: Sequence[HeadChunk], *, backward: bool
) -> ProjectedCosts:
    """Costs of attention with the products in its schedule.

    Args:
        heads: of each chunk.
    """
    schedule = (projected_backward if backward else projected_forward)(costs.schedule)
    last_of_group = {chunk.kv_chunk: index for index, chunk in enumerate(heads)}
    group_of_last = {last: costs.kv_heads[group] for group, last in last_of_group.items()}
    again = tuple(group_of_last.get(index, 0.0) for index in range(len(heads)))
    return ProjectedCosts(
        schedule,
        costs.heads,
        costs.kv_heads,
        costs.merges,
        costs.calls,
        costs.exchanges,
        again if backward else (),
    )


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of attention and its projections on one rank, forward and backward.

    Args:
        total: all of it.
        exposed: of it, waits for exchanges.
    """

    total: float
    exposed: float


def recompute_gain(cluster: Cluster, work: Workload, config: ParallelConfig) -> float:
    """What projecting again saves of a layer's time, forward and backward; negative: it costs."""
    block = config.of_attention()
    plain, again = (block_time(cluster, work, block, x).total for x in (OFF, RECOMPUTE))
    return (plain - again) / layer_time(cluster, work, config).total


@lru_cache(maxsize=1024)
def block_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, projections: str
) -> BlockTime:
    """One micro batch, by formula alone: no row of a profile is of such a block.

    Args:
        config: :meth:`ParallelConfig.of_attention`.
        projections: one of ``PROJECTIONS``.
    """
    passes = [
        simulated_pass(cluster, work, config, backward=backward, projections=projections).timeline
        for backward in (False, True)
    ]
    total = sum(x.total for x in passes)
    if projections == OFF:
        products = product_seconds(cluster, work, config, in_parts=False)
        total += 3 * (products.queries + products.keys + products.out)
    return BlockTime(total, sum(x.waits for x in passes))
