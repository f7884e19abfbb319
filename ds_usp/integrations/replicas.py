"""Ranks of a mesh as replicas that were given the same batch: losses, outputs and batches.

Every rank computes a shard of the tokens, and all see the whole batch's loss. The rule for
gradients is: the *mean* over the ranks of what ``.grad`` holds is the gradient of that loss. A
framework that sums over the ranks of a mesh instead asks for ``gradients="sum"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.lowlevel import refuse_second_derivative

Reduction = Literal["mean", "sum"]


def check_mesh(mesh: object) -> None:
    """ConfigError for anything but a mesh, such as a process group."""
    if not isinstance(mesh, SequenceMesh):
        raise ConfigError(
            f"mesh={mesh!r} must be a SequenceMesh: SequenceMesh.from_group(group, "
            "ulysses_degree=...), or SequenceMesh.single() for one process"
        )


class SumOfShards(torch.autograd.Function):
    """The sum over the ranks of a mesh of what each computed from its shard, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: SequenceMesh, gradients: Reduction) -> Tensor:
        # Each rank's loss depends on its own shard alone, so its gradient is a summand of the
        # whole's. What averages over all ranks divides by sp_degree too often: times sp_degree
        # here.
        ctx.factor = mesh.sp_degree if gradients == "mean" else 1
        total = x.detach().clone()
        if mesh.sp_group is not None:
            # Waited for on GPUs too: a rank whose head had no memory can leave, and the next pass
            # is computed. A sum that it does not answer would take the next pass's for its own.
            mesh.agree("the sum of the ranks' losses")
            dist.all_reduce(total, group=mesh.sp_group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The ranks' gradients are equal, each one's loss being the same: nothing to exchange.
        return grad * ctx.factor, None, None


class JoinShards(torch.autograd.Function):
    """The whole tensor on every rank, from the shard of each."""

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
    """The whole tensor from this rank's shard and the others', differentiable. Collective.

    Shapes:
        x: ``layout.length(mesh.rank)`` along ``dim``; the result has ``layout.seq_len`` there.

    Raises:
        LayoutError, MeshError: this rank, or another one, holds something else than its shard.
    """
    if not x.requires_grad:
        return mesh.gather(x.detach(), layout, dim)
    joined: Tensor = JoinShards.apply(x, layout, mesh, dim % x.ndim, gradients)
    return joined


def check_reduction(gradients: str) -> None:
    """ConfigError for a reduction of gradients that does not exist."""
    if gradients not in get_args(Reduction):
        raise ConfigError(
            f"gradients={gradients!r} must be 'mean' (DDP, FSDP2, ZeRO without an mpu average over "
            "all ranks) or 'sum' (the framework sums over the ranks of a mesh)"
        )


_INTEGERS = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)  # by bytes


class ArgumentsDigest:
    """What tells the arguments of forward passes apart: shapes, dtypes and a sum over each tensor,
    and plain values. Mappings, lists and tuples are gone through; ``meta`` has no values.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]] = {}
        plain: list[str] = []
        sums: dict[torch.device, list[Tensor]] = {}
        for name, x in _flat("", given):
            if isinstance(x, Tensor):
                if x.is_complex():
                    x = torch.view_as_real(x.resolve_conj())
                self._tensors[name] = tuple(x.shape), x.dtype, x.device
                # Sums of bits as integers wrap around: exact in any order, so that unlike GPUs
                # agree.
                bits = x.detach().reshape(-1).view(_INTEGERS[x.element_size()]).long()
                weights = torch.arange(1, len(bits) + 1, device=x.device) * 0x1E3779B97F4A7C15
                weights = (weights ^ (weights >> 29)) | 1  # unlike neighbours: swapped tokens show
                sums.setdefault(x.device, []).append((bits * weights).sum())
            elif isinstance(x, (int, float, str)):
                plain.append(f"{name} {x}")
        self._plain = ", ".join(plain)
        # From a GPU to pinned memory, behind the work of its stream: the host goes on.
        self._sums = {
            device: torch.stack(each).to("cpu", non_blocking=device.type == "cuda")
            for device, each in sums.items()
            if device.type != "meta"
        }
        self._copied = {
            device: torch.cuda.current_stream(device).record_event()
            for device in self._sums
            if device.type == "cuda"
        }

    @property
    def is_known(self) -> bool:
        """Whether :meth:`text` need not wait for a GPU."""
        return not self._copied

    def text(self, values: bool = True) -> str:
        """A text that differs between arguments; without tensors' values it is known at once."""
        texts = {
            name: f"{name} {shape} {str(dtype).removeprefix('torch.')}"
            for name, (shape, dtype, _) in self._tensors.items()
        }
        if values:
            for event in self._copied.values():
                event.synchronize()
            numbers = {device: iter(sums.tolist()) for device, sums in self._sums.items()}
            for name, (_, _, device) in self._tensors.items():
                texts[name] += f" {next(numbers.get(device, iter([0]))):x}"
        return "; ".join((", ".join(texts.values()), self._plain))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value


