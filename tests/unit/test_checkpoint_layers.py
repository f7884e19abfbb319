"""Groups of checkpointed layers: gradients bit for bit, counted inputs, layers that run again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory_model import Sizes, Stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_usp import ConfigError, RecomputeError
from ds_usp.memory import LayerMemory, Offload, in_chunks, run_for_gradients
from ds_usp.memory.offload import HostDeviceCopier
from ds_usp.memory.saved_attention import saved_tensors
from ds_usp.planner.formulas import input_bytes
from ds_usp.planner.memory import memory as planned_memory
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

CPU = torch.device("cpu")
SIZES = Sizes(tokens=16, heads=2, dim=8, ffn=48, layers=7)
HIDDEN_BYTES = SIZES.tokens * SIZES.hidden * 4
FULL = ParallelConfig(recompute="full", offload_unit="layer", offload_ratio=1.0)


def offload(ratio: float) -> Offload:
    return Offload(ratio, CPU, min_bytes=0, copier=HostDeviceCopier(CPU, 4096))


def gradients(memory: LayerMemory, in_flight: int = 1) -> list[Tensor]:
    """Of four micro batches, of which so many are in flight."""
    model = Stack(memory, SIZES)
    inputs, losses = model.inputs(4), []
    for x in inputs:
        losses.append(model(x))
        if len(losses) == in_flight:
            losses.pop(0).backward()
    for loss in losses:
        loss.backward()
    return model.gradients(inputs)


@pytest.mark.parametrize("recompute", ["full", "attention"])
@pytest.mark.parametrize("size", [2, 3, 7, 9])
def test_gradients_are_bitwise_those_without(recompute: str, size: int) -> None:
    want = gradients(LayerMemory("none"))
    for ratio, in_flight in ((None, 1), (0.4, 1), (1.0, 3)):
        moving = offload(ratio) if ratio is not None else None
        nested = gradients(LayerMemory(recompute, moving, checkpoint_layers=size), in_flight)
        assert all(map(torch.equal, nested, want)), (ratio, in_flight)
        if moving is not None:
            assert abs(moving.counts.offloaded - moving.counts.saved * moving.ratio) <= 512


@pytest.mark.parametrize("recompute", ["full", "attention"])
def test_torchs_checkpoint_that_is_not_reentrant(recompute: str) -> None:
    want = gradients(LayerMemory("none"))
    one = partial(checkpoint, use_reentrant=False)
    for moving in (None, offload(0.7)):
        nested = gradients(LayerMemory(recompute, moving, one, checkpoint_layers=3), 2)
        assert all(map(torch.equal, nested, want))


class Counted(nn.Module):
    """``tanh(x) * weight``, counting calls, and with them the results that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.calls, self.most = 0, 0
        self.results: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result = torch.tanh(x) * self.weight
        self.results = [ref for ref in self.results if ref() is not None]
        self.results.append(weakref.ref(result.untyped_storage()))
        self.most = max(self.most, len(self.results))
        return result


def run(memory: LayerMemory, layer: Callable[[Tensor], Any], layers: int) -> Tensor:
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    for number in range(layers):
        x = memory.run(number, layer, x)
    return x


