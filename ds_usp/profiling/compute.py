"""Rates of one GPU: GEMMs, attention, memory bandwidth, copies to host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds_usp.attention.functional import usp_attention
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.masks import MaskSpec
from ds_usp.planner.profile_rows import MeasuredAttention
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
        layout = mesh.layout("zigzag", length)
        shape = (1, layout.length(mesh.rank), sizes.heads, sizes.head_dim)
        q, k, v = (sizes.random(timer, *shape).requires_grad_() for _ in range(3))
        dout = sizes.random(timer, *shape)

        def forward(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, layout: object = layout
        ) -> torch.Tensor:
            out: torch.Tensor = usp_attention(  # type: ignore[call-overload]
                q, k, v, mesh=mesh, layout=layout, mask=MaskSpec.causal()
            )
            return out

        def both(dout: torch.Tensor = dout) -> None:
            torch.autograd.grad(forward(), (q, k, v), dout)  # noqa: B023 - used at once

        device_tensor, device_copy = timer.forward_backward(forward, both, sizes.sustained_s)
        yield MeasuredAttention(
            mesh.ulysses_degree,
            mesh.ring_degree,
            length,
            sizes.heads,
            sizes.heads,
            sizes.head_dim,
            device_tensor.device_s,
            device_copy.device_s,
            device_tensor.host_s,
            device_copy.host_s,
        )


def memory_bytes_per_s(timer: StepTimer, sizes: ProblemSizes) -> float:
    """Memory bandwidth that an elementwise sum of two tensors reaches."""
    a, b = (sizes.random(timer, sizes.memory_elements) for _ in range(2))
    out = torch.empty_like(a)
    seconds = timer.seconds(lambda: torch.add(a, b, out=out), sizes.max_s)
    return 3 * a.numel() * a.element_size() / seconds


def host_bytes_per_s(timer: StepTimer, sizes: ProblemSizes) -> float:
    """Pinned copies to host memory and back in parallel, on all GPUs at once: rate a direction."""
    device_tensor = sizes.random(timer, sizes.memory_elements // 4)
    device_copy = torch.empty_like(device_tensor)
    pinned = torch.empty(device_tensor.shape, dtype=device_tensor.dtype, pin_memory=timer.on_gpu)
    pinned_source = torch.empty(
        device_tensor.shape, dtype=device_tensor.dtype, pin_memory=timer.on_gpu
    )
    seconds = timer.overlapped(
        lambda: pinned.copy_(device_tensor, non_blocking=True),
        lambda: device_copy.copy_(pinned_source, non_blocking=True),
        sizes.max_s,
    )
    return device_tensor.numel() * device_tensor.element_size() / seconds
