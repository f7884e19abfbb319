"""xDiT (the package xfuser) as a case of ``bench_diffusers.py``: its wrappers of Flux and Wan.

xfuser 0.7 is imported when a case is prepared: it needs a GPU and triton at import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

# Of a class of diffusers: the module and the class of the wrapper.
WRAPPERS = {
    "FluxTransformer2DModel": ("transformer_flux", "xFuserFlux1Transformer2DWrapper"),
    "WanTransformer3DModel": ("transformer_wan", "xFuserWanTransformer3DWrapper"),
}
# Of a kernel's name in ds_usp: the attention backend of xfuser.
BACKENDS = {
    "flash4": "flash_4",
    "cudnn": "cudnn",
    "flash2": "sdpa_flash",
    "sdpa": "sdpa",
    "eager": "sdpa_math",
}
# Groups of its parallel_state, all of which a new mesh replaces.
GROUPS = ("_MODEL_REPLICA", "_DP", "_CFG", "_PP", "_SP", "_TP", "_FS", "_VAE", "_DIT")


def of_xdit(
    kernel: str, ulysses: int, ring: int, transformer: Any
) -> tuple[Any, Callable[[], int]]:
    """xDiT's wrapper with a transformer's weights, on ulysses x ring.

    Returns:
        The wrapper, and a function of the GPU memory that torch's allocator does not count.

    Raises:
        ValueError: training; its all-to-alls have no gradients.
        ImportError: xfuser, or what it imports, is not installed.
        NotImplementedError: of xfuser, on a machine without an accelerator.
        RuntimeError: of xfuser, for a kernel without log-sum-exp and a ring.
    """
    if transformer.training:
        raise ValueError("xDiT is for sampling: its all-to-alls have no gradients")
    heads = transformer.config.num_attention_heads
    wrapper = _wrapper_of(transformer, _globals_of(kernel, ulysses, ring, heads))
    return wrapper, int


def _wrapper_of(transformer: Any, set_globals: Callable[..., None]) -> Any:
    """The wrapper of a transformer's class with the same weights, called on a mesh's globals."""
    from importlib import import_module

    from accelerate import init_empty_weights

    module, name = WRAPPERS[type(transformer).__name__]
    set_globals()
    wrappers = import_module(f"xfuser.model_executor.models.transformers.{module}")
    with init_empty_weights(include_buffers=False):
        wrapper = getattr(wrappers, name).from_config(transformer.config)
    wrapper.load_state_dict(transformer.state_dict(), assign=True)
    wrapper.to(transformer.device).eval()  # .to() moves buffers
    wrapper.register_forward_pre_hook(set_globals)
    return wrapper


@lru_cache
def _globals_of(kernel: str, ulysses: int, ring: int, heads: int) -> Callable[..., None]:
    """Makes a mesh and a runtime state; a function that sets xfuser's globals to them."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import parallel_state, runtime_state
    from yunchang.globals import PROCESS_GROUP

    backend, rank = dist.get_backend(), dist.get_rank()
    parallel_state.init_distributed_environment(dist.get_world_size(), rank, backend=backend)
    for name in GROUPS:
        setattr(parallel_state, name, None)  # those of another mesh stay in its function
    degrees = {"ulysses_degree": ulysses, "ring_degree": ring}
    parallel_state.initialize_model_parallel(**degrees, backend=backend)
    arguments = xFuserArgs(**degrees, attention_backend=BACKENDS[kernel])
    pipeline: Any = SimpleNamespace(
        transformer=SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads))
    )
    runtime_state.initialize_runtime_state(pipeline, arguments.create_config()[0])
    # Flux's single blocks read it, for pipeline parallelism.
    runtime_state.get_runtime_state().max_condition_sequence_length = 0
    mesh_groups = ("ULYSSES_PG", "RING_PG")
    names = [(parallel_state, name) for name in GROUPS]
    names += [(runtime_state, "_RUNTIME"), *((PROCESS_GROUP, name) for name in mesh_groups)]
    values = [(holder, name, getattr(holder, name)) for holder, name in names]

    def set_globals(*_: Any) -> None:
        for holder, name, value in values:
            setattr(holder, name, value)

    return set_globals
