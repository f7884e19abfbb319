"""What a CUDA graph of a transformer's forward passes depends on, and where there can be none."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_usp.attention.tuning import Tuning
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import p2p_disabled_reason, single_hw_queue
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.diffusers.arguments import is_adapter


def check_graphs(mesh: SequenceMesh, tuning: Tuning) -> None:
    """Refuse CUDA graphs where exchanges cannot be captured.

    Raises:
        ConfigError: no GPU, exchanges by NCCL, or streams that share one queue.
    """
    if not torch.cuda.is_available():
        raise ConfigError("cuda_graphs=True needs a GPU; use cuda_graphs=False")
    why = mesh.copy_engine_unavailable or p2p_disabled_reason()
    why = "tuning has copies=False" if tuning.copies is False else why
    why = "tuning asks for a double ring" if isinstance(tuning.inner_ring, int) else why
    if mesh.sp_degree > 1 and why is not None:
        raise ConfigError(
            f"cuda_graphs=True needs exchanges by copy engines, but {why}. With those of NCCL in a "
            "CUDA graph destroy_process_group would hang. Use cuda_graphs=False"
        )
    if mesh.sp_degree > 1 and single_hw_queue():
        raise ConfigError(
            "cuda_graphs=True with CUDA_DEVICE_MAX_CONNECTIONS=1: a CUDA graph may wait for itself "
            "where all streams share a queue. Unset the variable, or use cuda_graphs=False"
        )


def refuse_capture(name: str) -> None:
    """Refuse a CUDA graph around a forward pass, whose arguments ranks compare on their CPUs.

    Raises:
        UnsupportedAttentionError: one is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedAttentionError(
            f"a CUDA graph captures an enabled {name}, whose ranks compare their arguments in each "
            "forward pass: call it without the graph, and let enable(..., cuda_graphs=True) capture"
        )


def check_compiled(transformer: nn.Module) -> None:
    """Refuse a pass that ``torch.compile`` of the whole transformer has called: graphs are not
    traced, so nothing would be compiled.

    Raises:
        UnsupportedAttentionError: it has.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        if type(caller).__name__ == "OptimizedModule" and caller._orig_mod is transformer:
            raise UnsupportedAttentionError(
                f"torch.compile of a {type(transformer).__name__} with cuda_graphs=True has no "
                "effect: use its compile_repeated_blocks()"
            )
        frame = frame.f_back


def check_device(name: str, device: torch.device) -> None:
    """Refuse weights that are not on the GPU that is captured.

    Raises:
        ConfigError: they are on the CPU, or on a GPU that is not the current one.
    """
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        raise ConfigError(
            f"{name} with cuda_graphs=True is on {device}, the current device is "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device, and move it there "
            "before its forward pass"
        )


def identities(transformer: nn.Module) -> Iterator[object]:
    """What a captured pass depends on besides arguments, the same again if nothing was replaced:
    modules, their hooks, compiled forms and attention processors, addresses of weights and buffers.
    """
    for module in transformer.modules():
        own = vars(module)
        processor = own.get("processor")
        yield id(module), module.training, id(processor)
        yield getattr(processor, "_attention_backend", None)
        yield id(own.get("_compiled_call_impl")), id(own.get("forward"))
        yield (*module._forward_pre_hooks, None, *module._forward_hooks)
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:
                    yield type(x)
                    yield from _addresses(x)


def _addresses(x: Any) -> Iterator[int]:
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _addresses(getattr(x, name))
    else:
        yield x.data_ptr()


def check_modules(transformer: nn.Module, own_hooks: frozenset[int] = frozenset()) -> None:
    """Refuse what happens in or around modules and would not be repeated by a graph.

    Args:
        own_hooks: the ids of hooks that a replay may leave out.

    Raises:
        UnsupportedAttentionError: hooks inside of the transformer, or before its forward pass and
            after ours; forward functions that were replaced (by offloading); ``torch.compile`` of
            the transformer; adapters that are not fused; quantized weights of unknown parts.
    """
    name = type(transformer).__name__
    for path, module in transformer.named_modules():
        why = _refusal(module, path == "", own_hooks)
        if why:
            raise UnsupportedAttentionError(
                f"{name} with cuda_graphs=True: {path or 'the transformer'} {why}. Or use "
                "cuda_graphs=False"
            )


def _refusal(module: nn.Module, is_root: bool, own_hooks: frozenset[int]) -> str:
    hooks = {*module._forward_pre_hooks, *module._forward_hooks} - own_hooks
    own = vars(module)
    if "_hf_hook" in own or ("forward" in own and not (is_root and own_hooks)):
        return "has a forward function of its own, as offloading and caches give it: remove it"
    if is_root and own.get("_compiled_call_impl") is not None:
        return "is compiled as a whole, which has no effect: use compile_repeated_blocks()"
    if is_root and own_hooks and next(reversed(module._forward_pre_hooks)) not in own_hooks:
        return "has a hook that sees this rank's shard: register it before enable"
    if not is_root and hooks:
        return "has a hook of another library or yours, which a graph does not call: remove it"
    if is_adapter(module):
        return (
            "is a layer of PEFT, whose scale and choice of adapters a graph does not follow: "
            "fuse_lora() and unload_lora_weights() before enable"
        )
    for x in module._parameters.values():
        plain = x is None or type(x) is nn.Parameter or is_traceable_wrapper_subclass(x)
        if not plain:
            return f"has a weight of the type {type(x).__name__}, whose other tensors may move"
    return ""
