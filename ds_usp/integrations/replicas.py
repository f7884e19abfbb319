"""Ranks of a mesh as replicas that were given the same batch: losses, outputs and batches.

Every rank computes a shard of the tokens, and all see the whole batch's loss. The rule for
gradients is: the *mean* over the ranks of what ``.grad`` holds is the gradient of that loss. A
framework that sums over the ranks of a mesh instead asks for ``gradients="sum"``. Enabled models of
transformers and diffusers call what is here, on every rank, in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.integrations.digests import ArgumentsDigest
from ds_usp.integrations.model_comparison import ModelComparison
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.memory.compile_guard import disable_in_compile

Reduction = Literal["mean", "sum"]


class _SumOfShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: SequenceMesh, gradients: Reduction) -> Tensor:
        # Each rank's loss depends on its own shard alone: its gradient is a summand of the whole's,
        # which an average over all ranks divides by sp_degree too often. Backward multiplies.
        ctx.factor = mesh.sp_degree if gradients == "mean" else 1
        total = x.detach().clone()
        if mesh.sp_group is not None:
            # Compared first: if some ranks have failed before this sum (no memory for the head),
            # the others' all-reduce would be answered by that of the next pass.
            mesh.agree("the sum of the ranks' losses")
            dist.all_reduce(total, group=mesh.sp_group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The ranks' gradients are equal, each one's loss being the same: nothing to exchange.
        return grad * ctx.factor, None, None


@disable_in_compile("the ranks compare before they sum their losses")
def sum_of_shards(x: Tensor, mesh: SequenceMesh, gradients: Reduction) -> Tensor:
    """The sum over the ranks of a mesh of what each computed from its shard, differentiable.
    Collective."""
    return _SumOfShards.apply(x, mesh, gradients)


class _JoinShards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: TokenLayout, mesh: SequenceMesh, dim: int, gradients: Reduction
    ) -> Tensor:
        ctx.arguments = layout, mesh, dim, gradients
        return mesh.gather(x.detach(), layout, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Every rank may have computed another loss from the whole tensor: the gradients are summed,
        # and each rank continues with its shard of them.
        layout, mesh, dim, gradients = ctx.arguments
        grad = grad.clone(memory_format=torch.contiguous_format)
        if mesh.sp_group is not None:
            refuse_second_derivative("an output that is joined over the ranks")
            mesh.agree("the gradient of an output that is joined over the ranks")
            dist.all_reduce(grad, group=mesh.sp_group)
        shard = layout.shard(grad, dim, mesh.rank)
        return (shard if gradients == "mean" else shard / mesh.sp_degree), None, None, None, None


def join_shards(
    x: Tensor, layout: TokenLayout, mesh: SequenceMesh, dim: int, gradients: Reduction = "mean"
) -> Tensor:
    """The whole tensor on every rank, from the ranks' shards. Differentiable; collective over the
    mesh.

    Shapes:
        x: ``layout.length(mesh.rank)`` along ``dim``; the result has ``layout.seq_len`` there.

    Raises:
        LayoutError, MeshError: this rank, or another one, holds something else than its shard.
    """
    dim %= x.ndim
    if not x.requires_grad:
        return mesh.gather(x.detach(), layout, dim)
    return _JoinShards.apply(x, layout, mesh, dim, gradients)


def check_reduction(gradients: str) -> None:
    """ConfigError for a reduction of gradients that does not exist."""
    if gradients not in get_args(Reduction):
        raise ConfigError(
            f"gradients={gradients!r} must be 'mean' (DDP, FSDP2, ZeRO without an mpu average over "
            "all ranks) or 'sum' (the framework sums over the ranks of a mesh)"
        )


class ValuesComparison:
    """The tensors' values of a forward pass, which the ranks of a mesh have still to compare.

    Attributes:
        finish: compares them, once they are known; MeshError if they differ. Collective over the
            mesh; nothing where all were compared at once.
    """

    def __init__(self) -> None:
        self.finish: Callable[[], None] = lambda: None

    def __deepcopy__(self, _: Any) -> ValuesComparison:
        return ValuesComparison()


@contextmanager
def same_on_all_ranks(
    mesh: SequenceMesh,
    subject: str,
    arguments: Mapping[str, Any],
    model: ModelComparison,
    *,
    advice: str = "",
    deferred: bool = False,
) -> Iterator[ValuesComparison]:
    """Compare the arguments of a forward pass, and the model, on all ranks when the body has ended,
    well or not: what one rank refuses every rank refuses. Collective over the mesh.

    Args:
        subject: precedes the arguments in the error.
        advice: the last sentence of the error, where arguments differ.
        deferred: leave values on GPUs to ``finish`` of what is yielded, so that a GPU need not be
            idle until the host has read them. They may not decide which collectives the pass has,
            but for attention, which compares its own calls.

    Raises:
        MeshError: the ranks were given other arguments, hold other weights or settings, or another
            rank has refused its own.
        Exception: what the body has raised.
    """
    # An error is sent with the comparison, and not raised before it: the other ranks would wait in
    # the exchanges of a pass that this one never begins.
    values = ValuesComparison()
    try:
        refusal = mesh.consistency.take_thread()
        if refusal is not None:
            raise refusal
        yield values
        if mesh.sp_group is None:
            return
        digest, model_digest = ArgumentsDigest(arguments), ArgumentsDigest(model.of_pass())
    except Exception as error:
        mesh.agree(subject, error)
        raise
    with_values = not deferred or (digest.is_known and model_digest.is_known)
    model.agree(subject, digest.text(with_values), model_digest.text(with_values), advice)
    if with_values:
        model.end_pass()
        return

    def finish() -> None:
        model.agree(f"values of {subject}", digest.text(), model_digest.text(), advice)
        model.end_pass()

    values.finish = finish
