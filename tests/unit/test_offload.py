"""Offloaded activations: bitwise gradients, counted bytes, and memory that is really free."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_model import Sizes, Stack
from torch import Tensor, nn

from ds_usp import ConfigError, RecomputeError
from ds_usp.memory import RECOMPUTE, LayerMemory, Offload
from ds_usp.memory import offload as offload_module
from ds_usp.memory.offload import HostDeviceCopier, HostStorages
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.memory import memory
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.training import keep_states_on_host

CPU = torch.device("cpu")
SIZES = Sizes(tokens=32, heads=4, dim=8, ffn=96, layers=4)
BLOCK = 4096  # smaller than most tensors here, so that they need several


def offload(ratio: float, min_bytes: int = 0) -> Offload:
    return Offload(ratio, CPU, min_bytes=min_bytes, copier=HostDeviceCopier(CPU, BLOCK))


def stack(memory: LayerMemory, layers: int = SIZES.layers) -> Stack:
    return Stack(memory, SIZES._replace(layers=layers))


def in_turn(model: Stack, inputs: list[Tensor]) -> None:
    """The plain engine: each micro batch's backward follows its forward."""
    for x in inputs:
        model(x).backward()


def one_forward_one_backward(model: Stack, inputs: list[Tensor]) -> None:
    """The first of three pipeline stages: up to three in flight, the oldest goes first."""
    waiting = []
    for x in inputs:
        waiting.append(model(x))
        if len(waiting) == 3:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()


def any_order(model: Stack, inputs: list[Tensor]) -> None:
    losses = [model(x) for x in inputs]
    for index in (2, 1, 3, 0):  # neither a queue nor a stack
        losses[index].backward()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are so small that threads cost most of the time."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


Schedule = Callable[[Stack, list[Tensor]], None]
SCHEDULES = (in_turn, one_forward_one_backward, any_order)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_bitwise_the_same_and_the_bytes_are_the_ratio(schedule, recompute):
    plain = stack(LayerMemory(recompute))
    inputs = plain.inputs(4)
    schedule(plain, inputs)
    want = plain.gradients(inputs)
    for ratio in (0.0, 0.37, 1.0):
        moving = offload(ratio)
        model = stack(LayerMemory(recompute, moving))
        inputs = model.inputs(4)
        schedule(model, inputs)
        assert all(torch.equal(g, w) for g, w in zip(model.gradients(inputs), want, strict=True))
        counts = moving.counts
        assert abs(counts.offloaded - ratio * counts.saved) <= 512
        assert (counts.saved > 0) == (ratio > 0)
    layer = counts.saved / (SIZES.layers - 1) / len(inputs)
    if schedule is in_turn:
        assert counts.late == 0
    elif schedule is one_forward_one_backward:  # the first layer, which nothing prefetches
        assert 0 < counts.late <= 1.1 * layer
    else:
        assert counts.late > 1.1 * layer


