"""Peak of what torch allocates on the CPU in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_of(step: Callable[[], object], repeats: int = 8) -> int:
    """Bytes that a step, which has run before, allocates at most beyond what it finds: the smallest
    of several measurements, because gloo's threads may free what they have sent too late."""
    return min(_measured_peak(step) for _ in range(repeats))


def _measured_peak(step: Callable[[], object]) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak
