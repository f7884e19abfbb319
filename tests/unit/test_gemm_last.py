"""GEMM-last recomputation: the same gradients and matrix products, for any linear layer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_usp import RecomputeError
from ds_usp.memory import GemmLast, recompute_before
from ds_usp.memory.saved_attention import saved_tensors

H, FFN, TOKENS = 24, 64, 10


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
        self.norm = norm(H)
        self.up, self.down = linear(H, 2 * FFN), linear(FFN, H)

    def forward(self, x: Tensor, join: Join) -> Tensor:
        return x + join(swiglu, self.down, join(self.norm, self.up, x))


def plain(producer: Any, consumer: Any, x: Tensor) -> Tensor:
    return consumer(producer(x))


def torch_checkpoint(producer: Any, consumer: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: consumer(producer(y)), x, use_reentrant=False)


def step(mlp: MLP, join: Join, layers: int = 2) -> tuple[list[Tensor], int, int]:
    """Gradients, FLOP of the backward pass, and bytes that it needs, parameters aside."""
    mlp.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS, H).requires_grad_()
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
def test_gradients_are_bitwise_the_same_and_no_product_runs_twice(
    linear: type[nn.Linear], norm: type[nn.Module]
) -> None:
    mlp = MLP(linear, norm)
    want, flops, saved_plain = step(mlp, plain)
    actual, flops_again, saved = step(mlp, recompute_before)
    assert all(torch.equal(g, w) for g, w in zip(actual, want, strict=True))
    assert flops_again == flops > 0
    # Of each layer x and the output of `up`; not those of the norm, silu and their product.
    assert saved == 2 * 2 * TOKENS * (H + 2 * FFN) * 4 <= saved_plain / 2


def test_the_count_would_see_a_product_that_runs_twice() -> None:
    mlp = MLP(FunctionLinear, nn.RMSNorm)
    assert step(mlp, torch_checkpoint)[1] > step(mlp, plain)[1]


def test_a_link_between_two_modules() -> None:
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


def test_a_consumer_that_is_handed_something_else_keeps_it() -> None:
    link, linear = GemmLast(), nn.Linear(H, H)
    produce, consume = link.produce(torch.sin), link.consume(linear)
    x, other = (torch.randn(3, H).requires_grad_() for _ in range(2))
    produce(x)
    consume(other).sum().backward()
    assert torch.equal(other.grad, torch.ones(3, H) @ linear.weight)


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        x = torch.randn(3, H)
        assert torch.equal(recompute_before(torch.sin, torch.cos, x), x.sin().cos())


def test_the_producer_runs_once_more_and_what_it_gave_is_freed() -> None:
    runs: list[weakref.ref[Any]] = []

    def producer(x: Tensor) -> Tensor:
        out = x.sin().exp()
        runs.append(weakref.ref(out))
        return out

    linear = nn.Linear(H, H)
    gc.disable()
    try:
        y = recompute_before(producer, linear, torch.randn(3, H).requires_grad_())
        assert len(runs) == 1 and runs[0]() is None
        y.sum().backward()
        assert len(runs) == 2 and runs[1]() is None
    finally:
        gc.enable()


def test_automatic_casts_are_those_of_the_forward_pass() -> None:
    """The producer casts to bf16 in the forward pass, and backward runs outside of autocast."""
    producer, consumer = nn.Linear(H, H), nn.Linear(H, H)

    def gradients(join: Join) -> list[Tensor]:
        x = torch.linspace(-1, 1, 3 * H).view(3, H).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = join(producer, consumer, x).float().square().mean()
        return list(torch.autograd.grad(loss, (x, producer.weight, consumer.weight)))

    assert all(map(torch.equal, gradients(recompute_before), gradients(plain)))


def test_hooks_pass_on_what_they_do_not_pack() -> None:
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


def test_inside_an_activation_checkpoint() -> None:
    mlp = MLP(FunctionLinear, nn.LayerNorm)
    want = step(mlp, plain)[0]
    for reentrant in (True, False):

        def layer(producer: Any, consumer: Any, x: Tensor, again: bool = reentrant) -> Tensor:
            def run(y: Tensor) -> Tensor:
                return recompute_before(producer, consumer, y)

            return checkpoint(run, x, use_reentrant=again)

        actual = step(mlp, layer)[0]
        torch.testing.assert_close(actual, want, rtol=2e-5, atol=1e-6)


def test_what_cannot_be_computed_again_is_refused() -> None:
    linear, x = nn.Linear(H, H), torch.randn(3, H).requires_grad_()
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


def test_an_input_that_is_changed_in_place_is_noticed() -> None:
    x = torch.randn(3, H).requires_grad_().exp()
    y = recompute_before(torch.sin, nn.Linear(H, H), x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RecomputeError, match="changed in place"):
        y.sum().backward()
