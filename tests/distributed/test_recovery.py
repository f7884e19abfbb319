"""An error in the middle of a call leaves no exchange in flight: the next call is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, attend, mesh_of, run_case
from harness import RankContext, WorkerPool

from ds_usp import SequenceMesh, Tuning
from ds_usp.attention import functional
from ds_usp.attention.plan import AttentionPlan
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.call_record import Signature
from ds_usp.comm.channel import PendingExchange
from ds_usp.kernels.sdpa import SdpaKernel

WORLD = 4
TIMEOUT_S = 20.0  # what takes longer hangs
MESSAGE = "the kernel gave up"


def kernel_calls(ctx: RankContext, case: Case, ulysses: int, method: str, stop: int) -> int:
    """Attention, forward and backward, on a kernel whose ``stop``-th call raises; the calls."""
    intact, calls = getattr(SdpaKernel, method), 0

    def failing(self: SdpaKernel, *args: Any) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        if calls == stop:
            raise RuntimeError(MESSAGE)
        calls += 1
        result: tuple[torch.Tensor, ...] = intact(self, *args)
        return result

    with mock.patch.object(SdpaKernel, method, failing):
        attend(mesh_of(ulysses), case)
    return calls


def failing_exchanges(stop: int, began: Callable[[], bool]) -> Any:
    """``PendingExchange.wait`` that raises at its ``stop``-th result after something began."""
    intact, taken = PendingExchange.wait, 0

    def failing(self: PendingExchange) -> tuple[torch.Tensor, ...]:
        nonlocal taken
        result = intact(self)
        if began():
            taken += 1
            if taken == stop:
                raise RuntimeError(MESSAGE)
        return result

    return mock.patch.object(PendingExchange, "wait", failing)


def exchange_interrupted(
    ctx: RankContext, ulysses: int, chunks: int, stop: int, forward: bool
) -> tuple[str, float]:
    """As :func:`interrupted`, where an exchange ends."""
    case = Case(batch=1, kernel="eager", tuning=Tuning(chunks, True))
    real, backward, message = functional.BackwardPass, forward, ""

    def begin(*args: Any, **more: Any) -> Any:
        nonlocal backward
        backward = True
        return real(*args, **more)

    begins = mock.patch.object(functional, "BackwardPass", begin)
    try:
        with begins, failing_exchanges(stop, lambda: backward):
            attend(mesh_of(ulysses), case)
    except RuntimeError as error:
        message = str(error)
    return message, max(run_case(ctx, replace(case, seed=1), ulysses).values())


# Ulysses degree, parts, what is taken when it fails, forward. There a part is taken as its keys set
# out and again as it is computed.
EXCHANGES = [(u, 2, stop, False) for u in (1, 2) for stop in (1, 2)]
EXCHANGES += [(2, 4, stop, True) for stop in (1, 3, 6, 7)]


@pytest.mark.parametrize(("ulysses", "chunks", "stop", "forward"), EXCHANGES)
def test_a_failed_wait_leaves_no_kv_exchange_in_flight(
    pool: WorkerPool, ulysses: int, chunks: int, stop: int, forward: bool
) -> None:
    results = pool.run(
        exchange_interrupted,
        WORLD,
        timeout=TIMEOUT_S,
        ulysses=ulysses,
        chunks=chunks,
        stop=stop,
        forward=forward,
    )
    assert [message for message, _ in results] == [MESSAGE] * WORLD, results
    assert max(error for _, error in results) < 1e-5, results


def interrupted(
    ctx: RankContext, ulysses: int, tuning: Tuning, method: str, part: int, at: int
) -> tuple[str, float]:
    """What a call said that broke off in a part of the heads, and the error of the next one."""
    case = Case(batch=1, kernel="sdpa", tuning=tuning)
    each, rest = divmod(kernel_calls(ctx, case, ulysses, method, stop=-1), int(tuning.chunks))
    message = "nothing" if rest == 0 else "parts of different lengths"
    try:
        kernel_calls(ctx, case, ulysses, method, stop=part * each + at % each)
    except RuntimeError as error:
        message = str(error)
    # Other numbers in tensors of the same shape: a message of the first call would spoil them.
    return message, max(run_case(ctx, replace(case, seed=1), ulysses).values())


# Ulysses degree, parts of the heads, the part in which it happens: between others where it can be.
CHUNKS = [(1, 1, 0), (1, 2, 1), (1, 4, 1), (2, 1, 0), (2, 2, 1), (2, 3, 1), (4, 2, 0), (4, 2, 1)]


# Gathered or not, inner ring.
MODES = {"block by block": (False, "auto"), "gathered": (True, "auto"), "double": (False, 2)}
CALLS = [(*each, mode) for mode in MODES for each in CHUNKS if mode != "double" or each[0] == 1]


@pytest.mark.parametrize("method", ["tile_forward", "tile_backward"])
@pytest.mark.parametrize(("ulysses", "chunks", "part", "mode"), CALLS)
def test_a_kernel_that_raises_leaves_no_exchange_in_flight(
    pool: WorkerPool, ulysses: int, chunks: int, part: int, mode: str, method: str
) -> None:
    gather, inner = MODES[mode]
    # In the own block while the next one comes, in the first one that came, and at the end. All
    # ranks break off in the same step; where the own block ends a part, that is counted from there.
    own_ends = method == "tile_backward" and chunks > 1 and part == chunks - 1 and mode != "double"
    for at in (0, -2 if own_ends else 1, -1):
        results = pool.run(
            interrupted,
            WORLD,
            timeout=TIMEOUT_S,
            ulysses=ulysses,
            tuning=Tuning(chunks, gather, inner_ring=inner),
            method=method,
            part=part,
            at=at,
        )
        assert [message for message, _ in results] == [MESSAGE] * WORLD, results
        assert max(error for _, error in results) < 1e-5, (at, results)


def waits_after_an_error(ctx: RankContext, method: str) -> tuple[str, int, int]:
    """How many all-to-alls a call has posted before a kernel raised, and has waited for."""
    real, works = HeadAllToAll._all_to_all, []

    def post(self: HeadAllToAll, *args: Any) -> Any:
        works.append(mock.Mock(wraps=real(self, *args)))
        return works[-1]

    message = ""
    with mock.patch.object(HeadAllToAll, "_all_to_all", post):
        try:
            kernel_calls(ctx, Case(kernel="sdpa", tuning=Tuning(chunks=4)), 2, method, stop=1)
        except RuntimeError as error:
            message = str(error)
    return message, len(works), sum(work.wait.called for work in works)


@pytest.mark.parametrize(("method", "posted"), [("tile_forward", 5), ("tile_backward", 16)])
def test_all_to_alls_in_flight_are_waited_for_after_an_error(
    pool: WorkerPool, method: str, posted: int
) -> None:
    """Nothing may be received into memory that is allocated again."""
    results = pool.run(waits_after_an_error, 2, timeout=TIMEOUT_S, method=method)
    assert results == [(MESSAGE, posted, posted)] * 2


def test_a_pass_that_finds_no_memory_for_its_output_is_an_aborted_one() -> None:
    """With copy engines the other ranks wait on the GPU, and hear of it at the next comparison."""
    mesh = SequenceMesh.single()
    begins = mock.patch.object(
        AttentionPlan, "reserve_resources", lambda *_: mesh.consistency.begin_pass()
    )
    needs = mock.patch.object(AttentionPlan, "needs_resources", True)
    real = functional.ForwardPass

    def forward(*args: Any, **more: Any) -> Any:
        with mock.patch.object(torch.Tensor, "new_empty", side_effect=RuntimeError(MESSAGE)):
            return real(*args, **more)

    starts = mock.patch.object(functional, "ForwardPass", forward)
    with begins, needs, starts, pytest.raises(RuntimeError, match=MESSAGE):
        attend(mesh, Case(kernel="eager", tuning=Tuning(chunks=2)))
    assert mesh.consistency._record(Signature(("the next call",))).aborted_passes == 1
    ends = mock.patch.object(AttentionPlan, "mark_pass_done", lambda _: mesh.consistency.end_pass())
    with begins, needs, ends:  # none, where a call ends well
        attend(mesh, Case(kernel="eager", tuning=Tuning(chunks=2)))
    assert mesh.consistency._record(Signature(("the next call",))).aborted_passes == 1
