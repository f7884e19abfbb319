"""What is cached of launches of a kernel, without Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_usp import lowlevel

Call = tuple[str, tuple[int, ...], tuple[Any, ...]]


class Kernel:
    """Records what was launched: the kernel by Triton, or what it compiled."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.calls.append(("triton", grid, (*args, *constants.values())))
            return _Compiled(self.calls)

        return launch


class _Compiled:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.calls.append(("compiled", grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(lowlevel, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(lowlevel, "_launcher_passes_constexprs", lambda: True)
    return Kernel()


def test_an_equal_launch_uses_the_compiled_kernel(kernel: Kernel) -> None:
    launcher = lowlevel.CachedLauncher(kernel)
    x, y = torch.zeros(64), torch.ones(64)
    for tensor in (x, y):
        launcher((9, 2), (tensor,), (3, 16), BLOCK=8)
    kind, grid, (pointer, *rest) = kernel.calls[0]
    assert kind == "triton" and grid == (9, 2) and rest == [3, 16, 8, 4]
    assert pointer.data_ptr() == x.data_ptr() and pointer.dtype == x.dtype
    assert kernel.calls[1] == ("compiled", (9, 2, 1), (y.data_ptr(), 3, 16, 8))


@pytest.mark.parametrize(
    "change",
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
def test_what_triton_compiles_anew_is_launched_by_triton(
    kernel: Kernel, change: dict[str, Any]
) -> None:
    launcher = lowlevel.CachedLauncher(kernel)
    args: dict[str, Any] = {"tensors": (torch.zeros(64),), "numbers": (3, 16), "BLOCK": 8}
    for options in (args, args | change, args, args | change):
        rest = dict(options)
        launcher((7,), rest.pop("tensors"), rest.pop("numbers"), **rest)
    assert [call[0] for call in kernel.calls] == ["triton", "triton", "compiled", "compiled"]


def test_an_unknown_triton_version_launches_itself(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowlevel, "_launcher_passes_constexprs", lambda: False)
    launcher = lowlevel.CachedLauncher(kernel)
    for _ in range(3):
        launcher((1,), (torch.zeros(4),), (4,))
    assert [call[0] for call in kernel.calls] == ["triton"] * 3


def test_the_cache_is_bounded(kernel: Kernel) -> None:
    launcher = lowlevel.CachedLauncher(kernel)
    for number in range(3000):
        launcher((1,), (torch.zeros(4),), (number,))
    assert len(launcher._cache) <= 1024
