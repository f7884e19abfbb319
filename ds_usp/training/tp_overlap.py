"""Tensor-parallel linear layers over sharded tokens, their communication under their products.

Between the layers each rank of a tensor-parallel group holds a shard of the tokens (Megatron's
sequence parallelism, 2205.05198), so norms and residuals are computed once, not on every rank.

    column-parallel    all-gather of tokens, product     backward: product, reduce-scatter
    row-parallel       product, reduce-scatter           backward: all-gather of gradients, product

Where product and collective depend on each other they run in a pipeline of pieces
(:class:`TensorParallelComm`). Where they do not, whole: a column-parallel layer's backward gathers
its input under the product of the input's gradient, and scatters that under the product of the
weight's gradient. Only the shard of the input is saved.

Parameters that see a shard of the tokens, norms and biases of row-parallel layers, get a part of
their gradient on each rank: :func:`sum_gradients`.

Letters of the shapes: n tokens of all ranks of the group, t ranks, b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_usp.errors import ConfigError
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.training.tp_comm import TensorParallelComm


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: TensorParallelComm
) -> Tensor:
    """A column-parallel linear layer: ``all tokens @ weight.T + bias``. Collective.

    Shapes:
        x ``[n/t, ..., h]``, weight ``[o, h]``, bias ``[o]``, result ``[n, ..., o]``: o of this
        rank's output columns.

    Raises:
        ConfigError: shapes or dtypes that do not fit.
    """
    _check(x, weight, comm)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"bias {list(bias.shape)} does not fit weight {list(weight.shape)}, [o, h]"
        )
    result: Tensor = AllGatherLinear.apply(x, weight, bias, comm)
    return result


def linear_reduce_scatter(x: Tensor, weight: Tensor, comm: TensorParallelComm) -> Tensor:
    """A row-parallel linear layer: this rank's tokens of the sum over ranks of ``x @ weight.T``.
    Collective.

    Shapes:
        x ``[n, ..., i]``, weight ``[h, i]``: i of this rank's input columns; result
        ``[n/t, ..., h]``.

    Raises:
        ConfigError: shapes or dtypes that do not fit, or tokens that t does not divide.
    """
    _check(x, weight, comm)
    check_tokens(len(x), comm.size)
    result: Tensor = LinearReduceScatter.apply(x, weight, comm)
    return result


def split_tokens(hidden: Tensor, comm: TensorParallelComm) -> Tensor:
    """This rank's shard of tokens that all ranks hold; the gradient is gathered. Collective.

    Shapes:
        hidden ``[n, ...]``, result ``[n/t, ...]``.

    Raises:
        ConfigError: tokens that t does not divide.
    """
    _check_comm(comm)
    check_tokens(len(hidden), comm.size)
    result: Tensor = SplitTokens.apply(hidden, comm)
    return result


def gather_tokens(hidden: Tensor, comm: TensorParallelComm) -> Tensor:
    """All tokens of the ranks' shards, for what gives every rank the whole gradient. Collective.

    Shapes:
        hidden ``[n/t, ...]``, result ``[n, ...]``.
    """
    _check_comm(comm)
    result: Tensor = GatherTokens.apply(hidden, comm)
    return result


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters that see a shard of the tokens over a group, from now on.

    Each gradient is summed in backward, before it is accumulated and before DeepSpeed, at any ZeRO
    stage, gets it. In fp32, or fp64 for fp64. Every rank must run the same backward.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    for parameter in parameters:
        parameter.register_hook(summed)


def check_tokens(tokens: int, ranks: int) -> None:
    """Refuse tokens that ranks cannot share evenly.

    Raises:
        ConfigError: with both numbers.
    """
    if tokens % ranks:
        raise ConfigError(
            f"{tokens} tokens cannot be sharded evenly over {ranks} tensor-parallel ranks: use a "
            f"multiple of {ranks}, such as {-(-tokens // ranks) * ranks}, or no sharding"
        )


class AllGatherLinear(torch.autograd.Function):
    """See :func:`all_gather_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: TensorParallelComm
    ) -> Tensor:
        # x itself is saved, not its rows: GEMM-last recomputation knows it by its storage.
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.has_bias = comm, bias is not None
        _, product = comm.gather_matmul(_rows(x), weight.t(), keep=False)
        if bias is not None:
            product += bias
        return _output(product, (comm.size * len(x), *x.shape[1:-1], -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("all_gather_linear")
        x, weight = ctx.saved_tensors
        comm: TensorParallelComm = ctx.comm
        grad = _rows(grad)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathered = comm.start_gather(_rows(x)) if needs_weight else None
        scattered = comm.start_scatter(grad @ weight) if needs_x else None
        dweight = grad.t() @ gathered() if gathered else None
        dbias = grad.sum(0) if ctx.has_bias and needs_bias else None
        return scattered().view_as(x) if scattered else None, dweight, dbias, None


class LinearReduceScatter(torch.autograd.Function):
    """See :func:`linear_reduce_scatter`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: TensorParallelComm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        shard = comm.matmul_scatter(_rows(x), weight.t())
        return _output(shard, (len(x) // comm.size, *x.shape[1:-1], -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("linear_reduce_scatter")
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        shard = _rows(grad)
        if needs_x:
            grad, dx = ctx.comm.gather_matmul(shard, weight, keep=needs_weight)
        else:
            grad, dx = ctx.comm.start_gather(shard)(), None
        dweight = grad.t() @ _rows(x) if needs_weight else None
        return None if dx is None else dx.view_as(x), dweight, None


class SplitTokens(torch.autograd.Function):
    """See :func:`split_tokens`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, comm: TensorParallelComm) -> Tensor:
        ctx.comm = comm
        return _own(hidden, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("split_tokens")
        return ctx.comm.start_gather(grad)(), None


class GatherTokens(torch.autograd.Function):
    """See :func:`gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, comm: TensorParallelComm) -> Tensor:
        ctx.comm = comm
        gathered: Tensor = comm.start_gather(hidden)()
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("gather_tokens")
        return _own(grad, ctx.comm), None


def _own(tokens: Tensor, comm: TensorParallelComm) -> Tensor:
    """This rank's shard, in memory of its own: a view would keep all tokens alive."""
    return tokens.chunk(comm.size)[comm.rank].clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    """``[..., h]`` as contiguous rows ``[*, h]``."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _output(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A matrix in another shape, which is no view of it: autograd forbids writing into an output
    that is one, as megatron-core's cross entropy does."""
    view = rows.view(shape)
    storage, offset = view.untyped_storage(), view.storage_offset()
    return rows.new_empty(0).set_(storage, offset, view.shape, view.stride())


def _check_comm(comm: TensorParallelComm) -> None:
    if not isinstance(comm, TensorParallelComm):
        raise ConfigError(
            f"comm={comm!r} must be a TensorParallelComm: TensorParallelComm.build(group, device)"
        )


def _check(x: Tensor, weight: Tensor, comm: TensorParallelComm) -> None:
    _check_comm(comm)
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ConfigError(
            f"x {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}: x must be "
            "[tokens, ..., i], weight [o, i], both of one dtype"
        )
