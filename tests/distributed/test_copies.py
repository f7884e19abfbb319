"""Copies of modules that hold a mesh, as an average of weights (EMA) makes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from cases import mesh_of
from harness import RankContext, WorkerPool

import ds_usp


def copies_differ(ctx: RankContext) -> list[float]:
    mesh = mesh_of(2)
    torch.manual_seed(0)
    fixed: Any = {"mesh": mesh, "layout": "zigzag", "mask": ds_usp.MaskSpec.causal()}
    qkv, out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
    modules = [
        ds_usp.USPSelfAttention(qkv, out, 4, 4, **fixed, overlap=True),
        ds_usp.USPAttention(
            torch.nn.functional.scaled_dot_product_attention, mesh=mesh, gather_idx=1
        ),
    ]
    x, heads = torch.ones(1, 4, 16), torch.ones(1, 4, 4, 4)
    inputs: list[tuple[torch.Tensor, ...]] = [(x,), (heads,) * 3]
    return [
        float((copy.deepcopy(module)(*given) - module(*given)).abs().max())
        for module, given in zip(modules, inputs, strict=True)
    ]


def test_a_copied_module_runs_on_the_same_mesh(pool: WorkerPool) -> None:
    assert pool.run(copies_differ, 2) == [[0.0, 0.0]] * 2
