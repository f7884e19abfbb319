"""What a launcher remembers of a kernel, without Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_usp import triton_launch

Call = tuple[str, tuple[int, ...], tuple[Any, ...]]


class Kernel:
    """Writes down who was launched: the kernel that looks at everything, or what it compiled."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.calls.append(("looked", grid, (*args, *constants.values())))
            return _Compiled(self.calls)

        return launch


class _Compiled:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.calls.append(("known", grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton_launch, "_launcher_passes_constexprs", lambda: True)
    return Kernel()


def test_the_same_launch_is_looked_at_once(kernel: Kernel) -> None:
    launch = triton_launch.CachedLauncher(kernel)
    x, y = torch.zeros(64), torch.ones(64)
    launch((7,), (x,), (3, 16), BLOCK=8)
    launch((9, 2), (y,), (3, 16), BLOCK=8)
    assert kernel.calls[0][:2] == ("looked", (7,)) and kernel.calls[0][2][1:] == (3, 16, 8, 4)
    how, grid, (given, *rest) = kernel.calls[1]
    assert how == "known" and grid == (9, 2, 1) and given is y and rest == [3, 16, 8]


@pytest.mark.parametrize(
    "other",
    [
        {"numbers": (3, 17)},
        {"numbers": (3, 1)},
        {"BLOCK": 16},
        {"num_warps": 8},
        {"tensors": (torch.zeros(64)[1:],)},
        {"tensors": (torch.zeros(64, dtype=torch.bfloat16),)},
    ],
    ids=str,
)
def test_what_triton_compiles_anew_is_looked_at(kernel: Kernel, other: dict[str, Any]) -> None:
    launch = triton_launch.CachedLauncher(kernel)
    how: dict[str, Any] = {"tensors": (torch.zeros(64),), "numbers": (3, 16), "BLOCK": 8}
    for each in (how, how | other, how, how | other):
        launch((7,), each["tensors"], each["numbers"], **without(each))
    assert [call[0] for call in kernel.calls] == ["looked", "looked", "known", "known"]


def without(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name not in ("tensors", "numbers")}


def test_another_triton_is_launched_its_own_way(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "_launcher_passes_constexprs", lambda: False)
    launch = triton_launch.CachedLauncher(kernel)
    for _ in range(3):
        launch((1,), (torch.zeros(4),), (4,))
    assert [call[0] for call in kernel.calls] == ["looked"] * 3


def test_what_is_remembered_does_not_grow_for_ever(kernel: Kernel) -> None:
    launch = triton_launch.CachedLauncher(kernel)
    for number in range(3000):
        launch((1,), (torch.zeros(4),), (number,))
    assert len(launch._cache) <= 1024
