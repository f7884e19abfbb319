"""Digests of the arguments of forward passes, which ranks compare."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from model_runs import IGNORED, plain_batch

from ds_usp.integrations.replicas import ArgumentsDigest, BatchDigest


def digest(batch: Mapping[str, torch.Tensor]) -> str:
    return BatchDigest(batch).text()


def test_digests_tell_batches_apart() -> None:
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
    assert digest({}) == "" == digest({})
    assert len({BatchDigest(x).text(values=False) for x in (batch, *others)}) == 1 + len(others) - 2
    assert not dist.is_initialized()


def test_digests_sum_without_rounding() -> None:
    """So that the order of a sum, another one on unlike GPUs, makes no difference."""
    noise = torch.tensor([1e30, 1.0, 2.0])
    assert digest({"noise": noise}) != digest({"noise": noise[[0, 2, 1]]})


def test_digests_compare_values_of_any_device_and_dtype() -> None:
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
