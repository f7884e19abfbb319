"""CUDA streams: the current one, and ordering after another."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream`` of a device with an index, in a fraction of its CPU time."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@lru_cache(maxsize=256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    """The stream object of these ids, made once, as making it costs CPU time."""
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def wait_for_stream(stream: Any, *tensors: torch.Tensor) -> None:
    """Let the current stream wait for another one, and that one for the tensors' gradients.

    Args:
        stream: None: nothing to wait for.
    """
    if stream is None or tensors[0].device.type == "cpu":
        return
    device = torch.get_device_module(tensors[0].device)
    device.current_stream().wait_stream(stream)

    def wait_in_backward(grad: torch.Tensor) -> None:
        stream.wait_stream(device.current_stream())

    for x in tensors:
        if x.requires_grad:
            x.register_hook(wait_in_backward)
