"""Where there is no GPU "cuda" means the CPU, and where there is one nothing is patched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_patches import PatchSet
from megatron_patches.megatron_core import without_apex
from megatron_patches.megatron_core.cpu_patch_table import training_without_gpu, without_gpu

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The patches of torch alone: they need no megatron-core."""
    patches = PatchSet("torch", (x for x in without_gpu() if x.target.startswith("torch")))
    patches.apply()
    try:
        assert patches.stale() == ()
        yield
    finally:
        patches.restore()


def test_a_gpu_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    targets = {x.target for x in (*without_gpu(), *training_without_gpu()) if x.applies}
    assert targets == {x.target for x in without_apex.patches()}


@NO_GPU
def test_tensors_are_made_on_the_cpu(on_cpu: None) -> None:
    x = torch.ones(3, device="cuda", pin_memory=True)
    same = (x.cuda(), x.to("cuda:1"), x.to(torch.device("cuda")), x.pin_memory())
    assert all(y.device.type == "cpu" and y.data_ptr() == x.data_ptr() for y in same)
    assert torch.zeros_like(x, device=torch.cuda.current_device()).device.type == "cpu"
    assert x.to("cuda", torch.float64).dtype == torch.float64
    assert torch.empty(2, device="meta").device.type == "meta"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"


@NO_GPU
def test_streams_have_nothing_to_wait_for(on_cpu: None) -> None:
    stream = torch.cuda.Stream(device=torch.cuda.current_device())
    with torch.cuda.stream(stream):
        event = stream.record_event()
    stream.wait_stream(torch.cuda.current_stream())
    event.wait(stream)
    torch.cuda.synchronize()
    assert event.query()


@NO_GPU
def test_random_states_are_those_of_the_cpu(on_cpu: None) -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="cuda"))


@NO_GPU
def test_restored_torch_refuses_cuda_again() -> None:
    patches = PatchSet("torch", (x for x in without_gpu() if x.target.startswith("torch")))
    before = torch.empty, torch.cuda.Stream
    patches.apply()
    patches.restore()
    assert (torch.empty, torch.cuda.Stream) == before
    assert not {"cuda", "to", "type", "pin_memory"} & vars(torch.Tensor).keys()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(1, device="cuda")
