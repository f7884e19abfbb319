"""What DeepSpeed's ZeRO-3 holds on a GPU beside its shards (0.19.8, ``runtime/zero/stage3.py``).

Counted on H200s by the stacks that allocated what was alive at a step's peak, and on CPUs
(``tests/megatron/test_trainer_zero3.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_usp.planner.formulas import head_elements, stage_elements
from ds_usp.planner.gradient_buckets import bucket_elements
from ds_usp.planner.parallel_config import ParallelConfig, Workload

LIVE_ELEMENTS = 1_000_000_000  # its stage3_max_live_parameters
SUB_GROUP_ELEMENTS = 1_000_000_000  # its sub_group_size, of a rank's shards


def bucket_bytes(work: Workload, config: ParallelConfig) -> float:
    """The buffer in which gradients are reduced, which is there all the time; they are reduced in
    fp32 where a sequence is on several ranks, else in the parameters' dtype. 0 but in ZeRO-3."""
    if config.zero != 3:
        return 0.0
    element = 4 if config.sp > 1 else config.param_bytes
    return float(element * bucket_elements(work.model, config.tp, config.zero))


def gathered_bytes(work: Workload, config: ParallelConfig, *, at_loss: bool) -> float:
    """Parameters that are gathered at the peak of a step, but the first one: then they are not
    gathered ahead. 0 but in ZeRO-3, and on one rank, which gathers nothing.

    Ahead of their use they are gathered until :data:`LIVE_ELEMENTS` are there, the last one whole;
    when a layer runs backward the output projection's are gone, and a gradient that waits for its
    reduction is where its parameter was.
    """
    if config.zero != 3 or config.zero_ranks == 1:
        return 0.0
    elements = stage_elements(work, config, 0)
    if not at_loss:
        elements -= head_elements(work, config)
    return min(elements, LIVE_ELEMENTS + _largest_parameter(work, config)) * config.param_bytes


def step_bytes(work: Workload, elements: float, config: ParallelConfig) -> float:
    """The optimizer's step, one sub-group after another: a copy of the gradients in fp32 as one
    flat tensor. A fused optimizer allocates nothing; torch's AdamW that is not fused as much again.
    0 but in ZeRO-3. Parameters join a sub-group until it has :data:`SUB_GROUP_ELEMENTS`, the last
    one whole; the largest sub-group counts.

    Args:
        elements: of the parameters of a stage, before they are sharded.
    """
    if config.zero != 3:
        return 0.0
    shard = elements / config.zero_ranks
    if shard <= SUB_GROUP_ELEMENTS:
        return 4.0 * shard
    largest = held = 0.0
    for size in _matrices(work, config):
        held += size / config.zero_ranks
        if held >= SUB_GROUP_ELEMENTS:
            largest, held = max(largest, held), 0.0
    return 4.0 * max(largest, held)


def _matrices(work: Workload, config: ParallelConfig) -> Iterator[float]:
    """Elements of the matrices of a stage on one tensor-parallel rank, in the model's order."""
    table, layer = _sizes(work, config)
    yield table
    for _ in range(config.layers_per_stage(work.model)):
        yield from layer
    if not work.model.tied:
        yield table


def _largest_parameter(work: Workload, config: ParallelConfig) -> float:
    """Elements of the largest parameter: an embedding or a matrix of a layer."""
    table, layer = _sizes(work, config)
    return max(table, *layer)


def _sizes(work: Workload, config: ParallelConfig) -> tuple[float, tuple[float, ...]]:
    """Elements of an embedding, and of a layer's matrices, on one tensor-parallel rank."""
    model, tp = work.model, config.tp
    queries, keys = model.hidden * model.q_width, model.hidden * model.kv_width
    mlp = model.hidden * model.ffn
    layer = queries, queries + 2 * keys, mlp * (2 if model.gated else 1), mlp
    return model.padded_vocab(tp) * model.hidden / tp, tuple(size / tp for size in layer)
