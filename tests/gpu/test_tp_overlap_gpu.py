"""Gradients of tensor-parallel layers on two GPUs: by torch's fused operators they are those of
whole collectives, over steps that reuse freed memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_attention_gpu import free_port
from torch import Tensor

from ds_usp.training import TensorParallelComm, all_gather_linear, linear_reduce_scatter

SIZES = ((4096, 1024), (4096, 4096), (12288, 2048))  # tokens, hidden
RANKS, STEPS = 2, 4


def gradients(comm: TensorParallelComm, tokens: int, hidden: int) -> list[Tensor]:
    device = torch.device("cuda", comm.rank)
    generator = torch.Generator(device).manual_seed(comm.rank)

    def random(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (x / shape[-1] ** 0.5).requires_grad_()

    weights, results = (random(hidden, hidden), random(hidden, hidden)), []
    for _ in range(STEPS):
        x = random(tokens // comm.size, hidden)
        y = torch.nn.functional.silu(all_gather_linear(x, weights[0], None, comm))
        y = linear_reduce_scatter(y, weights[1], comm)
        results += torch.autograd.grad(y.float().square().sum(), (x, *weights))
    return [x.float() for x in results]


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), USP_TP_FUSED="1")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    fused = TensorParallelComm.build(group, torch.device("cuda", rank))
    assert not fused.plain_reason, fused.plain_reason
    plain = TensorParallelComm(group, "compared with")
    worst = []
    for size in SIZES:
        pairs = zip(gradients(fused, *size), gradients(plain, *size), strict=True)
        worst.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    torch.save(worst, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_fused_gradients_are_those_of_whole_collectives(tmp_path):
    mp.spawn(rank_main, (free_port(), str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        assert max(torch.load(tmp_path / f"{rank}.pt")) < 2e-2
