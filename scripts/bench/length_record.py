"""Memory and time at the layer boundaries of the trainer's steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_harness import Session
from torch import Tensor, nn

GIB = 2**30
END = "end"  # the place after a step
Mark = torch.cuda.Event | float
_PRINT_EVERY_S = 10.0


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one place of a step, in bytes.

    Args:
        place: ``forward 3``: the input of layer 3; ``backward 3``: the gradient of its output.
        seconds: since the step began, when the place was launched.
        device, peak: allocated now, and at most since the moment before.
        host: activations and optimizer states in host memory.
    """

    place: str
    seconds: float
    device: int
    peak: int
    host: int

    def cells(self) -> list[str]:
        """Place, seconds and GiB, for a table."""
        sizes = (self.device, self.peak, self.host)
        return [self.place, f"{self.seconds:.2f}", *(f"{size / GIB:.4f}" for size in sizes)]


class StepRecord:
    """The moments of the last step, and the most bytes of all steps.

    Torch counts one peak, which each moment resets: :attr:`peak` is that of all moments.

    Args:
        begin: ``time.monotonic`` of the program's start, for the lines printed in between.
        on_moment: called with each moment at once, so that a run that is cut off leaves its own.

    Attributes:
        peak, reserved, used: most bytes allocated by torch, reserved by its allocator, and used on
            the device by all processes.
        outside: most bytes used there and not reserved by torch's allocator.
        host, states, pinned: most bytes of activations and of optimizer states that were in host
            memory, and the bytes pinned for activations.
        node: most bytes of the machine's memory in use, of this container or of all.
    """

    def __init__(
        self,
        session: Session,
        begin: float,
        on_moment: Callable[[Moment], None] | None = None,
    ) -> None:
        self._session, self._program_begin, self._on_moment = session, begin, on_moment
        self._printed = self._step_begin = time.monotonic()
        self.moments: list[Moment] = []
        self._pairs: list[tuple[str, Mark, Mark]] = []
        self.peak = self.reserved = self.used = self.outside = 0
        self.host = self.states = self.pinned = self.node = 0
        self._offload: Any = None
        self._states: Any = None
        self.title = ""

    def attach(self, loop: Any, *, attention: bool = False) -> None:
        """Record the steps of the trainer's loop.

        Args:
            attention: time the core attention of layers too; a layer whose core attention has hooks
                runs its projections before it, and never heads in chunks.
        """
        from usp_trainer.model import Layer

        layers = [part for part in loop.trainer.engine.module.modules() if isinstance(part, Layer)]
        self._offload, self._states = layers[0].memory.offload, loop.trainer.states
        for layer in layers:
            self._attach_to(layer, f"{layer.number}", self.sample)
            if attention:
                core = layer.layer.self_attention.core_attention
                self._attach_to(core, "attention", None)

    def _attach_to(
        self, module: nn.Module, name: str, sample: Callable[[str], None] | None
    ) -> None:
        """Time a module forward and backward, and call ``sample`` where each begins."""
        kind = "layer" if sample else name

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            begin.clear()
            if sample and torch.is_grad_enabled():
                sample(f"forward {name}")
            begin.append(self._mark())
            x = inputs[0]
            if x.requires_grad:
                x.register_hook(ended_backward)

        def after(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
            self._pairs.append((f"{kind} forward", begin[0], self._mark()))
            if out.requires_grad:
                out.register_hook(began_backward)

        def began_backward(_: Tensor) -> None:
            if sample:
                sample(f"backward {name}")
            backward.append(self._mark())

        def ended_backward(_: Tensor) -> None:
            if backward:
                self._pairs.append((f"{kind} backward", backward.pop(), self._mark()))

        begin: list[Mark] = []
        backward: list[Mark] = []
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def begin_step(self, title: str) -> None:
        """Forget the moments of the step before."""
        self.moments.clear()
        self._pairs.clear()
        self.title, self._step_begin = title, time.monotonic()
        if self._session.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def sample(self, place: str) -> None:
        """Add a moment; every ten seconds print it."""
        device, peak, now = 0, 0, time.monotonic()
        if self._session.on_gpu:
            device, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            used, reserved = total - free, torch.cuda.memory_reserved()
            self.used, self.reserved = max(self.used, used), max(self.reserved, reserved)
            self.outside = max(self.outside, used - reserved)
        host = self._count_host()
        self.peak = max(self.peak, peak)
        self.moments.append(Moment(place, now - self._step_begin, device, peak, host))
        if self._on_moment is not None:
            self._on_moment(self.moments[-1])
        if now - self._printed > _PRINT_EVERY_S:
            self._printed = now
            self.print(
                f"{self.title} {place}: {device / GIB:.1f} GiB, at most {self.peak / GIB:.1f}, "
                f"{self.outside / GIB:.1f} outside torch, {host / GIB:.1f} on the host, machine "
                f"{self.node / GIB:.1f}"
            )

    def _count_host(self) -> int:
        pool = self._offload.copier.pool
        here = (pool.num_blocks - pool.num_free) * pool.block_bytes
        states = self._states.bytes_away if self._states is not None else 0
        self.host, self.states = max(self.host, here), max(self.states, states)
        self.pinned = max(self.pinned, pool.num_blocks * pool.block_bytes)
        self.node = max(self.node, machine_memory_bytes())
        return here + states

    def detach(self) -> None:
        """Drop the references to the offload and the states, which hold the host memory."""
        self._offload = self._states = None

    def print(self, line: str) -> None:
        """Print on rank 0, with the seconds since the program's start."""
        self._session.print0(f"[{time.monotonic() - self._program_begin:6.1f} s] {line}")

    def seconds(self) -> dict[str, float]:
        """Of the last step, device time of its layers and of their attention, forward and backward;
        without recomputation, which the forward passes would include."""
        self._session.synchronize()
        total: dict[str, float] = {}
        for name, begin, end in self._pairs:
            total[name] = total.get(name, 0.0) + _between(begin, end)
        return total

    def _mark(self) -> Mark:
        if not self._session.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return begin.elapsed_time(end) / 1e3


def machine_memory_bytes() -> int:
    """Bytes in use of this container, or where none is counted of the whole machine."""
    current = Path("/sys/fs/cgroup/memory.current")
    if current.is_file():
        return int(current.read_text())
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return values["MemTotal"] - values["MemAvailable"]
