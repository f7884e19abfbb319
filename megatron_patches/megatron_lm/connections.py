"""``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron-LM demands under context parallelism.

It makes the GPU start kernels in the order in which the CPU launches them, and lets copies and
communication kernels of all streams wait for each other. Tensor parallelism and TransformerEngine's
context parallelism need that order for overlap; USP orders its streams by events. So it is not
demanded where USP alone shards tensors; where it is set, it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_patches.megatron_lm.context_parallel_kind import is_mixed, uses_usp

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


class _Environment:
    """The environment as Megatron-LM's check wants it; CUDA does not see it."""

    def __init__(self, environ: Any) -> None:
        self._environ = environ

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a variable."""
        return "1" if name == _VARIABLE else self._environ.get(name, default)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environ, name)


class _OS:
    """The module ``os`` with that environment."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.environ = _Environment(module.environ)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def not_demanded(args: Any) -> Iterator[None]:
    """Let Megatron-LM's check of its arguments pass without the variable, where none needs it."""
    from megatron.training import arguments

    only_usp = args.tensor_model_parallel_size == 1 and uses_usp(args) and not is_mixed(args)
    if not only_usp or args.use_torch_fsdp2 or args.use_megatron_fsdp:
        yield
        return
    original = arguments.os
    arguments.os = _OS(original)
    try:
        yield
    finally:
        arguments.os = original
