"""Storages in host memory: views are right again, whatever the order of calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_usp import ConfigError
from ds_usp.memory import offload
from ds_usp.memory.offload import HostDeviceCopier, HostStorages
from ds_usp.training import keep_states_on_host

CPU = torch.device("cpu")


def test_views_are_right_again_and_host_memory_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_MIN_BYTES", 100)
    copier = HostDeviceCopier(CPU, block_bytes=256)
    storages = HostStorages(CPU, copier=copier)
    flat, small = torch.arange(250.0), torch.ones(3)
    view, other = flat[50:70].view(4, 5), torch.arange(90.0) * 2
    for step in range(3):
        storages.send([flat, view, small, other])
        if step != 1:  # the copies of that one end before anything is freed
            storages.free()
            storages.free()
            assert flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
            assert storages.bytes_away == 4 * (250 + 90)
        storages.bring_back()
        storages.bring_back()
        assert storages.bytes_away == 0 and copier.pool.num_free == copier.pool.num_blocks == 6
        assert view.equal((torch.arange(50.0, 70) + step).view(4, 5)) and other[9] == 18
        flat += 1
    storages.send([small])
    storages.free()
    assert small.equal(torch.ones(3)) and storages.bytes_away == 0


def test_what_is_written_after_the_copies_began_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_MIN_BYTES", 100)
    storages = HostStorages(CPU)
    states, other = torch.arange(100.0), torch.ones(100)
    storages.send([states, other])
    states[50:].zero_()  # as who clears a momentum between two steps
    storages.free()
    assert states.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    storages.bring_back()
    assert states.sum() == sum(range(50)) and other.equal(torch.ones(100))


def test_an_optimizer_loads_its_states_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)
    master, module = torch.arange(8.0), torch.nn.Linear(2, 2)
    zero = SimpleNamespace(
        single_partition_of_fp32_groups=[master],
        optimizer=SimpleNamespace(state={}, param_groups=[]),
        step=lambda: master.data.add_(1),
        refresh_fp32_params=lambda: master.data.fill_(7),
    )
    made = engine(zero)
    made.module = module
    keep_states_on_host(made)
    for used in (zero.step, zero.refresh_fp32_params):
        module(torch.ones(1, 2))
        assert master.untyped_storage().nbytes() == 0
        used()
    zero.refresh_fp32_params()  # its copy to the host has begun
    module(torch.ones(1, 2))
    zero.step()
    assert master.equal(torch.full((8,), 8.0))


def test_nothing_is_lost_where_device_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_MIN_BYTES", 100)
    storages = HostStorages(CPU)
    first, second = torch.arange(100.0), torch.arange(100.0) * 2
    storages.send([first, second])
    storages.free()
    resize, calls = torch.UntypedStorage.resize_, []

    def resize_once(storage: torch.UntypedStorage, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        resize(storage, size)

    with monkeypatch.context() as short:
        short.setattr(torch.UntypedStorage, "resize_", resize_once)
        with pytest.raises(torch.OutOfMemoryError):
            storages.bring_back()
    storages.bring_back()
    assert first.equal(torch.arange(100.0)) and second.equal(torch.arange(100.0) * 2)


def engine(optimizer: Any, offload: str = "none") -> Any:
    config = SimpleNamespace(device=offload)
    return SimpleNamespace(
        optimizer=optimizer,
        module=torch.nn.Linear(2, 2),
        device=CPU,
        zero_offload_optimizer=lambda: config,
        zero_offload_param=lambda: None,
    )


def test_engines_with_other_states_are_refused() -> None:
    zero = SimpleNamespace(single_partition_of_fp32_groups=[])
    with pytest.raises(ConfigError, match="offload_optimizer on cpu"):
        keep_states_on_host(engine(zero, "cpu"))
    muon = SimpleNamespace(param_groups=[{"use_muon": False}, {"use_muon": True}])
    with pytest.raises(ConfigError, match="Muon uses its momentum in backward"):
        keep_states_on_host(engine(SimpleNamespace(**vars(zero), optimizer=muon)))
    with pytest.raises(ConfigError, match="SimpleNamespace keeps its fp32 weights elsewhere"):
        keep_states_on_host(engine(SimpleNamespace()))
