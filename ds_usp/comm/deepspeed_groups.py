"""Whether a DeepSpeed engine of this process sums gradients over the ranks of a sequence."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ds_usp.errors import ConfigError


def deepspeed_refusal(ranks: Sequence[int]) -> ConfigError | None:
    """Why DeepSpeed would leave gradients of attention over these global ranks unsummed; None if it
    would not, or does not run here.

    ``deepspeed.initialize(mesh_param=...)`` and ``sequence_parallel_size`` with
    ``data_parallel_size`` in its configuration make a device mesh; without an ``mpu`` ZeRO-0 to 2
    then reduce over its data-parallel dim alone. ZeRO-3 is right (DeepSpeed 0.19.8).
    """
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    module: Any = sys.modules.get("deepspeed.runtime.engine")
    if getattr(groups, "mesh_device", None) is None or module is None:
        return None
    # DeepSpeed keeps no list of its engines. This runs once, and only where a mesh device is set.
    engines = [x for x in gc.get_objects() if type(x) is module.DeepSpeedEngine]
    refusals = [_refusal(engine, ranks) for engine in engines]
    wrong = [each for each in refusals if each is not None]
    return wrong[0] if wrong and len(wrong) == len(refusals) else None


def _refusal(engine: Any, ranks: Sequence[int]) -> ConfigError | None:
    group = getattr(engine, "seq_data_parallel_group", None)
    if getattr(engine, "mesh_device", None) is None or group is None:
        return None
    stage, reduced = engine.zero_optimization_stage(), dist.get_process_group_ranks(group)
    if stage > 2 or set(ranks) <= set(reduced):
        return None
    return ConfigError(
        f"DeepSpeed with ZeRO-{stage} sums gradients over the global ranks {reduced} only, and the "
        f"ranks {list(ranks)} share each sequence: weights would drift apart. mesh_param=, or "
        "sequence_parallel_size in its configuration, does this. Leave it out and use "
        "ds_usp.training.initialize_deepspeed, or give deepspeed.initialize an mpu with "
        "get_sequence_data_parallel_group (ds_usp.training.deepspeed_mpu makes one)"
    )
