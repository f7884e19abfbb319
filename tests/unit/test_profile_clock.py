"""The clock on a GPU that is a sum of numbers: what it reads is what the device and its host took.

The host has a time, and the device one until which it is busy. A launch takes the host's time and
queues the device's; only ``synchronize`` makes the host wait.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_usp.profiling import StepTimer, layer_times, step_timer
from ds_usp.profiling.step_timer import Step, Times

CYCLES_PER_S = 1.98e9  # an H200's


class Machine:
    """One GPU and its host, in seconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.launches = self.holds = 0
        self.cold = False

    def perf_counter(self) -> float:
        return self.host

    def run(self, device_s: float, host_s: float) -> None:
        self.host += host_s
        self.device = max(self.device, self.host) + device_s
        self.launches += 1

    def step(self, device_s: float, host_s: float) -> Step:
        return lambda: self.run(device_s, host_s)

    def sleep(self, cycles: int) -> None:
        self.device = max(self.device, self.host) + cycles / CYCLES_PER_S
        self.holds += 1

    def synchronize(self, _: object = None) -> None:
        self.host, self.cold = max(self.host, self.device), True


class Event:
    """What ``torch.cuda.Event`` is of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.at = machine, 0.0

    def record(self) -> None:
        self.at = max(self._machine.device, self._machine.host)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=made.perf_counter))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(made))
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    return made


def timer_of(machine: Machine, budget_s: float = 60.0) -> StepTimer:
    timer = StepTimer(torch.device("cpu"), budget_s)
    timer.on_gpu = True
    return timer


@pytest.mark.parametrize(("device_s", "host_s"), [(8e-3, 1e-3), (1e-3, 8e-3), (2e-3, 2e-3)])
def test_device_and_host_are_told_apart(machine, device_s, host_s):
    """In a row such steps take the slower one's time; held back, a GPU shows its own."""
    times = timer_of(machine).times(machine.step(device_s, host_s), 0.2)
    # In a row the first launch is not hidden: one of the 25 steps that 0.2 s hold.
    assert times.device_s == pytest.approx(device_s, rel=0.02)
    assert times.host_s == pytest.approx(host_s)
    assert timer_of(machine).seconds(machine.step(device_s, host_s), 0.2) == pytest.approx(
        max(device_s, host_s), rel=0.1
    )


def test_the_first_launch_finds_its_caches_cold(machine):
    def step() -> None:
        machine.run(1e-2, 5e-3 if machine.cold else 1e-3)
        machine.cold = False

    assert timer_of(machine).times(step, 0.2).host_s == pytest.approx(1e-3)


def test_a_spent_budget_leaves_one_held_lap(machine):
    for budget_s, held in ((60.0, 5), (0.0, 1)):
        machine.launches = machine.holds = 0
        times = timer_of(machine, budget_s).times(machine.step(4e-3, 1e-3), 0.1)
        assert machine.holds == held
        assert times == Times(pytest.approx(4e-3, rel=0.05), pytest.approx(1e-3))  # type: ignore[arg-type]
    assert machine.launches == 2 + 2  # one that warms up, one to hold it for, and the lap's two


@pytest.mark.parametrize(
    ("both_s", "backward_s"),
    [
        ((4e-3, 7e-3), (3e-3, 5e-3)),
        ((0.9e-3, 1.9e-3), (1e-4, 2e-4)),  # noise must not make it free, or less
    ],
)
def test_backward_is_what_both_take_beyond_forward_a_tenth_of_it_at_least(
    machine, both_s, backward_s
):
    times = timer_of(machine).forward_backward(
        machine.step(1e-3, 2e-3), machine.step(*both_s), 0.05
    )
    for measured, seconds in zip(times, ((1e-3, 2e-3), backward_s), strict=True):
        assert (measured.device_s, measured.host_s) == pytest.approx(seconds)


def test_a_layers_times_are_device_there_and_back_then_host(machine):
    weight = torch.ones(3, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        machine.run(1e-3, 2e-3)
        out = x * weight
        out.register_hook(lambda _: machine.run(3e-3, 5e-3))
        return out

    times: Any = layer_times(timer_of(machine), layer, [weight], torch.ones(2, 3), 0.05)
    assert times == pytest.approx((1e-3, 3e-3, 2e-3, 5e-3))
