"""Sums in fp32 of a parameter's gradients, where a module runs once for each chunk of tokens.

A parameter of n chunks has n gradients, and autograd sums them in the parameter's dtype. In bf16
each addition rounds: relative to one product over all tokens the error of the sum is 1.4 times as
large at 4 chunks, 3 times at 32, 7 times at 256 (docs/usage/memory.md). Here every chunk computes
with a view of the parameter, whose gradient is added to an fp32 buffer; the parameter gets the sum,
rounded once.

A submodule gets its views between the hooks of a framework that run before its forward pass and
those after it, so ZeRO-3 and FSDP2 have gathered its parameters and do not see the views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Megatron's layers of TransformerEngine are subclasses in a package of Megatron's.
_OWN_SUMS = ("torch._dynamo", "transformer_engine")


def sum_in_fp32(run: Callable[[Tensor], Tensor], module: nn.Module | None) -> Any:
    """A function to call instead of ``run`` for each chunk of one forward pass, whose parameters'
    gradients are summed in fp32; ``run`` itself where autograd's sums are as good.

    Args:
        module: whose parameters ``run`` uses; None: the module that ``run`` is, is a method of or
            has as its first bound argument.
    """
    module = module or _module_of(run)
    if module is None or not torch.is_grad_enabled() or _sums_by_itself(module):
        return run
    if not any(map(_trains, module.modules())):
        return run
    sums = _ChunkSums(module)

    def run_with_views(part: Tensor) -> Tensor:
        with sums.views():
            return run(part)

    return run_with_views


class _ChunkSums:
    """The sums of one module's parameters over the chunks of one forward pass.

    Args:
        module: runs once for each chunk.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._modules = [part for part in module.modules() if _trains(part)]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def views(self) -> Iterator[None]:
        """Let submodules compute with views of their parameters, as long as each one runs."""
        replaced: dict[nn.Module, dict[str, tuple[nn.Parameter, Tensor]]] = {}
        handles, thread = [], get_ident()

        def is_of_run() -> bool:  # hooks run in calls from other threads and compiled code too
            return not torch.compiler.is_compiling() and get_ident() == thread

        def replace(part: nn.Module, *_: Any) -> None:
            # A view that is made without gradients would pass none on in later calls either.
            if not is_of_run() or part in replaced or not torch.is_grad_enabled():
                return
            summed = {n: p for n, p in part._parameters.items() if _is_summed(p) and p.numel()}
            replaced[part] = {name: (p, self._view(p)) for name, p in summed.items()}
            views: Any = {name: view for name, (_, view) in replaced[part].items()}
            part._parameters.update(views)

        def restore(part: nn.Module, *_: Any) -> None:
            for name, (parameter, view) in (replaced.pop(part, {}) if is_of_run() else {}).items():
                if part._parameters.get(name) is view:
                    part._parameters[name] = parameter

        if self._root in self._modules:  # its forward may be called without its hooks, or with them
            handles.append(self._root.register_forward_pre_hook(restore, prepend=True))
        for part in self._modules:
            handles.append(part.register_forward_pre_hook(replace))
            handles.append(part.register_forward_hook(restore, prepend=True))
        try:
            if self._root in self._modules:
                replace(self._root)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for part in list(replaced):  # a recomputation stops at the last tensor that it needs
                restore(part)

    def _view(self, parameter: nn.Parameter) -> Any:
        token = self._sums.get(parameter)
        if token is None:
            token = self._sums[parameter] = _Sum.apply(parameter)
        return _View.apply(parameter.detach(), token, token.grad_fn)


class _Sum(torch.autograd.Function):
    """An empty tensor on whose gradient that of the parameter depends: the sum of its views'."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        """Shapes: the result ``[0]``."""
        ctx.set_materialize_grads(False)
        ctx.totals, ctx.dtype = {}, parameter.dtype
        return parameter.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Tensor | None:
        """After the backward passes of all views, of as many chunks as the loss depends on."""
        total = ctx.totals.pop(torch._C._current_graph_task_id(), None)
        return None if total is None else total.to(ctx.dtype)


class _View(torch.autograd.Function):
    """The parameter for one chunk."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, token: Tensor, node: Any) -> Tensor:
        """A view; ``node`` is that of the token, where the gradients are summed."""
        ctx.set_materialize_grads(False)
        ctx.node = node
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        """Add the gradient to the sum of this backward pass.

        One pass may run inside another, as a reentrant checkpoint's does; the sum of one that
        failed stays unused until the graph is freed.
        """
        totals, pass_id = ctx.node.totals, torch._C._current_graph_task_id()
        if grad is not None:
            if pass_id not in totals:
                totals[pass_id] = grad.to(torch.float32, copy=True)
            elif torch.is_grad_enabled():  # create_graph=True: autograd keeps what was added
                totals[pass_id] = totals[pass_id] + grad
            else:
                totals[pass_id] += grad
        return None, None, None


def _module_of(run: Callable[..., Any]) -> nn.Module | None:
    """The module that a function is, is a method of, or has as its first bound argument."""
    while isinstance(run, partial):
        if run.args and isinstance(run.args[0], nn.Module):
            return run.args[0]
        run = run.func
    owner = run if isinstance(run, nn.Module) else getattr(run, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _sums_by_itself(module: nn.Module) -> bool:
    """Whether a part of a module adds to fp32 gradients in its own backward pass, or is compiled
    (as its forward method may be): then autograd's sums stay.

    Megatron's linear layers with ``gradient_accumulation_fusion`` and TransformerEngine's with
    ``fuse_wgrad_accumulation`` add each chunk's gradient to ``main_grad``.
    """
    return any(
        getattr(part, "gradient_accumulation_fusion", False)
        or getattr(part, "fuse_wgrad_accumulation", False)
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        or any(kind.__module__.startswith(_OWN_SUMS) for kind in type(part).__mro__)
        for part in module.modules()
    )


def _trains(part: nn.Module) -> bool:
    """Whether a module has parameters of its own that may be trained in low precision. FSDP2's
    shards may, whatever their dtype: parameters take their place in the forward pass."""
    return any(_is_summed(p) or _is_sharded(p) for p in part._parameters.values())


def _is_summed(parameter: Tensor | None) -> TypeGuard[nn.Parameter]:
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dtype in LOW_PRECISION
    )


def _is_sharded(parameter: Tensor | None) -> bool:
    """Whether it is a DTensor, known by its placements: this package imports no process groups."""
    return parameter is not None and hasattr(parameter, "placements") and parameter.requires_grad
