"""Fused biases and lazy synchronization, without a GPU and without Megatron-DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.megatron_deepspeed import compat, speedups


def test_a_number_goes_to_a_gpu_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "full", lambda *args, **options: calls.append((args, options)))
    module = speedups.lazy_sync_torch()
    module.tensor(0.5, device=torch.device("cuda", 1), dtype=torch.bfloat16)
    options = {"device": torch.device("cuda", 1), "dtype": torch.bfloat16}
    assert calls == [(((), 0.5), options)]
    for data, device in ((0.5, None), (0.5, "cpu"), ([1, 2], "cpu")):
        assert torch.equal(module.tensor(data, device=device), torch.tensor(data))
    assert len(calls) == 1
    monkeypatch.setattr(torch, "bmm", changed := object())  # as a profiler would
    assert (
        module.bmm is changed
        and module.nn is torch.nn
        and module.Tensor is torch.Tensor
        and torch.tensor is not module.tensor
    )


def test_the_bias_dropout_fusion_of_torchscript_is_off() -> None:
    args = SimpleNamespace(
        bias_dropout_fusion=True, masked_softmax_fusion=True, gradient_accumulation_fusion=True
    )
    compat.switch_off_missing_fusions(args)
    assert not args.bias_dropout_fusion


def test_without_a_gpu_the_originals_add_biases() -> None:
    x, bias = torch.ones(3, 2, 4), torch.arange(4.0)
    calls: list[Any] = []

    def original(*args: Any) -> None:
        calls.append(args)

    speedups.add_bias(original, x, bias.expand_as(x), x, 0.0, True)
    speedups.linear(original, SimpleNamespace(), x, torch.eye(4), bias, False, True, False)
    assert [len(args) for args in calls] == [5, 7]


def test_an_expanded_bias_becomes_one_row() -> None:
    bias = torch.arange(4.0)
    for expanded in (bias, bias.expand(3, 2, 4), bias.expand(3, 1, 4), bias.expand(1, 1, 4)):
        assert torch.equal(speedups._unexpand_bias(expanded), bias)
    full = torch.rand(3, 4)
    assert speedups._unexpand_bias(full) is full
