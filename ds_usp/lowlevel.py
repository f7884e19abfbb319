"""Tools that the packages above share: copies between strided tensors, launches of Triton kernels,
the refusal of second derivatives, functions of other packages with other globals, and a wait for
threads of other packages. Kernels and exchanges call the first two in each pass, a mesh waits for
threads when its process ends; nothing here communicates."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ds_usp.errors import ConfigError, USPError

_MAX_CACHED = 1024  # launches; documents differ from step to step
_ALIGNMENT = 16  # bytes; Triton compiles anew where a pointer's differs
# Triton's compiled kernels take all arguments, constants too, in their order.
_TRITON = (3, 3), (3, 9)
# These lines of a thread's status differ between two looks if it has run in between.
_THREAD_STATE = re.compile(r"^(?:State|\w*voluntary_ctxt_switches):.*", re.MULTILINE)


def strided_copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """``out.copy_(x)``, on GPUs as 16-byte elements where the last dim allows it: twice as fast as
    2-byte elements."""
    if x.is_cuda and out.dtype == x.dtype and not x.is_neg():
        size = x.element_size()
        aligned = _rows_are_16_byte_aligned(size, x.shape[-1], out.stride(), x.stride())
        starts = int(out.storage_offset() * size) | int(x.storage_offset() * size)
        if aligned and not (starts | out.data_ptr() | x.data_ptr()) % 16:
            out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


@lru_cache(maxsize=4096)
def _rows_are_16_byte_aligned(size: int, length: int, *strides: tuple[int, ...]) -> bool:
    """Return whether all rows along the last dim are dense, and begin and end at multiples of 16
    bytes from the first element.

    Args:
        size: bytes of an element.
        length: elements of a row.
        strides: of each tensor, in elements.
    """
    distances = [length, *(stride for row in strides for stride in row[:-1])]
    dense = all(row[-1] == 1 for row in strides)
    return dense and not any(n * size % 16 for n in distances)


@lru_cache(maxsize=8)
def load_triton_module(module: str) -> ModuleType | None:
    """Import a module of Triton kernels; None where Triton is not installed."""
    try:
        return import_module(module)
    except ImportError:
        return None


class _Pointer:
    """An address as Triton inspects it at the first launch; a tuple would be several arguments."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


