"""megatron-core and Megatron-LM on machines without a GPU, where "cuda" means the CPU.

``cpu_patch_table.py`` names the functions of torch or of Megatron that they replace, where there is
no GPU. Each gets the replaced function as its first argument, then the caller's arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def create(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A factory function of torch: the tensor is made on the CPU, in pageable memory."""
    if kwargs.get("device") is not None:
        kwargs["device"] = _without_cuda(kwargs["device"])
    kwargs.pop("pin_memory", None)  # raises without a GPU
    return original(*args, **kwargs)


def to_cuda(original: Callable[..., Tensor], tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """``Tensor.cuda``, ``Tensor.pin_memory``: the tensor itself."""
    return tensor


def to(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``."""
    if kwargs.get("device") is not None:
        kwargs["device"] = _without_cuda(kwargs["device"])
    return original(tensor, *map(_without_cuda, args), **kwargs)


def type_name(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type``: the name of a type is CUDA's, which Megatron's optimizers compare."""
    result = original(tensor, *args, **kwargs)
    if isinstance(result, str) and not result.startswith("torch.cuda."):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def current_device(original: Callable[[], int]) -> torch.device:
    """The device on which megatron-core allocates."""
    return _CPU


def nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replaces what has no meaning on the CPU, where operations are complete when they return."""


def current_stream(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Stream:
    """The stream of the CPU."""
    return Stream()


def stream_context(original: Callable[..., Any], stream: Any) -> Any:
    """``torch.cuda.stream``, for :class:`Stream`."""
    return nullcontext()


class Event:
    """``torch.cuda.Event`` of a device that is never behind: all work is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class Stream:
    """``torch.cuda.Stream`` of a device that has one order of execution: nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any = None) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


def get_random_state(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The state of the CPU's generator, from which "cuda" tensors are drawn."""
    return torch.get_rng_state()


def set_random_state(
    original: Callable[..., None], state: Tensor, *args: Any, **kwargs: Any
) -> None:
    """Restore a state of :func:`get_random_state`."""
    torch.set_rng_state(state)


def seed(original: Callable[[int], None], seed: int) -> None:
    """Seed the CPU's generator."""
    torch.default_generator.manual_seed(seed)


@contextmanager
def fork_random_state(
    original: Callable[..., Any], tracker: Any, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """``CudaRNGStatesTracker.fork`` without its warning that the CPU's generator was used."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    disabled, logger.disabled = logger.disabled, True
    try:
        with original(tracker, *args, **kwargs):
            yield
    finally:
        logger.disabled = disabled


def p2p_ops(original: Callable[..., Any], **kwargs: Any) -> Any:
    """``_p2p_ops``, called by keywords: sends hold their tensors' memory until they are complete.

    The interleaved schedule replaces ``output.data`` while the send is in flight. CUDA's allocator
    reuses such memory in stream order only, the CPU's at once. The Work that ``isend`` returns
    holds the detached alias. ``_batched_p2p_ops`` waits before it returns and needs nothing.
    """
    for name in ("tensor_send_prev", "tensor_send_next"):
        if kwargs[name] is not None:
            kwargs[name] = kwargs[name].detach()
    return original(**kwargs)


def move_to_host(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """``maybe_move_tensor_to_cpu``, whose array is of the sizes that an all-to-all takes: it makes
    one of a tensor on CUDA alone."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def initialize_megatron(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``initialize_megatron``, which refuses to start without CUDA."""
    return original(*args, **{**kwargs, "allow_no_cuda": True})


def architecture(original: Callable[[], int]) -> int:
    """``get_device_arch_version``: one that needs no limit on concurrent kernels."""
    return 10


def with_one_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that leaves out groups or seeds where it counts no GPU: it counts one."""
    count = torch.cuda.device_count
    torch.cuda.device_count = lambda: 1
    try:
        return original(*args, **kwargs)
    finally:
        torch.cuda.device_count = count


def _without_cuda(device: Any) -> Any:
    """The CPU for a CUDA device, by name or as ``torch.device``; anything else as it is."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return _CPU
    return _CPU if isinstance(device, torch.device) and device.type == "cuda" else device
