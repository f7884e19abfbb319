"""All-to-alls of heads by FlashInfer's ``UlyssesCommunicator``: one kernel a tensor exchanges and
transposes.

The kernel runs on the current stream: nothing overlaps it, and it holds its SMs while a rank is
late. So it is for calls that the host's work decides, where an attention call asks for it.
``SequenceMesh.reserve`` makes one a mesh, and ``HeadAllToAll`` calls it in forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.copy_engine import current_stream
from ds_usp.comm.packing import DeferredSum

RANKS = (2, 4, 6, 8)  # for which the kernel is compiled
_CARRIER = torch.bfloat16  # a communicator takes one dtype; the kernel moves bytes


@lru_cache(maxsize=1)
def communicator_class() -> Any:
    """FlashInfer's ``UlyssesCommunicator``; ImportError where it is not installed."""
    return import_module("flashinfer.comm.ulysses").UlyssesCommunicator


def fused_unavailable_reason() -> str | None:
    """Why this process cannot use FlashInfer's exchange; None if it can."""
    try:
        communicator_class()
    except Exception as error:  # a build for another CUDA or torch raises what it likes
        text = f"{type(error).__name__}: {error}"
        return f'FlashInfer cannot be imported ({text}); pip install "ds-usp[flashinfer]"'
    return None


# Note [whose memory]
#
# Peers write to, or read from, a staging buffer of the communicator. It is used again by the next
# exchange, but no result lies there: the kernel's last step copies it to a tensor of the caller's,
# which may be saved for backward. An exchange begins when all ranks' streams have reached it, so in
# one stream none overtakes another; a call in a second stream waits for the first. CUDA graphs take
# copy engines: a replay would not know of calls in other streams, nor of a buffer that has grown.
class FusedExchange:
    """The communicator of one group, made anew where a larger call comes.

    Args:
        group: the ranks; all GPUs of one node, linked by NVLink.
        device: this rank's GPU.

    Attributes:
        exchanges: how many were started.
    """

    captured = False  # by a CUDA graph: none is

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._group, self._device = group, torch.device(device.type, index)
        self._communicator: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.exchanges = 0

    @property
    def reserved_bytes(self) -> int:
        return 0 if self._communicator is None else int(self._communicator.max_bytes)

    def has_capacity(self, size: int) -> bool:
        """Return whether a tensor of so many bytes fits; the same on every rank."""
        return self._communicator is not None and size <= self.reserved_bytes

    def reserve(self, size: int) -> None:
        """Reserve staging memory for tensors of so many bytes; collective.

        Raises:
            RuntimeError: a rank cannot compile the kernel, or has no NVLink; every rank raises it.
        """
        if not self.has_capacity(size):
            self.close()
            self._communicator = communicator_class()(
                self._group, max_bytes=size, dtype=_CARRIER, backend="nvlink", device=self._device
            )

    def close(self) -> None:
        """Free the memory; collective, and waits for all work in flight."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def abort_waits(self) -> bool:
        """A kernel that waits for a rank cannot be ended: as NCCL's it ends with the process."""
        return False

    def note_replay(self) -> None:
        """Do nothing: no CUDA graph has this exchange."""

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """``[B, s, H, D] -> [B, S, h, D]``, new tensors."""
        self._begin()
        scatter = self._communicator.scatter_heads
        return tuple([_viewed(scatter(_carried(x)), x.dtype) for x in tensors])

    def to_sequence(
        self, sources: Sequence[torch.Tensor | DeferredSum], outs: Sequence[torch.Tensor]
    ) -> None:
        """``[B, S, h, D] -> [B, s, H, D]``, written to dense ``outs``."""
        self._begin()
        for source, out in zip(sources, outs, strict=True):
            x = source if isinstance(source, torch.Tensor) else source.result()
            gathered = _viewed(out, _CARRIER)
            self._communicator.gather_heads(_carried(x.to(out.dtype)), out=gathered)

    def _begin(self) -> None:
        self.exchanges += 1
        if self._device.type == "cuda":
            stream = current_stream(self._device)
            if self._stream is not None and self._stream is not stream:
                stream.wait_stream(self._stream)
            self._stream = stream


def _carried(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as the kernel takes them, dense."""
    return _viewed(x.contiguous(), _CARRIER)


def _viewed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.view(dtype)
