"""Activation checkpoints of token-wise functions, one chunk of tokens at a time.

torch's checkpoints do the work, so that the parameters of all chunks stay inputs of one graph.
Layers of integrations, ``megatron_patches`` and the trainer call it in each forward pass. Nothing
here communicates, but hooks of a chunk's modules do (ZeRO-3, FSDP2): all ranks need as many chunks.

Source: DeepSpeed's ALST (Bekman et al., 2506.13996), section 3.1.1, with backward passes of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError


def in_chunks(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    chunks: int,
    dim: int = 0,
    module: nn.Module | None = None,
) -> Tensor:
    """``run(x)`` in chunks along ``dim``, each checkpointed: an MLP whose intermediate tensors
    never exist for all tokens.

    Backward keeps ``x`` and no other tensor of all tokens, and runs the function once more for
    each chunk. The gradient of ``x`` is that of ``run(x)``; those of parameters are sums over
    chunks, in fp32 for the parameters of a module, else (and under ``torch.compile``, for
    TransformerEngine's layers and FSDP1's) in the parameters' dtype.

    Args:
        run: computes every index along ``dim`` independently, as an MLP does tokens; its result
            has as many, and may differ in the other sizes. Dropout draws others than at once.
        chunks: how many, not of how many tokens, as shards may differ in length; sizes differ by
            at most 1. 1: plain ``run(x)``. ``planner/formulas.py`` prices what one chunk holds.
        module: whose parameters ``run`` uses. None: the module that ``run`` is, is a method of or
            has as the first argument of a ``functools.partial``, if it does.

    Raises:
        ConfigError: fewer than 1, or more than ``x`` has indices along ``dim``; or ``run`` returns
            another number of indices.
    """
    size = x.shape[dim]
    if not isinstance(chunks, int) or not 1 <= chunks <= size:
        raise ConfigError(
            f"chunks={chunks!r} must be a whole number from 1 to the size of dim {dim}, {size}"
        )
    if chunks == 1:
        return run(x)
    module = module or _module_of(run)
    borders = list(pairwise(index * size // chunks for index in range(chunks + 1)))
    return in_chunks_at(lambda part, _start, _stop: run(part), x, borders, dim, module)


def in_chunks_at(
    run: Callable[[Tensor, int, int], Tensor],
    x: Tensor,
    borders: Sequence[tuple[int, int]],
    dim: int,
    module: nn.Module | None,
) -> Tensor:
    """Compute as :func:`in_chunks` does, with a function that takes its chunk's ``(start, stop)``
    of ``borders`` too. These ascend from 0 to the size of ``dim`` without gap or overlap: that is
    not checked, and with others gradients are wrong."""
    size = x.shape[dim]
    if torch.compiler.is_compiling():  # a compiler has no use for the order of writes
        parts = [(x.narrow(dim, start, stop - start), start, stop) for start, stop in borders]
        return torch.cat([checkpoint(run, *part, use_reentrant=False) for part in parts], dim)
    # Not torch.split and torch.cat: these hold two more tensors of all tokens, the parts' gradients
    # before they are joined and the results before they are. Each is written where it belongs.
    output, run = x, sum_in_fp32(run, module)
    for start, stop in borders:
        x, part = TakeChunk.apply(x, dim, start, stop)
        result = checkpoint(run, part, start, stop, use_reentrant=False)
        if start == 0:
            output = _empty_output(result, dim, stop, size)
        output = WriteChunk.apply(output, result, dim, start)
        del part, result  # before the next chunk is computed
    return output


def _empty_output(result: Tensor, dim: int, length: int, size: int) -> Tensor:
    """An uninitialized output of ``size`` indices along ``dim``, otherwise like the ``result`` of
    a chunk of ``length`` indices; ConfigError if that has another number of them."""
    if result.shape[dim] != length:
        raise ConfigError(
            f"a chunk of {length} indices along dim {dim} has a result of {result.shape[dim]}: the "
            "function must compute every index by itself"
        )
    shape = list(result.shape)
    shape[dim] = size
    return result.new_empty(shape)


class TakeChunk(torch.autograd.Function):
    """``x`` for the chunks to come, and the chunk ``[start, stop)`` of it: nothing is copied.
    Backward has each chunk overwrite its own indices of one gradient, as none overlaps another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        ctx.dim, ctx.start, ctx.stop, ctx.shape = dim, start, stop, x.shape
        ctx.set_materialize_grads(False)
        return x, x.narrow(dim, start, stop - start)

    @staticmethod
    def backward(ctx: Any, later: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        # The last chunk is the first one here: it allocates the gradient of x, which the others get
        # as ``later`` and write into. If it has none, what follows this chunk must be zeros.
        if later is None and grad is not None:
            is_last = ctx.stop == ctx.shape[ctx.dim]
            later = (grad.new_empty if is_last else grad.new_zeros)(ctx.shape)
        elif later is not None and torch.is_grad_enabled():
            later = later.clone()  # create_graph=True: what autograd keeps is not changed
        if later is not None:
            chunk_grad = later.narrow(ctx.dim, ctx.start, ctx.stop - ctx.start)
            chunk_grad.zero_() if grad is None else chunk_grad.copy_(grad)
        return later, None, None, None


class WriteChunk(torch.autograd.Function):
    """The output with one chunk's result written into it, where no other chunk writes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, result: Tensor, dim: int, start: int) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, start, result.shape[dim]
        output.narrow(dim, start, ctx.length).copy_(result)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # All of it for the earlier chunks, not zeros where this one wrote: as chunks do not
        # overlap, each reads its own part alone.
        return grad, grad.narrow(ctx.dim, ctx.start, ctx.length), None, None


LOW_PRECISION = (torch.bfloat16, torch.float16)
# Megatron's layers of TransformerEngine are subclasses in a package of Megatron's.
_OWN_SUMS = ("torch._dynamo", "transformer_engine")


def sum_in_fp32(run: Callable[..., Tensor], module: nn.Module | None) -> Any:
    """A function to call instead of ``run`` for each chunk of one forward pass, whose parameters'
    gradients are summed in fp32; ``run`` itself where none in low precision is summed here."""
    # Note [gradients of chunks]
    # A parameter of n chunks gets n gradients, which autograd sums in the parameter's dtype. In
    # bf16 each addition rounds: relative to one product over all tokens the error of the sum is 1.4
    # times as large at 4 chunks, 3 times at 32, 7 times at 256 (docs/usage/memory.md). So each
    # chunk computes with a view of the parameter (_View), whose gradient is added to an fp32
    # buffer, and the parameter gets the sum (_Sum), rounded once: hooks of DDP, ZeRO and FSDP see
    # one gradient. A submodule has its views from after the hooks that gather its parameters
    # (ZeRO-3, FSDP2) to before those that release them, and these see no view.
    module = module or _module_of(run)
    if module is None or not torch.is_grad_enabled() or _sums_by_itself(module):
        return run
    if not any(map(_trains, module.modules())):
        return run
    sums = _ChunkSums(module)

    def run_with_views(*part: Any) -> Tensor:
        with sums.views():
            return run(*part)

    return run_with_views


class _ChunkSums:
    """The sums of one module's parameters over the chunks of one forward pass; :meth:`views` is
    entered for each chunk, in forward and when backward recomputes it."""

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._modules = [part for part in module.modules() if _trains(part)]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def views(self) -> Iterator[None]:
        """Put views in the place of parameters while the body computes a chunk: of each part of the
        module during its own forward pass, of the module itself all the time."""
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
    """An empty tensor, the token, through which the parameter gets the sum of its views' gradients,
    ``totals``, to which ``_View.backward`` adds."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.totals, ctx.dtype = {}, parameter.dtype
        return parameter.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Tensor | None:
        # After the backward passes of all views, of as many chunks as the loss depends on.
        total = ctx.totals.pop(torch._C._current_graph_task_id(), None)
        return None if total is None else total.to(ctx.dtype)


class _View(torch.autograd.Function):
    """The parameter for one chunk; ``node`` is the token's, where the gradients are summed. A
    recomputation's views only give saved tensors: their own nodes are not run."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, token: Tensor, node: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node = node
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        # By backward pass: one may run inside another, as a reentrant checkpoint's does; the sum of
        # one that failed stays unused until the graph is freed.
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
    """The module of ``run`` by the rule of :func:`in_chunks`; None: ``run`` shows none."""
    while isinstance(run, partial):
        if run.args and isinstance(run.args[0], nn.Module):
            return run.args[0]
        run = run.func
    owner = run if isinstance(run, nn.Module) else getattr(run, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _sums_by_itself(module: nn.Module) -> bool:
    """Whether a part of a module adds to fp32 gradients in its own backward pass, or is compiled:
    then autograd's sums stay."""
    # Megatron's linear layers with gradient_accumulation_fusion and TransformerEngine's with
    # fuse_wgrad_accumulation add each chunk's gradient to main_grad.
    return any(
        getattr(part, "gradient_accumulation_fusion", False)
        or getattr(part, "fuse_wgrad_accumulation", False)
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        or any(kind.__module__.startswith(_OWN_SUMS) for kind in type(part).__mro__)
        for part in module.modules()
    )


def _trains(part: nn.Module) -> bool:
    # FSDP2's shards may be trained in low precision whatever their dtype: parameters take their
    # place in the forward pass. A DTensor is known by its placements: this package imports no
    # process groups.
    return any(
        _is_summed(p) or (p is not None and hasattr(p, "placements") and p.requires_grad)
        for p in part._parameters.values()
    )


def _is_summed(parameter: Tensor | None) -> TypeGuard[nn.Parameter]:
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dtype in LOW_PRECISION
    )
