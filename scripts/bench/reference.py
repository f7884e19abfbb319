"""fp64 reference of causal attention, and the errors of a mesh against it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from baselines import usp_attend
from bench_harness import Session
from shapes import Shape

import ds_usp
from ds_usp import testing as oracle

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("out", "dq", "dk", "dv")


def causal_reference(session: Session, inputs: Tensors) -> Tensors:
    """Out, dq, dk and dv of causal attention in fp64, by the oracle of the tests; collective."""
    results = oracle.attention_in_blocks(
        oracle.Tensors(*inputs),
        oracle.causal,
        block_elements=1 << 25 if session.on_gpu else 1 << 22,
        rank=session.rank,
        world=session.world,
    )
    return results["out"], results["dq"], results["dk"], results["dv"]


def fresh_inputs(session: Session, shape: Shape) -> Tensors:
    """Random bf16 q, k, v and dout of the full sequence, unseeded, equal on all ranks."""
    torch.seed()
    drawn = shape.random(session.device, shape.seq_len)
    for x in drawn:
        dist.broadcast(x, src=0)
    return drawn


def errors(
    session: Session, mesh: ds_usp.SequenceMesh, kernel: str, inputs: Tensors, reference: Tensors
) -> list[float]:
    """Relative errors (L2 norm over all ranks) of out, dq, dk and dv of a call over a mesh."""
    layout = mesh.layout("zigzag", inputs[0].shape[1])
    shards = [layout.shard(x, dim=1, rank=mesh.rank).detach() for x in inputs]
    q, k, v = (x.requires_grad_() for x in shards[:3])
    out = usp_attend(mesh, layout, kernel, ds_usp.MaskSpec.causal())(q, k, v)
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), shards[3]))
    if {x.dtype for x in results} != {q.dtype}:  # a wider dtype would hide rounding errors
        raise TypeError(f"{[x.dtype for x in results]} returned for {q.dtype} inputs")
    squares = []
    for result, expected in zip(results, reference, strict=True):
        shard = layout.shard(expected, dim=1, rank=mesh.rank)
        squares += [(result.double() - shard).square().sum().item(), shard.square().sum().item()]
    sums = session.all_reduced(squares)
    return [(error / norm) ** 0.5 for error, norm in zip(sums[::2], sums[1::2], strict=True)]


def worst_ratio(mesh_errors: list[float], kernel_errors: list[float]) -> float:
    """Largest ratio of an error to the single-GPU kernel's; NaN if any is NaN."""
    return (torch.tensor(mesh_errors) / torch.tensor(kernel_errors)).max().item()
