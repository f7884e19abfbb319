"""Seconds of a step on the GPU and of its launch on the CPU, the same numbers on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

Step = Callable[[], object]

_REPEATS, _MAX_STEPS = 3, 200
# While a sleep kernel holds the GPU, for four steps and at most so long; its cycles are of a fast
# GPU's clock, so that on no GPU the sleep is shorter.
_HELD_REPEATS, _HELD_STEPS, _MAX_HELD_S, _CYCLES_PER_S = 5, 2, 0.15, 2e9


@dataclass(frozen=True)
class Times:
    """Seconds of a step: of the device, when the CPU launches ahead of it; and of the CPU to launch
    it, 0 on a CPU device."""

    device_s: float
    host_s: float


class StepTimer:
    """Times steps, within a budget that is the same on all ranks; collective.

    Args:
        budget_s: seconds for all measurements together; beyond it a measurement is one repeat after
            a warm-up.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self._budget_s = device, budget_s
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._begin = time.perf_counter()
        self.on_gpu = device.type == "cuda"

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begin

    def seconds(self, step: Step, max_s: float = 0.3) -> float:
        """Seconds of one step on the slowest rank: the median of ``_REPEATS``, each the mean of up
        to ``_MAX_STEPS`` steps in a row, after 2 warm-up steps.

        The CPU launches ahead of a GPU, as in training. Where the timer's budget is spent it is
        the time of the second warm-up step.

        Args:
            max_s: seconds for all repeats together. They take longer if not one step fits into
                each: up to 4 ``max_s``; beyond that there is one repeat, of one step.
        """
        step_s, remaining_s = self._warm_up(step, max_s)
        if remaining_s <= 0:
            return step_s
        steps = max(1, min(_MAX_STEPS, int(remaining_s / _REPEATS / step_s)))
        repeats = _REPEATS if _REPEATS * step_s < 4 * max_s else 1
        return statistics.median(
            self._max_over_ranks([self._time_once(step, steps)])[0] for _ in range(repeats)
        )

    def times(self, step: Step, max_s: float = 0.3) -> Times:
        """Device and CPU launch time of a step, on the slowest rank.

        A GPU is kept busy by a sleep kernel while the CPU launches, so that neither waits for the
        other. A step that is GPU-bound is timed again in a row, at the sustained clock.
        """
        if not self.on_gpu:
            return Times(self.seconds(step, max_s), 0.0)
        step_s, remaining_s = self._warm_up(step, max_s)
        repeats = _HELD_REPEATS if remaining_s > 0 else 1
        held = [
            self._time_with_gpu_held(step, min(4 * step_s, _MAX_HELD_S)) for _ in range(repeats)
        ]
        # A rank's median, then the slowest rank: an outlier of one rank does not count.
        device, host = self._max_over_ranks(
            [statistics.median(times) for times in zip(*held, strict=True)]
        )
        steps = int(remaining_s / max(device, host))
        if device <= host or steps < 1:
            return Times(device, host)
        self._time_once(step, -(-steps // 2))
        return Times(self._max_over_ranks([self._time_once(step, steps)])[0], host)

    def forward_backward(
        self, forward: Step, both_steps: Step, max_s: float
    ) -> tuple[Times, Times]:
        """Times of a forward step, and of the backward that ``both_steps`` adds to it."""
        forward_times, total = self.times(forward, max_s), self.times(both_steps, max_s)
        backward = (
            max(total_s - forward_s, 0.1 * forward_s)
            for total_s, forward_s in (
                (total.device_s, forward_times.device_s),
                (total.host_s, forward_times.host_s),
            )
        )
        return forward_times, Times(*backward)

    def overlapped(self, first: Step, second: Step, max_s: float = 0.3) -> float:
        if not self.on_gpu:
            return self.seconds(lambda: (first(), second()), max_s)
        side, main = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)

        def both_steps() -> None:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                second()
            first()
            main.wait_stream(side)

        return self.seconds(both_steps, max_s)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _warm_up(self, step: Step, max_s: float) -> tuple[float, float]:
        """Seconds of a step after a warm-up, and seconds that remain for repeats."""
        self._time_once(step, 1)
        step_s, spent = self._max_over_ranks([self._time_once(step, 1), self.elapsed_s])
        return step_s, min(max_s, self._budget_s - spent)

    def _time_once(self, step: Step, steps: int) -> float:
        """Mean seconds of so many steps in a row on this rank, after all ranks are idle."""
        self.synchronize()
        self._max_over_ranks([0.0])  # a barrier
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return (time.perf_counter() - begin) / steps

    def _time_with_gpu_held(self, step: Step, hold_s: float) -> tuple[float, float]:
        """This rank's GPU and CPU launch seconds of a step, launched while a sleep kernel of
        ``hold_s`` seconds, which is not counted, holds the GPU, so that it never waits for a
        launch. The mean of the GPU's; the smallest of the CPU's, whose caches are cold at first."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        self._max_over_ranks([0.0])  # a barrier: the CPUs begin together
        torch.cuda._sleep(int(hold_s * _CYCLES_PER_S))
        if self.world > 1:  # the GPUs begin together, when the last of them wakes
            dist.all_reduce(torch.zeros(1, device=self.device))
        begin.record()
        launched = [time.perf_counter()]
        for _ in range(_HELD_STEPS):
            step()
            launched.append(time.perf_counter())
        end.record()
        self.synchronize()
        host = min(later - earlier for earlier, later in pairwise(launched))
        return begin.elapsed_time(end) / 1e3 / _HELD_STEPS, host

    def _max_over_ranks(self, values: list[float]) -> list[float]:
        """Each value's maximum over the ranks; collective."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        maxima: list[float] = tensor.tolist()
        return maxima
