"""Where the first step of a run is: it compiles kernels and pins host memory, which takes minutes
for long sequences, and without a line it looks like one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

SECONDS = 10.0  # before the first line, and between two


@contextmanager
def progress_lines(
    layers: Sequence[tuple[int, nn.Module]],
    count: int,
    print_line: Callable[[str], None],
    seconds: float = SECONDS,
) -> Iterator[None]:
    """Inside, a line every few seconds has the layer whose kernels this process has launched last.
    A step that is over before the first line prints nothing.

    Args:
        layers: of this rank, each with its number in the model, from 1.
        count: layers of the model.
        print_line: called from another thread.
        seconds: between lines, and before the first.
    """
    place, ended, begin = ["before the first layer"], threading.Event(), time.monotonic()

    def enter(direction: str, number: int, *_: object) -> None:
        place[0] = f"{direction} pass of layer {number} of {count}"

    def watch_backward(number: int, _: nn.Module, __: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(partial(enter, "backward", number))

    def print_lines() -> None:
        note = "; a first step compiles kernels and may pin host memory"
        while not ended.wait(seconds):
            print_line(f"first step, {time.monotonic() - begin:.0f} s: {place[0]}{note}")
            note = ""

    hooks = []
    for number, layer in layers:
        hooks.append(layer.register_forward_pre_hook(partial(enter, "forward", number)))
        hooks.append(layer.register_forward_hook(partial(watch_backward, number)))
    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for hook in hooks:
            hook.remove()
