"""Ranks that run the backward passes of a mesh otherwise than the others are refused everywhere;
what all of them do alike is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp.memory import keep_attention
from ds_usp.testing import causal, dense_attention, relative_error

WORLD = 4
TIMEOUT_S = 20.0  # what takes longer hangs
HEADS, TOKENS, DIM = 4, 16, 8

# Each way of attention: Ulysses degree, and what makes it.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Local(torch.nn.Module):
    """A local attention of the user's, ``[b, s, h, d]``."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True)
        return out.transpose(1, 2)


def attention_of(mode: str) -> Attend:
    kind, degree = mode.split()
    mesh = mesh_of(int(degree))
    layout = mesh.layout("contiguous", TOKENS)
    mask = ds_usp.MaskSpec.causal()
    if kind == "local":
        return ds_usp.USPAttention(Local(), gather_idx=1, mesh=mesh, layout="contiguous")
    if kind == "joint":
        return lambda q, k, v: (
            ds_usp.usp_joint_attention(
                *(x for x in (q, k, v)),
                *(x[:, :4].detach() for x in (q, k, v)),
                mesh=mesh,
                layout=layout,
                mask=mask,
            )[1].sum(dim=1, keepdim=True)
            + q * 0
        )
    attend: Attend = lambda q, k, v: ds_usp.usp_attention(  # noqa: E731
        q, k, v, mesh=mesh, layout=layout, mask=mask
    )
    if kind == "compiled":
        torch._dynamo.reset()
        return torch.compile(attend, backend="aot_eager", fullgraph=True)
    if kind == "compiled-local":
        torch._dynamo.reset()
        module = ds_usp.USPAttention(Local(), gather_idx=1, mesh=mesh, layout="contiguous")
        return torch.compile(module, backend="aot_eager", fullgraph=True)
    if kind == "kept":
        return lambda q, k, v: torch.utils.checkpoint.checkpoint(
            keep_attention(attend), q, k, v, use_reentrant=False
        )
    if kind == "again":
        return lambda q, k, v: torch.utils.checkpoint.checkpoint(
            attend, q, k, v, use_reentrant=False
        )
    return attend


def run_calls(ctx: RankContext, mode: str, orders: Sequence[Sequence[int]]) -> tuple[str, float]:
    """Two calls of one shape, whose backward passes this rank runs in its order, then another call;
    what was raised, and the worst error of their gradients of q."""
    mesh, attend = mesh_of(int(mode.split()[1])), attention_of(mode)
    layout = mesh.layout("contiguous", TOKENS)
    calls, q_grads = [], {}
    message, worst = "", 0.0
    try:
        for call in range(2):
            generator = torch.Generator().manual_seed(call)
            full = [torch.randn(1, TOKENS, HEADS, DIM, generator=generator) for _ in range(4)]
            local_qkv = [layout.shard(x, 1, mesh.rank).requires_grad_() for x in full[:3]]
            calls.append((full, local_qkv, attend(*local_qkv)))
        for call in orders[ctx.rank]:
            full, local_qkv, out = calls[call]
            dout = layout.shard(full[3], 1, mesh.rank)
            (q_grads[call],) = torch.autograd.grad(
                out, local_qkv[:1], dout, retain_graph="kept" not in mode
            )
        attend(*calls[0][1])
        mesh.check()
    except ds_usp.MeshError as error:
        message = str(error)
    for call, grad in {} if message or "joint" in mode else q_grads.items():
        full = [x.double() for x in calls[call][0]]
        q = full[0].requires_grad_()
        dense, _ = dense_attention(q, *full[1:3], causal(range(TOKENS), range(TOKENS)))
        (want,) = torch.autograd.grad(dense, [q], full[3])
        worst = max(worst, relative_error(grad, layout.shard(want, 1, mesh.rank)))
    return message, worst


MODES = ["usp 1", "usp 2", "usp 4", "local 4", "joint 2", "kept 2", "again 2"]
COMPILED = ["compiled 1", "compiled 2", "compiled-local 4"]


@pytest.mark.parametrize("mode", MODES + COMPILED)
def test_backward_passes_in_different_orders_are_refused(pool: WorkerPool, mode: str) -> None:
    orders = [(0, 1), (1, 0), (1, 0), (1, 0)]
    for text, _ in pool.run(run_calls, WORLD, timeout=TIMEOUT_S, mode=mode, orders=orders):
        assert "backward pass of call" in text and "on ranks 1-3" in text and "on rank 0" in text


@pytest.mark.parametrize("mode", ["usp 1", "usp 4", "local 4"])
def test_a_rank_with_more_or_fewer_backward_passes_is_refused(pool: WorkerPool, mode: str) -> None:
    for odd in [(1, 1, 0), (1, 0, 0), (1,), (0,), ()]:
        orders = [(1, 0), (1, 0), odd, (1, 0)]
        for text, _ in pool.run(run_calls, WORLD, timeout=TIMEOUT_S, mode=mode, orders=orders):
            assert "rank 2" in text and "ranks 0-1, 3" in text, (odd, text)


@pytest.mark.parametrize("mode", MODES)
def test_any_order_that_all_ranks_share_is_right(pool: WorkerPool, mode: str) -> None:
    orders: list[Any] = [(1, 0), (0, 1), (1,), ()]
    orders += [(1, 1, 0)] if mode.split()[0] in ("usp", "local") else []
    for order in orders:
        results = pool.run(run_calls, WORLD, timeout=TIMEOUT_S, mode=mode, orders=[order] * WORLD)
        for text, error in results:
            assert not text and error <= 1e-5, (order, text, error)


def go_on_after_an_error(ctx: RankContext) -> tuple[str, str]:
    """What is said where ranks use two meshes over one group in another order, and by a backward
    pass after it, which all ranks run alike."""
    meshes = [ds_usp.SequenceMesh.from_group(None, 2) for _ in range(2)]
    messages = []
    try:
        meshes[ctx.rank % 2].check()
    except ds_usp.MeshError as error:
        messages.append(str(error))
    x = torch.randn(1, TOKENS // ctx.world, HEADS, DIM, requires_grad=True)
    mask = ds_usp.MaskSpec.causal()
    try:
        ds_usp.usp_attention(
            x, x, x, mesh=meshes[0], layout="contiguous", mask=mask
        ).sum().backward()
    except ds_usp.MeshError as error:
        messages.append(str(error))
    return messages[0], "".join(messages[1:])


def test_ranks_that_go_on_after_an_error_number_calls_alike(pool: WorkerPool) -> None:
    for first, second in pool.run(go_on_after_an_error, WORLD):
        assert "a check of the mesh" in first
        assert not second
