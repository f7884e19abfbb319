"""Check that DeepSpeed engines of this process reduce gradients over the ranks of a sequence."""

# In comm, and not in training: every mesh must have it, also in programs that call
# deepspeed.initialize themselves and never import ds_usp.training, which are those that get it
# wrong. It imports nothing of DeepSpeed: it reads what is loaded.

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ds_usp.errors import ConfigError


class DeepSpeedCheck:
    """Why DeepSpeed would leave gradients of attention over some global ranks unsummed; None if it
    sums them, or does not run in this process. Called at every backward pass.

    ``deepspeed.initialize(mesh_param=...)`` and ``sequence_parallel_size`` with
    ``data_parallel_size`` in its configuration make a device mesh, which stays for engines that are
    made later; without an ``mpu`` ZeRO-0 to 2 then reduce over its data-parallel dim alone. ZeRO-3
    is right (DeepSpeed 0.19.8).

    Args:
        ranks: the global ranks that share each sequence.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._passed: Any = None  # the device mesh under which gradients are right

    def __call__(self) -> ConfigError | None:
        groups: Any = sys.modules.get("deepspeed.utils.groups")
        device_mesh = getattr(groups, "mesh_device", None)
        if device_mesh is None or device_mesh is self._passed:
            return None
        refusal = _refusal(_engines(), self._ranks)
        if refusal is None:
            self._passed = device_mesh
        return refusal


def _engines() -> list[Any]:
    """The engine that runs ``engine.backward``; all engines under ``loss.backward()``, which does
    not say whose backward pass it is."""
    module: Any = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return []
    # DeepSpeed keeps no list of its engines. Not the subclass for pipelines, which has an mpu.
    engines = [x for x in gc.get_objects() if type(x) is module.DeepSpeedEngine]
    return [x for x in engines if getattr(x, "_running_engine_backward", False)] or engines


def _refusal(engines: Sequence[Any], ranks: Sequence[int]) -> ConfigError | None:
    """The first engine's refusal; None if an engine sums over all ``ranks``, or there is none."""
    refusals = [_engine_refusal(engine, ranks) for engine in engines]
    return refusals[0] if refusals and None not in refusals else None


def _engine_refusal(engine: Any, ranks: Sequence[int]) -> ConfigError | None:
    """The error of an engine that sums over fewer than ``ranks``; None if it is right."""
    group = getattr(engine, "seq_data_parallel_group", None)
    if group is None:
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
