"""What one GPU does: matrix products, attention, memory, copies to its host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds_usp.attention.functional import usp_attention
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.masks import MaskSpec
from ds_usp.planner.profile_rows import MeasuredAttention
from ds_usp.profiling.problem_sizes import Sizes
from ds_usp.profiling.step_timer import Clock


def product_flop_per_s(clock: Clock, sizes: Sizes) -> Iterator[tuple[int, float]]:
    """(tokens, FLOP/s) of a linear layer's three products: forward, and both of backward."""
    width = sizes.width
    weight = sizes.random(clock, width, width)
    for tokens in sizes.product_tokens:
        x, dy = sizes.random(clock, tokens, width), sizes.random(clock, tokens, width)

        def step(x: torch.Tensor = x, dy: torch.Tensor = dy) -> None:
            x @ weight
            dy @ weight.t()
            x.t() @ dy

        yield tokens, 6 * tokens * width**2 / clock.seconds(step, sizes.most_s)


def attention_calls(
    clock: Clock, sizes: Sizes, mesh: SequenceMesh, lengths: Sequence[int]
) -> Iterator[MeasuredAttention]:
    """Calls of :func:`usp_attention` on a mesh, each direction, causal zigzag."""
    for length in lengths:
        layout = mesh.layout("zigzag", length)
        shape = (1, layout.length(mesh.rank), sizes.heads, sizes.head_dim)
        q, k, v = (sizes.random(clock, *shape).requires_grad_() for _ in range(3))
        dout = sizes.random(clock, *shape)

        def forward(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, layout: object = layout
        ) -> torch.Tensor:
            out: torch.Tensor = usp_attention(  # type: ignore[call-overload]
                q, k, v, mesh=mesh, layout=layout, mask=MaskSpec.causal()
            )
            return out

        def both(dout: torch.Tensor = dout) -> None:
            torch.autograd.grad(forward(), (q, k, v), dout)  # noqa: B023 - used at once

        there, back = clock.both_ways(forward, both, sizes.kept_up_s)
        yield MeasuredAttention(
            mesh.ulysses_degree,
            mesh.ring_degree,
            length,
            sizes.heads,
            sizes.heads,
            sizes.head_dim,
            there.device_s,
            back.device_s,
            there.host_s,
            back.host_s,
        )


def memory_bytes_per_s(clock: Clock, sizes: Sizes) -> float:
    """What an elementwise sum of two tensors reads and writes."""
    a, b = (sizes.random(clock, sizes.memory_elements) for _ in range(2))
    out = torch.empty_like(a)
    seconds = clock.seconds(lambda: torch.add(a, b, out=out), sizes.most_s)
    return 3 * a.numel() * a.element_size() / seconds


def host_bytes_per_s(clock: Clock, sizes: Sizes) -> float:
    """Copies to the host and back at once, on all GPUs at once: each direction's rate."""
    there = sizes.random(clock, sizes.memory_elements // 4)
    back = torch.empty_like(there)
    kept = torch.empty(there.shape, dtype=there.dtype, pin_memory=clock.on_gpu)
    other = torch.empty(there.shape, dtype=there.dtype, pin_memory=clock.on_gpu)
    seconds = clock.together(
        lambda: kept.copy_(there, non_blocking=True),
        lambda: back.copy_(other, non_blocking=True),
        sizes.most_s,
    )
    return there.numel() * there.element_size() / seconds
