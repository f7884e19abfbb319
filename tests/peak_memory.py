"""Peak of what torch allocates on the CPU in a step."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_of(step: Callable[[], object], repeats: int = 8) -> int:
    """Bytes that a step, which has run before, allocates at most beyond what it finds.

    The median of several measurements: gloo's threads may free what they have sent too late, which
    raises one of them and lowers the next, that did not see it allocated.
    """
    return statistics.median_low(_measured_peak(step) for _ in range(repeats))


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


class LiveBytes(TorchDispatchMode):
    """The most bytes of results of operators that live at once; not what a kernel has inside."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        of_inputs = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in of_inputs:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out
