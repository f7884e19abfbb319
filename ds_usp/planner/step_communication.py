"""The communication of one step by kind: bytes, seconds, and what no kernel hides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_usp.planner.attention_schedule import OFF
from ds_usp.planner.attention_time import attention_s, simulated_pass
from ds_usp.planner.data_parallel_time import data_parallel_time
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.hidden import HiddenExchange
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.step_time import StepTime
from ds_usp.planner.tensor_parallel_time import tensor_parallel_time
from ds_usp.planner.topology import DIRECT, exchange_s, group_of
from ds_usp.planner.traffic import layer_traffic, stage_boundary_bytes, step_traffic

# Recomputations whose backward exchanges again what forward of attention, of the products did.
_ATTENTION_AGAIN = ("attention-only", "full")
_PRODUCTS_AGAIN = ("attention", "full")
_RING = ("ring_kv", "ring_dkv", "ring_kv_outer", "ring_dkv_outer")


@dataclass(frozen=True, slots=True)
class StepExchange:
    """One kind of communication in one step, on one rank in the mean.

    Args:
        kind: as ``--usp-report-communication`` names it.
        sent_bytes: to other ranks, or to host memory and back.
        seconds: in which one is in flight.
        exposed: of these, those in which no kernel runs.
    """

    kind: str
    sent_bytes: float
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds under kernels."""
        return max(0.0, self.seconds - self.exposed)


def step_communication(
    cluster: Cluster,
    work: Workload,
    config: ParallelConfig,
    step: StepTime,
    projections: str = OFF,
) -> tuple[StepExchange, ...]:
    """The kinds that a step has, of the formulas that price it.

    Args:
        step: its time.
        projections: where the products around attention are, one of ``PROJECTIONS``.
    """
    layers = config.micro_batches(work.global_batch) * config.layers_per_stage(work.model)
    rows = [*_attention(cluster, work, config, layers, projections)]
    sent = step_traffic(work, config)
    reduction, gather = data_parallel_time(cluster, work, config, step.layers)
    rows += [
        _row("gradient reduction", sent.gradients, reduction),
        _row("parameter gather", sent.parameters, gather),
    ]
    traffic = layer_traffic(work, config)
    forward, backward = tensor_parallel_time(cluster, work, config)
    times = 2 if config.recompute in _PRODUCTS_AGAIN else 1
    both = (forward * times + backward) * layers
    rows.append(
        _row("tensor parallel", layers * (times * traffic.tp_forward + traffic.tp_backward), both)
    )
    if config.pp > 1:
        boundary = stage_boundary_bytes(work, config)
        transfers = 2 * config.micro_batches(work.global_batch) * config.virtual_stages(work.model)
        one = exchange_s(cluster, group_of(config, "pp"), boundary, DIRECT, 1)
        exposed = min(step.pipeline, transfers * one)
        rows.append(StepExchange("pipeline", transfers * boundary, transfers * one, exposed))
    if config.offload_ratio:
        copied = layers * config.offload_ratio * layer_bytes(work, config)
        seconds = copied / cluster.host_bytes_per_s
        exposed = max(0.0, seconds - step.layers)
        rows.append(StepExchange("copies to and from the host", 2 * copied, seconds, exposed))
    return tuple(row for row in rows if row.seconds > 0)


def _row(kind: str, sent_bytes: float, time: HiddenExchange) -> StepExchange:
    return StepExchange(kind, sent_bytes, time.seconds, time.exposed)


def _attention(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers: int, projections: str
) -> Iterator[StepExchange]:
    """All-to-alls and the ring's exchanges, as the simulation of the schedule has them; where a
    profile has calls, as much slower as these are."""
    if config.sp == 1:
        return
    traffic, again = layer_traffic(work, config), 2 if config.recompute in _ATTENTION_AGAIN else 1
    sums = {"all-to-all": [0.0, 0.0], "ring": [0.0, 0.0]}
    for backward, times in ((False, again), (True, 1)):
        plain, timeline = (
            simulated_pass(cluster, work, config, backward=backward, projections=x).timeline
            for x in (OFF, projections)
        )
        slower = times * attention_s(cluster, work, config, backward=backward).total / plain.total
        for kind, of_kind in (("all-to-all", ("all_to_all",)), ("ring", _RING)):
            sums[kind][0] += slower * sum(map(timeline.busy, of_kind))
            sums[kind][1] += slower * sum(timeline.exposed.get(x, 0.0) for x in of_kind)
    ulysses = traffic.ulysses * (again + 1 + (projections == "recompute"))
    ring = traffic.ring_forward * again + traffic.ring_backward
    for kind, sent in (("all-to-all", ulysses), ("ring", ring)):
        seconds, exposed = sums[kind]
        yield StepExchange(kind, layers * sent, layers * seconds, layers * exposed)
