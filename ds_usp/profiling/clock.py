"""Time of a step on this rank's device, the same number on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

Step = Callable[[], object]

_LAPS, _MOST_STEPS = 3, 200


class Clock:
    """Measures steps in a row, within a budget that all ranks see alike.

    Collective: every rank measures the same steps in the same order.

    Args:
        device: where steps run.
        budget_s: seconds for all measurements together; a measurement beyond them is short.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self._budget_s = device, budget_s
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._begin = time.perf_counter()
        self.on_gpu = device.type == "cuda"

    @property
    def elapsed_s(self) -> float:
        """Since this clock was made, on this rank."""
        return time.perf_counter() - self._begin

    def seconds(self, step: Step, most_s: float = 0.3) -> float:
        """One step's time on the slowest rank: the median of some laps of many steps in a row.

        The host runs ahead of a GPU, as it does in training.

        Args:
            most_s: what the laps may take together, after a warm-up.
        """
        self._lap(step, 1)
        one, spent = self._most([self._lap(step, 1), self.elapsed_s])
        left = min(most_s, self._budget_s - spent)
        steps = max(1, min(_MOST_STEPS, int(left / _LAPS / one)))
        laps = _LAPS if left > 0 and _LAPS * one < 4 * most_s else 1
        return statistics.median(self._most([self._lap(step, steps)])[0] for _ in range(laps))

    def together(self, first: Step, second: Step, most_s: float = 0.3) -> float:
        """Seconds of two steps that begin at once, on a GPU each on a stream of its own."""
        if not self.on_gpu:
            return self.seconds(lambda: (first(), second()), most_s)
        side, main = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)

        def both() -> None:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                second()
            first()
            main.wait_stream(side)

        return self.seconds(both, most_s)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _lap(self, step: Step, steps: int) -> float:
        self.synchronize()
        self._most([0.0])  # ranks begin together
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return (time.perf_counter() - begin) / steps

    def _most(self, values: list[float]) -> list[float]:
        if self.world == 1:
            return values
        tensor = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found