class DeviceBytes:
    """Bytes of the storages of saved tensors that are on the device: now, and the largest seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.items: list[weakref.ref[Any]] = []
        self.peak = 0
        storage_class = offload_module._OffloadedStorage

        def made(*args: Any) -> Any:
            item = storage_class(*args)
            self.items.append(weakref.ref(item))
            return item

        monkeypatch.setattr(offload_module, "_OffloadedStorage", made)

    @property
    def now(self) -> int:
        alive = [item for ref in self.items if (item := ref()) is not None]
        names = ("data", "_device_remainder", "_prefetch_buffer")
        buffers = [getattr(item, name) for item in alive for name in names]
        return sum(x.numel() for x in buffers if x is not None)

    def record(self, *_: Any) -> None:
        self.peak = max(self.peak, self.now)


@pytest.fixture
def device_bytes(monkeypatch: pytest.MonkeyPatch) -> DeviceBytes:
    return DeviceBytes(monkeypatch)


def test_what_backward_does_not_need_is_neither_counted_nor_moved():
    moving, weight = offload(0.5), nn.Parameter(torch.full((SIZES.tokens, SIZES.hidden), 1.5))
    hidden = torch.randn(SIZES.tokens, SIZES.hidden, requires_grad=True)
    for number in range(3):
        with moving.layer(number):
            hidden.exp().sin()  # saves, and is freed at once
            hidden = hidden * weight
    counts, one = moving.counts, SIZES.tokens * SIZES.hidden * 4
    assert (counts.saved, counts.offloaded) == (2 * one, one)
    hidden.sum().backward()
    assert moving.bytes_away == 0


@pytest.mark.parametrize("ratio", [0.0, 0.4, 0.75, 1.0])
def test_resident_bytes_are_the_planners_formula(device_bytes, ratio):
    """Two layers, and of the others what is not offloaded; a deep model, because a part of a tensor
    of which only a part is offloaded is there twice while its copies are in flight."""
    layers = 24
    model = stack(LayerMemory("none", offload(max(ratio, 1e-9))), layers)
    for layer in model.layers:
        layer.register_forward_hook(device_bytes.record)
        layer.register_full_backward_hook(device_bytes.record)
    (x,) = model.inputs(1)
    loss = model(x)
    one = model.memory.offload.counts.saved / (layers - 1)
    assert device_bytes.now <= one + (layers - 1) * (1 - ratio) * one + 512 * layers
    loss.backward()
    shape = ModelShape("stack", layers, SIZES.hidden, SIZES.ffn, SIZES.heads, SIZES.heads, 100)
    work, split = (
        Workload(shape, SIZES.tokens),
        ParallelConfig(offload_unit="layer", offload_ratio=ratio),
    )
    planned = memory(work, split).activations / layer_bytes(work, split)
    assert device_bytes.peak / one == pytest.approx(planned, rel=0.02)
    assert device_bytes.now == 0


def test_a_graph_that_is_dropped_frees_everything(device_bytes):
    moving = offload(0.5)
    model = stack(LayerMemory("none", moving))
    gc.disable()
    try:
        loss = model(model.inputs(1)[0])
        assert device_bytes.now > 0 and moving.copier.pool.num_free < moving.copier.pool.num_blocks
        del loss
        assert device_bytes.now == 0
        assert moving.copier.pool.num_free == moving.copier.pool.num_blocks
    finally:
        gc.enable()


def test_host_memory_is_used_again():
    moving = offload(1.0)
    model = stack(LayerMemory("none", moving))
    in_turn(model, model.inputs(1))
    made = moving.copier.pool.num_blocks
    in_turn(model, model.inputs(4))
    assert 0 < made == moving.copier.pool.num_blocks


def test_two_views_of_one_storage_are_offloaded_once():
    moving, x = offload(1.0), torch.randn(64, 64).requires_grad_()
    with moving.layer(0):
        y = x.exp()
        z = y[:, :32] * y[:, 32:] * y.t()[:, :32].sin()
    with moving.layer(1):
        loss = z.sum()
    # exp's output, its product of halves, and sine's input are views of one; the rest is one each.
    size = 64 * 64 * 4
    assert moving.counts.saved <= size + 4 * size // 2
    (grad,) = torch.autograd.grad(loss, x)
    y = x.exp()
    (want,) = torch.autograd.grad((y[:, :32] * y[:, 32:] * y.t()[:, :32].sin()).sum(), x)
    assert torch.equal(grad, want)


def test_parameters_stay_and_small_tensors_too():
    moving = offload(1.0, min_bytes=1 << 20)
    model = stack(LayerMemory("none", moving))
    in_turn(model, model.inputs(1))
    assert moving.counts.offloaded == 0
    moving = offload(1.0)
    linear = nn.Linear(SIZES.hidden, SIZES.hidden)
    x = torch.randn(3, SIZES.hidden).requires_grad_()
    for number in range(2):
        with moving.layer(number):
            y = linear(x)
    assert moving.counts.saved == x.nbytes
    y.sum().backward()


def test_without_gradients_nothing_moves():
    moving = offload(1.0)
    with torch.no_grad():
        stack(LayerMemory("none", moving))(torch.randn(1, SIZES.tokens, SIZES.hidden))
    assert moving.counts.saved == 0


def test_a_tensor_that_is_changed_in_place_is_noticed():
    moving = offload(1.0)
    x = torch.randn(8, 8).requires_grad_()
    with moving.layer(0):
        y = x.exp()
        z = y.sin()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RecomputeError, match="changed in place"), moving.layer(1):
        z.sum()


def test_a_tensor_that_stays_on_the_device_is_noticed_in_backward():
    """Half of a layer's bytes are offloaded, a part of its large tensor; its small one stays."""
    moving = offload(0.5)
    x = torch.randn(8, 8).requires_grad_()
    with moving.layer(0):
        large, small = x.repeat(4, 1).exp(), x.exp()
        hidden = large.sin().sum() * small.sin().sum()
    with moving.layer(1):
        loss = hidden.exp()
    assert [item.size for item in moving._passes[-1][0].items if item.data is not None] == [256]
    with torch.no_grad():
        small.mul_(2)
    with pytest.raises(RecomputeError, match="changed in place"):
        loss.backward()


def test_an_error_in_a_layer_leaves_it_usable():
    moving = offload(1.0)
    model = stack(LayerMemory("none", moving))
    with pytest.raises(KeyError), moving.layer(0):
        model.inputs(1)[0].exp()
        raise KeyError("mine")
    in_turn(model, model.inputs(2))


