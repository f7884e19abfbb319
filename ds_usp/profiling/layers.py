"""A transformer layer but for its attention core, and the ends of a model, in plain torch.

The layer stands for a host's. What a host of yours really runs is measured with the same
functions: :func:`layer_times` takes any callable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_usp.planner.models import ModelShape
from ds_usp.planner.profile_rows import MeasuredEnds, MeasuredLayer
from ds_usp.profiling.problem_sizes import Sizes
from ds_usp.profiling.step_timer import Clock


@dataclass(frozen=True)
class PlainLayer:
    """Norm, projections, MLP and residuals; the queries stand for what attention makes of them.

    Under tensor parallelism (Megatron's, 1909.08053) two sums a direction: after the matrices that
    are cut along their rows, and of the gradients before those that are cut along their columns.
    """

    model: ModelShape
    tp: int
    group: dist.ProcessGroup | None
    weights: dict[str, Tensor]

    @classmethod
    def make(
        cls, clock: Clock, sizes: Sizes, model: ModelShape, tp: int, group: dist.ProcessGroup | None
    ) -> PlainLayer:
        """With random weights."""
        h, f = model.hidden, model.ffn // tp
        q, k = model.q_width // tp, model.kv_width // tp
        shapes: dict[str, tuple[int, ...]] = {"qkv": (q + 2 * k, h), "out": (h, q)}
        shapes |= {"fc1": (2 * f if model.gated else f, h), "fc2": (h, f)}
        shapes |= {"norm1": (h,), "norm2": (h,)}
        weights = {
            name: (sizes.random(clock, *shape) * 0.02).requires_grad_()
            for name, shape in shapes.items()
        }
        return cls(model, tp, group, weights)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` in and out."""
        w, model = self.weights, self.model
        qkv = F.linear(self._shared(self._norm(x, w["norm1"])), w["qkv"])
        core = qkv[:, : model.q_width // self.tp].contiguous()
        x = x + self._summed(F.linear(core, w["out"]))
        fc1 = F.linear(self._shared(self._norm(x, w["norm2"])), w["fc1"])
        if model.gated:
            gate, value = fc1.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(fc1)
        return x + self._summed(F.linear(inner, w["fc2"]))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.model.biases:
            return F.layer_norm(x, (self.model.hidden,), weight)
        return F.rms_norm(x, (self.model.hidden,), weight)

    def _summed(self, x: Tensor) -> Tensor:
        if self.tp > 1:
            dist.all_reduce(x.data, group=self.group)
        return x

    def _shared(self, x: Tensor) -> Tensor:
        if self.tp > 1 and x.requires_grad:
            x.register_hook(self._sum_gradient)
        return x

    def _sum_gradient(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self.group)
        return gradient


def layer_times(
    clock: Clock,
    layer: Callable[[Tensor], Tensor],
    weights: Iterable[Tensor],
    x: Tensor,
    most_s: float,
) -> tuple[float, float, float, float]:
    """Seconds of a layer forward, and backward for its input and weights: of the device in both
    directions, then of the host."""
    dy = torch.randn_like(x)
    x = x.detach().requires_grad_()
    wanted = (x, *weights)

    def both() -> None:
        torch.autograd.grad(layer(x), wanted, dy)

    there, back = clock.both_ways(lambda: layer(x), both, most_s)
    return there.device_s, back.device_s, there.host_s, back.host_s


def layers(
    clock: Clock, sizes: Sizes, model: ModelShape, tp: int, group: dist.ProcessGroup | None
) -> Iterator[MeasuredLayer]:
    """Rows of a model's layers."""
    layer = PlainLayer.make(clock, sizes, model, tp, group)
    shape = model.hidden, model.ffn, model.q_width, model.kv_width, model.gated, tp
    for tokens in sizes.layer_tokens:
        x = sizes.random(clock, tokens, model.hidden)
        times = layer_times(clock, layer, layer.weights.values(), x, sizes.kept_up_s)
        yield MeasuredLayer(*shape, tokens, *times)


def ends(clock: Clock, sizes: Sizes, model: ModelShape) -> Iterator[MeasuredEnds]:
    """Rows of embedding, last norm, output head and cross entropy, without tensor parallelism."""
    table = (sizes.random(clock, model.vocab, model.hidden) * 0.02).requires_grad_()
    norm = sizes.random(clock, model.hidden).requires_grad_()
    for tokens in sizes.layer_tokens[:-1]:
        ids = torch.randint(model.vocab, (tokens,), device=clock.device)

        def step(ids: Tensor = ids) -> None:
            hidden = F.rms_norm(F.embedding(ids, table), (model.hidden,), norm)
            loss = F.cross_entropy(F.linear(hidden, table).float(), ids)
            torch.autograd.grad(loss, (table, norm))

        times = clock.times(step, sizes.kept_up_s)
        yield MeasuredEnds(model.hidden, model.vocab, 1, tokens, times.device_s, times.host_s)
