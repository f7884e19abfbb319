"""CUDA graphs of attention over several GPUs: launched in turns, with calls in between."""

from functools import partial

import pytest
import torch
from gpu_ranks import WORLDS, needs_two, run_on_gpus

import ds_usp
from ds_usp import Tuning
from ds_usp.testing import relative_error

Graph = tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]


class Calls:
    """Calls on tensors whose numbers change."""

    def __init__(self, mesh: ds_usp.SequenceMesh, tokens: int, copies: bool) -> None:
        self.mesh, self.copies = mesh, copies
        self.layout = mesh.layout("zigzag", tokens)
        shape = 1, self.layout.length(mesh.rank), 8, 64
        self.qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        self.dout = torch.randn_like(self.qkv[0])
        for x in self.qkv:
            x.requires_grad_()

    def change(self) -> None:
        with torch.no_grad():
            for x in (*self.qkv, self.dout):
                x.normal_()

    def attend(self, chunks: int, *qkv: torch.Tensor) -> torch.Tensor:
        return ds_usp.usp_attention(
            *qkv,
            mesh=self.mesh,
            layout=self.layout,
            mask=ds_usp.MaskSpec.causal(),
            kernel="cudnn",
            tuning=Tuning(chunks, True, copies=self.copies),
        )

    def backward(self, out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out, self.qkv, self.dout)]

    def step(self, chunks: int) -> list[torch.Tensor]:
        return self.backward(self.attend(chunks, *self.qkv))

    def captured(self, chunks: int) -> Graph:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                self.step(chunks)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return graph, self.step(chunks)

    def check(self, actual: list[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        for one, other in zip(actual, self.step(1), strict=True):
            assert relative_error(one.cpu(), other.cpu().double()) < 5e-3


def graph_main(rank: int, world: int, ulysses: int, tokens: int, copies: bool) -> None:
    calls = Calls(ds_usp.SequenceMesh.from_group(None, ulysses), tokens, copies)
    graphs = [calls.captured(chunks) for chunks in (1, 2)]
    for turn in range(3):
        calls.change()
        for graph, _ in [*graphs, *graphs[:turn]]:
            graph.replay()
        for _, results in graphs:
            calls.check(results)
    if copies:
        check_graphs_of_forward_and_backward(calls)
        calls.step(4)  # in rooms that are there
        calls.mesh.release()
        assert calls.mesh.reserved_bytes > 0, "a graph's rooms were given back"
    for graph, _ in graphs:
        graph.reset()  # communicators that a graph refers to do not end


def check_graphs_of_forward_and_backward(calls: Calls) -> None:
    """Of two layers, whose backward passes come in any order."""
    layers = [
        torch.cuda.make_graphed_callables(partial(calls.attend, chunks), tuple(calls.qkv))
        for chunks in (1, 2)
    ]
    for order in (layers, layers[::-1]):
        calls.change()
        outs = [layer(*calls.qkv) for layer in layers]
        for layer in order:
            calls.check(calls.backward(outs[layers.index(layer)]))


@pytest.mark.several_gpus
@needs_two
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("ulysses, tokens", [(1, 1024), (2, 1021)])
def test_calls_can_be_captured_in_cuda_graphs(ulysses, tokens, copies):
    run_on_gpus(graph_main, WORLDS[-1], ulysses, tokens, copies)
