"""Rates of one GPU: GEMMs, attention, memory bandwidth, copies to host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds_usp.attention.functional import usp_attention
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.masks import MaskSpec
from ds_usp.planner.hardware import MeasuredAttention
from ds_usp.profiling.problem_sizes import ProblemSizes
from ds_usp.profiling.step_timer import StepTimer


def product_flop_per_s(timer: StepTimer, sizes: ProblemSizes) -> Iterator[tuple[int, float]]:
    """(tokens, FLOP/s) of a linear layer's three GEMMs: forward, and both of backward."""
    width = sizes.width
    weight = sizes.random(timer, width, width)
    for tokens in sizes.product_tokens:
        x, dy = sizes.random(timer, tokens, width), sizes.random(timer, tokens, width)

        def step(x: torch.Tensor = x, dy: torch.Tensor = dy) -> None:
            x @ weight
            dy @ weight.t()
            x.t() @ dy

        yield tokens, 6 * tokens * width**2 / timer.seconds(step, sizes.max_s)


def attention_calls(
    timer: StepTimer, sizes: ProblemSizes, mesh: SequenceMesh, lengths: Sequence[int]
) -> Iterator[MeasuredAttention]:
    """Calls of :func:`usp_attention` on a mesh, each direction, causal zigzag."""
    for length in lengths:
        yield _attention_call(timer, sizes, mesh, length)


def _attention_call(
    timer: StepTimer, sizes: ProblemSizes, mesh: SequenceMesh, length: int
) -> MeasuredAttention:
    """One call of so many tokens of the whole sequence, forward and backward."""
    layout = mesh.layout("zigzag", length)
    shape = (1, layout.length(mesh.rank), sizes.heads, sizes.head_dim)
    q, k, v = (sizes.random(timer, *shape).requires_grad_() for _ in range(3))
    dout = sizes.random(timer, *shape)

    def attend() -> torch.Tensor:
        return usp_attention(q, k, v, mesh=mesh, layout=layout, mask=MaskSpec.causal())

    def both() -> None:
        torch.autograd.grad(attend(), (q, k, v), dout)

    forward, backward = timer.forward_backward(attend, both, sizes.sustained_s)
    heads = sizes.heads, sizes.heads, sizes.head_dim
    seconds = forward.device_s, backward.device_s, forward.host_s, backward.host_s
    return MeasuredAttention(mesh.ulysses_degree, mesh.ring_degree, length, *heads, *seconds)


def memory_bytes_per_s(timer: StepTimer, sizes: ProblemSizes) -> float:
    """Memory bandwidth that an elementwise sum of two tensors reaches."""
    a, b = (sizes.random(timer, sizes.memory_elements) for _ in range(2))
    out = torch.empty_like(a)
    seconds = timer.seconds(lambda: torch.add(a, b, out=out), sizes.max_s)
    return 3 * a.numel() * a.element_size() / seconds


def host_bytes_per_s(timer: StepTimer, sizes: ProblemSizes) -> float:
    """Pinned copies to host memory and back in parallel, on all GPUs at once: rate a direction."""
    x = sizes.random(timer, sizes.memory_elements // 4)
    y = torch.empty_like(x)
    pinned, pinned_source = (
        torch.empty(x.shape, dtype=x.dtype, pin_memory=timer.on_gpu) for _ in range(2)
    )
    seconds = timer.overlapped(
        lambda: pinned.copy_(x, non_blocking=True),
        lambda: y.copy_(pinned_source, non_blocking=True),
        sizes.max_s,
    )
    return x.numel() * x.element_size() / seconds
