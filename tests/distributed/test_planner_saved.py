"""Bytes that a real layer saves for backward, counted, against the planner's activation formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import mesh_of
from harness import RankContext, WorkerPool
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.models import ModelShape
from ds_usp.planner.split import Split, Workload

SHAPE = ModelShape("layer", 1, 256, 704, 8, 4, 100)
SEQ_LEN, B = 256, 2


class FusedNorm(torch.autograd.Function):
    """RMSNorm that saves its input, its weight and one number a token, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, rstd)
        return (x.float() * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, rstd = ctx.saved_tensors
        hat, inner = x.float() * rstd, grad.float() * weight.float()
        dx = rstd * (inner - hat * (inner * hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad.float() * hat).sum((0, 1)).to(weight.dtype)


class Layer(torch.nn.Module):
    """A Llama layer around :func:`ds_usp.usp_attention`; ``recompute`` is the planner's."""

    def __init__(self, mesh: ds_usp.SequenceMesh, recompute: str) -> None:
        super().__init__()
        h, f, q, k = SHAPE.hidden, SHAPE.ffn, SHAPE.q_width, SHAPE.kv_width
        self.mesh, self.recompute = mesh, recompute
        shapes = {"norm1": (h,), "norm2": (h,), "qkv": (h, q + 2 * k), "out": (q, h)}
        shapes |= {"fc1": (h, 2 * f), "fc2": (f, h)}
        self.weights = torch.nn.ParameterDict(
            {name: torch.randn(shape, dtype=torch.bfloat16) / 16 for name, shape in shapes.items()}
        )

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout = self.mesh.layout("zigzag", SEQ_LEN)
        return ds_usp.usp_attention(
            q, k, v, mesh=self.mesh, layout=layout, mask=ds_usp.MaskSpec.causal()
        )

    def again(self, on: str, fn: Any, *args: torch.Tensor) -> Any:
        """Under a checkpoint if that is what is computed again; the last product then is not,
        because recomputation stops early."""
        return checkpoint(fn, *args, use_reentrant=False) if self.recompute == on else fn(*args)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        w, (batch, tokens, _) = self.weights, x.shape
        q_width, k_width = SHAPE.q_width, SHAPE.kv_width

        def project(y: torch.Tensor) -> torch.Tensor:
            return FusedNorm.apply(y, w["norm1"]) @ w["qkv"]

        def up(y: torch.Tensor) -> torch.Tensor:
            return FusedNorm.apply(y, w["norm2"]) @ w["fc1"]

        def down(y: torch.Tensor) -> torch.Tensor:
            gate, value = y.chunk(2, -1)
            return (F.silu(gate) * value) @ w["fc2"]

        qkv = self.again("gemm-last", project, x).split((q_width, k_width, k_width), -1)
        # Rotary embeddings and the like make tensors of their own out of the split.
        heads = [part.unflatten(-1, (-1, SHAPE.head_dim)).clone() for part in qkv]
        mixed = self.again("attention-only", self.attention, *heads)
        x = x + mixed.reshape(batch, tokens, q_width) @ w["out"]
        fc1 = self.again("gemm-last", up, x)
        return x + self.again("gemm-last", down, fc1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again("full", self.body, x)


def saved_bytes(ctx: RankContext, ulysses: int, recompute: str) -> int:
    """Of all storages that autograd keeps, once each, parameters aside."""
    mesh = mesh_of(ulysses)
    layer = Layer(mesh, recompute)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    tokens = mesh.layout("zigzag", SEQ_LEN).length(mesh.rank)
    x = torch.randn(B, tokens, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x.clone())
    total = sum(storage.nbytes() for storage in kept.values())
    y.sum().backward()
    return total


@pytest.mark.parametrize("recompute", ["none", "gemm-last", "attention-only", "full"])
@pytest.mark.parametrize(
    ("world", "ulysses"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 8)]
)
def test_saved_bytes_are_the_formula(
    pool: WorkerPool, world: int, ulysses: int, recompute: str
) -> None:
    work = Workload(SHAPE, SEQ_LEN)
    split = Split(ulysses=ulysses, ring=world // ulysses, recompute=recompute, micro_batch=B)
    for counted in pool.run(saved_bytes, world, ulysses=ulysses, recompute=recompute):
        assert counted == pytest.approx(layer_bytes(work, split), rel=0.01)
