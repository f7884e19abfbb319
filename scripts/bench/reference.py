"""fp64 reference of causal attention, and the errors of a baseline against it."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from baselines import Baseline
from bench_harness import Session
from shapes import Shape

from ds_usp import testing as oracle

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("out", "dq", "dk", "dv")


def causal_reference(session: Session, shape: Shape, inputs: Tensors) -> Tensors:
    """Out, dq, dk and dv of causal attention within the shape's documents or tree in fp64, by the
    oracle of the tests; collective."""
    lengths = [stop - start for start, stop in pairwise(shape.borders or (0, shape.seq_len))]

    def allowed(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if shape.tree:
            branch = oracle.same_branch(queries, keys, shape.segments)
            return branch & oracle.causal(queries, keys)
        return oracle.causal(queries, keys) & oracle.same_document(queries, keys, lengths)

    results = oracle.attention_in_blocks(
        oracle.Tensors(*inputs),
        allowed,
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
    session: Session, baseline: Baseline, shape: Shape, inputs: Tensors, reference: Tensors
) -> list[float]:
    """Relative errors (L2 norm over all ranks) of out, dq, dk and dv of a baseline.

    Tokens of padding hold the first token's values, so that a baseline that reads them errs.
    """
    attend, _, held = baseline.attend(shape)
    positions = torch.tensor(held, device=session.device)
    tokens, own = positions.clamp(min=0), positions >= 0
    q, k, v, dout = (x[:, tokens].detach() for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    with baseline.around():
        out = attend(q, k, v)
        results = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    if {x.dtype for x in results} != {q.dtype}:  # a wider dtype would hide rounding errors
        raise TypeError(f"{[x.dtype for x in results]} returned for {q.dtype} inputs")
    squares = []
    for result, expected in zip(results, reference, strict=True):
        shard = expected[:, tokens[own]]
        error = result[:, own].double() - shard
        squares += [error.square().sum().item(), shard.square().sum().item()]
    sums = session.all_reduced(squares)
    return [(error / norm) ** 0.5 for error, norm in zip(sums[::2], sums[1::2], strict=True)]


def worst_ratio(mesh_errors: list[float], kernel_errors: list[float]) -> float:
    """Largest ratio of an error to the single-GPU kernel's; NaN if any is NaN."""
    return (torch.tensor(mesh_errors) / torch.tensor(kernel_errors)).max().item()
