"""Offloaded activations: bitwise gradients, counted bytes, and memory that is really free."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_usp import ConfigError, MaskSpec, RecomputeError, SequenceMesh, usp_attention
from ds_usp.memory import RECOMPUTE, GemmLast, LayerMemory, Offload, recompute_before
from ds_usp.memory.pinned_transfer import HostDeviceCopier, PinnedBlockPool
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.memory import memory
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

CPU = torch.device("cpu")
MESH = SequenceMesh.single()
S, HEADS, DIM, FFN, LAYERS = 32, 4, 8, 96, 4
H = HEADS * DIM
BLOCK = 4096  # smaller than most tensors here, so that they lie in several


def offload(ratio: float, min_bytes: int = 0) -> Offload:
    return Offload(ratio, CPU, min_bytes=min_bytes, copier=HostDeviceCopier(CPU, BLOCK))


class Layer(nn.Module):
    """Norm, projection, attention, projection; norm, product, SwiGLU, product."""

    def __init__(self, gemm_last: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.RMSNorm(H)
        self.mix, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 2 * FFN), nn.Linear(FFN, H)
        if gemm_last:
            GemmLast.between(self.norm1, self.mix)
            GemmLast.between(self.norm2, self.up)
        self.join = recompute_before if gemm_last else lambda gate, down, y: down(gate(y))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm1(x)).unflatten(-1, (-1, DIM)).chunk(3, 2)
        layout = MESH.layout("contiguous", S)
        mixed = usp_attention(q, k, v, mesh=MESH, layout=layout, mask=MaskSpec.causal())
        x = x + self.out(mixed.flatten(2))
        return x + self.join(gated, self.down, self.up(self.norm2(x)))


def gated(y: Tensor) -> Tensor:
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


class Model(nn.Module):
    def __init__(self, memory: LayerMemory, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Layer(memory.recompute == "gemm-last") for _ in range(layers))
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.memory.run(number, layer, x)
        return x.square().mean()

    def inputs(self, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(9)
        return [torch.randn(1, S, H, generator=generator).requires_grad_() for _ in range(count)]

    def gradients(self, inputs: list[Tensor]) -> list[Tensor]:
        found = [*(p.grad for p in self.parameters()), *(x.grad for x in inputs)]
        self.zero_grad()
        return found


def in_turn(model: Model, inputs: list[Tensor]) -> None:
    """The plain engine: each micro batch's backward follows its forward."""
    for x in inputs:
        model(x).backward()


def one_forward_one_backward(model: Model, inputs: list[Tensor]) -> None:
    """The first of three pipeline stages: up to three in flight, the oldest goes first."""
    waiting = []
    for x in inputs:
        waiting.append(model(x))
        if len(waiting) == 3:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()


def any_order(model: Model, inputs: list[Tensor]) -> None:
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


Schedule = Callable[[Model, list[Tensor]], None]
SCHEDULES = (in_turn, one_forward_one_backward, any_order)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_bitwise_the_same_and_the_bytes_are_the_ratio(
    schedule: Schedule, recompute: str
) -> None:
    plain = Model(LayerMemory(recompute))
    inputs = plain.inputs(4)
    schedule(plain, inputs)
    want = plain.gradients(inputs)
    for ratio in (0.0, 0.37, 1.0):
        moving = offload(ratio)
        model = Model(LayerMemory(recompute, moving))
        inputs = model.inputs(4)
        schedule(model, inputs)
        assert all(torch.equal(g, w) for g, w in zip(model.gradients(inputs), want, strict=True))
        counts = moving.counts
        assert abs(counts.offloaded - ratio * counts.saved) <= 512
        assert (counts.saved > 0) == (ratio > 0)
    layer = counts.saved / (LAYERS - 1) / len(inputs)
    if schedule is in_turn:
        assert counts.late == 0
    elif schedule is one_forward_one_backward:  # the first of all, which nothing foretells
        assert 0 < counts.late <= 1.1 * layer
    else:
        assert counts.late > 1.1 * layer


