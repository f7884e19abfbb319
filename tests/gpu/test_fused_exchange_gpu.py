"""FlashInfer's exchange of heads moves the same bytes as copy engines, on GPUs linked by NVLink."""

import gpu_ranks
import pytest
import torch

import ds_usp
from ds_usp.comm.fused_exchange import fused_unavailable_reason

pytestmark = [
    pytest.mark.several_gpus,
    gpu_ranks.needs_two,
    pytest.mark.skipif(fused_unavailable_reason() is not None, reason="FlashInfer is missing"),
]
FUSED = ds_usp.Tuning(1, copies="flashinfer")


def attend(
    mesh: ds_usp.SequenceMesh, tokens: int, dtype: torch.dtype, tuning: ds_usp.Tuning
) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients of views of one packed projection, 8 heads of 4."""
    layout = mesh.layout("contiguous", tokens)
    generator = torch.Generator("cuda").manual_seed(tokens + mesh.rank)
    size = (1, layout.length(mesh.rank), 8 + 4 + 4, 64)
    packed = torch.randn(size, generator=generator, device="cuda", dtype=dtype)
    q, k, v = (x.requires_grad_() for x in packed.split((8, 4, 4), 2))
    out, lse = ds_usp.usp_attention(
        q,
        k,
        v,
        mesh=mesh,
        layout=layout,
        mask=ds_usp.MaskSpec.causal(),
        kernel="eager",
        tuning=tuning,
        return_lse=True,
    )
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), out.detach().roll(1, 1))]


def same_bytes(rank: int, world: int) -> None:
    mesh = ds_usp.SequenceMesh.from_group()
    side = torch.cuda.Stream()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in (256, 2048, 512):  # the second one grows the buffer
            expected = attend(mesh, tokens, dtype, ds_usp.Tuning(1, copies=True))
            engine = mesh.copy_engines.get("fused")
            before = engine.exchanges if engine else 0
            actual = attend(mesh, tokens, dtype, FUSED)
            assert mesh.copy_engines["fused"].exchanges == before + 5  # qkv, out, lse; dout, dqkv
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                again = attend(mesh, tokens, dtype, FUSED)
            third = attend(mesh, tokens, dtype, FUSED)  # waits for the call in the other stream
            torch.cuda.synchronize()
            for results in (actual, again, third):
                assert all(map(torch.equal, results, expected)), (dtype, tokens)
    reserved = mesh.reserved_bytes
    mesh.release()
    assert mesh.reserved_bytes == 0 < reserved
    assert all(map(torch.equal, attend(mesh, 512, dtype, FUSED), attend(mesh, 512, dtype, FUSED)))


def captured(rank: int, world: int) -> None:
    mesh = ds_usp.SequenceMesh.from_group()
    layout = mesh.layout("contiguous", 512)
    q, k, v = torch.randn(3, 1, 512 // world, 8, 64, device="cuda", dtype=torch.bfloat16)
    call = {"mesh": mesh, "layout": layout, "mask": ds_usp.MaskSpec.causal(), "kernel": "eager"}
    expected = ds_usp.usp_attention(q, k, v, **call, tuning=FUSED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call in a graph: copy engines have memory for it
        out = ds_usp.usp_attention(q, k, v, **call, tuning=FUSED)
    exchanges = mesh.copy_engines["fused"].exchanges
    for _ in range(2):
        graph.replay()
        eager = ds_usp.usp_attention(q, k, v, **call, tuning=FUSED)
        torch.cuda.synchronize()
        assert torch.equal(out, expected) and torch.equal(eager, expected)
    assert mesh.copy_engines["fused"].exchanges == exchanges + 4


@pytest.mark.parametrize("world", gpu_ranks.EVERY_WORLD)
@pytest.mark.parametrize("check", [same_bytes, captured])
def test_flashinfers_exchange(check, world):
    gpu_ranks.run_on_gpus(check, world)
