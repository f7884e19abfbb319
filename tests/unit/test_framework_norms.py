"""Norms of all gradients at once, beside a loop over them in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_patches.megatron_deepspeed import norms

pytest.importorskip("deepspeed")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = ((7, 5), (3,), (1,), (64, 33), (2, 2, 2))


def random_gradients(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    drawn = (torch.randn(shape) * 10**power for power, shape in enumerate(SHAPES))
    return [x.to(device, dtype) for x in drawn]


def params(**marks: Iterable[int]) -> list[Any]:
    """One for each shape, marked as DeepSpeed's would be."""
    found = [SimpleNamespace(model_parallel=False) for _ in SHAPES]
    for mark, numbers in marks.items():
        for number in numbers:
            setattr(found[number], mark, True)
    return found


def loop(optimizer: Any, gradients: Any, owners: Any, norm_type: float = 2) -> Tensor:
    """DeepSpeed's rule: replicated parameters do not count, whole ones on the first rank only."""
    optimizer.launched = 0
    total = 0.0
    counted = (grad for grad in gradients if not getattr(grad, "_zero_padding", False))
    for grad, param in zip(counted, owners, strict=False):
        optimizer.launched += 1
        if getattr(param, "ds_pipe_replicated", False):
            continue
        if param.model_parallel or optimizer.model_parallel_rank == 0:
            total += sum(abs(float(x)) ** norm_type for x in grad.double().flatten())
    return torch.tensor(total ** (1 / norm_type), dtype=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2, 3.0])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_the_loop(
    dtype: torch.dtype, rank: int, norm_type: float, device: str
) -> None:
    gradients = random_gradients(device, dtype)
    padding = torch.full((4,), 9.0, dtype=dtype, device=device)
    padding._zero_padding = True  # type: ignore[attr-defined]
    gradients.insert(2, padding)
    owners = params(model_parallel=(0, 3, 4), ds_pipe_replicated=(1, 4))
    optimizer = SimpleNamespace(model_parallel_rank=rank, launched=0)
    want = loop(optimizer, gradients, owners, norm_type)
    got = norms.gradient_norm(loop, optimizer, gradients, owners, norm_type)
    assert float(got) == pytest.approx(float(want), rel=1e-12)
    assert optimizer.launched <= 4  # kinds of parameters, not parameters


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2, 3.0, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_deepspeeds_own_function_says_the_same_of_all_gradients_and_of_their_norms(
    rank: int, norm_type: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    monkeypatch.setattr(stage_1_and_2.dist, "all_reduce", lambda *_, **__: None)
    own = stage_1_and_2.DeepSpeedZeroOptimizer.get_grad_norm_direct
    optimizer = SimpleNamespace(
        model_parallel_rank=rank,
        dp_process_group=None,
        device=torch.device(device),
        _model_parallel_all_reduce=lambda **_: None,
    )
    gradients, owners = (
        random_gradients(device),
        params(model_parallel=(0, 3), ds_pipe_replicated=(1,)),
    )
    want = own(optimizer, gradients, owners, norm_type)
    got = norms.gradient_norm(own, optimizer, iter(gradients), owners, norm_type)
    assert float(got) == pytest.approx(float(want), rel=1e-6) and got.dtype == want.dtype
    assert float(want) > 1e3, "the largest of them is split over the ranks"


def test_a_norm_that_torch_cannot_take_at_once_is_deepspeeds() -> None:
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    for gradients, norm_type in ((mixed, 2), ([], 2), ([torch.ones(2)], math.inf)):
        seen: list[Any] = []
        norms.gradient_norm(
            lambda _, given, owners, kind, seen=seen: seen.append((given, owners, kind)),
            SimpleNamespace(),
            iter(gradients),
            ["owner"],
            norm_type,
        )
        assert seen == [(gradients, ["owner"], norm_type)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(len(SHAPES)))
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    bad: float | None, where: int, device: str
) -> None:
    gradients: list[Any] = random_gradients(device)
    gradients[0].view(-1)[0] = torch.finfo(torch.float32).max
    if bad is not None:
        gradients[where].view(-1)[-1] = bad
    groups = {0: [*gradients[:2], None], 1: gradients[2:]}
    optimizer = SimpleNamespace(averaged_gradients=groups, bit16_groups=[[], []])
    found = norms.has_overflow(pytest.fail, optimizer)
    assert found.shape == (1,) and found.dtype == torch.bool
    assert bool(found) == (bad is not None)


def test_no_gradients_are_deepspeeds_to_judge() -> None:
    optimizer = SimpleNamespace(averaged_gradients={0: [None]}, bit16_groups=[[]])
    assert norms.has_overflow(lambda _: "asked", optimizer) == "asked"
