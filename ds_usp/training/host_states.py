"""Optimizer states and fp32 master weights that wait in host memory between optimizer steps.

A loop calls :func:`keep_states_on_host` once, on every rank; hooks and wrapped methods do the rest,
without communication. DeepSpeed's own ``engine.offload_states`` (0.19.8) takes fewer optimizers and
pins host memory anew at every call. Gradients stay on the device: backward adds to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_usp.errors import ConfigError
from ds_usp.memory.offload import HostStorages
from ds_usp.memory.saved_attention import storage_id

# Where DeepSpeed's optimizers keep the master weights: ZeRO-1 and 2, ZeRO-1 in bf16, ZeRO-3.
_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
)

# Methods that read or write states.
_OF_OPTIMIZER = ("step", "state_dict", "load_state_dict", "refresh_fp32_params")
_OF_ENGINE = ("save_checkpoint", "load_checkpoint")


def keep_states_on_host(engine: Any) -> StatesOnHost:
    """Let an engine's optimizer states and master weights wait in host memory while it computes.

    They leave the device before the engine's next forward pass, with copies that start when an
    optimizer step ends, and are back before the optimizer's step, while the engine saves or loads
    a checkpoint, and while the optimizer saves, loads or refreshes its states. What else reads or
    writes them does so within :meth:`StatesOnHost.on_device`.

    Args:
        engine: of ``deepspeed.initialize``, its pipeline engine too. The engine's module gets a
            hook, and these methods of the optimizer and of the engine are wrapped.

    Raises:
        ConfigError: DeepSpeed offloads optimizer or parameters itself; the optimizer's fp32
            weights are not where ZeRO of DeepSpeed 0.19 has them; or it is DeepSpeed's Muon.
    """
    states = StatesOnHost(engine)
    for owner, names in ((engine.optimizer, _OF_OPTIMIZER), (engine, _OF_ENGINE)):
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, states.on_device()(getattr(owner, name)))
    engine.module.register_forward_pre_hook(lambda *_: states.leave())
    return states


class StatesOnHost:
    """The optimizer states and master weights of one engine; see :func:`keep_states_on_host`."""

    def __init__(self, engine: Any) -> None:
        _refuse(engine)
        self._module, self._optimizer = engine.module, engine.optimizer
        self._storages = HostStorages(torch.device(engine.device))
        self._uses = 0  # on_device blocks that are open: save_checkpoint calls state_dict

    @property
    def bytes_away(self) -> int:
        """Bytes in host memory that have no memory on the device now."""
        return self._storages.bytes_away

    def leave(self) -> None:
        """Free the tensors on the device, before every forward pass; not within on_device."""
        # The copies have started when the step ended, and had the time of logging and reading the
        # next batch: here they are only waited for. Before the first step there were none.
        if not self._uses:
            self._storages.send(self._tensors())
            self._storages.free()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the tensors on the device in the body, which may be nested; then their copies to the
        host begin. They stay on the device until :meth:`leave`."""
        if not self._uses:
            self._storages.bring_back()
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._storages.send(self._tensors())

    def _tensors(self) -> list[Tensor]:
        # States and masters whose storages no parameter shares: before the first step no states.
        base = getattr(self._optimizer, "optimizer", self._optimizer)
        tensors = [value for state in base.state.values() for value in state.values()]
        for name in _MASTERS:
            tensors += getattr(self._optimizer, name, [])
        # In fp32 masters are the parameters themselves, which forward needs.
        used = set()
        for parameter in self._module.parameters():
            used.add(storage_id(parameter.detach()))
            if hasattr(parameter, "ds_tensor"):  # its shard at ZeRO-3
                used.add(storage_id(parameter.ds_tensor))
        return [x for x in tensors if isinstance(x, Tensor) and storage_id(x) not in used]


def _refuse(engine: Any) -> None:
    if getattr(engine, "optimizer", None) is None or not hasattr(engine, "zero_offload_optimizer"):
        raise ConfigError(
            f"states on the host: {type(engine).__name__} is no engine of deepspeed.initialize "
            "with an optimizer"
        )
    # The master weights are freed by resizing their storages: what DeepSpeed has moved already, or
    # keeps elsewhere, would be freed under its hands.
    for offloaded, key in (
        (engine.zero_offload_optimizer(), "offload_optimizer"),
        (engine.zero_offload_param(), "offload_param"),
    ):
        device = getattr(offloaded, "device", None)
        device = getattr(device, "value", device)
        if device not in (None, "none"):
            raise ConfigError(
                f"states on the host, and zero_optimization.{key} on {device} in DeepSpeed's "
                "configuration: leave one of the two out"
            )
    optimizer = engine.optimizer
    groups = getattr(getattr(optimizer, "optimizer", optimizer), "param_groups", ())
    if any(group.get("use_muon") for group in groups):
        raise ConfigError(
            "states on the host: DeepSpeed's Muon uses its momentum in backward, where it is away. "
            "Use Adam, or leave states on the GPU"
        )
    is_known = any(hasattr(optimizer, name) for name in _MASTERS)
    if not is_known and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"states on the host: {type(optimizer).__name__} keeps its fp32 weights elsewhere than "
            "ZeRO-1 to 3 do. Use a ZeRO stage, or fp32 with ZeRO-0"
        )
