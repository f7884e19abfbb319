"""Ranks whose models have different weights raise an error in their first forward pass."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import tiny_diffusers
import tiny_models
import torch
import torch.distributed as dist
from cases import mesh_of
from harness import RankContext
from model_runs import IGNORED, plain_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_usp
from ds_usp.integrations import diffusers, transformers
from ds_usp.integrations.replicas import ArgumentsDigest, sample_of_weights

WAN = "WanTransformer3DModel"
MESSAGE = r"weights \(8 elements of each; load one checkpoint or seed alike\) in float32"
Forward = Callable[[], Any]


def sampled(module: nn.Module) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in sample_of_weights(module).items()}


def holding(*tensors: torch.Tensor) -> nn.Module:
    return nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in tensors)


def test_a_sample_is_of_each_weights_middle_and_last_row():
    many, few = torch.arange(60.0).view(3, 20), torch.tensor([7.0, 8.0])
    spaced = [20.0, 25, 30, 35, 40, 45, 50, 55]
    assert sampled(holding(many, few)) == {"float32": [*spaced, 7, 8]}
    other = many.T.contiguous().T  # as it lies in memory makes no difference
    assert sampled(holding(other, few, torch.tensor(3.0))) == {"float32": [*spaced, 7, 8, 3]}
    one = torch.arange(16.0)
    assert sampled(holding(one)) == {"float32": [0, 2, 4, 6, 8, 10, 12, 14]}
    both = sampled(holding(few, few.bfloat16(), torch.ones(1, 2, 2, 1, dtype=torch.uint8)))
    assert both == {"float32": [7, 8], "bfloat16": [7, 8], "uint8": [1, 1]}


def test_buffers_are_sampled_that_are_saved():
    model = nn.BatchNorm1d(2, affine=False)
    model.register_buffer("cache", torch.ones(5), persistent=False)
    assert sampled(model) == {"int64": [0], "float32": [0, 0, 1, 1]}


def test_what_ranks_hold_in_parts_is_left_out():
    marks = {"ds_id": 1, "_fsdp_flattened": True, "allreduce": False}
    marked = [nn.Parameter(torch.ones(3)) for _ in marks]
    for parameter, (name, value) in zip(marked, marks.items(), strict=True):
        setattr(parameter, name, value)
    nothing = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, device="meta"))
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    assert sampled(nn.ParameterList([*marked, *nothing, sparse])) == {}
    assert sampled(nn.LazyLinear(3)) == {}


def of_fully_shard(ctx: RankContext) -> dict[str, list[float]]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return sampled(model)


def test_shards_of_fsdp2_are_left_out(pool):
    assert pool.run(of_fully_shard, 2) == [{}, {}]


def refused_each_time(forward: Forward, layer: Any, rank: int) -> None:
    """Passes with other weights in a matrix's last row, and what comes after them."""
    equal = layer.weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            layer.weight[-1] += rank
        with pytest.raises(ds_usp.MeshError, match=MESSAGE):
            forward()
        with torch.no_grad():
            layer.weight.copy_(equal)
    forward()
    with torch.no_grad():
        layer.weight[-1] += rank
    forward()  # compared once


def after_a_pass_that_failed(forward: Forward, layer: Any, rank: int) -> None:
    """Of another reason, before values on GPUs were compared."""

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        forward()
    handle.remove()
    with torch.no_grad():
        layer.weight[-1] += rank
    with pytest.raises(ds_usp.MeshError, match=MESSAGE):
        forward()
    with torch.no_grad():
        layer.weight[-1] -= rank
        layer.weight[-1] = 1.0
    forward()


def of_model(ctx: RankContext, name: str, check: Any, known: bool) -> None:
    """``known``: values on CPUs; else they are compared when a pass ends, as on GPUs."""
    model: Any
    if name == WAN:
        model = tiny_diffusers.build(WAN)
        enabled, layer = diffusers.enable(model, mesh_of(2)), model.blocks[1].attn1.to_q
        given = tiny_diffusers.arguments(WAN)
    else:
        model = tiny_models.build("llama")
        enabled, layer = transformers.enable(model, mesh_of(2)), model.lm_head
        given = plain_batch()
    with enabled, patch.object(ArgumentsDigest, "is_known", known):
        check(lambda: model(**given), layer, ctx.rank)


@pytest.mark.parametrize(
    ("name", "check", "known"),
    [
        (WAN, refused_each_time, True),
        (WAN, refused_each_time, False),
        (WAN, after_a_pass_that_failed, False),
        ("llama", refused_each_time, True),
    ],
)
def test_different_weights_are_refused_until_a_pass_has_succeeded(pool, name, check, known):
    pool.run(of_model, 2, name=name, check=check, known=known)


def digest(batch: Mapping[str, torch.Tensor]) -> str:
    return ArgumentsDigest(batch).text()


def test_digests_tell_batches_apart():
    batch = plain_batch()
    same = digest(batch)
    assert digest({name: x.clone() for name, x in batch.items()}) == same
    swapped = batch["input_ids"].clone()
    swapped[1, [2, 3]] = swapped[1, [3, 2]]
    others = (
        {**batch, "input_ids": swapped},
        {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == IGNORED, -99)},
        {**batch, "input_ids": batch["input_ids"].T},
        {"input_ids": batch["input_ids"]},
        {"input_ids": batch["input_ids"].double(), "labels": batch["labels"]},
    )
    assert len({same, *map(digest, others)}) == 1 + len(others)
    assert digest({}) == digest({})
    shapes = {ArgumentsDigest(x).text(values=False) for x in (batch, *others)}
    assert len(shapes) == 1 + len(others) - 2
    assert not dist.is_initialized()


def test_digests_sum_without_rounding():
    """So that the order of a sum, another one on unlike GPUs, makes no difference."""
    noise = torch.tensor([1e30, 1.0, 2.0])
    assert digest({"noise": noise}) != digest({"noise": noise[[0, 2, 1]]})


def test_digests_compare_values_of_any_device_and_dtype():
    given = {
        "scale": torch.ones(2),
        "latents": torch.zeros(3, device="meta"),
        "mask": torch.tensor([[True] * 3 + [False] * 5, [True] * 6 + [False] * 2]),
        "rotary": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "small": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 3),
    }
    same = ArgumentsDigest(given).text()
    assert ArgumentsDigest(dict(given)).text() == same
    others = {
        "latents": torch.zeros(4, device="meta"),
        "mask": torch.tensor([[True] * 6 + [False] * 2, [True] * 5 + [False] * 3]),
        "rotary": given["rotary"].conj(),
        "small": given["small"].bfloat16(),
        "none": torch.zeros(0, 3, dtype=torch.bool),
    }
    texts = {ArgumentsDigest({**given, name: value}).text() for name, value in others.items()}
    assert len(texts - {same}) == len(others)
