"""Calls of the CUDA driver API that torch lacks, by NVIDIA's cuda-bindings: signal flags that
streams set and wait for, and copies between addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ds_usp.errors import MeshError

_MIN_VERSION = 11070  # CUDA 11.7, the first with cuStreamBatchMemOp_v2
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_BATCH = 255


@lru_cache(maxsize=1)
def driver() -> Any:
    """NVIDIA's ``cuda.bindings.driver``, on which newer CUDA builds of torch depend.

    Raises:
        ImportError: it is not installed.
        RuntimeError: there is no NVIDIA driver, or one older than CUDA 11.7.
    """
    try:
        module = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ImportError("cuda-bindings is missing (pip install cuda-bindings)") from error
    status, version = module.cuDriverGetVersion()
    if status:
        raise RuntimeError(f"the NVIDIA driver cannot be used: error {int(status)}")
    if version < _MIN_VERSION:
        release = f"CUDA {version // 1000}.{version % 1000 // 10}"
        raise RuntimeError(f"the NVIDIA driver is of {release}; copy engines need CUDA 11.7")
    return module


@lru_cache(maxsize=1)
def _device_memory() -> Any:
    return driver().CUmemorytype.CU_MEMORYTYPE_DEVICE


class FlagOp(NamedTuple):
    """A stream operation on a 32-bit flag: write it, after all earlier writes are visible, or wait.

    Attributes:
        is_wait: wait until the flag is at least ``value``; else write ``value``.
    """

    address: int
    value: int
    is_wait: bool = False


class FlagOpBatch:
    """Flag operations in this order as one driver call, whose arguments are prepared once."""

    def __init__(self, ops: Sequence[FlagOp]) -> None:
        if len(ops) > _MAX_BATCH:
            raise MeshError(
                f"{len(ops)} flag operations in one call, but the driver takes {_MAX_BATCH}"
            )
        self._ops = ops

    def enqueue(self, stream: int) -> None:
        """Enqueue all on a stream, which a CUDA graph may be capturing."""
        if self._ops:
            _call(driver().cuStreamBatchMemOp, stream, len(self._ops), self._params, 0)

    @cached_property
    def _params(self) -> list[Any]:
        """The operations as structs of ``cuStreamBatchMemOp``."""
        kinds = driver().CUstreamBatchMemOpType
        params = [driver().CUstreamBatchMemOpParams() for _ in self._ops]
        for param, op in zip(params, self._ops, strict=True):
            field = param.waitValue if op.is_wait else param.writeValue
            kind = "WAIT" if op.is_wait else "WRITE"
            field.operation = getattr(kinds, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
            field.address, field.value = op.address, driver().cuuint32_t(op.value)
            field.flags = 0  # of a wait: CU_STREAM_WAIT_VALUE_GEQ
        return params


def graph_capture_id(stream: torch.cuda.Stream) -> int:
    """The id of the CUDA graph that captures the current stream; 0 if none does."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    _, _status, capture_id, *_ = _call(driver().cuStreamGetCaptureInfo, stream.cuda_stream)
    return int(capture_id)


def copy_async(stream: int, dst: int, src: int, size: int) -> None:
    """Copy ``size`` bytes between device addresses."""
    _call(driver().cuMemcpyDtoDAsync, dst, src, size, stream)


def copy_2d_async(
    stream: int, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int
) -> None:
    """Copy ``rows`` of ``width`` bytes, a pitch in bytes apart."""
    copy = driver().CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = _device_memory()
    copy.srcDevice, copy.srcPitch = src, src_pitch
    copy.dstDevice, copy.dstPitch = dst, dst_pitch
    copy.WidthInBytes, copy.Height = width, rows
    _call(driver().cuMemcpy2DAsync, copy, stream)


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
    """Call a driver function and check its error code; returns (code, results...)."""
    results = function(*arguments)
    if results[0]:
        # The runtime binds a context at a thread's first call of it; autograd's threads are new.
        if results[0] == _NO_CONTEXT:
            _bind(torch.cuda.current_device())
            results = function(*arguments)
        if results[0]:
            error = int(results[0])
            raise MeshError(f"the CUDA driver refused {function.__name__}: error {error}")
    return results


def _bind(device: int) -> None:
    """Make the device's primary context, which the runtime uses, this thread's: also during the
    capture of a CUDA graph, when streams may not be queried."""
    error, context = driver().cuDevicePrimaryCtxRetain(device)
    error = error or driver().cuCtxSetCurrent(context)[0]
    if error:
        raise MeshError(f"the CUDA driver gives no context for GPU {device}: error {int(error)}")
