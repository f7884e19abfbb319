"""Ranks whose models have other weights are told so in their first forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_diffusers
import tiny_models
import torch
from harness import RankContext, WorkerPool
from model_runs import mesh_of, plain_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_usp
from ds_usp.integrations import diffusers, transformers
from ds_usp.integrations.weights import sample_of_weights

WAN = "WanTransformer3DModel"


def sampled(module: nn.Module) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in sample_of_weights(module).items()}


def holding(*tensors: torch.Tensor) -> nn.Module:
    return nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in tensors)


def test_a_sample_is_of_each_weights_middle_row() -> None:
    many, few = torch.arange(60.0).view(3, 20), torch.tensor([7.0, 8.0])
    spaced = [20.0, 22, 24, 26, 28, 30, 32, 34]
    assert sampled(holding(many, few)) == {"float32 cpu": [*spaced, 7, 8]}
    other = many.T.contiguous().T  # as it lies in memory makes no difference
    assert sampled(holding(other, few, torch.tensor(3.0))) == {"float32 cpu": [*spaced, 7, 8, 3]}
    both = sampled(holding(few, few.bfloat16(), torch.ones(1, 2, 2, 1, dtype=torch.uint8)))
    assert both == {"float32 cpu": [7, 8], "bfloat16 cpu": [7, 8], "uint8 cpu": [1]}


def test_what_ranks_hold_in_parts_is_left_out() -> None:
    of_zero3 = nn.Parameter(torch.ones(3))
    of_zero3.ds_id = 1  # type: ignore[attr-defined]
    of_fsdp = nn.Parameter(torch.ones(3))
    of_fsdp._fsdp_flattened = True  # type: ignore[attr-defined]
    expert = nn.Parameter(torch.ones(3))
    expert.allreduce = False  # type: ignore[attr-defined]
    nothing = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, device="meta"))
    assert sampled(nn.ParameterList([of_zero3, of_fsdp, expert, *nothing])) == {}


def of_fully_shard(ctx: RankContext) -> dict[str, list[float]]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return sampled(model)


def test_shards_of_fsdp2_are_left_out(pool: WorkerPool) -> None:
    assert pool.run(of_fully_shard, 2) == [{}, {}]


def wan(rank: int) -> None:
    model = tiny_diffusers.build(WAN)
    with diffusers.enable(model, mesh_of(2)):
        check(lambda: model(**tiny_diffusers.arguments(WAN)), model.proj_out, rank)


def llama(rank: int) -> None:
    model = tiny_models.build("llama")
    with transformers.enable(model, mesh_of(2)):
        check(lambda: model(**plain_batch()), model.lm_head, rank)


def check(forward: Callable[[], Any], layer: nn.Module, rank: int) -> None:
    """A pass with other weights is refused, each time; one with equal weights is not."""
    weight: Any = layer.weight
    equal = weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            weight += rank
        with pytest.raises(ds_usp.MeshError, match=r"weights \(of one checkpoint or seed\) float"):
            forward()
        with torch.no_grad():
            weight.copy_(equal)
    forward()


def refused(ctx: RankContext, door: Callable[[int], None]) -> None:
    door(ctx.rank)


@pytest.mark.parametrize("door", [wan, llama])
def test_other_weights_are_refused_until_a_pass_has_begun(pool: WorkerPool, door: Any) -> None:
    pool.run(refused, 2, door=door)
