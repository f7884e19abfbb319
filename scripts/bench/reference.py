"""fp64 reference of causal attention, and the errors of a mesh against it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from baselines import usp_attend
from bench_harness import Session
from shapes import Shape

import ds_usp

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("out", "dq", "dk", "dv")
QUERIES = 256  # rows of the score matrix per block: memory is linear in the length


def causal_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Tensors:
    """Out, dq, dk and dv of causal attention in fp64, in blocks of queries.

    q, dout ``[b, s, h, d]``, k, v ``[b, s, h_kv, d]``. With p the softmax of a row of scores:
    ds = scale p * (dout v' - dout . out), dq = ds k, dk = ds' q, dv = p' dout.
    """
    users, length, scale = q.shape[2] // k.shape[2], q.shape[1], q.shape[3] ** -0.5
    q, k, v, dout = (x.double().transpose(1, 2) for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(users, dim=1) for x in (k, v))
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        rows, seen = (..., slice(start, stop), slice(None)), (..., slice(stop), slice(None))
        scores = scale * q[rows] @ k[seen].mT
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
        p = scores.masked_fill_(future, float("-inf")).softmax(-1)
        out[rows] = p @ v[seen]
        delta = (dout[rows] * out[rows]).sum(-1, keepdim=True)
        ds = scale * p * (dout[rows] @ v[seen].mT - delta)
        dq[rows] = ds @ k[seen]
        dk[seen] += ds.mT @ q[rows]
        dv[seen] += p.mT @ dout[rows]
    dk, dv = (x.unflatten(1, (-1, users)).sum(2) for x in (dk, dv))
    out, dq, dk, dv = (x.transpose(1, 2) for x in (out, dq, dk, dv))
    return out, dq, dk, dv


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
