"""Bytes that a real layer saves for backward, counted, against the planner's activation formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import mesh_of
from harness import RankContext, WorkerPool
from memory_model import FusedNorm
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp.memory import keep_attention, recompute_before
from ds_usp.memory.saved_attention import saved_tensors
from ds_usp.planner.formulas import layer_bytes
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

SHAPE = ModelShape("layer", 1, 256, 704, 8, 4, 100)
SEQ_LEN, B = 64, 2


class Layer(torch.nn.Module):
    """A Llama layer around :func:`ds_usp.usp_attention`; ``recompute`` is the planner's."""

    def __init__(self, mesh: ds_usp.SequenceMesh, shape: ModelShape, recompute: str) -> None:
        super().__init__()
        h, f, q, k = shape.hidden, shape.ffn, shape.q_width, shape.kv_width
        self.mesh, self.shape, self.recompute = mesh, shape, recompute
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

    def before(self, producer: Any, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """The producer is computed again in front of the product, if that is what is."""
        if self.recompute == "gemm-last":
            return recompute_before(producer, linear, x)
        return linear(producer(x))

    def again(self, on: str, fn: Any, *args: torch.Tensor) -> Any:
        """Under a checkpoint if that is what is computed again."""
        return checkpoint(fn, *args, use_reentrant=False) if self.recompute == on else fn(*args)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        w, (batch, tokens, _) = self.weights, x.shape
        q_width, k_width = self.shape.q_width, self.shape.kv_width

        def norm(name: str) -> Any:
            return lambda y: FusedNorm.apply(y, w[name])

        def linear(name: str) -> Any:
            return lambda y: y @ w[name]

        def gate(y: torch.Tensor) -> torch.Tensor:
            gate, value = y.chunk(2, -1)
            return F.silu(gate) * value

        qkv = self.before(norm("norm1"), linear("qkv"), x).split((q_width, k_width, k_width), -1)
        # Rotary embeddings and the like make tensors of their own out of the split.
        heads = [part.unflatten(-1, (-1, self.shape.head_dim)).clone() for part in qkv]
        mixed = self.again("attention-only", self.attention, *heads)
        x = x + mixed.reshape(batch, tokens, q_width) @ w["out"]
        fc1 = self.before(norm("norm2"), linear("fc1"), x)
        return x + self.before(gate, linear("fc2"), fc1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "attention":
            return checkpoint(keep_attention(self.body), x, use_reentrant=False)
        return self.again("full", self.body, x)


def saved_bytes(ctx: RankContext, ulysses: int, recompute: str, shape: ModelShape = SHAPE) -> int:
    """Of all storages that autograd keeps, once each, parameters aside."""
    mesh = mesh_of(ulysses)
    layer = Layer(mesh, shape, recompute)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    tokens = mesh.layout("zigzag", SEQ_LEN).length(mesh.rank)
    x = torch.randn(B, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    with saved_tensors(pack, lambda tensor: tensor):
        y = layer(x.clone())
    total = sum(storage.nbytes() for storage in kept.values())
    y.sum().backward()
    return total


@pytest.mark.parametrize("recompute", ["none", "gemm-last", "attention-only", "attention", "full"])
@pytest.mark.parametrize(
    ("world", "ulysses"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 8)]
)
def test_saved_bytes_are_the_formula(
    pool: WorkerPool, world: int, ulysses: int, recompute: str
) -> None:
    work = Workload(SHAPE, SEQ_LEN)
    config = ParallelConfig(
        ulysses=ulysses, ring=world // ulysses, recompute=recompute, micro_batch=B
    )
    for counted in pool.run(saved_bytes, world, ulysses=ulysses, recompute=recompute):
        assert counted == pytest.approx(layer_bytes(work, config), rel=0.01)


def test_gemm_last_keeps_the_part_that_the_formula_says(pool: WorkerPool) -> None:
    """(6 h + 2 f) / (8 h + 4 f) with f = 8/3 h, as many KV heads as heads, no exchange."""
    shape = ModelShape("llama", 1, 384, 1024, 8, 8, 100)
    kept, everything = (
        pool.run(saved_bytes, 1, ulysses=1, recompute=recompute, shape=shape)[0]
        for recompute in ("gemm-last", "none")
    )
    assert kept / everything == pytest.approx(0.607, abs=0.01)
