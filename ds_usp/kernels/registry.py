"""The table of kernels and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import cast

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.kernels.api import AttentionKernel, KernelRequest


@dataclass(frozen=True)
class KernelRow:
    """One kernel: its public name and where its class is. Imported only when it is considered."""

    name: str
    module: str
    attribute: str


# Best first: "auto" takes the first that can serve the request.
KERNELS = (
    KernelRow("flash2", "ds_usp.kernels.flash2", "Flash2Kernel"),
    KernelRow("sdpa", "ds_usp.kernels.sdpa", "SdpaKernel"),
    KernelRow("eager", "ds_usp.kernels.eager", "EagerKernel"),
)
AUTO = "auto"


@lru_cache(maxsize=1024)
def select_kernel(request: KernelRequest, name: str = AUTO) -> AttentionKernel:
    """The best kernel for the request, or the named one.

    Raises:
        UnsupportedAttentionError: no kernel can serve it; the message lists each one's reason.
    """
    rows = [row for row in KERNELS if name in (AUTO, row.name)]
    if not rows:
        known = ", ".join([AUTO, *(row.name for row in KERNELS)])
        raise UnsupportedAttentionError(f"unknown attention kernel {name!r}; there are {known}")
    reasons = []
    for row in rows:
        kernel, reason = _load(row)
        reason = reason or (kernel.caps.refusal(request) if kernel else None)
        if kernel and reason is None:
            return kernel
        reasons.append(f"  {row.name}: {reason}")
    raise UnsupportedAttentionError(
        f"no attention kernel serves {request.dtype} on {request.device} with head dim "
        f"{request.head_dim} and a {request.mask} mask:\n" + "\n".join(reasons)
    )


@lru_cache(maxsize=64)
def _load(row: KernelRow) -> tuple[AttentionKernel | None, str | None]:
    """The kernel, or why its library cannot be used here."""
    try:
        return cast(AttentionKernel, getattr(import_module(row.module), row.attribute)()), None
    except (ImportError, AttributeError) as error:
        return None, f"cannot be imported: {error}"
