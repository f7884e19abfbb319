"""A transformer layer without its attention core, and a model's embedding and head, in plain torch.

:func:`layer_times` takes any callable, so that a framework's own layer is measured the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_usp.planner.hardware import MeasuredEmbeddingHead, MeasuredLayer
from ds_usp.planner.models import ModelShape
from ds_usp.profiling.problem_sizes import ProblemSizes
from ds_usp.profiling.step_timer import StepTimer


@dataclass(frozen=True)
class ReferenceLayer:
    """Norms, projections, MLP and residuals; the queries are used as attention's output.

    Tensor parallelism (Megatron's, 1909.08053) has two all-reduces a direction: of the outputs of
    row-parallel matrices, and of the input gradients of column-parallel ones.
    """

    model: ModelShape
    tp: int
    group: dist.ProcessGroup | None
    weights: dict[str, Tensor]

    @classmethod
    def make(
        cls,
        timer: StepTimer,
        sizes: ProblemSizes,
        model: ModelShape,
        tp: int,
        group: dist.ProcessGroup | None,
    ) -> ReferenceLayer:
        """A layer with random weights."""
        h, f = model.hidden, model.ffn // tp
        q, k = model.q_width // tp, model.kv_width // tp
        shapes: dict[str, tuple[int, ...]] = {"qkv": (q + 2 * k, h), "out": (h, q)}
        shapes |= {"fc1": (2 * f if model.gated else f, h), "fc2": (h, f)}
        shapes |= {"norm1": (h,), "norm2": (h,)}
        weights = {
            name: (sizes.random(timer, *shape) * 0.02).requires_grad_()
            for name, shape in shapes.items()
        }
        return cls(model, tp, group, weights)

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output for ``x``, both ``[tokens, hidden]``, tokens of this rank."""
        w, model = self.weights, self.model
        qkv = F.linear(self._reduce_input_grad(self._norm(x, w["norm1"])), w["qkv"])
        core = qkv[:, : model.q_width // self.tp].contiguous()
        x = x + self._all_reduced(F.linear(core, w["out"]))
        fc1 = F.linear(self._reduce_input_grad(self._norm(x, w["norm2"])), w["fc1"])
        if model.gated:
            gate, value = fc1.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(fc1)
        return x + self._all_reduced(F.linear(inner, w["fc2"]))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.model.biases:
            return F.layer_norm(x, (self.model.hidden,), weight)
        return F.rms_norm(x, (self.model.hidden,), weight)

    def _all_reduced(self, x: Tensor) -> Tensor:
        if self.tp > 1:
            dist.all_reduce(x.data, group=self.group)
        return x

    def _reduce_input_grad(self, x: Tensor) -> Tensor:
        """Sum the gradient of the column-parallel input over the tensor-parallel ranks."""
        if self.tp > 1 and x.requires_grad:
            x.register_hook(self._all_reduce_gradient)
        return x

    def _all_reduce_gradient(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self.group)
        return gradient


def layer_times(
    timer: StepTimer,
    layer: Callable[[Tensor], Tensor],
    weights: Iterable[Tensor],
    x: Tensor,
    max_s: float,
) -> tuple[float, float, float, float]:
    """Seconds of a layer's forward pass, and of its backward pass for the input and the weights.

    Collective over the timer's ranks.

    Args:
        weights: the tensors whose gradients backward computes.
        x: the layer's input, ``[tokens, hidden]`` for :class:`ReferenceLayer`.
        max_s: seconds for each of two measurements, forward alone and with backward; see
            :meth:`StepTimer.seconds`.

    Returns:
        GPU seconds forward and backward, CPU launch seconds forward and backward (0 on a CPU): the
        last four fields of ``MeasuredLayer``.
    """
    dy = torch.randn_like(x)
    x = x.detach().requires_grad_()
    inputs = (x, *weights)

    def both() -> None:
        torch.autograd.grad(layer(x), inputs, dy)

    forward, backward = timer.forward_backward(lambda: layer(x), both, max_s)
    return forward.device_s, backward.device_s, forward.host_s, backward.host_s


def layers(
    timer: StepTimer,
    sizes: ProblemSizes,
    model: ModelShape,
    tp: int,
    group: dist.ProcessGroup | None,
) -> Iterator[MeasuredLayer]:
    """Measured rows of a model's layer, one for each number of tokens of ``ProblemSizes``."""
    layer = ReferenceLayer.make(timer, sizes, model, tp, group)
    shape = model.hidden, model.ffn, model.q_width, model.kv_width, model.gated, tp
    for tokens in sizes.layer_tokens:
        x = sizes.random(timer, tokens, model.hidden)
        times = layer_times(timer, layer, layer.weights.values(), x, sizes.sustained_s)
        yield MeasuredLayer(*shape, tokens, *times)


def embedding_and_head(
    timer: StepTimer, sizes: ProblemSizes, model: ModelShape
) -> Iterator[MeasuredEmbeddingHead]:
    """Rows of embedding, last norm, output head and cross entropy, without tensor parallelism."""
    table = (sizes.random(timer, model.vocab, model.hidden) * 0.02).requires_grad_()
    norm = sizes.random(timer, model.hidden).requires_grad_()
    for tokens in sizes.layer_tokens[:-1]:
        ids = torch.randint(model.vocab, (tokens,), device=timer.device)

        def step(ids: Tensor = ids) -> None:
            hidden = F.rms_norm(F.embedding(ids, table), (model.hidden,), norm)
            loss = F.cross_entropy(F.linear(hidden, table).float(), ids)
            torch.autograd.grad(loss, (table, norm))

        times = timer.times(step, sizes.sustained_s)
        yield MeasuredEmbeddingHead(
            model.hidden, model.vocab, 1, tokens, times.device_s, times.host_s
        )
