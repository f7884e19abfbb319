"""Activation checkpoints of token-wise functions, one chunk of tokens at a time.

torch's checkpoints do the work, so that the parameters of all chunks stay inputs of one graph: a
parameter's gradients of the chunks are summed before the parameter gets them
(:mod:`ds_usp.memory.chunk_gradients`), and hooks of DDP, ZeRO and FSDP see one gradient in each
backward pass. Only the chunks' borders are functions of this module: each chunk's result is written
into the output as soon as it is known, and each chunk's gradient into that of the input.
``torch.split`` and ``torch.cat`` would hold two more tensors of all tokens, one in each direction.

Source: DeepSpeed's ALST (Bekman et al., 2506.13996), section 3.1.1, whose tiled MLP runs its own
backward passes and so needs to tell ZeRO which of its gradients is the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_usp.errors import ConfigError
from ds_usp.memory.chunk_gradients import sum_in_fp32


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
            has as many, and may differ in the other sizes.
        chunks: how many, of sizes that differ by at most 1.
        module: whose parameters ``run`` uses. None: the module that ``run`` is, is a method of or
            has as the first argument of a ``functools.partial``, if it does.

    Raises:
        ConfigError: fewer than 1, or more than ``x`` has indices along ``dim``; or ``run`` returns
            another number of indices.
    """
    if not isinstance(chunks, int) or not 1 <= chunks <= x.shape[dim]:
        raise ConfigError(
            f"chunks={chunks!r} must be a whole number from 1 to the size of dim {dim}, "
            f"{x.shape[dim]}"
        )
    if chunks == 1:
        return run(x)
    if torch.compiler.is_compiling():  # a compiler has no use for the order of writes
        split = torch.tensor_split(x, chunks, dim)
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in split], dim)
    size, output, run = x.shape[dim], x, sum_in_fp32(run, module)
    for index in range(chunks):
        start, stop = index * size // chunks, (index + 1) * size // chunks
        x, part = TakeChunk.apply(x, dim, start, stop)
        result = checkpoint(run, part, use_reentrant=False)
        if index == 0:
            output = _empty_output(result, dim, stop, size)
        output = WriteChunk.apply(output, result, dim, start)
        del part, result  # before the next chunk is computed
    return output


def _empty_output(first: Tensor, dim: int, length: int, size: int) -> Tensor:
    """Uninitialized: the output of all chunks.

    Args:
        first: the first chunk's result, of ``length`` of ``size`` indices.

    Raises:
        ConfigError: it has another number of indices.
    """
    if first.shape[dim] != length:
        raise ConfigError(
            f"a chunk of {length} indices along dim {dim} has a result of {first.shape[dim]}: the "
            "function must compute every index by itself"
        )
    shape = list(first.shape)
    shape[dim] = size
    return first.new_empty(shape)


class TakeChunk(torch.autograd.Function):
    """``x`` for the chunks to come, and the chunk ``[start, stop)`` of it.

    In backward the last chunk is the first one: it allocates the gradient of ``x``, and all others
    write into it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """``x`` itself and a view of it: nothing is copied."""
        ctx.dim, ctx.start, ctx.stop, ctx.shape = dim, start, stop, x.shape
        ctx.set_materialize_grads(False)
        return x, x.narrow(dim, start, stop - start)

    @staticmethod
    def backward(ctx: Any, later: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        """The gradient of ``x``, of whose chunks the earlier ones are written later."""
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
    """The output with one chunk's result written into it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, result: Tensor, dim: int, start: int) -> Tensor:
        """The output, changed in place."""
        ctx.dim, ctx.start, ctx.length = dim, start, result.shape[dim]
        output.narrow(dim, start, ctx.length).copy_(result)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """All of the gradient for the earlier chunks, which read their own part of it alone, and
        this chunk's part: a view."""
        return grad, grad.narrow(ctx.dim, ctx.start, ctx.length), None, None
