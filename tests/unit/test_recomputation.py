"""Recomputation: what checkpoints save, free and refuse; nested groups; GEMM-last."""

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
from torch.utils.flop_counter import FlopCounterMode

from ds_usp import (
    ConfigError,
    MaskSpec,
    RecomputeError,
    Scores,
    SequenceMesh,
    UnsupportedAttentionError,
    USPAttention,
    usp_attention,
)
from ds_usp.memory import (
    GemmLast,
    LayerMemory,
    Offload,
    in_chunks,
    keep_attention,
    recompute_before,
    run_for_gradients,
)
from ds_usp.memory.offload import HostDeviceCopier
from ds_usp.memory.saved_attention import is_saving, saved_tensors
from ds_usp.planner.formulas import input_bytes
from ds_usp.planner.memory import memory as planned_memory
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

MESH = SequenceMesh.single()
S, H, D = 16, 2, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    layout = MESH.layout("contiguous", q.shape[1])
    return usp_attention(q, k, v, mesh=MESH, layout=layout, mask=MaskSpec.causal())


def layer(x: torch.Tensor) -> torch.Tensor:
    return attend(x.sin(), x.cos(), x.tanh()) * 2


def some(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, S, H, D, generator=generator).requires_grad_()


class Spy:
    """:func:`layer`, which notes the storage of every attention output without keeping it alive."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref[Any]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = attend(x.sin(), x.cos(), x.tanh())
        self.storages.append(weakref.ref(out.untyped_storage()))
        return out * 2

    @property
    def alive(self) -> list[bool]:
        return [ref() is not None for ref in self.storages]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_graph_that_is_dropped_frees_what_was_saved(reentrant):
    spy = Spy()
    gc.disable()
    try:
        y = checkpoint(keep_attention(spy), some(), use_reentrant=reentrant)
        assert spy.alive == [True]
        del y
        if not reentrant:  # torch's checkpoint and a Function that saves its input: a cycle
            gc.collect()
        assert spy.alive == [False]
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_frees_the_tensors_even_where_the_loss_lives_on(reentrant):
    spy = Spy()
    loss = checkpoint(keep_attention(spy), some(), use_reentrant=reentrant).sum()
    assert spy.alive == [True]
    loss.backward()
    assert not any(spy.alive) and loss.grad_fn is not None


def test_without_gradients_nothing_is_saved():
    with torch.no_grad():
        assert keep_attention(layer) is layer
    assert keep_attention(layer) is not layer


def test_recomputed_inputs_serve_where_nothing_is_exchanged():
    """q, k and v are not kept: the only large tensors that live on are the input and the output."""
    made: list[weakref.ref[torch.Tensor]] = []

    def spying(x: torch.Tensor) -> torch.Tensor:
        qkv = [x.sin(), x.cos(), x.tanh()]
        made.extend(map(weakref.ref, (each.untyped_storage() for each in qkv)))
        return attend(*qkv)

    y = checkpoint(keep_attention(spying), some(), use_reentrant=True)
    assert [ref() for ref in made] == [None] * 3
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_saved_inputs_are_read_in_the_forward_pass_too(reentrant):
    """A local attention may differentiate something of its own; v is saved before q here."""

    def own(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        (slope,) = torch.autograd.grad((v.exp() * v * q).sum(), v, retain_graph=True)
        return q + k + slope.detach() * v

    attention = USPAttention(own, mesh=MESH)

    def run(x: Tensor) -> Tensor:
        return attention(x.sin(), x.cos(), x.tanh(), 0)

    x, kept = some(), some()
    run(x).sum().backward()
    checkpoint(keep_attention(run), kept, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, kept.grad)


def test_an_error_in_the_first_run_leaves_nothing_behind():
    def failing(x: torch.Tensor) -> torch.Tensor:
        layer(x)
        raise KeyError("mine")

    run = keep_attention(failing)
    with pytest.raises(KeyError):
        checkpoint(run, some(), use_reentrant=False)
    assert not is_saving()
    x = some()
    with pytest.raises(KeyError):  # the same one again is a first run again
        run(x)
    assert torch.equal(layer(x), layer(some()))


def backward_twice(run: Callable[..., torch.Tensor], reentrant: bool) -> None:
    y = checkpoint(run, some(), use_reentrant=reentrant).sum()
    y.backward(retain_graph=True)
    y.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_runs_once(reentrant):
    backward_twice(layer, reentrant)
    with pytest.raises(RecomputeError, match="retain_graph"):
        backward_twice(keep_attention(layer), reentrant)


def test_a_recomputation_that_does_something_else_is_refused():
    calls: list[int] = []

    def more(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(layer(x)) if len(calls) > 1 else layer(x)

    def shorter(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(x[:, : S // len(calls)]).sum() + 0 * x.sum()

    for run, words in ((more, "more often"), (shorter, "otherwise")):
        calls.clear()
        y = checkpoint(keep_attention(run), some(), use_reentrant=True)
        with pytest.raises(RecomputeError, match=words):
            y.sum().backward()


class Mixed(torch.nn.Module):
    """A local attention of two buffers and a number."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor, self.inner = factor, torch.nn.Identity()
        self.register_buffer("slopes", torch.full((2,), factor))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.inner(q) * k * self.factor + v


