"""Calls of the CUDA driver API that torch lacks: signal flags that streams set and wait for, and
copies between addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ds_usp.errors import MeshError

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_OP_WAIT_VALUE, _OP_WRITE_VALUE = (
    1,
    2,
)  # CU_STREAM_MEM_OP_WAIT_VALUE_32, until it is as much; ..._WRITE_VALUE_32
_MAX_BATCH = 255


class CUstreamBatchMemOpParams(ctypes.Structure):
    """The driver's CUstreamBatchMemOpParams, 48 bytes."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class FlagOp(NamedTuple):
    """A stream operation on a 32-bit flag: write it, after all earlier writes are visible, or wait.

    Attributes:
        is_wait: wait until the flag is at least ``value``; else write ``value``.
    """

    address: int
    value: int
    is_wait: bool = False


class FlagOpBatch:
    """Flag operations in this order as one driver call (cuStreamBatchMemOp), whose arguments are
    prepared once."""

    def __init__(self, ops: Sequence[FlagOp]) -> None:
        if len(ops) > _MAX_BATCH:
            raise MeshError(
                f"{len(ops)} flag operations in one call, but the driver takes {_MAX_BATCH}"
            )
        structs = [
            CUstreamBatchMemOpParams(
                _OP_WAIT_VALUE if op.is_wait else _OP_WRITE_VALUE, op.address, op.value
            )
            for op in ops
        ]
        self._count, self._jobs = len(structs), (CUstreamBatchMemOpParams * len(structs))(*structs)

    def enqueue(self, stream: int) -> None:
        """Enqueue all on a stream, which a CUDA graph may be capturing."""
        if self._count:
            _call("cuStreamBatchMemOp_v2", stream, self._count, self._jobs, 0)


class CUDA_MEMCPY2D(ctypes.Structure):  # noqa: N801 # the driver's name
    """The driver's CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_kind", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_kind", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    )


@lru_cache(maxsize=1)
def driver() -> Any:
    """libcuda, with the signatures of the functions used here.

    Raises:
        OSError, AttributeError: there is none, or an older one.
    """
    library = ctypes.CDLL("libcuda.so.1")
    library.cuStreamBatchMemOp_v2.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.POINTER(CUstreamBatchMemOpParams),
        ctypes.c_uint,
    )
    library.cuStreamBatchMemOp_v2.restype = ctypes.c_int
    library.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(CUDA_MEMCPY2D), ctypes.c_void_p)
    library.cuMemcpy2DAsync_v2.restype = ctypes.c_int
    library.cuMemcpyDtoDAsync_v2.argtypes = (
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    library.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    library.cuDevicePrimaryCtxRetain.argtypes = ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
    library.cuDevicePrimaryCtxRetain.restype = ctypes.c_int
    library.cuStreamGetCaptureInfo_v2.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_uint64),
        *[ctypes.c_void_p] * 3,
    )
    library.cuStreamGetCaptureInfo_v2.restype = ctypes.c_int
    library.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
    library.cuCtxSetCurrent.restype = ctypes.c_int
    return library


def graph_capture_id(stream: torch.cuda.Stream) -> int:
    """The id of the CUDA graph that captures the current stream; 0 if none does."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    state, number = ctypes.c_int(), ctypes.c_uint64()
    arguments = stream.cuda_stream, ctypes.byref(state), ctypes.byref(number), None, None, None
    _call("cuStreamGetCaptureInfo_v2", *arguments)
    return number.value


def copy_async(stream: int, dst: int, src: int, size: int) -> None:
    """Copy ``size`` bytes between device addresses (cuMemcpyDtoDAsync)."""
    _call("cuMemcpyDtoDAsync_v2", dst, src, size, stream)


def copy_2d_async(
    stream: int, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int
) -> None:
    """Copy ``rows`` of ``width`` bytes, a pitch in bytes apart (cuMemcpy2DAsync)."""
    device = 2  # CU_MEMORYTYPE_DEVICE
    job = CUDA_MEMCPY2D(
        0, 0, device, None, src, None, src_pitch,
        0, 0, device, None, dst, None, dst_pitch,
        width, rows,
    )  # fmt: skip
    _call("cuMemcpy2DAsync_v2", ctypes.byref(job), stream)


def _call(name: str, *arguments: Any) -> None:
    error = getattr(driver(), name)(*arguments)
    if error == _NO_CONTEXT:  # the runtime binds one to a thread at its first call, as autograd's
        _bind(torch.cuda.current_device())
        error = getattr(driver(), name)(*arguments)
    if error:
        raise MeshError(f"the CUDA driver refused {name}: error {error}")


def _bind(device: int) -> None:
    """Make the device's primary context, which the runtime uses, this thread's: also during the
    capture of a CUDA graph, when streams may not be queried."""
    context = ctypes.c_void_p()
    error = driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    error = error or driver().cuCtxSetCurrent(context)
    if error:
        raise MeshError(f"the CUDA driver gives no context for GPU {device}: error {error}")
