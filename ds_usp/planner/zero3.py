"""What DeepSpeed's ZeRO-3 holds on a GPU beside its shards (0.19.8, ``runtime/zero/stage3.py``).

Counted on H200s by the stacks that allocated what was alive at a step's peak, and on CPUs
(``tests/megatron/test_trainer_zero3.py``).
"""

from __future__ import annotations

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
    model, tp = work.model, config.tp
    elements = stage_elements(work, config, 0)
    if not at_loss:
        elements -= head_elements(work, config)
    matrix = model.hidden * model.ffn * (2 if model.gated else 1)
    largest = max(model.padded_vocab(tp) * model.hidden, matrix) / tp
    return min(elements, LIVE_ELEMENTS + largest) * config.param_bytes


def step_bytes(elements: float, config: ParallelConfig) -> float:
    """Copies of the optimizer's step, one sub-group after another, in fp32: the gradients as one
    flat tensor, and the root of the second moment, which torch's AdamW takes of all its tensors at
    once. 0 but in ZeRO-3.

    Args:
        elements: of the parameters of a stage, before they are sharded.
    """
    if config.zero != 3:
        return 0.0
    return 8.0 * min(elements / config.zero_ranks, SUB_GROUP_ELEMENTS)
