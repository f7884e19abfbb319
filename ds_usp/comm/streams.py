"""The streams of a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream`` of a device with an index, in a fraction of its host time."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@lru_cache(maxsize=256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


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