class Seen:
    """Bytes of all that layers save and have on the device, and the most there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ds_usp.memory import offload as module

        self.items: list[weakref.ref[Any]] = []
        self.most = 0
        made = module._OffloadedStorage.__init__

        def init(item: Any, *args: Any) -> None:
            made(item, *args)
            self.items.append(weakref.ref(item))

        monkeypatch.setattr(module._OffloadedStorage, "__init__", init)

    @property
    def now(self) -> int:
        alive = [item for ref in self.items if (item := ref()) is not None]
        parts = [
            x
            for item in alive
            for x in (item.data, item._device_remainder, item._prefetch_buffer)
            if x is not None
        ]
        return sum(x.numel() for x in parts)

    def look(self, *_: Any) -> None:
        self.most = max(self.most, self.now)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    yield Seen(monkeypatch)


def test_what_backward_does_not_need_is_neither_counted_nor_moved() -> None:
    moving, weight = offload(0.5), nn.Parameter(torch.full((S, H), 1.5))
    hidden = torch.randn(S, H, requires_grad=True)
    for number in range(3):
        with moving.layer(number):
            hidden.exp().sin()  # saves, and goes at once
            hidden = hidden * weight
    counts, one = moving.counts, S * H * 4
    assert (counts.saved, counts.offloaded) == (2 * one, one)
    hidden.sum().backward()
    assert moving.bytes_away == 0


@pytest.mark.parametrize("ratio", [0.0, 0.4, 0.75, 1.0])
def test_what_is_resident_is_the_planners_formula(seen: Seen, ratio: float) -> None:
    """Two layers whole, and of the others what does not leave; a deep model, because a tensor that
    is cut in two is there twice, in part, while its copies are under way."""
    layers = 24
    model = Model(LayerMemory("none", offload(max(ratio, 1e-9))), layers)
    for layer in model.layers:
        layer.register_forward_hook(seen.look)
        layer.register_full_backward_hook(seen.look)
    (x,) = model.inputs(1)
    loss = model(x)
    one = model.memory.offload.counts.saved / (layers - 1)
    assert seen.now <= one + (layers - 1) * (1 - ratio) * one + 512 * layers
    loss.backward()
    shape = ModelShape("stack", layers, H, FFN, HEADS, HEADS, 100)
    work, split = Workload(shape, S), ParallelConfig(offload_unit="layer", offload_ratio=ratio)
    planned = memory(work, split).activations / layer_bytes(work, split)
    assert seen.most / one == pytest.approx(planned, rel=0.02)
    assert seen.now == 0


def test_a_graph_that_is_dropped_frees_everything(seen: Seen) -> None:
    moving = offload(0.5)
    model = Model(LayerMemory("none", moving))
    gc.disable()
    try:
        loss = model(model.inputs(1)[0])
        assert seen.now > 0 and moving.copier.pool.num_free < moving.copier.pool.num_blocks
        del loss
        assert seen.now == 0
        assert moving.copier.pool.num_free == moving.copier.pool.num_blocks
    finally:
        gc.enable()


def test_host_memory_is_used_again() -> None:
    moving = offload(1.0)
    model = Model(LayerMemory("none", moving))
    in_turn(model, model.inputs(1))
    made = moving.copier.pool.num_blocks
    in_turn(model, model.inputs(4))
    assert 0 < made == moving.copier.pool.num_blocks


def test_a_parcel_in_several_blocks() -> None:
    blocks = PinnedBlockPool(pinned=False, block_bytes=8)
    allocation = blocks.allocate(20)
    assert blocks.num_blocks == 3
    assert [len(piece) for piece in allocation.slices(0, 20)] == [8, 8, 4]
    assert [len(piece) for piece in allocation.slices(5, 17)] == [3, 8, 1]
    assert [len(piece) for piece in allocation.slices(9, 11)] == [2]


def test_two_views_of_one_memory_travel_once() -> None:
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


def test_parameters_stay_and_small_tensors_too() -> None:
    moving = offload(1.0, min_bytes=1 << 20)
    model = Model(LayerMemory("none", moving))
    in_turn(model, model.inputs(1))
    assert moving.counts.offloaded == 0
    moving = offload(1.0)
    linear = nn.Linear(H, H)
    x = torch.randn(3, H).requires_grad_()
    for number in range(2):
        with moving.layer(number):
            y = linear(x)
    assert moving.counts.saved == x.nbytes
    y.sum().backward()


def test_without_gradients_nothing_moves() -> None:
    moving = offload(1.0)
    with torch.no_grad():
        Model(LayerMemory("none", moving))(torch.randn(1, S, H))
    assert moving.counts.saved == 0


def test_a_tensor_that_is_changed_in_place_is_noticed() -> None:
    moving = offload(1.0)
    x = torch.randn(8, 8).requires_grad_()
    with moving.layer(0):
        y = x.exp()
        z = y.sin()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RecomputeError, match="changed in place"), moving.layer(1):
        z.sum()


def test_an_error_in_a_layer_leaves_it_usable() -> None:
    moving = offload(1.0)
    model = Model(LayerMemory("none", moving))
    with pytest.raises(KeyError), moving.layer(0):
        model.inputs(1)[0].exp()
        raise KeyError("mine")
    in_turn(model, model.inputs(2))


def test_a_ratio_out_of_range_and_an_unknown_policy_are_refused() -> None:
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            offload(ratio)
    with pytest.raises(ConfigError, match="gemm-last"):
        LayerMemory("some")
