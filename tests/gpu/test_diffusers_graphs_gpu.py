"""CUDA graphs of diffusion transformers on two GPUs: fp32, tiny random models, against one GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_attention_gpu import free_port
from test_diffusers_gpu import MESHES, WORLD, join_group, model_on, moved, relative, run, say
from torch import Tensor

import ds_usp

pytestmark = [
    pytest.mark.several_gpus,
    pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
KILLED_AFTER = 6  # passes: without a graph, captured, replayed
PATIENCE_S = 30
# Their forward passes copy from the CPU, which torch cannot capture.
NOT_CAPTURED = ("ChromaTransformer2DModel", "CogView4Transformer2DModel")


def graphs(device: torch.device) -> Iterator[tuple[str, float]]:
    """Passes that ds_usp captures, of two batches in turns, compiled too; a rank that differs."""
    from tiny_diffusers import ALWAYS_MASKED, arguments, build, output_of

    from ds_usp.integrations.diffusers import PLANS, enable

    for name in [name for name in PLANS if name not in (*ALWAYS_MASKED, *NOT_CAPTURED)]:
        transformer = build(name).eval().to(device)
        batches = [moved(arguments(name, seed=seed), device) for seed in (1, 2)]
        with torch.no_grad():
            wants = [output_of(transformer, given) for given in batches]
            for ulysses in MESHES:
                mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
                with enable(transformer, mesh, cuda_graphs=True):
                    yield (
                        f"{name}, ulysses {ulysses}, CUDA graphs",
                        of_turns(transformer, batches, wants),
                    )
    with torch.no_grad():
        for name in NOT_CAPTURED:
            transformer, given = build(name).eval().to(device), moved(arguments(name), device)
            want, mesh = output_of(transformer, given), ds_usp.SequenceMesh.from_group(None, 2)
            with enable(transformer, mesh, cuda_graphs=True):
                error = relative(output_of(transformer, given), want)  # before the capture
                with pytest.raises(ds_usp.UnsupportedAttentionError, match="between CPU and CUDA"):
                    transformer(**given)
            yield f"{name}, refused by name", error
        transformer, given = model_on(device, "WanTransformer3DModel")
        want = transformer(**given).sample
        mesh = ds_usp.SequenceMesh.from_group(None, 2)
        with enable(transformer, mesh, cuda_graphs=True):
            transformer.compile_repeated_blocks(fullgraph=True)
            yield "compiled blocks in CUDA graphs", of_turns(transformer, [given], [want])
            if dist.get_rank():  # has no graph any more
                transformer.proj_out.weight.data = transformer.proj_out.weight.data.clone()
            with pytest.raises(ds_usp.MeshError, match="replayed from a CUDA graph"):
                transformer(**given)
            yield "after ranks that differ", of_turns(transformer, [given], [want])


def of_turns(transformer: Any, batches: list[Any], wants: list[Tensor]) -> float:
    """The largest error of four passes with each batch; infinite, with the reason, if refused."""
    from tiny_diffusers import output_of

    try:
        outputs = [output_of(transformer, given) for _ in range(4) for given in batches]
    except ds_usp.UnsupportedAttentionError as error:
        say(str(error)[:300])
        return float("inf")
    return max(relative(*pair) for pair in zip(outputs, 4 * wants, strict=True))


def killed_main(rank: int, port: int, ulysses: int, outcome: Any) -> None:
    """Replay passes until rank 1 is killed; rank 0 puts its error, the seconds that it took, and
    those until the GPU was idle."""
    from ds_usp.integrations.diffusers import enable

    join_group(rank, port)
    transformer, given = model_on(torch.device("cuda"), "WanTransformer3DModel")
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
    with torch.no_grad(), enable(transformer, mesh, cuda_graphs=True):
        for _ in range(KILLED_AFTER):
            transformer(**given)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                transformer(**given)
        except ds_usp.MeshError as error:
            noticed = time.perf_counter() - begin
            torch.cuda.synchronize()
            outcome.put((str(error), noticed, time.perf_counter() - begin))


def test_cuda_graphs() -> None:
    run(graphs)


@pytest.mark.parametrize("ulysses", MESHES)
def test_a_rank_killed_between_replays(ulysses: int) -> None:
    """The other rank gets an error within seconds, and its GPU does not wait for ever."""
    context = mp.get_context("spawn")
    outcome, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=killed_main, args=(rank, port, ulysses, outcome), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        text, noticed, idle = outcome.get(timeout=120)
    finally:
        for process in ranks:
            process.kill()
    sys.stdout.write(f"ulysses {ulysses}: {noticed:.2f} s, GPU idle {idle:.2f} s: {text}\n")
    assert "rank 1" in text
    assert idle < PATIENCE_S
