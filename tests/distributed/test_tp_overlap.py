"""Tensor-parallel linear layers over sharded tokens, against dense fp64 on one rank."""

from __future__ import annotations

import warnings
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankContext, WorkerPool
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from ds_usp import ConfigError
from ds_usp import testing as oracle
from ds_usp.training import (
    TensorParallelComm,
    all_gather_linear,
    gather_tokens,
    linear_reduce_scatter,
    split_tokens,
    sum_gradients,
    tp_comm,
)

N, B, H, F = 8, 2, 12, 16
LIMIT = 1e-12
NAMES = ("norm", "up", "up_bias", "down", "down_bias")


def inputs() -> tuple[torch.Tensor, dict[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, B, H), (H,), (F, H), (F,), (H, F), (H,))
    x, *values = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, {name: torch.nn.Parameter(value) for name, value in zip(NAMES, values, strict=True)}


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)).sum()


@cache
def dense() -> dict[str, torch.Tensor]:
    """Output and gradients of norm, two linear layers and a residual, on one rank."""
    x, p = inputs()
    x.requires_grad_()
    normed = functional.rms_norm(x, (H,), p["norm"], 1e-6)
    wide = functional.gelu(functional.linear(normed, p["up"], p["up_bias"]))
    y = x + functional.linear(wide, p["down"], p["down_bias"])
    loss_of(y).backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | {name: q.grad for name, q in p.items()}  # type: ignore[dict-item]


def errors_of_layer(comm: TensorParallelComm) -> dict[str, float]:
    """The same, sharded, relative to this rank's part of the dense result."""
    x, whole = inputs()
    x.requires_grad_()
    part = slice(F // comm.size * comm.rank, F // comm.size * (comm.rank + 1))
    cut = {"up": (part,), "up_bias": (part,), "down": (slice(None), part)}
    everything: tuple[slice, ...] = (slice(None),)
    p = {n: torch.nn.Parameter(q[cut.get(n, everything)].clone()) for n, q in whole.items()}
    sum_gradients((p["norm"], p["down_bias"]), comm.group)
    shard = split_tokens(x, comm)
    normed = functional.rms_norm(shard, (H,), p["norm"], 1e-6)
    wide = functional.gelu(all_gather_linear(normed, p["up"], p["up_bias"], comm))
    y = shard + linear_reduce_scatter(wide, p["down"], comm) + p["down_bias"]
    y = gather_tokens(y, comm)
    y.mul_(1.0)  # outputs may be written into
    loss_of(y).backward()
    assert x.grad is not None
    got = {"y": y.detach(), "x": x.grad} | {name: q.grad for name, q in p.items()}
    expected = dense()
    return {
        name: oracle.relative_error(value, expected[name][cut.get(name, everything)])
        for name, value in got.items()
    }


# ---------------------------------------------- the fused operators, on CPUs by their definitions


def low_contention_all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    ranks = dist.get_world_size()
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor, ranks, group_name)


