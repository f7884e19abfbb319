"""The table of kernels and the choice among them, which ``attention/plan.py`` makes once a plan of
a call, on every rank by itself; the ranks then compare the kernel's name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import cast

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.kernels.api import (
    AttentionKernel,
    KernelRequest,
    PaddedHeadDimKernel,
    UnsuitableDeviceError,
)

Reason = str | Exception


@dataclass(frozen=True)
class KernelEntry:
    """One kernel: its public name and where its class is; imported when it is first considered. The
    name of one that is in no table is its place: ``module:Class``."""

    name: str
    module: str
    class_name: str


# Best first: "auto" takes the first that can serve the request. settings.py has the names too.
KERNELS = (
    KernelEntry("flash4", "ds_usp.kernels.flash4", "Flash4Kernel"),
    KernelEntry("flash3", "ds_usp.kernels.flash3", "Flash3Kernel"),
    KernelEntry("cudnn", "ds_usp.kernels.cudnn", "CudnnKernel"),
    KernelEntry("flash2", "ds_usp.kernels.flash2", "Flash2Kernel"),
    KernelEntry("efficient", "ds_usp.kernels.efficient", "EfficientKernel"),
    KernelEntry("sdpa", "ds_usp.kernels.sdpa", "SdpaKernel"),
    KernelEntry("eager", "ds_usp.kernels.eager", "EagerKernel"),
)
AUTO = "auto"


# A kernel is chosen from what it declares (KernelCaps), not by trying it: a try would have to run
# on every rank, some failures are silent wrong numbers, and the message needs the reasons.
# What a library really supports was measured once and stands in its row of HEAD_DIMS.
@lru_cache(maxsize=1024)
def select_kernel(request: KernelRequest, name: str = AUTO) -> AttentionKernel:
    """The best kernel for the request, or the named one, with its soft cap and padding; for
    documents, which may be many, the best that computes them in one call, if any does.

    Raises:
        UnsupportedAttentionError: no kernel can serve it; the message lists each one's reason.
    """
    check_kernel_name(name)
    reasons, without_varlen = [], []
    for entry in _named(name):
        kernel, reason = _load_if_suitable(entry, request)
        if kernel is None:
            reasons.append(f"  {entry.name}: {reason}")
        elif request.documents and not kernel.caps.varlen:
            without_varlen.append(kernel)
        else:
            return _adapted(kernel, request)
    if without_varlen:
        return _adapted(without_varlen[0], request)
    raise UnsupportedAttentionError(f"no attention kernel serves {request}:\n" + "\n".join(reasons))


def _named(name: str) -> tuple[KernelEntry, ...]:
    """The rows of a name; of "auto" all, of a kernel of the user's own one that is made of it."""
    # By its place and not by a call that registers it: a name goes through flags and configurations
    # to every rank, and the process has no table that one rank may have changed and another not.
    if ":" in name:
        return (KernelEntry(name, *name.split(":")),)
    return tuple(entry for entry in KERNELS if name in (AUTO, entry.name))


def _adapted(kernel: AttentionKernel, request: KernelRequest) -> AttentionKernel:
    """The kernel with the padding and the soft cap of a request, which it can serve."""
    dims = kernel.caps.head_dims.padded(request.head_dims)
    if dims != request.head_dims:
        kernel = PaddedHeadDimKernel(kernel, dims)
    return kernel if request.softcap is None else kernel.with_softcap(request.softcap)


@lru_cache(maxsize=1024)
def missing_libraries(request: KernelRequest) -> str | None:
    """The warning, in one line, that "auto" chose a slower kernel for want of a library; None where
    no missing one would serve the request better on this device and dtype.

    Raises:
        UnsupportedAttentionError: no kernel can serve the request.
    """
    chosen = select_kernel(request)
    better = KERNELS[: [entry.name for entry in KERNELS].index(chosen.name)]
    reasons = [(entry.name, _load_if_suitable(entry, request)[1]) for entry in better]
    missing = [
        f"{name} ({str(reason).splitlines()[0]})"
        for name, reason in reasons
        if isinstance(reason, Exception) and not isinstance(reason, UnsuitableDeviceError)
    ]
    if not missing:
        return None
    return f"attention runs on the kernel {chosen.name}; faster ones cannot be used: " + ", ".join(
        missing
    )


def check_kernel_name(name: str) -> None:
    """UnsupportedAttentionError if what a user gives is neither "auto", nor in the table, nor of
    the form ``module:Class``. Nothing is imported: options are checked by it before a call."""
    names = [AUTO, *(entry.name for entry in KERNELS)]
    module, colon, class_name = name.partition(":") if isinstance(name, str) else ("", "", "")
    is_place = colon and class_name.isidentifier() and module.replace(".", "_").isidentifier()
    if name not in names and not is_place:
        raise UnsupportedAttentionError(
            f"unknown attention kernel {name!r}; there are {', '.join(names)}, or one of your own, "
            "'module:Class'"
        )


def available_kernels(device: str) -> list[KernelEntry]:
    """The kernels whose library can be used here on that kind of device."""
    return [entry for entry in KERNELS if unusable_reason(entry, device) is None]


def unusable_reason(entry: KernelEntry, device: str) -> str | None:
    """Why a kernel cannot run here on that kind of device; None if it can."""
    kernel, reason = _load(entry)
    if kernel is None:
        return str(reason)
    if kernel.caps.devices and device not in kernel.caps.devices:
        return f"runs on {'/'.join(sorted(kernel.caps.devices))}, not {device}"
    return None


def _load_if_suitable(
    entry: KernelEntry, request: KernelRequest
) -> tuple[AttentionKernel | None, Reason | None]:
    """The kernel if it can serve the request, or why not: an exception if it cannot be used here.
    Its class is checked first: that refusal holds on every machine."""
    kernel_class, reason = _import(entry)
    if kernel_class is None or (refusal := kernel_class.caps.refusal(request)) is not None:
        return None, reason or refusal
    kernel, reason = _load(entry)
    if kernel is None or (refusal := kernel.caps.refusal(request)) is not None:
        return None, reason or refusal
    return kernel, None


@lru_cache(maxsize=64)
def _import(entry: KernelEntry) -> tuple[type[AttentionKernel] | None, Exception | None]:
    """The kernel's class, or why its file cannot be imported."""
    try:
        kernel_class = getattr(import_module(entry.module), entry.class_name)
        return cast(type[AttentionKernel], kernel_class), None
    except (ImportError, AttributeError) as error:
        return None, ImportError(f"cannot be imported: {error}")


@lru_cache(maxsize=64)
def _load(entry: KernelEntry) -> tuple[AttentionKernel | None, Exception | None]:
    """The kernel, or why its library cannot be used on this machine."""
    kernel_class, reason = _import(entry)
    if kernel_class is None:
        return None, reason
    try:
        return kernel_class(), None
    except (ImportError, AttributeError) as error:
        return None, error
