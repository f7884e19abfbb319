"""A second stream, on which exchanges run while the first one computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class Lane:
    """Runs exchanges beside the current stream of a GPU; on a CPU, or if told so, in place.

    Memory is handed over without waiting and without torch's ``record_stream``, which would keep
    it until the GPU has caught up with the host: a task starts after all that the current stream
    was given before, so what tasks allocate may be forgotten at any time; what they use of the
    current stream's is held until that stream has waited for them.

    Args:
        device: where the tensors are.
        beside: False runs everything in place.
    """

    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        self._main = self._side = None
        if beside and device.type == "cuda":
            self._main = current_stream(device)
            self._side = _side_stream(device, self._main.cuda_stream)
        self._tasks = 0
        self._held: list[tuple[int, object]] = []

    def run(self, task: Callable[[], Result], uses: object = None) -> Cargo[Result]:
        """Run ``task`` after all that the current stream was given so far, beside what follows.

        Args:
            uses: what the task reads of the current stream's memory and the caller may forget.
        """
        if self._side is None or self._main is None:
            return Cargo(task(), 0, None)
        self._tasks += 1
        self._held.append((self._tasks, uses))
        self._side.wait_stream(self._main)
        device = torch.cuda.current_device()
        torch.cuda.set_stream(self._side)  # a third of the host time of torch.cuda.stream
        try:
            return Cargo(task(), self._tasks, self._side.record_event())
        finally:
            torch.cuda.set_stream(self._main)
            if device != self._main.device_index:  # which set_stream makes the current one
                torch.cuda.set_device(device)

    def take(self, cargo: Cargo[Result]) -> Result:
        """What a task returned; the current stream waits until it is there."""
        if cargo.done is not None and self._main is not None:
            self._main.wait_event(cargo.done)
            self._held = [(task, uses) for task, uses in self._held if task > cargo.task]
        return cargo.result

    def join(self) -> None:
        """Let the current stream wait for everything that was run."""
        if self._side is not None and self._main is not None:
            self._main.wait_stream(self._side)
            self._side.wait_stream(self._main)
            self._held.clear()


class Cargo(Generic[Result]):
    """What a task on a lane returns, and when it is there."""

    def __init__(self, result: Result, task: int, done: torch.cuda.Event | None) -> None:
        self.result, self.task, self.done = result, task, done


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream`` of a device with an index, in a fraction of its host time."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@lru_cache(maxsize=256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """One a stream that computes, so that no two of them share its memory. Of high priority: its
    short copies are not to queue behind a long kernel."""
    return torch.cuda.Stream(device, priority=-1)


def wait_for_stream(stream: Any, *tensors: torch.Tensor) -> None:
    """Order what follows after another stream's work, and that stream after our gradients.

    Args:
        stream: None: there is none.
    """
    if stream is None or tensors[0].device.type == "cpu":
        return
    device = torch.get_device_module(tensors[0].device)
    device.current_stream().wait_stream(stream)

    def hand_over(grad: torch.Tensor) -> None:
        stream.wait_stream(device.current_stream())

    for x in tensors:
        if x.requires_grad:
            x.register_hook(hand_over)