def multiplied(q: Tensor, k: Tensor, v: Tensor, factor: float = 2.0) -> Tensor:
    return factor * q * k + v


def in_closure(factor: float) -> Callable[..., Tensor]:
    return lambda q, k, v: multiplied(q, k, v, factor)


MADE_ANEW: dict[str, Callable[[float], Callable[..., Tensor]]] = {
    "module": Mixed,
    "partial": lambda factor: partial(multiplied, factor=factor),
    "closure": in_closure,
    "method": lambda factor: Mixed(factor).forward,
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", MADE_ANEW.values(), ids=MADE_ANEW)
def test_attention_that_each_run_makes_anew_is_replayed(make, reentrant):
    calls: list[float] = []
    factors = [2.0, 2.0]

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(factors[len(calls)])
        mesh = SequenceMesh.single()
        attention = USPAttention(make(calls[-1]), mesh=mesh, layout="contiguous")
        y = attention(x.sin(), x.cos(), x.tanh(), 0)
        mask = MaskSpec.causal()
        return usp_attention(y.sin(), y, y, mesh=mesh, layout="contiguous", mask=mask)

    x = some()
    (actual,) = torch.autograd.grad(
        checkpoint(keep_attention(run), x, use_reentrant=False).sum(), x
    )
    calls.clear()
    (want,) = torch.autograd.grad(run(x).sum(), x)
    assert torch.equal(actual, want)
    calls.clear()
    factors[1] = 3.0
    y = checkpoint(keep_attention(run), some(), use_reentrant=reentrant)
    with pytest.raises(RecomputeError, match=r"pass: \w+ \S*3\..* now, \S*2\.") as said:
        y.sum().backward()
    assert "\n" not in str(said.value)


# torch 2.9 leaves the hooks of a checkpoint whose function raised to the collector, which takes
# them off after those around them, and says so; later ones take them off as the error passes.
@pytest.mark.filterwarnings(
    "ignore:(?s).*_checkpoint_without:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("outer", [True, False])
def test_a_checkpoint_inside_needs_a_keep_attention_of_its_own(outer):
    def nested(wrap: Callable[..., Any], inner: bool) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(wrap(layer), x, use_reentrant=inner) * 2

        x = some()
        checkpoint(keep_attention(run), x, use_reentrant=outer).sum().backward()
        assert x.grad is not None
        return x.grad

    want = nested(keep_attention, False)
    assert torch.equal(nested(lambda run: run, True), want)
    with pytest.raises(RecomputeError, match=r"give it one, checkpoint\(keep_attention\(layer\)"):
        nested(lambda run: run, False)


def test_an_output_that_is_changed_in_place_is_noticed():
    def careless(x: torch.Tensor) -> torch.Tensor:
        out = attend(x.sin(), x.cos(), x.tanh())
        out.detach().mul_(2)
        return out * 2

    y = checkpoint(keep_attention(careless), some(), use_reentrant=True)
    with pytest.raises(RecomputeError, match="changed in place"):
        y.sum().backward()


def test_second_derivatives_are_refused():
    x = some()
    y = checkpoint(keep_attention(layer), x, use_reentrant=False)
    with pytest.raises(RecomputeError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Learning(torch.nn.Module):
    """A local attention with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * self.scale


def test_a_local_attention_with_parameters_is_refused():
    drop_in = USPAttention(Learning(), mesh=MESH)

    def run(x: torch.Tensor) -> torch.Tensor:
        return drop_in(x, x, x, 0)

    checkpoint(run, some(), use_reentrant=False).sum().backward()
    with pytest.raises(UnsupportedAttentionError, match="Learning has parameters"):
        checkpoint(keep_attention(run), some(), use_reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_attention_that_draws_random_numbers_leaves_them_as_the_first_run_did(reentrant):
    class Dropping(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(q * k, 0.5) + v

    drop_in = USPAttention(Dropping(), mesh=MESH)

    def run(x: torch.Tensor) -> torch.Tensor:
        mixed = drop_in(x.sin(), x.cos(), x, 0)
        return torch.nn.functional.dropout(mixed.tanh() * 3, 0.5)

    def gradient(attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(11)
        x = some()
        attention(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient(run)
    actual = gradient(lambda x: checkpoint(keep_attention(run), x, use_reentrant=reentrant))
    assert torch.equal(actual, want)


def test_an_output_that_reaches_no_loss_is_as_it_is_without():
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), x * 3

    for run in (two, keep_attention(two)):
        x = some()
        checkpoint(run, x, use_reentrant=True)[1].sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_sinks_that_are_computed_in_the_checkpoint_get_gradients(reentrant):
    """A reentrant checkpoint's first run has no gradients, so they require none there."""
    mesh, x = SequenceMesh.single(), torch.randn(1, S, 2, 4)
    grads = []
    for wrap in (lambda run: run, keep_attention):
        sinks = torch.nn.Parameter(torch.tensor([0.5, -0.5], dtype=torch.bfloat16))

        def run(q: torch.Tensor, sinks: torch.nn.Parameter = sinks) -> torch.Tensor:
            return usp_attention(
                q,
                q * 2,
                q * 3,
                mesh=mesh,
                layout=mesh.layout("zigzag", S),
                mask=MaskSpec.causal(),
                scores=Scores(sinks=sinks.float()),
            )

        q = x.clone().requires_grad_()
        checkpoint(wrap(run), q, use_reentrant=reentrant).square().sum().backward()
        grads.append([q.grad, sinks.grad])
    for plain, kept in zip(*grads, strict=True):
        assert kept is not None and torch.equal(plain, kept)


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
def test_gradients_are_bitwise_those_without(recompute, size):
    want = gradients(LayerMemory("none"))
    for ratio, in_flight in ((None, 1), (0.4, 1), (1.0, 3)):
        moving = offload(ratio) if ratio is not None else None
        nested = gradients(LayerMemory(recompute, moving, checkpoint_layers=size), in_flight)
        assert all(map(torch.equal, nested, want)), (ratio, in_flight)
        if moving is not None:
            assert abs(moving.counts.offloaded - moving.counts.saved * moving.ratio) <= 512


@pytest.mark.parametrize("recompute", ["full", "attention"])
def test_torchs_checkpoint_that_is_not_reentrant(recompute):
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
def test_layers_run_and_inputs_kept(layers, size):
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
def test_host_memory_is_the_planners(size):
    for layers in (4, 8, 9, 12, 32):
        sizes = SIZES._replace(layers=layers)
        moving = Offload(1.0, CPU, min_bytes=0, copier=HostDeviceCopier(CPU, HIDDEN_BYTES))
        model = Stack(LayerMemory("full", moving, checkpoint_layers=size), sizes)
        (x,) = model.inputs(1)
        model(x).backward()
        planned = offloaded_inputs(sizes, FULL.replace(checkpoint_layers=size))
        assert moving.copier.pool.num_blocks == round(planned), layers


@pytest.mark.parametrize(("size", "layers"), [(2, 8), (4, 16)])
def test_attentions_results_in_host_memory_are_the_planners(size, layers):
    sizes, moving = SIZES._replace(layers=layers), offload(1.0)
    model = Stack(LayerMemory("attention", moving, checkpoint_layers=size), sizes)
    (x,) = model.inputs(1)
    loss = model(x)
    planned = offloaded_inputs(sizes, FULL.replace(recompute="attention", checkpoint_layers=size))
    assert 1 <= planned * HIDDEN_BYTES / moving.bytes_away < 1.1
    loss.backward()


def test_a_graph_that_is_dropped_frees_the_group():
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
def test_saved_bytes_are_one_input_a_group(mlp_chunks):
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
def test_dropout_of_every_generator_is_the_same(recompute):
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
            recompute, checkpoint=tracked, checkpoint_layers=size, random_tracker=lambda: tracker
        )
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        leaf, weight.grad = x, None
        for number in range(5):
            x, _ = memory.run(number, layer, x)
        x.sum().backward()
        after = torch.rand(4), torch.rand(4, generator=tracker.generator)
        results.append((leaf.grad, weight.grad, *after))
    assert all(map(torch.equal, *results))


def test_autocast_of_the_forward_pass():
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


def test_inputs_that_are_no_results_are_refused():
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


def test_checkpoints_that_keep_their_input_otherwise_are_refused():
    """As DeepSpeed's, which keeps it as an attribute."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            ctx.x = x
            return run(x)

    memory = LayerMemory("full", checkpoint=Keeping.apply, checkpoint_layers=2)
    with pytest.raises(ConfigError, match="keeps it otherwise"):
        memory.run(0, torch.sin, torch.ones(3).requires_grad_())


def test_a_layer_that_does_otherwise_each_time_is_noticed():
    memory, sizes = LayerMemory("full", checkpoint_layers=2), iter([3, 2])

    def first(x: Tensor) -> Tensor:
        return x[: next(sizes)].sin()

    x = memory.run(1, torch.sin, memory.run(0, first, torch.ones(3).requires_grad_()))
    with pytest.raises(RecomputeError, match=r"\[2\] torch.float32 when computed again"):
        x.sum().backward()


def test_policies_without_checkpoints_are_refused():
    for recompute in ("none", "gemm-last"):
        with pytest.raises(ConfigError, match="Use attention or full"):
            LayerMemory(recompute, checkpoint_layers=2)
    with pytest.raises(ConfigError, match="whole number of 1 or more"):
        LayerMemory("full", checkpoint_layers=0)


def test_a_recomputation_keeps_the_values_of_single_elements_alone():
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x.sum()

    x = torch.arange(3.0, requires_grad=True)
    hidden, loss = run_for_gradients(run, x)
    assert hidden.shape == (3,) and hidden.untyped_storage().nbytes() == 4 and loss == 3
    torch.autograd.backward((hidden, loss), (torch.ones(3), torch.ones(())))
    assert x.grad is not None and x.grad.tolist() == [3, 3, 3]
    with torch.no_grad():
        assert run_for_gradients(run, x)[0].tolist() == [0, 2, 4]


FEATURES, FFN, TOKENS = 24, 64, 10


class Product(torch.autograd.Function):
    """A linear layer as Megatron's, DeepSpeed's and TransformerEngine's are: a function of its own
    that saves its input after it has computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class FunctionLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias


class DeepSpeedLinear(nn.Linear):
    """What DeepSpeed calls instead of ``F.linear`` under ZeRO-3."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
        except ImportError as error:  # not skipped: ZeRO-3 must not be left untested unnoticed
            pytest.fail(f"needs DeepSpeed, pip install -c constraints.txt deepspeed: {error}")

        return LinearFunctionForZeroStage3.apply(x, self.weight, self.bias)


LINEARS = (nn.Linear, FunctionLinear, DeepSpeedLinear)
NORMS = (nn.LayerNorm, nn.RMSNorm)
Join = Callable[..., Tensor]


def swiglu(y: Tensor) -> Tensor:
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


class MLP(nn.Module):
    """Norm, product, SwiGLU, product, and a residual."""

    def __init__(self, linear: type[nn.Linear], norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(FEATURES)
        self.up, self.down = linear(FEATURES, 2 * FFN), linear(FFN, FEATURES)

    def forward(self, x: Tensor, join: Join) -> Tensor:
        return x + join(swiglu, self.down, join(self.norm, self.up, x))


def plain(producer: Any, consumer: Any, x: Tensor) -> Tensor:
    return consumer(producer(x))


def step(mlp: MLP, join: Join, layers: int = 2) -> tuple[list[Tensor], int, int]:
    """Gradients, FLOP of the backward pass, and bytes that it needs, parameters aside."""
    mlp.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS, FEATURES).requires_grad_()
    stored: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    y = x
    with saved_tensors(pack, lambda tensor: tensor):
        for _ in range(layers):
            y = mlp(y, join)
    size = sum(storage.nbytes() for storage in stored.values())
    stored.clear()
    with FlopCounterMode(display=False) as flops:
        y.square().sum().backward()
    return [x.grad, *(p.grad for p in mlp.parameters())], flops.get_total_flops(), size


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("linear", LINEARS)
def test_gradients_are_bitwise_the_same_and_no_product_runs_twice(linear, norm):
    mlp = MLP(linear, norm)
    want, flops, saved_plain = step(mlp, plain)
    actual, flops_again, saved = step(mlp, recompute_before)
    assert all(torch.equal(g, w) for g, w in zip(actual, want, strict=True))
    assert flops_again == flops > 0
    # Of each layer x and the output of `up`; not those of the norm, silu and their product.
    assert saved == 2 * 2 * TOKENS * (FEATURES + 2 * FFN) * 4 <= saved_plain / 2


def test_a_link_between_two_modules():
    mlp = MLP(nn.Linear, nn.LayerNorm)
    want = step(mlp, plain)
    GemmLast.between(mlp.norm, mlp.up)
    down = GemmLast()
    mlp.down.forward = down.consume(mlp.down.forward)
    produced = down.produce(swiglu)

    def join(producer: Any, consumer: Any, x: Tensor) -> Tensor:
        return consumer(produced(x) if producer is swiglu else producer(x))

    actual = step(mlp, join)
    assert all(torch.equal(g, w) for g, w in zip(actual[0], want[0], strict=True))
    assert actual[1] == want[1] and actual[2] < 0.6 * want[2]


def test_a_consumer_that_is_handed_something_else_keeps_it():
    link, linear = GemmLast(), nn.Linear(FEATURES, FEATURES)
    produce, consume = link.produce(torch.sin), link.consume(linear)
    x, other = (torch.randn(3, FEATURES).requires_grad_() for _ in range(2))
    produce(x)
    consume(other).sum().backward()
    assert torch.equal(other.grad, torch.ones(3, FEATURES) @ linear.weight)


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        x = torch.randn(3, FEATURES)
        assert torch.equal(recompute_before(torch.sin, torch.cos, x), x.sin().cos())


def test_the_producer_runs_once_more_and_what_it_gave_is_freed():
    runs: list[weakref.ref[Any]] = []

    def producer(x: Tensor) -> Tensor:
        out = x.sin().exp()
        runs.append(weakref.ref(out))
        return out

    linear = nn.Linear(FEATURES, FEATURES)
    gc.disable()
    try:
        y = recompute_before(producer, linear, torch.randn(3, FEATURES).requires_grad_())
        assert len(runs) == 1 and runs[0]() is None
        y.sum().backward()
        assert len(runs) == 2 and runs[1]() is None
    finally:
        gc.enable()


def test_automatic_casts_are_those_of_the_forward_pass():
    """The producer casts to bf16 in the forward pass, and backward runs outside of autocast."""
    producer, consumer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def gradients(join: Join) -> list[Tensor]:
        x = torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = join(producer, consumer, x).float().square().mean()
        return list(torch.autograd.grad(loss, (x, producer.weight, consumer.weight)))

    assert all(map(torch.equal, gradients(recompute_before), gradients(plain)))


def test_hooks_pass_on_what_they_do_not_pack():
    def pack_of(shape: tuple[int, ...], packed: list[Tensor]) -> Callable[[Tensor], Tensor | None]:
        return lambda x: packed.append(x) or x if x.shape == shape else None

    inner: list[Tensor] = []
    outer: list[Tensor] = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    hooks = saved_tensors(pack_of((3,), outer), lambda t: t * 5)
    with hooks, saved_tensors(pack_of((2,), inner), lambda t: t * 7):
        loss = x.exp().sum() + y.exp().sum()
    assert ([len(t) for t in inner], [len(t) for t in outer]) == ([2], [3])
    loss.backward()
    assert torch.equal(x.grad, 7 * x.exp()) and torch.equal(y.grad, 5 * y.exp())


def test_inside_an_activation_checkpoint():
    mlp = MLP(FunctionLinear, nn.LayerNorm)
    want = step(mlp, plain)[0]
    for reentrant in (True, False):

        def layer(producer: Any, consumer: Any, x: Tensor, again: bool = reentrant) -> Tensor:
            def run(y: Tensor) -> Tensor:
                return recompute_before(producer, consumer, y)

            return checkpoint(run, x, use_reentrant=again)

        actual = step(mlp, layer)[0]
        torch.testing.assert_close(actual, want, rtol=2e-5, atol=1e-6)


def test_what_cannot_be_computed_again_is_refused():
    linear, x = nn.Linear(FEATURES, FEATURES), torch.randn(3, FEATURES).requires_grad_()
    with pytest.raises(RecomputeError, match="Dropout draws random numbers"):
        recompute_before(nn.Dropout(0.5), linear, x)
    with pytest.raises(RecomputeError, match="returns its input"):
        recompute_before(nn.Identity(), linear, x)
    runs: list[int] = []

    def changing(y: Tensor) -> Tensor:
        runs.append(1)
        return y.sin() if len(runs) == 1 else y.sin().exp().sin()

    with pytest.raises(RecomputeError, match="the same both times"):
        recompute_before(changing, linear, x.exp()).sum().backward()


def test_an_input_that_is_changed_in_place_is_noticed():
    x = torch.randn(3, FEATURES).requires_grad_().exp()
    y = recompute_before(torch.sin, nn.Linear(FEATURES, FEATURES), x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RecomputeError, match="changed in place"):
        y.sum().backward()
