"""How long a GPU waits for the CPU to launch its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_usp.planner.profile_rows import launch_seconds, seconds_at


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """Kernels in launch order: GPU seconds, CPU launch seconds, and the GPU's idle time.

    A flow shop of two machines (Johnson, 1954): nothing synchronizes them, so the GPU ends at the
    maximum over all launches of the CPU's time up to that launch plus the GPU's time from it on.
    ``a + b`` runs one after the other, ``a * n`` n times.

    Args:
        device_s: of the GPU.
        launch_s: of the CPU to launch all of it; 0: not known, the GPU never waits.
        wait_s: GPU idle time until the end; of one launch: until it is launched.
    """

    device_s: float
    launch_s: float = 0.0
    wait_s: float = -1.0

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            object.__setattr__(self, "wait_s", self.launch_s)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Any], size: float, by: str, seconds: str, launch: str
    ) -> LaunchedWork:
        """Interpolated between a profile's rows, whose fields are named."""
        points = [(getattr(row, by), getattr(row, launch)) for row in rows]
        return cls(seconds_at(rows, by, seconds, size), launch_seconds(points, size))

    def __add__(self, other: LaunchedWork) -> LaunchedWork:
        wait = max(self.wait_s, self.launch_s - self.device_s + other.wait_s)
        return LaunchedWork(self.device_s + other.device_s, self.launch_s + other.launch_s, wait)

    def __mul__(self, times: int) -> LaunchedWork:
        if times == 0:
            return NOTHING
        behind = max(0.0, (times - 1) * (self.launch_s - self.device_s))
        return LaunchedWork(times * self.device_s, times * self.launch_s, self.wait_s + behind)

    def fraction(self, of: int) -> LaunchedWork:
        """The work of one of so many equal launches."""
        return LaunchedWork(self.device_s / of, self.launch_s / of)

    def part(self, share: float) -> LaunchedWork:
        """A share of the work, of its GPU and its launch time."""
        return LaunchedWork(self.device_s * share, self.launch_s * share)

    def in_launches(self, launches: int) -> LaunchedWork:
        """The same work in so many equal launches."""
        return self.fraction(launches) * launches

    def scaled(self, measured: LaunchedWork, formula: LaunchedWork) -> LaunchedWork:
        """Times measured / formula of similar work, with that work's launch time."""
        return LaunchedWork(self.device_s * measured.device_s / formula.device_s, measured.launch_s)

    def without_launch_time(self) -> LaunchedWork:
        """This work with a launch time that is not known."""
        return LaunchedWork(self.device_s)


NOTHING = LaunchedWork(0.0)
