"""The attention that a processor of diffusers calls, replaced by attention over a mesh.

Processors call torch's ``scaled_dot_product_attention``, or diffusers' ``dispatch_attention_fn``,
which calls it on the backend ``native``. Eagerly those of diffusers run with other globals, in
which these names are attention over the mesh. A mode that sees every function of torch does the
same where ``torch.compile`` traces, and for all other processors; it costs some 3 us for each of
the 30 to 70 functions that a processor calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

import torch
from diffusers.models import attention_dispatch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.diffusers.pass_state import PassState
from ds_usp.integrations.diffusers.plan import Tokens

NATIVE = "native"
_TORCH_ATTENTION = functional.scaled_dot_product_attention


class MeshAttention:
    """The attention of one call of a processor.

    Args:
        name: the processor's class.
        state: of the forward pass.
        tokens: of the queries and keys.

    Attributes:
        calls: gets a value for each attention; a list, as Dynamo reads no attribute of a mode.
    """

    def __init__(self, name: str, state: PassState, tokens: Tokens) -> None:
        self._name, self._state, self._tokens = name, state, tokens
        self.calls: list[bool] = []

    def heads_first(
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
        """The signature of torch's; ``enable_gqa`` is what fewer KV heads mean here anyway.

        Shapes:
            all ``[b, h, s_local, d]``.
        """
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.tokens_first(q, k, v, attn_mask, dropout_p, is_causal, scale).transpose(1, 2)

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
        """The signature of diffusers'.

        Shapes:
            all ``[b, s_local, h, d]``.

        Raises:
            UnsupportedAttentionError: a mask, dropout, a backend, or other options.
        """
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
            given = sorted(attention_kwargs or {}) or ["a parallel_config"]
            raise UnsupportedAttentionError(
                f"{self._name} gives attention {', '.join(given)}, which is not served"
            )
        check_backend(self._name, backend)
        return self._state.attend(query, key, value, self._tokens, scale)


def check_backend(name: str, backend: object) -> None:
    """Refuse an attention backend of diffusers.

    Args:
        name: of the processor.
        backend: its own.

    Raises:
        UnsupportedAttentionError: any but ``native``.
    """
    value = getattr(backend, "value", backend)
    if value is not None and str(value) != NATIVE:
        raise UnsupportedAttentionError(
            f"{name} has the attention backend {value!r}: call set_attention_backend('native'); "
            "the kernel is chosen by enable(kernel=...)"
        )


class AttentionMode(TorchFunctionMode):
    """Within it torch's ``scaled_dot_product_attention`` is attention over the mesh."""

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


def with_mesh_attention(call: Callable[..., Any]) -> Callable[..., Any] | None:
    """A processor's ``__call__`` whose attention is that of :func:`run_with`; None for one that is
    not diffusers' own, or calls attention by other functions than its own code."""
    if not isinstance(call, FunctionType) or call.__module__.partition(".")[0] != "diffusers":
        return None
    replaced: dict[str, object] = {}
    for name in call.__code__.co_names:
        value = call.__globals__.get(name)
        if value is functional:
            replaced[name] = _FUNCTIONAL
        elif value is attention_dispatch.dispatch_attention_fn:
            replaced[name] = _dispatch_attention
    if not replaced or "super" in call.__code__.co_names:
        return None
    copied = FunctionType(
        call.__code__,
        {**call.__globals__, **replaced},
        call.__name__,
        call.__defaults__,
        call.__closure__,
    )
    copied.__kwdefaults__ = call.__kwdefaults__
    return copied


def run_with(attention: MeshAttention, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what :func:`with_mesh_attention` has made."""
    before = _CURRENT.set(attention)
    try:
        return call(*args, **kwargs)
    finally:
        _CURRENT.reset(before)


def _dispatch_attention(*args: Any, **kwargs: Any) -> Tensor:
    attention = _CURRENT.get()
    if kwargs.get("backend") is None:  # as attention_backend(...) or the environment has set it
        active = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]
        kwargs["backend"] = active
    return attention.tokens_first(*args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    return _CURRENT.get().heads_first(*args, **kwargs)


_FUNCTIONAL = ModuleType(functional.__name__, functional.__doc__)
vars(_FUNCTIONAL).update(vars(functional), scaled_dot_product_attention=_attention)
