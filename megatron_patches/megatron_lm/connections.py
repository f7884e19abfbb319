"""``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron-LM demands under context parallelism.

It makes the GPU start kernels in the order in which the CPU launches them, and lets copies and
communication kernels of all streams wait for each other. Tensor parallelism and TransformerEngine's
context parallelism need that order for overlap; USP orders its streams by events. So it is not
demanded where USP alone shards tensors; where it is set, it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

from megatron_patches.megatron_lm.context_parallel_kind import is_mixed, uses_usp

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@contextmanager
def not_demanded(args: Any) -> Iterator[None]:
    """Let Megatron-LM's check of its arguments pass without the variable, where none needs it;
    inside, its module of arguments has an ``os`` of its own."""
    from megatron.training import arguments

    only_usp = args.tensor_model_parallel_size == 1 and uses_usp(args) and not is_mixed(args)
    if not only_usp or args.use_torch_fsdp2 or args.use_megatron_fsdp:
        yield
        return
    original = arguments.os
    # The environment as the check wants it, which CUDA does not see; nobody may write into it.
    environ = MappingProxyType({**original.environ, _VARIABLE: "1"})
    arguments.os = SimpleNamespace(**{**vars(original), "environ": environ})
    try:
        yield
    finally:
        arguments.os = original
