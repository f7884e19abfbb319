"""Seconds of the exchange of gradients and parameters, and what the layers hide of them."""

from __future__ import annotations

from typing import NamedTuple

from ds_usp.planner.gradient_buckets import bucket_elements, full_buckets
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.hidden import HiddenExchange, exposed, in_buckets, under
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.topology import COLLECTIVE, exchange_s, group_of
from ds_usp.planner.traffic import step_traffic


class DataParallelTime(NamedTuple):
    """Of one step.

    Attributes:
        gradients: their reduction.
        parameters: their all-gathers.
    """

    gradients: HiddenExchange
    parameters: HiddenExchange


def reduces_under_backward(config: ParallelConfig) -> bool:
    """Whether gradients are reduced under backward, not at its end. DeepSpeed's bf16 optimizer,
    which alone sums gradients of bf16 weights in fp32 under ZeRO-1, reduces all at the end."""
    at_end = config.unsharded_grad_reduce and config.zero == 1
    return config.zero == 3 or (config.overlap_gradients and not at_end)


def data_parallel_time(
    cluster: Cluster, work: Workload, config: ParallelConfig, layers_s: float
) -> DataParallelTime:
    """ZeRO-3 gathers under the layers, once a direction, and reduces under backward; the other
    stages reduce at the end, or bucket by bucket under backward (ZeRO-2 of every micro batch, else
    of the last), and then gather parameters.

    Args:
        layers_s: of all micro batches, both directions.
    """
    sent, group = step_traffic(work, config), group_of(config, "zero")
    micro_batches = config.micro_batches(work.global_batch)
    backward_s = layers_s * 2 / 3
    if config.zero == 3:
        messages = micro_batches * work.model.layers
        gather = exchange_s(cluster, group, sent.parameters / 2, COLLECTIVE, messages)
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE, messages)
        both = under(cluster, gather + reduce, backward_s)
        part = reduce / (gather + reduce) if reduce else 0.0
        parameters = under(cluster, gather, layers_s / 3) + both * (1 - part)
        return DataParallelTime(both * part, parameters)
    parameters = exposed(exchange_s(cluster, group, sent.parameters, COLLECTIVE))
    if not reduces_under_backward(config):
        reduce = exchange_s(cluster, group, sent.gradients, COLLECTIVE)
        return DataParallelTime(exposed(reduce), parameters)
    model, layers = work.model, config.layers_per_stage(work.model)
    elements = bucket_elements(model, config.tp, config.zero)
    filled = full_buckets(model, config.tp, layers, elements)
    times = micro_batches if config.zero == 2 else 1
    bytes_each = sent.gradients / times / sum(elements for _, elements in filled)
    one_s = backward_s / micro_batches
    buckets = (
        (part * one_s, exchange_s(cluster, group, elements * bytes_each, COLLECTIVE))
        for part, elements in filled
    )
    return DataParallelTime(in_buckets(cluster, buckets, one_s) * times, parameters)