class PreparedLaunch:
    """A launch of a Triton kernel in which all but device, dtypes and addresses of its tensors is
    fixed: these are given in each call, in the kernel's order.

    Triton inspects every argument of every launch to find the compiled kernel: half of the CPU
    time. Here it is one lookup.

    Args:
        kernel: decorated by ``triton.jit``; its pointers come first, then its integers, then its
            constants.
        grid: of one to three numbers.
        numbers, constants: in the kernel's order.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int, ...],
        *,
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._constants = {**constants, "num_warps": num_warps}
        self._all_numbers = (*numbers, *constants.values())
        self._compiled: dict[object, Callable[..., None]] = {}

    def __call__(
        self, device: torch.device, dtypes: tuple[torch.dtype, ...], addresses: Sequence[int]
    ) -> None:
        bits = 0
        for address in addresses:
            bits |= address
        offsets = tuple([x % _ALIGNMENT for x in addresses]) if bits % _ALIGNMENT else ()
        key = device.index, dtypes, offsets
        run = self._compiled.get(key)
        if run is not None and device.index == torch.cuda.current_device():
            run(*addresses, *self._all_numbers)
            return
        with torch.cuda.device(device):
            if run is not None:
                run(*addresses, *self._all_numbers)
                return
            pointers = map(_Pointer, addresses, dtypes)
            compiled = self._kernel[self._grid](*pointers, *self._numbers, **self._constants)
        if compiled is not None and _launcher_passes_constexprs():
            if len(self._compiled) >= _MAX_CACHED:
                self._compiled.clear()
            self._compiled[key] = compiled[(*self._grid, 1, 1)[:3]]


# Of tensors and a number: the grid, the kernel's integers and its constants.
LaunchArguments = Callable[
    [Sequence[torch.Tensor], int], tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]
]


class CachedLauncher:
    """Launches a Triton kernel that is called again and again with the same integers. ``numbers``
    and ``constants`` are as of :class:`PreparedLaunch`; tensors are on the device of the first."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._cache: dict[object, PreparedLaunch] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        numbers: tuple[int, ...],
        *,
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        key = grid, numbers, num_warps, *constants.values()
        launch = self._cache.get(key)
        if launch is None:
            launch = self._prepare(key, grid, numbers, num_warps=num_warps, **constants)
        dtypes = tuple([x.dtype for x in tensors])
        launch(tensors[0].device, dtypes, [x.data_ptr() for x in tensors])

    def launch_by_tensors(
        self, tensors: Sequence[torch.Tensor], count: int, arguments: LaunchArguments
    ) -> None:
        """Launch with what ``arguments`` returns for these tensors and ``count``. It is not called
        again for the same ``count``, first shape, dtypes and strides, on which alone it may depend;
        one launcher must always be given the same ``arguments``."""
        dtypes = tuple([x.dtype for x in tensors])
        key = count, tensors[0].shape, dtypes, *[x.stride() for x in tensors]
        launch = self._cache.get(key)
        if launch is None:
            grid, numbers, constants = arguments(tensors, count)
            launch = self._prepare(key, grid, numbers, **constants)
        launch(tensors[0].device, dtypes, [x.data_ptr() for x in tensors])

    def _prepare(
        self, key: object, grid: tuple[int, ...], numbers: tuple[int, ...], **options: Any
    ) -> PreparedLaunch:
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        launch = PreparedLaunch(self.kernel, grid, numbers, **options)
        self._cache[key] = launch
        return launch


@lru_cache(maxsize=1)
def _launcher_passes_constexprs() -> bool:
    """Whether this Triton's compiled launcher takes constexprs as arguments too."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return _TRITON[0] <= version < _TRITON[1]


def refuse_second_derivative(operation: str, error: type[USPError] = ConfigError) -> None:
    """Call it in the backward pass of an ``autograd.Function`` whose operations autograd cannot
    follow: collectives, kernels, gradients that the forward pass has computed. Their derivatives
    would be missing from the result without an error. ``operation`` is named in the message.

    Raises:
        USPError: of the class ``error``, where autograd records this backward pass.
    """
    if torch.is_grad_enabled():
        raise error(
            f"the gradient of {operation} was asked to be differentiable itself "
            "(create_graph=True, or torch.func of a gradient), which is not computed here: leave "
            f"create_graph out, or compute this part of the loss without {operation}"
        )


def with_globals(function: FunctionType, names: dict[str, Any], *closure: Any) -> FunctionType:
    """Return a function of the same code whose globals are the dict ``names`` itself, no copy.
    recurrent_layers.py makes such functions in ``enable``, diffusers' processor.py one in each
    eager call of attention: it must stay cheap.

    Args:
        closure: all its cells, in the order of ``co_freevars``; without any its own stay.
    """
    cells = closure or function.__closure__
    clone = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


def wait_for_native_threads(name: str, timeout_s: float) -> None:
    """Wait until the threads of this process that the system knows by ``name``, of which it keeps
    15 characters, sleep; ``timeout_s`` at most. They get the GIL meanwhile. mesh.py waits so for
    gloo's when Python ends. Without ``/proc`` no thread is found."""
    deadline, before = time.monotonic() + timeout_s, list[list[str]]()
    while time.monotonic() < deadline:
        with suppress(OSError):  # a thread has just ended
            texts = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
            states = [_THREAD_STATE.findall(x) for x in texts if x.startswith(f"Name:\t{name}\n")]
            # One that waits for the GIL sleeps too, in short naps: its number of switches rises.
            if states == before and all("sleeping" in state[0] for state in states):
                return
            before = states
        time.sleep(1e-3)