def test_a_ratio_out_of_range_and_an_unknown_policy_are_refused():
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            offload(ratio)
    with pytest.raises(ConfigError, match="gemm-last"):
        LayerMemory("some")


def test_views_are_right_again_and_host_memory_is_reused(monkeypatch):
    monkeypatch.setattr(offload_module, "_MIN_BYTES", 100)
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


def test_what_is_written_after_the_copies_began_is_kept(monkeypatch):
    monkeypatch.setattr(offload_module, "_MIN_BYTES", 100)
    storages = HostStorages(CPU)
    states, other = torch.arange(100.0), torch.ones(100)
    storages.send([states, other])
    states[50:].zero_()  # as who clears a momentum between two steps
    storages.free()
    assert states.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    storages.bring_back()
    assert states.sum() == sum(range(50)) and other.equal(torch.ones(100))


def test_an_optimizer_loads_its_states_on_the_device(monkeypatch):
    monkeypatch.setattr(offload_module, "_MIN_BYTES", 1)
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


def test_nothing_is_lost_where_device_memory_is_short(monkeypatch):
    monkeypatch.setattr(offload_module, "_MIN_BYTES", 100)
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


def engine(optimizer: Any, device: str = "none") -> Any:
    config = SimpleNamespace(device=device)
    return SimpleNamespace(
        optimizer=optimizer,
        module=torch.nn.Linear(2, 2),
        device=CPU,
        zero_offload_optimizer=lambda: config,
        zero_offload_param=lambda: None,
    )


def test_engines_with_other_states_are_refused():
    zero = SimpleNamespace(single_partition_of_fp32_groups=[])
    with pytest.raises(ConfigError, match="offload_optimizer on cpu"):
        keep_states_on_host(engine(zero, "cpu"))
    muon = SimpleNamespace(param_groups=[{"use_muon": False}, {"use_muon": True}])
    with pytest.raises(ConfigError, match="Muon uses its momentum in backward"):
        keep_states_on_host(engine(SimpleNamespace(**vars(zero), optimizer=muon)))
    with pytest.raises(ConfigError, match="SimpleNamespace keeps its fp32 weights elsewhere"):
        keep_states_on_host(engine(SimpleNamespace()))


def test_one_hardware_queue_of_a_gpu_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    copier = HostDeviceCopier(CPU, BLOCK)
    for ratio, device, warned in ((0.0, "cuda", 0), (0.5, "cpu", 0), (0.5, "cuda", 1)):
        Offload(ratio, device, copier=copier)
        assert [x.levelname for x in caplog.records] == ["WARNING"] * warned


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_that_the_ranks_of_a_host_lack_is_refused_before_it_is_taken(monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    layer_input = 4 * SIZES.tokens * SIZES.heads * SIZES.dim  # all that is saved of a layer
    needed = ranks * 2 * layer_input  # of 4 layers the first has its own, the last one stays
    for free in (needed, needed - 1):
        monkeypatch.setenv("USP_HOST_MEMORY_GIB", repr(free / 2**30))
        copier = HostDeviceCopier(CPU, BLOCK)
        model = stack(LayerMemory("full", Offload(1.0, CPU, copier=copier, min_bytes=1, layers=4)))
        (x,) = model.inputs(1)
        if free == needed:
            model(x).backward()
            assert copier.pool.num_blocks == 3 * layer_input // BLOCK
        else:
            with pytest.raises(ConfigError, match=f"{ranks} ranks of this host"):
                model(x)
            assert copier.pool.num_blocks == layer_input // BLOCK


def test_a_rank_that_comes_late_does_not_count_the_others_memory_twice(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for at_start, now, fits in ((8, 4, True), (7, 4, False), (8, 3, False), (7, 8, True)):
        readings = iter((at_start * BLOCK, now * BLOCK))
        monkeypatch.setattr(offload_module, "free_memory", lambda readings=readings: next(readings))
        pool = offload_module.PinnedBlockPool(False, BLOCK)
        with nullcontext() if fits else pytest.raises(ConfigError, match="2 ranks of this host"):
            pool.reserve(BLOCK, 4)


def test_states_that_find_no_host_memory_are_refused_and_stay(monkeypatch):
    states = [torch.ones(1 << 16) for _ in range(3)]
    storages = HostStorages(CPU, copier=HostDeviceCopier(CPU, 1 << 17))
    monkeypatch.setenv("USP_HOST_MEMORY_GIB", repr(5 * 2**17 / 2**30))
    with pytest.raises(ConfigError, match="USP_HOST_MEMORY_GIB"):
        storages.send(states)
    storages.free()
    assert all(x.untyped_storage().nbytes() == 1 << 18 for x in states)
