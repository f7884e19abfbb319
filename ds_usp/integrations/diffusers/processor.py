"""Attention processors of diffusers whose attention runs over a mesh."""

from __future__ import annotations

import copy
import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.diffusers.pass_state import PassState
from ds_usp.integrations.diffusers.plan import Tokens

_NATIVE = "native"
_MARK, _TOKENS = "_sharded_by_ds_usp", "_tokens_of_ds_usp"


class HoldsState(Protocol):
    """Whose forward passes attention belongs to."""

    state: PassState | None


class _ShardedAttention(TorchFunctionMode):
    """Within it ``scaled_dot_product_attention`` is attention over the mesh.

    Args:
        calls: gets a value for each of them; a list, as Dynamo reads no attribute of a mode.
    """

    def __init__(self, name: str, state: PassState, tokens: Tokens, calls: list[bool]) -> None:
        super().__init__()
        self._name, self._state, self._tokens = name, state, tokens
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            if func is torch.Tensor.unflatten:  # of super(), which Dynamo does not trace in a mode
                func = torch.unflatten
            return func(*args, **(kwargs or {}))
        self._calls.append(True)
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The signature of torch's; ``enable_gqa`` is what fewer KV heads mean here anyway."""
        if attn_mask is not None and attn_mask.device.type == "meta":  # the pass has its values
            attn_mask = None
        if attn_mask is not None or dropout_p or is_causal:
            problem = f"a mask {list(attn_mask.shape)}" if attn_mask is not None else ""
            problem = problem or ("is_causal" if is_causal else f"dropout {dropout_p}")
            raise UnsupportedAttentionError(
                f"{self._name} gives attention {problem}, which its plan does not know: attention "
                "over sharded tokens is full, but for padding of text that the plan names"
            )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._state.attend(q, k, v, self._tokens, scale).transpose(1, 2)


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
    check_backend(processor)


def check_backend(processor: Any) -> None:
    """Refuse a processor with an attention backend of diffusers.

    Raises:
        UnsupportedAttentionError: any but ``native``.
    """
    name = type(processor).__name__
    backend = getattr(processor, "_attention_backend", None)
    if backend is not None and str(getattr(backend, "value", backend)) != _NATIVE:
        raise UnsupportedAttentionError(
            f"{name} has the attention backend {getattr(backend, 'value', backend)!r}: call "
            "set_attention_backend('native'); the kernel is chosen by enable(kernel=...)"
        )


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

    @functools.wraps(call)
    def sharded_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: PassState | None = getattr(self, _MARK).state
        if state is None:
            raise ConfigError(
                f"{name} of an enabled transformer runs outside of a forward pass of it. Call the "
                "transformer, not a part of it; checkpoint by its enable_gradient_checkpointing()"
            )
        check_backend(self)
        calls: list[bool] = []
        with _ShardedAttention(name, state, getattr(self, _TOKENS), calls):
            out = call(self, *args, **kwargs)
        if len(calls) != 1:
            raise UnsupportedAttentionError(
                f"{name} has called torch's scaled_dot_product_attention {len(calls)} times, "
                "and once is served. It computes attention itself (adapters, caches), or "
                "by another backend: call set_attention_backend('native')"
            )
        return out

    return type(f"Sharded{name}", (cls,), {"__call__": sharded_call})


def _copy_as(processor: Any, cls: type[Any]) -> Any:
    """A copy of a processor of another class.

    Raises:
        TypeError, AttributeError: functions, methods, classes with ``__slots__``.
    """
    copied = copy.copy(processor)
    copied.__class__ = cls
    return copied
