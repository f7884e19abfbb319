"""Kept, recomputed and offloaded activations on a GPU: bitwise gradients, free memory, no waiting.

pytest tests/gpu/test_memory_gpu.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_usp import MaskSpec, SequenceMesh, usp_attention
from ds_usp.memory import RECOMPUTE, GemmLast, LayerMemory, Offload, recompute_before

S, HEADS, DIM, FFN, LAYERS = 4096, 8, 64, 1408, 6
H = HEADS * DIM


class Layer(nn.Module):
    """Norm, projection, attention, projection; norm, product, SwiGLU, product."""

    def __init__(self, gemm_last: bool) -> None:
        super().__init__()
        self.mesh = SequenceMesh.single()
        self.norm1, self.norm2 = nn.RMSNorm(H), nn.RMSNorm(H)
        self.mix, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 2 * FFN), nn.Linear(FFN, H)
        if gemm_last:
            GemmLast.between(self.norm1, self.mix)
            GemmLast.between(self.norm2, self.up)
        self.join: Any = recompute_before if gemm_last else lambda f, linear, y: linear(f(y))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm1(x)).unflatten(-1, (-1, DIM)).chunk(3, 2)
        layout = self.mesh.layout("contiguous", S)
        mixed = usp_attention(q, k, v, mesh=self.mesh, layout=layout, mask=MaskSpec.causal())
        x = x + self.out(mixed.flatten(2))
        return x + self.join(gated, self.down, self.up(self.norm2(x)))


def gated(y: Tensor) -> Tensor:
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


class Stack:
    """Some layers under a policy."""

    def __init__(self, recompute: str, ratio: float) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(3)
        with device:
            layers = [Layer(recompute == "gemm-last") for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers).to(torch.bfloat16)
        self.offload = Offload(ratio, device)
        self.memory = LayerMemory(recompute, self.offload)
        self.x = torch.randn(1, S, H, device=device, dtype=torch.bfloat16).requires_grad_()

    def loss(self) -> Tensor:
        x = self.x
        for number, layer in enumerate(self.layers):
            x = self.memory.run(number, layer, x)
        return x.float().square().mean()

    def gradients(self, in_flight: int = 1) -> list[Tensor]:
        for p in (self.x, *self.layers.parameters()):
            p.grad = None
        waiting = [self.loss() for _ in range(in_flight)]
        for index in range(in_flight):
            waiting.pop(index % len(waiting)).backward()
        return [p.grad.clone() for p in (self.x, *self.layers.parameters())]


@pytest.fixture
def same_order() -> Iterator[None]:
    """Attention's backward sums in one order; what has no such mode may go on as it is."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("same_order")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_offload_changes_no_bit_and_frees_memory(recompute: str) -> None:
    want = Stack(recompute, 0.0).gradients(3)
    for ratio in (0.5, 1.0):
        moving = Stack(recompute, ratio)
        moving.gradients()
        counts = moving.offload.counts  # of one micro batch: what is small stays
        assert abs(counts.offloaded - ratio * counts.saved) <= 2**20
        for _ in range(2):  # the second time from used host memory
            got = moving.gradients(3)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert moving.offload.bytes_away == 0


def test_less_is_resident_after_the_forward_pass() -> None:
    def after_forward(ratio: float) -> int:
        stack = Stack("none", ratio)
        stack.loss().backward()  # kernels and workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = stack.loss()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    everything, half, nothing = (after_forward(ratio) for ratio in (0.0, 0.5, 1.0))
    one = everything / LAYERS
    assert half == pytest.approx(everything - 0.5 * (LAYERS - 1) * one, rel=0.05)
    assert nothing == pytest.approx(one, rel=0.3)


def test_a_graph_that_is_dropped_while_copies_run_corrupts_nothing() -> None:
    want = Stack("none", 0.0).gradients()
    moving = Stack("none", 1.0)
    for _ in range(3):
        del_me = moving.loss()
        del del_me
    got = moving.gradients()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2, atol=1e-4)


def test_policies_agree() -> None:
    want = Stack("none", 0.0).gradients()
    for recompute in RECOMPUTE[1:]:
        for g, w in zip(Stack(recompute, 0.3).gradients(), want, strict=True):
            error = (g - w).float().norm() / w.float().norm().clamp(min=1e-12)
            assert float(error) < 1e-2, recompute
