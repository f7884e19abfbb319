"""Saved, recomputed and offloaded activations on a GPU: bitwise gradients, freed memory.

pytest tests/gpu/test_memory_gpu.py
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from memory_model import Sizes, Stack
from torch import Tensor

from ds_usp.memory import RECOMPUTE, LayerMemory, Offload

SIZES = Sizes(tokens=4096, heads=8, dim=64, ffn=1408, layers=6)


class Model:
    """Some layers in bf16 under a policy."""

    def __init__(self, recompute: str, ratio: float) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.offload = Offload(ratio, device)
        stack = Stack(LayerMemory(recompute, self.offload), SIZES)
        self.stack = stack.to(device, torch.bfloat16)
        (self.x,) = stack.inputs(1)

    def loss(self) -> Tensor:
        return self.stack(self.x)

    def gradients(self, in_flight: int = 1) -> list[Tensor]:
        self.x.grad = None
        waiting = [self.loss() for _ in range(in_flight)]
        for index in range(in_flight):
            waiting.pop(index % len(waiting)).backward()
        return [grad.clone() for grad in self.stack.gradients([self.x])]


@pytest.fixture
def same_order() -> Iterator[None]:
    """Attention's backward sums in one order; what has no such mode may go on as it is."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("same_order")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_offload_changes_no_bit_and_frees_memory(recompute):
    want = Model(recompute, 0.0).gradients(3)
    for ratio in (0.5, 1.0):
        moving = Model(recompute, ratio)
        moving.gradients()
        counts = moving.offload.counts  # of one micro batch: what is small stays
        assert abs(counts.offloaded - ratio * counts.saved) <= 2**20
        for _ in range(2):  # the second time from used host memory
            actual = moving.gradients(3)
        assert all(torch.equal(g, w) for g, w in zip(actual, want, strict=True))
        assert moving.offload.bytes_away == 0


def test_less_is_resident_after_the_forward_pass():
    def after_forward(ratio: float) -> int:
        model = Model("none", ratio)
        model.loss().backward()  # kernels and workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model.loss()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    everything, half, nothing = (after_forward(ratio) for ratio in (0.0, 0.5, 1.0))
    one = everything / SIZES.layers
    assert half == pytest.approx(everything - 0.5 * (SIZES.layers - 1) * one, rel=0.05)
    assert nothing == pytest.approx(one, rel=0.3)


def test_a_graph_that_is_dropped_while_copies_run_corrupts_nothing():
    want = Model("none", 0.0).gradients()
    moving = Model("none", 1.0)
    for _ in range(3):
        del_me = moving.loss()
        del del_me
    actual = moving.gradients()
    for g, w in zip(actual, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2, atol=1e-4)


def test_policies_agree():
    want = Model("none", 0.0).gradients()
    for recompute in RECOMPUTE[1:]:
        for g, w in zip(Model(recompute, 0.3).gradients(), want, strict=True):
            error = (g - w).float().norm() / w.float().norm().clamp(min=1e-12)
            assert float(error) < 1e-2, recompute


def test_options_that_are_set_after_the_import_of_torch_are_read():
    code = """
import os, torch, ds_usp
assert torch.cuda.is_available()
os.environ.update(ds_usp.allocator_variables(os.environ, expandable_segments=True))
host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
x = torch.arange(1 << 26, device="cuda").to(torch.uint8)
host.copy_(x)
assert host.is_pinned() and torch.equal(host.cuda(), x)
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""
    command = [sys.executable, "-c", code]
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr
