"""Gradient norms and overflow of all gradients at once, beside DeepSpeed's loops over them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_patches.megatron_deepspeed import speedups

pytest.importorskip("deepspeed")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = ((7, 5), (3,), (1,), (64, 33), (2, 2, 2))


def random_gradients(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The last ones are the largest by far."""
    drawn = (torch.randn(shape) * 10**power for power, shape in enumerate(SHAPES))
    return [x.to(device, dtype) for x in drawn]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2, 3.0, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_deepspeeds(
    dtype: torch.dtype, rank: int, norm_type: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, which does not count, and parameters sharded over ranks or replicated."""
    from deepspeed.runtime.zero import stage_1_and_2

    monkeypatch.setattr(stage_1_and_2.dist, "all_reduce", lambda *_, **__: None)
    optimizer = SimpleNamespace(
        model_parallel_rank=rank,
        dp_process_group=None,
        device=torch.device(device),
        _model_parallel_all_reduce=lambda **_: None,
    )
    counts: list[int] = []

    def deepspeed_norm(self: Any, gradients: Any, params: Any, kind: float) -> Tensor:
        counts.append(len(gradients))
        return stage_1_and_2.DeepSpeedZeroOptimizer.get_grad_norm_direct(
            self, gradients, params, kind
        )

    gradients = random_gradients(device, dtype)
    padding = torch.full((4,), 1e9, dtype=dtype, device=device)
    padding._zero_padding = True  # type: ignore[attr-defined]
    gradients.insert(2, padding)
    params = [
        SimpleNamespace(model_parallel=index in (0, 3), ds_pipe_replicated=index == 1)
        for index in range(len(SHAPES))
    ]
    expected = deepspeed_norm(optimizer, gradients, params, norm_type)
    norm = speedups.gradient_norm(deepspeed_norm, optimizer, iter(gradients), params, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6) and norm.dtype == expected.dtype
    assert float(expected) > 1e3
    assert counts[1] <= 3 or norm_type == math.inf  # kinds of parameters, not parameters


def test_gradients_that_foreach_does_not_take_are_left_to_deepspeed() -> None:
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    for gradients, norm_type in ((mixed, 2), ([], 2), ([torch.ones(2)], math.inf)):
        calls: list[Any] = []
        speedups.gradient_norm(
            lambda *args, calls=calls: calls.append(args[1:]),
            SimpleNamespace(),
            iter(gradients),
            ["owner"],
            norm_type,
        )
        assert calls == [(gradients, ["owner"], norm_type)]
    optimizer = SimpleNamespace(averaged_gradients={0: [None]}, bit16_groups=[[]])
    assert speedups.has_overflow(lambda _: "DeepSpeed's", optimizer) == "DeepSpeed's"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(len(SHAPES)))
def test_an_overflow_is_found_in_any_gradient(
    bad: float | None, position: int, device: str
) -> None:
    gradients: list[Any] = random_gradients(device)
    gradients[0].view(-1)[0] = torch.finfo(torch.float32).max
    if bad is not None:
        gradients[position].view(-1)[-1] = bad
    groups = {0: [*gradients[:2], None], 1: gradients[2:]}
    optimizer = SimpleNamespace(averaged_gradients=groups, bit16_groups=[[], []])
    overflow = speedups.has_overflow(pytest.fail, optimizer)
    assert overflow.shape == (1,) and overflow.dtype == torch.bool
    assert bool(overflow) == (bad is not None)
