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
    seen = kernels.unhurried_torch()
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