class ValuesComparison:
    """The tensors' values of a forward pass, which the ranks of a mesh have still to compare.

    Attributes:
        digest: None if nothing is left to compare.
    """

    def __init__(self, mesh: SequenceMesh, what: str) -> None:
        self._mesh, self._what = mesh, what
        self.digest: ArgumentsDigest | None = None

    def __deepcopy__(self, _: Any) -> ValuesComparison:
        return ValuesComparison(self._mesh, self._what)

    def finish(self) -> None:
        """Compare them, once they are known; MeshError if they differ. Collective over the mesh."""
        digest, self.digest = self.digest, None
        if digest is not None:
            self._mesh.agree(f"{self._what} {digest.text()}")


@contextmanager
def same_on_all_ranks(
    mesh: SequenceMesh, what: str, given: Mapping[str, Any], deferred: bool = False
) -> Iterator[ValuesComparison]:
    """Compare the arguments of a forward pass on all ranks when the body has ended, well or not:
    what one rank refuses every rank refuses. Collective over the mesh.

    Args:
        what: precedes the arguments in the error.
        deferred: leave values on GPUs to :meth:`ValuesComparison.finish`, so that a GPU need not
            be idle until the host has read them. They may not decide which collectives the pass
            has, but for attention, which compares its own calls.

    Raises:
        MeshError: the ranks were given other arguments, or another rank has refused its own.
        Exception: what the body has raised.
    """
    # An error is sent with the comparison, and not raised before it: the other ranks would wait in
    # the exchanges of a pass that this one never begins.
    error: Exception | None = None
    comparison = ValuesComparison(mesh, what)
    mesh.consistency.begin_forward_pass()
    try:
        yield comparison
    except Exception as refused:
        error = refused
    if mesh.sp_group is not None:
        digest = ArgumentsDigest(given)
        if deferred and not digest.is_known:
            comparison.digest = digest
        mesh.agree(f"{what} {digest.text(values=comparison.digest is None)}", error)
    if error is not None:
        raise error


_ELEMENTS = 8  # of each weight: another seed or checkpoint changes nearly all of them


class WeightsComparison:
    """Weights among the arguments that ranks compare, until one forward pass has succeeded.

    The pass after one that failed compares them again. If it failed on one rank only, ranks then
    differ in what they compare: all raise an error, and in the pass after it all compare.
    """

    def __init__(self, needed: bool) -> None:
        self._needed, self._is_done = needed, False

    def of(self, module: nn.Module) -> dict[str, Tensor]:
        """What the forward pass that begins compares besides its arguments."""
        is_done, self._is_done = self._is_done, False
        if is_done or not self._needed:
            return {}
        what = f"weights ({_ELEMENTS} elements of each; load one checkpoint or seed alike)"
        return {f"{what} in {name}": x for name, x in sample_of_weights(module).items()}

    def end(self) -> None:
        """After a comparison that no rank has refused."""
        self._is_done = True


def sample_of_weights(module: nn.Module) -> dict[str, Tensor]:
    """A few elements of each weight and persistent buffer that a rank holds whole, by dtype: of the
    middle and the last row, where a table that was enlarged has its new ones, evenly spaced."""
    samples: dict[torch.dtype, list[Tensor]] = {}
    for weight in _weights(module):
        of_dtype = samples.setdefault(weight.dtype, [])
        for row in _rows(weight.detach()):
            of_dtype.append(row if not of_dtype else row.to(of_dtype[0].device))
    return {
        str(dtype).removeprefix("torch."): torch.cat(rows)
        for dtype, rows in samples.items()
        if rows
    }


def _rows(weight: Tensor) -> list[Tensor]:
    """Of a matrix and of what has more dims two rows, each with half of the elements."""
    if weight.ndim < 2:
        return [_spaced(weight.reshape(-1), _ELEMENTS)]
    middle = last = weight
    while middle.ndim > 1:
        middle, last = middle[len(middle) // 2], last[-1]
    return [_spaced(row, _ELEMENTS // 2) for row in (middle, last)]


def _spaced(row: Tensor, count: int) -> Tensor:
    return row[:: max(1, len(row) // count)][:count]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from filter(_is_whole, module.parameters())
    for inner in module.modules():
        kept = set(inner._buffers) - inner._non_persistent_buffers_set
        buffers = (inner._buffers[name] for name in sorted(kept))
        yield from (x for x in buffers if x is not None and _is_whole(x))


def _is_whole(weight: Tensor) -> bool:
    # Of weights that FSDP, ZeRO-3 or tensor parallelism shards, and of DeepSpeed's experts, ranks
    # hold different parts; of other tensor classes and those without values nothing can be read.
    if hasattr(weight, "ds_id") or hasattr(weight, "_fsdp_flattened"):
        return False
    if not getattr(weight, "allreduce", True):  # as DeepSpeed marks experts
        return False
    plain = type(weight.data) is Tensor and not nn.parameter.is_lazy(weight)
    readable = plain and weight.layout is torch.strided and weight.device.type != "meta"
    return readable and weight.numel() > 0
