"""What stands in for Megatron-DeepSpeed's kernels, without a GPU and without the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.megatron_deepspeed import kernels


def test_a_number_goes_to_a_gpu_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "full", lambda *args, **how: asked.append((args, how)))
    seen = kernels.lazy_sync_torch()
    seen.tensor(0.5, device=torch.device("cuda", 1), dtype=torch.bfloat16)
    how = {"device": torch.device("cuda", 1), "dtype": torch.bfloat16}
    assert asked == [(((), 0.5), how)]
    for data, device in ((0.5, None), (0.5, "cpu"), ([1, 2], "cpu")):
        assert torch.equal(seen.tensor(data, device=device), torch.tensor(data))
    assert len(asked) == 1
    monkeypatch.setattr(torch, "bmm", changed := object())  # as a profiler would
    assert (
        seen.bmm is changed
        and seen.nn is torch.nn
        and seen.Tensor is torch.Tensor
        and torch.tensor is not seen.tensor
    )


def test_torchscripts_dropout_is_left_out() -> None:
    args = SimpleNamespace(
        bias_dropout_fusion=True, masked_softmax_fusion=True, gradient_accumulation_fusion=True
    )
    kernels.switch_off_missing_fusions(args)
    assert not args.bias_dropout_fusion


def test_without_a_gpu_the_host_adds_its_biases() -> None:
    x, bias = torch.ones(3, 2, 4), torch.arange(4.0)
    asked: list[Any] = []

    def host(*args: Any) -> None:
        asked.append(args)

    kernels.add_bias(host, x, bias.expand_as(x), x, 0.0, True)
    kernels.linear(host, SimpleNamespace(), x, torch.eye(4), bias, False, True, False)
    assert [len(args) for args in asked] == [5, 7]


def test_a_bias_that_was_expanded_is_one_row() -> None:
    bias = torch.arange(4.0)
    for given in (bias, bias.expand(3, 2, 4), bias.expand(3, 1, 4), bias.expand(1, 1, 4)):
        assert torch.equal(kernels._unexpand_bias(given), bias)
    whole = torch.rand(3, 4)
    assert kernels._unexpand_bias(whole) is whole
