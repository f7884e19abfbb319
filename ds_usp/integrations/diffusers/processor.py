"""Attention processors of diffusers whose attention runs over a mesh, in place of stock ones."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, Protocol, cast

import torch
from diffusers.models import attention_dispatch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.diffusers.pass_state import PassState
from ds_usp.integrations.diffusers.plans import Tokens
from ds_usp.lowlevel import with_globals
from ds_usp.memory.compile_guard import disable_in_compile

_BACKEND = "_attention_backend"
# Attributes of a sharded processor: see the arguments of `sharded`, in this order.
_OWNER, _TOKENS, _TIMES = "_sharded_by_ds_usp", "_tokens_of_ds_usp", "_attends_of_ds_usp"
_SKIPPED = "all_perturbed"  # an argument of processors: they do not attend
# Processors that attend to the tokens first, and then give each image token keys of their own, of
# an IP-Adapter, which stay whole on every rank. SD3's gives both at once, and is refused.
_ADAPTED = frozenset({"FluxIPAdapterAttnProcessor"})


class HoldsState(Protocol):
    """Has the state of the pass that attention belongs to; None outside: a ShardedTransformer."""

    state: PassState | None


def check_processor(module: nn.Module) -> None:
    """Refuse the processor of an attention module if its attention cannot be sharded: ConfigError
    for that of another enabled transformer, else UnsupportedAttentionError."""
    processor, cls = module.processor, cast(Any, type(module.processor))
    name = cls.__name__
    if hasattr(processor, _OWNER):
        raise ConfigError(
            f"{name} is that of another enabled transformer: give this one a processor of its own"
        )
    if name not in _ADAPTED and (isinstance(processor, nn.Module) or "IPAdapter" in name):
        raise UnsupportedAttentionError(
            f"{name}: IP-Adapters but Flux's, and other attention processors with weights of their "
            "own, are not served; unload them"
        )
    try:
        _copy_as(processor, _sharded_class(cls))
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
    """UnsupportedAttentionError for an attention backend but ``native``: a processor's own, or the
    process's, which it takes if it has none and calls diffusers' dispatch."""
    backend, cls = getattr(processor, _BACKEND, None), type(processor)
    check_backend(cls.__name__, backend)
    call = getattr(cls.__call__, "__wrapped__", cls.__call__)
    if backend is None and _names_any(call, _DISPATCH):
        active = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]
        advice = ", leave attention_backend(...), unset DIFFUSERS_ATTN_BACKEND"
        check_backend(cls.__name__, active, advice)


def sharded(processor: Any, tokens: Tokens, owner: HoldsState, times: int = 1) -> Any:
    """A copy of an attention processor whose attention runs over the mesh.

    Args:
        tokens: the kinds of its queries and keys.
        owner: holds the forward pass that runs; ``copy.deepcopy`` of a model copies it, too.
        times: how often it attends in a call, see ``twice`` of a plan.
    """
    cls: Any = type(processor)
    copied = _copy_as(processor, _sharded_class(cls))
    setattr(copied, _OWNER, owner)
    setattr(copied, _TOKENS, tokens)
    setattr(copied, _TIMES, times)
    return copied


@functools.cache
def _sharded_class(cls: type[Any]) -> type[Any]:
    # One class for all processors of a class, so that blocks share what torch.compile makes of one:
    # what is traced of a call is all but the attention, which is the op ds_usp::attention. The
    # signature stays that of the original, which diffusers reads.
    call, name = cls.__call__, cls.__name__
    replaced = ReplacedAttention.of(call)

    @functools.wraps(call)
    def sharded_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: PassState | None = getattr(self, _OWNER).state
        if state is None and torch.is_grad_enabled():
            raise ConfigError(
                f"{name} of an enabled transformer runs outside of a forward pass of it. Call the "
                "transformer, not a part of it; checkpoint by its enable_gradient_checkpointing()"
            )
        if state is None:
            return call(self, *args, **kwargs)
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
        # LTX-2's guidance by changed attention has tokens' own values in place of the output.
        if kwargs.get(_SKIPPED) is not None and kwargs[_SKIPPED] and not attention.calls:
            if not torch.compiler.is_compiling():
                state.attended += 1  # as `PassState.attend` counts in passes that skip none
            return out
        # No call: it attended within the shard, by something that was not replaced.
        if len(attention.calls) != (times := getattr(self, _TIMES)):
            raise UnsupportedAttentionError(
                f"{name} has called torch's scaled_dot_product_attention {len(attention.calls)} "
                f"times, where its plan says {times}. It computes attention itself "
                "(adapters, caches), or by another backend: call set_attention_backend('native')"
            )
        return out

    # Which diffusers reads in every block; that of a wrapper is found by two steps.
    setattr(sharded_call, "__signature__", inspect.signature(call))  # noqa: B010 - for mypy
    return type(f"Sharded{name}", (cls,), {"__call__": sharded_call})


def _copy_as(processor: Any, cls: type[Any]) -> Any:
    """A copy of another class; TypeError or AttributeError for functions and classes with slots."""
    copied = copy.copy(processor)
    copied.__class__ = cls
    return copied


NATIVE = "native"
_TORCH_ATTENTION = functional.scaled_dot_product_attention
_DIFFUSERS_ATTENTION = attention_dispatch.dispatch_attention_fn
_DISPATCH = _DIFFUSERS_ATTENTION.__name__


class MeshAttention:
    """The attention of one call of a processor, of the class ``name``, over the mesh.

    Attributes:
        calls: gets a value for each attention; a list, as Dynamo reads no attribute of a mode.
    """

    def __init__(self, name: str, state: PassState, tokens: Tokens) -> None:
        self._name, self._state, self._tokens = name, state, tokens
        self._is_adapted = name in _ADAPTED
        self.calls: list[bool] = []

    def heads_first(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """torch's signature, with which :meth:`tokens_first` begins: ``[b, h, s_local, d]``."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.tokens_first(q, k, v, *args, **kwargs).transpose(1, 2)

    def tokens_first(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Tensor:
        """diffusers' signature; ``enable_gqa`` is what fewer KV heads mean here anyway.

        Shapes: all ``[b, s_local, h, d]``. Raises UnsupportedAttentionError for other options.
        """
        if self.calls and self._is_adapted:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return _TORCH_ATTENTION(q, k, v, attn_mask, scale=scale).transpose(1, 2)
        self.calls.append(True)
        if attn_mask is not None and attn_mask.device.type == "meta":  # the pass has its values
            attn_mask = None
        if attn_mask is not None or dropout_p or is_causal:
            problem = f"a mask {list(attn_mask.shape)}" if attn_mask is not None else ""
            problem = problem or ("is_causal" if is_causal else f"dropout {dropout_p}")
            raise UnsupportedAttentionError(
                f"{self._name} gives attention {problem}, which its plan does not know: attention "
                "over sharded tokens is full, but for padding of text that the plan names"
            )
        if attention_kwargs or parallel_config is not None:
            options = sorted(attention_kwargs or {}) or ["a parallel_config"]
            raise UnsupportedAttentionError(
                f"{self._name} gives attention {', '.join(options)}, which is not served"
            )
        check_backend(self._name, backend)
        return self._state.attend(query, key, value, self._tokens, scale)


def check_backend(name: str, backend: object, advice: str = "") -> None:
    """UnsupportedAttentionError for an attention backend of diffusers but ``native``.

    Args:
        backend: the processor's own, or that of the process.
        advice: what else to undo, as it may have set the backend.
    """
    value = getattr(backend, "value", backend)
    if value is not None and str(value) != NATIVE:
        raise UnsupportedAttentionError(
            f"{name} has the attention backend {value!r}: call set_attention_backend('native')"
            f"{advice}; the kernel is chosen by enable(kernel=...)"
        )


class AttentionMode(TorchFunctionMode):
    """Makes torch's ``scaled_dot_product_attention`` attention over the mesh."""

    def __init__(self, attention: MeshAttention) -> None:
        super().__init__()
        self._attend = attention.heads_first

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _TORCH_ATTENTION:
            return self._attend(*args, **(kwargs or {}))
        if func is torch.Tensor.unflatten:  # of super(), which Dynamo does not trace in a mode
            func = torch.unflatten
        return func(*args, **(kwargs or {}))


_CURRENT: ContextVar[MeshAttention] = ContextVar("_CURRENT")


# Note [two ways into a processor]
# Processors call torch's scaled_dot_product_attention or diffusers' dispatch_attention_fn by name.
# A torch function mode catches the first, which the second calls, but costs some 3 us of CPU time
# at each of the 30 to 70 torch functions of a call. So it serves compiled code and users'
# processors; else the function is made anew with other globals for these two names.
class ReplacedAttention:
    """A processor's ``__call__`` with attention over the mesh in place of the functions that it
    calls by name; made by :meth:`of`."""

    def __init__(self, call: FunctionType) -> None:
        self._call, self._names = call, call.__code__.co_names

    @classmethod
    def of(cls, call: object) -> ReplacedAttention | None:
        """Made of a processor's ``__call__``; None for one that is not diffusers' own, or calls
        attention by other functions: :class:`AttentionMode` serves it."""
        if not isinstance(call, FunctionType) or call.__module__.partition(".")[0] != "diffusers":
            return None
        by_name = _names_any(call, _TORCH_ATTENTION.__name__, _DISPATCH)
        return cls(call) if by_name and not _names_any(call, "super") else None

    def with_current_globals(self) -> Callable[..., Any] | None:
        """The function with its module's globals of this moment, for :func:`run_with`; None where
        torch's or diffusers' attention was patched, which it would leave out."""
        if functional.scaled_dot_product_attention is not _TORCH_ATTENTION:
            return None
        names = self._call.__globals__
        replaced: dict[str, object] = {}
        for name in self._names:
            value = names.get(name)
            if value is functional:
                replaced[name] = _FUNCTIONAL
            elif name == _DISPATCH:
                if value is not _DIFFUSERS_ATTENTION:
                    return None
                replaced[name] = lambda *args, **kw: _CURRENT.get().tokens_first(*args, **kw)
        return with_globals(self._call, {**names, **replaced})


def _names_any(call: object, *names: str) -> bool:
    """Whether a function's own code, not that of others which it calls, has one of these names."""
    code = getattr(call, "__code__", None)
    return code is not None and not set(names).isdisjoint(code.co_names)


# Dynamo keeps what it compiles among the globals of a function, and finds it by its code: those of
# the next call are others. It gets here where attention has broken the graph of a block.
@disable_in_compile("a function with globals of its own")
def run_with(attention: MeshAttention, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what :meth:`ReplacedAttention.with_current_globals` has made."""
    before = _CURRENT.set(attention)
    try:
        return call(*args, **kwargs)
    finally:
        _CURRENT.reset(before)


class _Functional(ModuleType):
    """torch.nn.functional with another ``scaled_dot_product_attention``."""

    @staticmethod
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        return _CURRENT.get().heads_first(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


_FUNCTIONAL = _Functional(functional.__name__)
