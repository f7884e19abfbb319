"""How long a GPU waits for its host to launch what it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """Work that the host launches and the GPU then does, in the order in which it is launched.

    A flow shop of two machines (Johnson, 1954): nothing synchronizes them, so the GPU ends at the
    greatest, over all launches, of the host's time up to that launch and the GPU's from it on.
    Jobs are added and multiplied: one after the other, and so many times.

    Args:
        device_s: of the GPU.
        host_s: of the host to launch all of it; 0: not known, nothing waits for it.
        wait_s: what the GPU idles until all of it is done; one launch: until it is launched.
    """

    device_s: float
    launch_s: float = 0.0
    wait_s: float = -1.0

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            object.__setattr__(self, "wait_s", self.launch_s)

    def __add__(self, other: LaunchedWork) -> LaunchedWork:
        wait = max(self.wait_s, self.launch_s - self.device_s + other.wait_s)
        return LaunchedWork(self.device_s + other.device_s, self.launch_s + other.launch_s, wait)

    def __mul__(self, times: int) -> LaunchedWork:
        if times == 0:
            return NOTHING
        behind = max(0.0, (times - 1) * (self.launch_s - self.device_s))
        return LaunchedWork(times * self.device_s, times * self.launch_s, self.wait_s + behind)

    def fraction(self, of: int) -> LaunchedWork:
        """One of so many equal launches."""
        return LaunchedWork(self.device_s / of, self.launch_s / of)

    def in_launches(self, launches: int) -> LaunchedWork:
        """The same work in so many equal launches."""
        return self.fraction(launches) * launches

    def scaled(self, measured: LaunchedWork, formula: LaunchedWork) -> LaunchedWork:
        """This job by what is known of another one; the host launches as much as for that."""
        return LaunchedWork(self.device_s * measured.device_s / formula.device_s, measured.launch_s)

    def without_launch_time(self) -> LaunchedWork:
        """Of a host that is not known."""
        return LaunchedWork(self.device_s)


NOTHING = LaunchedWork(0.0)