@pytest.mark.parametrize(("layers", "size"), [(8, 4), (7, 3), (6, 1), (5, 5), (9, 2)])
def test_layers_run_and_inputs_kept(layers: int, size: int) -> None:
    groups = -(-layers // size)
    layer, kept = Counted(), []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    gc.disable()
    try:
        with saved_tensors(pack, lambda tensor: tensor):
            loss = run(LayerMemory("full", checkpoint_layers=size), layer, layers).sum()
        assert len(kept) == groups
        kept.clear()
        assert layer.calls == layers
        alive = sum(ref() is not None for ref in layer.results)
        assert alive == groups - 1
        layer.most = 0
        loss.backward()
        assert layer.calls == 2 * layers + (layers - groups)
        del loss
        assert not any(ref() is not None for ref in layer.results)
        # Inputs of groups, those inside of the last one, the two results of a layer that runs.
        assert layer.most <= groups + size + 1
    finally:
        gc.enable()


def offloaded_inputs(sizes: Sizes, config: ParallelConfig) -> float:
    """What the planner says of host memory, in inputs of a layer."""
    heads = sizes.heads, sizes.heads
    shape = ModelShape("stack", sizes.layers, sizes.hidden, sizes.ffn, *heads, 100)
    work = Workload(shape, sizes.tokens)
    return planned_memory(work, config).offloaded / input_bytes(work, config)


@pytest.mark.parametrize("size", range(1, 9))
def test_host_memory_is_the_planners(size: int) -> None:
    for layers in (4, 8, 9, 12, 32):
        sizes = SIZES._replace(layers=layers)
        moving = Offload(1.0, CPU, min_bytes=0, copier=HostDeviceCopier(CPU, HIDDEN_BYTES))
        model = Stack(LayerMemory("full", moving, checkpoint_layers=size), sizes)
        (x,) = model.inputs(1)
        model(x).backward()
        planned = offloaded_inputs(sizes, FULL.replace(checkpoint_layers=size))
        assert moving.copier.pool.num_blocks == round(planned), layers


@pytest.mark.parametrize(("size", "layers"), [(2, 8), (4, 16)])
def test_attentions_results_in_host_memory_are_the_planners(size: int, layers: int) -> None:
    sizes, moving = SIZES._replace(layers=layers), offload(1.0)
    model = Stack(LayerMemory("attention", moving, checkpoint_layers=size), sizes)
    (x,) = model.inputs(1)
    loss = model(x)
    planned = offloaded_inputs(sizes, FULL.replace(recompute="attention", checkpoint_layers=size))
    assert 1 <= planned * HIDDEN_BYTES / moving.bytes_away < 1.1
    loss.backward()


def test_a_graph_that_is_dropped_frees_the_group() -> None:
    layer, moving = Counted(), offload(1.0)
    memory = LayerMemory("full", moving, checkpoint_layers=3)
    gc.disable()
    try:
        loss = run(memory, layer, 5)
        del loss
        assert not any(ref() is not None for ref in layer.results)
        assert moving.copier.pool.num_free == moving.copier.pool.num_blocks > 0
    finally:
        gc.enable()


def saved_bytes(memory: LayerMemory, mlp_chunks: int = 0) -> int:
    """What the forward pass of a stack keeps, parameters aside."""
    model, saved = Stack(memory, SIZES), {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    if mlp_chunks:
        for layer in model.layers:
            layer.down.forward = partial(in_chunks, layer.down.forward, chunks=mlp_chunks, dim=1)
    (x,) = model.inputs(1)
    with saved_tensors(pack, lambda tensor: tensor):
        for number, layer in enumerate(model.layers):
            x = memory.run(number, layer, x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("mlp_chunks", [0, 4])
def test_saved_bytes_are_one_input_a_group(mlp_chunks: int) -> None:
    for recompute in ("full", "attention"):
        each = saved_bytes(LayerMemory(recompute), mlp_chunks)
        for size, groups in ((2, 4), (3, 3), (7, 1)):
            grouped = saved_bytes(LayerMemory(recompute, checkpoint_layers=size), mlp_chunks)
            assert each - grouped == (SIZES.layers - groups) * HIDDEN_BYTES
        if recompute == "full":
            assert each == SIZES.layers * HIDDEN_BYTES


class Tracker:
    """A framework's generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def get_states(self) -> dict[str, Tensor]:
        return {"own": self.generator.get_state()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.generator.set_state(states["own"])


@pytest.mark.parametrize("recompute", ["full", "attention"])
def test_dropout_of_every_generator_is_the_same(recompute: str) -> None:
    tracker = Tracker()
    weight = torch.eye(8).requires_grad_()

    def tracked(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        states = tracker.get_states()
        first = [True]

        def restored(x: Tensor) -> Tensor:
            current = tracker.get_states()
            if not first:
                tracker.set_states(states)
            result = run(x)
            if not first:
                tracker.set_states(current)
            first.clear()
            return result

        return checkpoint(restored, x, use_reentrant=True)

    def layer(x: Tensor) -> tuple[Tensor, None]:
        mask = torch.rand(x.shape, generator=tracker.generator) < 0.7
        return F.dropout(x @ weight, 0.3).sin() * mask, None

    results = []
    for size in (1, 3):
        torch.manual_seed(3)
        tracker.generator.manual_seed(5)
        memory = LayerMemory(
            recompute,
            checkpoint=tracked,
            checkpoint_layers=size,
            random_tracker=lambda: tracker,
        )
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        leaf, weight.grad = x, None
        for number in range(5):
            x, _ = memory.run(number, layer, x)
        x.sum().backward()
        after = torch.rand(4), torch.rand(4, generator=tracker.generator)
        results.append((leaf.grad, weight.grad, *after))
    assert all(map(torch.equal, *results))


def test_autocast_of_the_forward_pass() -> None:
    results = []
    for memory in (LayerMemory("none"), LayerMemory("full", checkpoint_layers=3)):
        torch.manual_seed(2)
        layers = [nn.Linear(8, 8) for _ in range(4)]
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        y = x
        with torch.autocast("cpu", torch.bfloat16):
            for number, layer in enumerate(layers):
                y = memory.run(number, layer, y)
        y.float().sum().backward()
        results.append([x.grad, *(layer.weight.grad for layer in layers)])
    assert all(map(torch.equal, *results))


def test_inputs_that_are_no_results_are_refused() -> None:
    memory = LayerMemory("full", checkpoint_layers=2)
    x = memory.run(0, torch.sin, torch.ones(3).requires_grad_())
    with pytest.raises(ConfigError, match="input of layer 1 is not the result of layer 0"):
        memory.run(1, torch.sin, x * 2)
    x = memory.run(0, torch.sin, torch.ones(3).requires_grad_())  # usable after the error
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(ConfigError, match="unchanged"):
        memory.run(1, torch.sin, x)
    with pytest.raises(ConfigError, match="got 2 inputs"):
        memory.run(0, torch.add, x, x)
    with torch.no_grad():
        assert memory.run(4, torch.add, x, x).equal(2 * x)


def test_checkpoints_that_keep_their_input_otherwise_are_refused() -> None:
    """As DeepSpeed's, which keeps it as an attribute."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            ctx.x = x
            return run(x)

    memory = LayerMemory("full", checkpoint=Keeping.apply, checkpoint_layers=2)
    with pytest.raises(ConfigError, match="keeps it otherwise"):
        memory.run(0, torch.sin, torch.ones(3).requires_grad_())


def test_a_layer_that_does_otherwise_each_time_is_noticed() -> None:
    memory, sizes = LayerMemory("full", checkpoint_layers=2), iter([3, 2])

    def first(x: Tensor) -> Tensor:
        return x[: next(sizes)].sin()

    x = memory.run(1, torch.sin, memory.run(0, first, torch.ones(3).requires_grad_()))
    with pytest.raises(RecomputeError, match=r"\[2\] torch.float32 when computed again"):
        x.sum().backward()


def test_policies_without_checkpoints_are_refused() -> None:
    for recompute in ("none", "gemm-last"):
        with pytest.raises(ConfigError, match="Use attention or full"):
            LayerMemory(recompute, checkpoint_layers=2)
    with pytest.raises(ConfigError, match="whole number of 1 or more"):
        LayerMemory("full", checkpoint_layers=0)


def test_a_recomputation_keeps_the_values_of_single_elements_alone() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x.sum()

    x = torch.arange(3.0, requires_grad=True)
    hidden, loss = run_for_gradients(run, x)
    assert hidden.shape == (3,) and hidden.untyped_storage().nbytes() == 4 and loss == 3
    torch.autograd.backward((hidden, loss), (torch.ones(3), torch.ones(())))
    assert x.grad is not None and x.grad.tolist() == [3, 3, 3]
    with torch.no_grad():
        assert run_for_gradients(run, x)[0].tolist() == [0, 2, 4]