def low_contention_reduce_scatter(
    tensor: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    assert reduce_op == "sum"
    ranks = dist.get_world_size()
    return torch.ops._c10d_functional.reduce_scatter_tensor(tensor, reduce_op, ranks, group_name)


@cache
def operators_for_cpus() -> torch.library.Library:
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name, definition in {
        "fused_all_gather_matmul": symmetric_memory._fused_all_gather_matmul_fallback,
        "fused_matmul_reduce_scatter": symmetric_memory._fused_matmul_reduce_scatter_fallback,
        "_low_contention_all_gather": low_contention_all_gather,
        "_low_contention_reduce_scatter": low_contention_reduce_scatter,
    }.items():
        library.impl(name, definition)
    return library


def is_fused(comm: TensorParallelComm, *unused: object) -> bool:
    return not comm.plain_reason


def errors_on_rank(ctx: RankContext, wrong: bool = False) -> list[dict[str, float] | str]:
    operators_for_cpus()
    plain = TensorParallelComm.build(ctx.group, torch.device("cpu"))
    assert plain.plain_reason == "the ranks do not compute on GPUs"
    fused = TensorParallelComm(ctx.group, "")
    with (
        mock.patch.object(TensorParallelComm, "_is_fused", is_fused),
        mock.patch.object(TensorParallelComm, "_reserve", lambda comm, size: None),
    ):
        results = [errors_of_layer(plain), errors_of_layer(fused)]
        trials = [tp_comm._trial(fused, torch.device("cpu"))]
        gathered = torch.ops.symm_mem._low_contention_all_gather
        with mock.patch.object(
            torch.ops.symm_mem,
            "_low_contention_all_gather",
            lambda tensor, name: gathered(tensor + (ctx.rank == 1), name),
        ):
            trials.append(tp_comm._trial(fused, torch.device("cpu")))
        with mock.patch.object(torch.ops.symm_mem, "_low_contention_all_gather", None):
            trials.append(tp_comm._trial(fused, torch.device("cpu")))
    return [*results, *trials]


@pytest.mark.parametrize("world", [2, 4])
def test_plain_and_fused_equal_dense(world: int, pool: WorkerPool) -> None:
    for plain, fused, right, wrong, raising in pool.run(errors_on_rank, world):
        assert max(plain.values()) < LIMIT, plain
        assert max(fused.values()) < LIMIT, fused
        assert right == ""
        assert wrong.endswith("computed something else than the plain ones here")
        assert raising.startswith("the fused operators raise TypeError")


def operands_on_rank(ctx: RankContext) -> list[tuple[bool, bool]]:
    """Whether what a posted operator reads on its own stream is freed before, and after, the wait
    for it."""

    def posted(operand: torch.Tensor, *unused: object) -> torch.Tensor:
        return torch.zeros(1)

    comm, freed = TensorParallelComm(ctx.group, ""), []
    operators = ("_low_contention_all_gather", "_low_contention_reduce_scatter")
    gather, scatter = (mock.patch.object(torch.ops.symm_mem, name, posted) for name in operators)
    fused = mock.patch.object(TensorParallelComm, "_is_fused", is_fused)
    reserve = mock.patch.object(TensorParallelComm, "_reserve", lambda comm, size: None)
    with gather, scatter, fused, reserve:
        for post in (comm.start_gather, comm.start_scatter):
            operand = torch.ones(4, 4)
            storage = StorageWeakRef(operand.untyped_storage())
            pending = post(operand)
            del operand
            before = storage.expired()
            pending()
            del pending
            freed.append((before, storage.expired()))
    return freed


def test_operands_live_until_the_wait(pool: WorkerPool) -> None:
    assert pool.run(operands_on_rank, 1) == [[(False, True)] * 2]


def refusals_on_rank(ctx: RankContext) -> list[str]:
    comm = TensorParallelComm(ctx.group, "a test")
    texts = []
    for call in (
        lambda: split_tokens(torch.zeros(3, 4), comm),
        lambda: linear_reduce_scatter(torch.zeros(3, 4), torch.zeros(2, 4), comm),
        lambda: all_gather_linear(torch.zeros(2, 4), torch.zeros(2, 5), None, comm),
        lambda: all_gather_linear(torch.zeros(2, 4), torch.zeros(2, 4).double(), None, comm),
    ):
        try:
            call()
        except ConfigError as error:
            texts.append(str(error))
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4)
    for made in (
        all_gather_linear(x, weight, None, comm),
        linear_reduce_scatter(x, weight, comm),
        split_tokens(x, comm),
        gather_tokens(x, comm),
    ):
        try:
            torch.autograd.grad(made.sum(), x, create_graph=True)
        except ConfigError as error:
            texts.append(str(error))
    return texts


def test_what_does_not_fit_is_refused(pool: WorkerPool) -> None:
    for uneven, uneven_too, shape, dtype, *second in pool.run(refusals_on_rank, 2):
        assert ["create_graph" in text for text in second] == [True] * 4
        assert uneven == uneven_too
        assert (
            "3 tokens" in uneven
            and "2 tensor-parallel ranks: use a multiple of 2, such as 4" in uneven
        )
        assert "x [2, 4] torch.float32, weight [2, 5]" in shape
        assert "torch.float64: x must be [tokens, ..., i]" in dtype


def warnings_of_collectives(ctx: RankContext) -> list[str]:
    comm = TensorParallelComm(ctx.group, "of this test")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gathered = comm.start_gather(torch.full((1, 2), float(ctx.rank)))()
        shard = comm.start_scatter(gathered)()
    torch.testing.assert_close(shard, torch.full((1, 2), 2.0 * ctx.rank))
    return [str(warning.message) for warning in caught]


def test_no_name_is_used_that_torch_warns_of(pool: WorkerPool) -> None:
    assert pool.run(warnings_of_collectives, 2) == [[], []]
