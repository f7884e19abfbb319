"""How long a GPU waits for its host to launch what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Work that the host launches and the GPU then does, some times in a row.

    Args:
        device_s: of the GPU, once.
        host_s: of the host to launch it, once; 0: not known, nothing waits for it.
        times: how often.
    """

    device_s: float
    host_s: float = 0.0
    times: int = 1

    def __add__(self, other: Job) -> Job:
        """Both, one after the other, as one."""
        return Job(self.device_s + other.device_s, self.host_s + other.host_s, self.times)


def waiting_s(jobs: Sequence[Job]) -> float:
    """Seconds that the GPU idles for its host in a row of jobs that nothing synchronizes.

    A flow shop of two machines (Johnson, 1954): what is launched first is computed first, so the
    end is the greatest, over all jobs, of the host's time up to that job and the GPU's from it on.
    Of equal jobs in a row that is the first or the last.
    """
    device = sum(job.device_s * job.times for job in jobs)
    ends, host, rest = device, 0.0, device
    for job in jobs:
        last = host + job.host_s * job.times + job.device_s
        ends = max(ends, host + job.host_s + rest)
        host += job.host_s * job.times
        rest -= job.device_s * job.times
        ends = max(ends, last + rest)
    return ends - device
