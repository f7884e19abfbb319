"""``torch.compile`` with inductor on GPUs: one graph, NCCL or copy engines, eager's results."""

from typing import Any

import pytest
import torch
from gpu_ranks import EVERY_WORLD, run_on_gpus
from torch._dynamo.utils import counters

import ds_usp
from ds_usp.testing import relative_error

pytestmark = pytest.mark.several_gpus
STEPS = 4  # as many as torch's CUDA graphs need to warm up, to record and to replay twice


class Layer(torch.nn.Module):
    def __init__(self, mesh: ds_usp.SequenceMesh, tuning: ds_usp.Tuning) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(512, 3 * 512, device="cuda", dtype=torch.bfloat16)
        self.mesh, self.tuning = mesh, tuning
        self.layout, self.mask = mesh.layout("zigzag", 1024), ds_usp.MaskSpec.causal()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).unflatten(-1, (8, -1)).chunk(3, dim=-1)
        options: dict[str, Any] = {"layout": self.layout, "mask": self.mask, "tuning": self.tuning}
        return x + ds_usp.usp_attention(q, k, v, mesh=self.mesh, **options).flatten(2)


def rank_main(rank: int, world: int, mode: str) -> None:
    torch._inductor.config.compile_threads = 1
    for ulysses in (u for u in (1, 2, 4) if world % u == 0):
        mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
        for tuning in (ds_usp.Tuning(), ds_usp.Tuning(2, True), ds_usp.Tuning(2, copies=False)):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            layer = Layer(mesh, tuning)
            run = torch.compile(layer, fullgraph=True, mode=mode)
            for _ in range(STEPS):
                outcomes = []
                x = torch.randn(2, 1024 // world, 512, device="cuda", dtype=torch.bfloat16)
                for each in (layer, run):
                    y = x.clone().requires_grad_()
                    out = each(y)
                    out.square().sum().backward()
                    outcomes.append([z.clone() for z in (out, y.grad, layer.mix.weight.grad)])
                    layer.zero_grad()
                for expected, actual in zip(*outcomes, strict=True):
                    error = relative_error(actual.cpu(), expected.cpu().double())
                    assert error < 1e-2, (ulysses, tuning, error)
            assert counters["stats"]["unique_graphs"] == 1, counters


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("world", EVERY_WORLD)
def test_a_compiled_layer_equals_the_layer(world, mode):
    run_on_gpus(rank_main, world, mode)
