"""Attention processors of diffusers whose attention runs over a mesh."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, Protocol

import torch
from torch import nn

from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.diffusers.attention_calls import (
    AttentionMode,
    MeshAttention,
    ReplacedAttention,
    check_backend,
    check_backend_of_process,
    run_with,
)
from ds_usp.integrations.diffusers.pass_state import PassState
from ds_usp.integrations.diffusers.plan import Tokens

_BACKEND = "_attention_backend"
_MARK, _TOKENS = "_sharded_by_ds_usp", "_tokens_of_ds_usp"


class HoldsState(Protocol):
    """Whose forward passes attention belongs to."""

    state: PassState | None


def check_processor(module: nn.Module) -> None:
    """Refuse a processor whose attention cannot be sharded.

    Raises:
        ConfigError: it is sharded already.
        UnsupportedAttentionError: IP-Adapters and other processors with weights, functions, norms
            over tokens, or an attention backend.
    """
    processor, name = module.processor, type(module.processor).__name__
    if is_sharded(processor):
        raise ConfigError(f"{name} is sharded already: disable() the transformer first")
    if isinstance(processor, nn.Module) or "IPAdapter" in name:
        raise UnsupportedAttentionError(
            f"{name}: IP-Adapters, and other attention processors with weights of their own, are "
            "not served; unload them"
        )
    try:
        _copy_as(processor, _sharded_class(type(processor)))
    except (TypeError, AttributeError) as error:
        raise UnsupportedAttentionError(
            f"{name}: an attention processor must be an object of a class of its own, without "
            "__slots__, whose __call__ can be replaced; wrap it in one"
        ) from error
    for norm in ("group_norm", "spatial_norm"):
        if getattr(module, norm, None) is not None:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} has a {norm}, which normalizes over all tokens: a shard "
                "has other means than the sequence"
            )
    check_backend_of(processor)


def check_backend_of(processor: Any) -> None:
    """See :func:`check_backend` and :func:`check_backend_of_process`."""
    backend, cls = getattr(processor, _BACKEND, None), type(processor)
    check_backend(cls.__name__, backend)
    if backend is None:
        call = cls.__call__
        check_backend_of_process(cls.__name__, getattr(call, "__wrapped__", call))


def is_sharded(processor: Any) -> bool:
    """Whether :func:`sharded` has made it."""
    return hasattr(processor, _MARK)


def sharded(processor: Any, tokens: Tokens, owner: HoldsState) -> Any:
    """A copy of an attention processor whose attention runs over the mesh.

    Its class is a subclass whose call has the same signature, which diffusers reads.

    Args:
        tokens: of its queries and keys.
        owner: holds the forward pass that runs; a copy of both has its own.
    """
    cls: Any = type(processor)
    copied = _copy_as(processor, _sharded_class(cls))
    setattr(copied, _MARK, owner)
    setattr(copied, _TOKENS, tokens)
    return copied


@functools.cache
def _sharded_class(cls: type[Any]) -> type[Any]:
    """The subclass of an attention processor's class; one for all its processors, so that blocks
    share what ``torch.compile`` makes of one.

    What is traced of a call is all but the attention, which is the op ``ds_usp::attention``.

    Raises:
        TypeError: a class that cannot have subclasses.
    """
    call, name = cls.__call__, cls.__name__
    replaced = ReplacedAttention.of(call)

    @functools.wraps(call)
    def sharded_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: PassState | None = getattr(self, _MARK).state
        if state is None:
            raise ConfigError(
                f"{name} of an enabled transformer runs outside of a forward pass of it. Call the "
                "transformer, not a part of it; checkpoint by its enable_gradient_checkpointing()"
            )
        check_backend(name, getattr(self, _BACKEND, None))
        attention = MeshAttention(name, state, getattr(self, _TOKENS))
        eager_call = None
        if replaced is not None and not torch.compiler.is_compiling():
            eager_call = replaced.with_current_globals()
        if eager_call is None:
            with AttentionMode(attention):
                out = call(self, *args, **kwargs)
        else:
            out = run_with(attention, eager_call, self, *args, **kwargs)
        if len(attention.calls) != 1:
            raise UnsupportedAttentionError(
                f"{name} has called torch's scaled_dot_product_attention {len(attention.calls)} "
                "times, and once is served. It computes attention itself (adapters, caches), or "
                "by another backend: call set_attention_backend('native')"
            )
        return out

    # Which diffusers reads in every block; that of a wrapper is found by two steps.
    setattr(sharded_call, "__signature__", inspect.signature(call))  # noqa: B010 - for mypy
    return type(f"Sharded{name}", (cls,), {"__call__": sharded_call})


def _copy_as(processor: Any, cls: type[Any]) -> Any:
    """A copy of a processor of another class.

    Raises:
        TypeError, AttributeError: functions, methods, classes with ``__slots__``.
    """
    copied = copy.copy(processor)
    copied.__class__ = cls
    return copied
