"""Ranks that differ are refused everywhere; an error in a call leaves no exchange in flight."""

import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, attend, mesh_of, run_case
from harness import RankContext
from test_meshes import both_transports, checker_of

import ds_usp
from ds_usp import SequenceMesh, Tuning
from ds_usp.attention import functional
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.channel import PendingExchange
from ds_usp.comm.consistency import SharedNumbers
from ds_usp.kernels.sdpa import SdpaKernel
from ds_usp.memory import keep_attention
from ds_usp.testing import causal, dense_attention, relative_error

WORLD = 4
TIMEOUT_S = 20.0  # what takes longer hangs
HEADS, TOKENS, DIM = 4, 16, 8

# Each way of attention: Ulysses degree, and what makes it.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Local(torch.nn.Module):
    """A local attention of the user's, ``[b, s, h, d]``."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True)
        return out.transpose(1, 2)


def attention_of(mode: str, mesh: SequenceMesh | None = None) -> Attend:
    kind, degree = mode.split()
    mesh = mesh or mesh_of(int(degree))
    layout = mesh.layout("contiguous", TOKENS)
    mask = ds_usp.MaskSpec.causal()
    if kind == "local":
        return ds_usp.USPAttention(Local(), gather_idx=1, mesh=mesh, layout="contiguous")
    if kind == "joint":
        return lambda q, k, v: (
            ds_usp.usp_joint_attention(
                *(x for x in (q, k, v)),
                *(x[:, :4].detach() for x in (q, k, v)),
                mesh=mesh,
                layout=layout,
                mask=mask,
            )[1].sum(dim=1, keepdim=True)
            + q * 0
        )
    attend: Attend = lambda q, k, v: ds_usp.usp_attention(  # noqa: E731
        q, k, v, mesh=mesh, layout=layout, mask=mask
    )
    if kind in ("compiled", "graph"):  # the op's backward in torch's graph, or in autograd's
        torch._dynamo.reset()
        backend = "aot_eager" if kind == "compiled" else "eager"
        return torch.compile(attend, backend=backend, fullgraph=True)
    if kind == "compiled-local":
        torch._dynamo.reset()
        module = ds_usp.USPAttention(Local(), gather_idx=1, mesh=mesh, layout="contiguous")
        return torch.compile(module, backend="aot_eager")  # the local attention breaks the graph
    if kind == "kept":
        return lambda q, k, v: torch.utils.checkpoint.checkpoint(
            keep_attention(attend), q, k, v, use_reentrant=False
        )
    if kind == "again":
        return lambda q, k, v: torch.utils.checkpoint.checkpoint(
            attend, q, k, v, use_reentrant=False
        )
    return attend


def run_calls(ctx: RankContext, mode: str, orders: Sequence[Sequence[int]]) -> tuple[str, float]:
    """Two calls of one shape, whose backward passes this rank runs in its order, then another call;
    what was raised, and the worst error of their gradients of q."""
    mesh, attend = mesh_of(int(mode.split()[1])), attention_of(mode)
    layout = mesh.layout("contiguous", TOKENS)
    calls, q_grads = [], {}
    message, worst = "", 0.0
    try:
        for call in range(2):
            generator = torch.Generator().manual_seed(call)
            full = [torch.randn(1, TOKENS, HEADS, DIM, generator=generator) for _ in range(4)]
            local_qkv = [layout.shard(x, 1, mesh.rank).requires_grad_() for x in full[:3]]
            calls.append((full, local_qkv, attend(*local_qkv)))
        for call in orders[ctx.rank]:
            full, local_qkv, out = calls[call]
            dout = layout.shard(full[3], 1, mesh.rank)
            (q_grads[call],) = torch.autograd.grad(
                out, local_qkv[:1], dout, retain_graph="kept" not in mode
            )
        attend(*calls[0][1])
        mesh.check()
    except ds_usp.MeshError as error:
        message = str(error)
    for call, grad in {} if message or "joint" in mode else q_grads.items():
        full = [x.double() for x in calls[call][0]]
        q = full[0].requires_grad_()
        dense, _ = dense_attention(q, *full[1:3], causal(range(TOKENS), range(TOKENS)))
        (want,) = torch.autograd.grad(dense, [q], full[3])
        worst = max(worst, relative_error(grad, layout.shard(want, 1, mesh.rank)))
    return message, worst


MODES = ["usp 1", "usp 2", "usp 4", "local 4", "joint 2", "kept 2", "again 2"]
COMPILED = ["compiled 1", "compiled 2", "compiled-local 4"]


@pytest.mark.parametrize("mode", MODES + COMPILED)
def test_backward_passes_in_different_orders_are_refused(pool, mode):
    orders = [(0, 1), (1, 0), (1, 0), (1, 0)]
    for text, _ in pool.run(run_calls, WORLD, timeout=TIMEOUT_S, mode=mode, orders=orders):
        assert "backward pass of call" in text and "on ranks 1-3" in text and "on rank 0" in text


@pytest.mark.parametrize("mode", ["usp 1", "usp 4", "local 4"])
def test_a_rank_with_more_or_fewer_backward_passes_is_refused(pool, mode):
    for odd in [(1, 1, 0), (1, 0, 0), (1,), (0,), ()]:
        orders = [(1, 0), (1, 0), odd, (1, 0)]
        for text, _ in pool.run(run_calls, WORLD, timeout=TIMEOUT_S, mode=mode, orders=orders):
            assert "rank 2" in text and "ranks 0-1, 3" in text, (odd, text)


@pytest.mark.parametrize("mode", MODES)
def test_any_order_that_all_ranks_share_is_right(pool, mode):
    orders: list[Any] = [(1, 0), (0, 1), (1,), ()]
    orders += [(1, 1, 0)] if mode.split()[0] in ("usp", "local") else []
    for order in orders:
        results = pool.run(run_calls, WORLD, timeout=TIMEOUT_S, mode=mode, orders=[order] * WORLD)
        for text, error in results:
            assert not text and error <= 1e-5, (order, text, error)


Error = tuple[str, str]  # the class of what was raised, and its text


def raised(run: Callable[[], Any]) -> Error:
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def qkv_of(mesh: SequenceMesh, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's shards of q, k and v, and of their causal attention."""
    generator = torch.Generator().manual_seed(seed)
    full = [torch.randn(1, TOKENS, HEADS, DIM, generator=generator) for _ in range(3)]
    want, _ = dense_attention(*(x.double() for x in full), causal(range(TOKENS), range(TOKENS)))
    layout = mesh.layout("contiguous", TOKENS)
    q, k, v, want = (layout.shard(x, 1, mesh.rank) for x in (*full, want))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], want


def good_call(mesh: SequenceMesh, attend: Attend) -> float:
    """The error of a call that all ranks make, with its backward pass."""
    qkv, want = qkv_of(mesh, 5)
    out = attend(*qkv)
    out.sum().backward()
    return relative_error(out, want)


def layers_of(kind: str) -> tuple[SequenceMesh, list[Attend]]:
    """Three layers whose calls are alike."""
    mesh = mesh_of(2 if "ring" in kind or "label" in kind else WORLD)
    given: dict[str, Any] = {"mesh": mesh, "layout": "contiguous"}
    mask = ds_usp.MaskSpec.causal()
    if "label" in kind:
        usp = partial(ds_usp.usp_attention, mask=mask, **given)
        return mesh, [partial(usp, label=f"layer {i}") for i in range(3)]
    if "ring" in kind:
        given |= {"mask": mask, "dropout_p": 0.0}
    return mesh, [ds_usp.USPAttention(Local(), gather_idx=1, **given) for _ in range(3)]


def skip_a_layer(ctx: RankContext, kind: str) -> tuple[Error, int, float]:
    """What is said where rank 1 leaves out the second of three layers, at which of its calls, and
    the error of a call after it."""
    mesh, layers = layers_of(kind)
    (q, k, v), _ = qkv_of(mesh, 0)
    calls = 0

    def run() -> None:
        nonlocal calls
        for index, layer in enumerate(layers):
            if index != 1 or ctx.rank != 1:
                layer(q, k, v)
                calls += 1

    with torch.no_grad():
        said = raised(run)
    return said, calls, good_call(mesh, layers[0])


@pytest.mark.parametrize("kind", ["module", "ring module", "label"])
def test_a_rank_that_leaves_out_a_layer_is_found_in_the_next_one(pool, kind):
    shown = "label layer: 1 on ranks 0, 2-3, 2 on rank 1" if kind == "label" else "USPAttention: "
    for (name, text), calls, error in pool.run(skip_a_layer, WORLD, timeout=TIMEOUT_S, kind=kind):
        assert name == "MeshError" and shown in text and "on rank 1\n" in text, text
        assert calls == 1 and error <= 1e-5


def leave_before_backward(ctx: RankContext, mode: str, how: str) -> tuple[Error, float]:
    """What each rank says where rank 1 (with "all": every rank) does something else before the
    backward pass compares; and the error of the next call."""
    mesh, attend = mesh_of(int(mode.split()[1])), attention_of(mode)
    odd, attended = ctx.rank == 1 or "all" in how, attend
    if odd and "recomputes" in how:
        attended = attention_of(mode.replace("usp", "again"))
    qkv, _ = qkv_of(mesh, 0)

    def run() -> None:
        out = attended(*qkv)
        if odd and "changes" in how:
            with torch.no_grad():
                out.mul_(-3.0)
        torch.autograd.grad(out.sum(), qkv, create_graph=odd and "twice" in how)

    return raised(run), good_call(mesh, attend)


@pytest.mark.parametrize("mode", ["usp 1", "usp 2", "usp 4", "graph 1"])
def test_a_backward_pass_that_one_rank_cannot_begin_raises_everywhere(pool, mode):
    hows = {}
    if mode.startswith("usp"):
        hows["recomputes"] = "MeshError", ["backward pass of call", "rank 1: batch 1, "]
        hows["derives twice"] = "UnsupportedAttentionError", ["create_graph", "rank 1: "]
    if mode.endswith("1"):
        hows["changes in place"] = "RuntimeError", ["inplace operation", "rank 1: "]
    for how, (kind, (text, others)) in hows.items():
        case = {"mode": mode, "how": how}
        results = pool.run(leave_before_backward, WORLD, timeout=TIMEOUT_S, **case)
        for rank, ((name, message), error) in enumerate(results):
            assert name == (kind if rank == 1 else "MeshError"), (how, name, message)
            assert text in message and (rank == 1 or others in message), (how, message)
            assert error <= 1e-5, (how, error)


def test_an_output_is_no_view_on_some_ranks_only(pool):
    """Of a contiguous causal ring the first rank's output is its only kernel's."""
    case = {"mode": "usp 1", "how": "all changes"}
    for (name, text), error in pool.run(leave_before_backward, WORLD, timeout=TIMEOUT_S, **case):
        assert name == "RuntimeError" and "modified by an inplace operation" in text
        assert error <= 1e-5


class Wrong(Local):
    """A local attention that does something else on one rank, once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        how, self.how = self.how, ""
        if how == "raises":
            raise torch.OutOfMemoryError(MESSAGE)
        out = super().forward(q, k, v)
        changed = {"dtype": out.double(), "head dim": out[..., :4], "dims": out[0]}
        return changed.get(how, out)


def wrong_local_attention(ctx: RankContext, how: str, kept: bool) -> tuple[Error, float]:
    mesh = mesh_of(WORLD)
    local = Wrong(how if ctx.rank == 1 else "")
    local.weight = torch.nn.Parameter(torch.zeros(1), how == "trains" and ctx.rank == 1)
    module = ds_usp.USPAttention(local, gather_idx=1, mesh=mesh, layout="contiguous")
    qkv, _ = qkv_of(mesh, 0)
    first = keep_attention(module) if kept else module
    return raised(lambda: first(*qkv)), good_call(mesh, module)


def kept_by_one(ctx: RankContext) -> tuple[Error, float]:
    mesh, attend, keep = mesh_of(2), attention_of("usp 2"), attention_of("kept 2")
    qkv, _ = qkv_of(mesh, 0)
    first = keep if ctx.rank == 1 else attend
    return raised(lambda: first(*qkv)), good_call(mesh, attend)


def test_backward_from_shards_on_one_rank_alone_is_refused(pool):
    """It would send q, k, v and the output to ranks that expect the output's gradient."""
    for (name, message), error in pool.run(kept_by_one, WORLD, timeout=TIMEOUT_S):
        assert name == "MeshError" and error <= 1e-5
        assert "saved: heads on ranks 0, 2-3, shards on rank 1" in message, message


@pytest.mark.parametrize("kept", [False, True])
def test_a_local_attention_that_differs_on_one_rank_raises_everywhere(pool, kept):
    """Between two exchanges, and all can continue."""
    texts = {
        "raises": ("OutOfMemoryError", MESSAGE),
        "dims": (
            "ConfigError",
            "the local attention returned [16, 1, 8] for queries [1, 16, 1, 8]",
        ),
        "dtype": ("MeshError", "torch.float32 on ranks 0, 2-3, torch.float64 on rank 1"),
        "head dim": ("MeshError", "8 on ranks 0, 2-3, 4 on rank 1"),
    }
    if kept:
        texts["trains"] = ("UnsupportedAttentionError", "under keep_attention that gradient would")
    for how, (kind, text) in texts.items():
        case = {"how": how, "kept": kept}
        results = pool.run(wrong_local_attention, WORLD, timeout=TIMEOUT_S, **case)
        for rank, ((name, message), error) in enumerate(results):
            assert name == (kind if rank == 1 else "MeshError"), (how, name, message)
            assert text in message and ("rank 1" in message or rank == 1), (how, message)
            assert error <= 1e-5, (how, error)


def in_thread(name: str, run: Callable[[], Any]) -> Any:
    """The result of ``run`` in a thread that ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(run()), name=name)
    thread.start()
    thread.join()
    return results[0]


def two_threads(ctx: RankContext, names: tuple[str, str]) -> tuple[list[Error], list[float], float]:
    """What two threads of a rank say and compute, whose calls come in another order on each rank;
    and the error of a call in the main thread when they have ended."""
    mesh = SequenceMesh.from_group(dist.new_group(), 2)
    layout, errors, worst = mesh.layout("contiguous", TOKENS), list[Error](), list[float]()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = ds_usp.MaskSpec.causal()
        return ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask)

    def work(seed: int) -> None:
        for turn in range(6):
            time.sleep(0.002 * seed * ((ctx.rank * 7 + turn * 3) % 5))
            qkv, want = qkv_of(mesh, seed)
            said = raised(lambda: worst.append(relative_error(attend(*qkv), want)))  # noqa: B023
            errors.append(said)

    threads = [threading.Thread(target=work, args=(x,), name=names[x]) for x in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, worst, good_call(mesh, attend)


@pytest.mark.parametrize("names", [("one", "two"), ("MainThread", "two")])
def test_two_threads_on_a_mesh_are_refused_and_never_mixed(pool, names):
    for errors, worst, last in pool.run(two_threads, WORLD, timeout=TIMEOUT_S, names=names):
        texts = [text for kind, text in errors if kind]
        assert {kind for kind, _ in errors} <= {"MeshError", ""} and texts
        assert any(names[1] in x and "executor of one worker" in x for x in texts), texts
        assert max([0.0, *worst]) <= 1e-5 and last <= 1e-5, (worst, last)


def threads_in_turn(ctx: RankContext) -> tuple[list[float], list[Error]]:
    """Errors of calls in threads of which each has ended before the next one computes, and of what
    a thread recomputes in its backward pass; what is said where the owner has not ended, and where
    the ranks' threads have other names."""
    mesh = SequenceMesh.from_group(dist.new_group(), 2)
    mesh.check()  # in the main thread, whose mesh it does not become
    mesh.agree("a text")
    attend, again = attention_of("usp 2", mesh), attention_of("again 2", mesh)
    right = [in_thread(name, lambda: good_call(mesh, attend)) for name in ("first", "second")]
    qkv, want = qkv_of(mesh, 1)
    with ThreadPoolExecutor(1, "worker") as pool:
        right += [pool.submit(good_call, mesh, again).result()]
        refused = raised(lambda: attend(*qkv))
        mesh.check()
        right += [pool.submit(good_call, mesh, again).result()]
    other = in_thread(f"rank{ctx.rank}", lambda: raised(lambda: attend(*qkv)))
    out = again(*qkv)
    in_thread("backward", lambda: out.sum().backward())
    return [*right, good_call(mesh, attend), relative_error(out, want)], [refused, other]


def test_a_mesh_belongs_to_the_thread_that_computes_until_that_has_ended(pool):
    for right, (refused, other) in pool.run(threads_in_turn, WORLD, timeout=TIMEOUT_S):
        assert max(right) <= 1e-5
        assert refused[0] == other[0] == "MeshError"
        assert "thread 'MainThread' calls" in refused[1] and "'worker_0', which has" in refused[1]
        assert "thread: 'rank0' on rank 0, " in other[1] and "new_group" in other[1]


def backward_after_an_aborted_pass(ctx: RankContext, aborted: list[int]) -> None:
    """A backward pass after a pass that some ranks aborted."""
    consistency = checker_of(ctx, True)
    consistency.check_call("a call", wait=False)
    for _ in range(2):
        consistency.check_backward(1, wait=False)
        consistency.in_pass = True
        if ctx.rank not in aborted:
            consistency.in_pass = False
    consistency.drain()


def test_no_backward_pass_follows_one_that_one_rank_aborted(pool):
    for same in ([], [0, 1, 2]):
        pool.run(backward_after_an_aborted_pass, 3, aborted=same)
    for error in pool.errors(backward_after_an_aborted_pass, 3, aborted=[1]):
        assert isinstance(error, ds_usp.MeshError)
        assert "aborted passes: 0 on ranks 0, 2, " in str(error)
        assert "1, the last after 0 exchanges on rank 1" in str(error)


def many_passes(ctx: RankContext, odd: bool) -> tuple[str, int]:
    """Passes of verified calls as GPUs compare them: the error, and after how many of them. The
    others answer only when this rank has continued, so a rank that waited would never end."""
    consistency = checker_of(ctx, True)
    numbers = []
    for _ in range(9):
        consistency.check_call("a call", wait=False)
        numbers.append(consistency.number)
    consistency.check_backward(numbers.pop(), wait=False)  # the first one waits
    if odd and ctx.rank == 1:
        numbers[-1], numbers[-2] = numbers[-2], numbers[-1]
    count = 0
    try:
        while numbers:
            consistency.check_backward(numbers.pop(), wait=False)
            count += 1
        consistency.check()
    except ds_usp.MeshError as error:
        return str(error), count
    return "", count


def test_passes_that_differ_on_gpus_are_found_a_few_passes_later(pool):
    assert pool.run(many_passes, 3, odd=False) == [("", 8)] * 3
    for message, count in pool.run(many_passes, 3, odd=True):
        assert "backward pass of call: 8 on ranks 0, 2, 7 on rank 1" in message
        assert count == 4


def numbers_on_gpus(
    ctx: RankContext,
    odd: int,
    calls: int,
    passes: int = 0,
    refused: bool = False,
    captured: bool = False,
    more: int = 0,
) -> tuple[str, int]:
    """Calls with tables that are read as a GPU's are, with another element in one call on rank 1,
    and backward passes, captured by a CUDA graph or not; what is said, and after how many."""
    consistency = checker_of(ctx, True)
    count = 0
    is_captured = mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
    try:
        stream = is_captured.start()
        for call in range(calls):
            tables = {"cos": torch.ones(3, 5, 400), "sin": torch.ones(3, 5, 400)}
            tables["sin"][2, 3, 77] += 1e-7 * (call == odd and ctx.rank == 1)
            tables |= {f"tensor {number}": torch.ones(2) for number in range(more)}
            numbers = SharedNumbers(tables)
            numbers.is_on_gpu = True
            consistency.check_call(f"layer {call % 4}", wait=False, numbers=numbers)
            count += 1
            consistency.check_now("a step")  # what asks for its own reason is told no other
        if refused:
            with contextlib.suppress(ds_usp.ConfigError, ds_usp.MeshError):
                error = ds_usp.ConfigError("no") if ctx.rank == 1 else None
                consistency.check_call("a call", error=error)
        stream.return_value = captured
        for _ in range(passes):
            consistency.check_backward(1, wait=False)
            count += 1
        stream.return_value = False
        consistency.check()
    except ds_usp.MeshError as error:
        return str(error), count
    finally:
        is_captured.stop()
    consistency.check()
    return "", count


def test_numbers_on_gpus_are_compared_by_one_record_of_sixteen_comparisons_or_by_a_check(pool):
    assert pool.run(numbers_on_gpus, 2, odd=-1, calls=20, passes=9) == [("", 29)] * 2
    for odd, calls, passes, how, found in (
        (2, 20, 0, {}, range(17, 18)),  # each call is two comparisons
        (9, 12, 0, {}, range(12, 13)),
        (9, 10, 34, {}, range(39, 44)),  # found by a pass, before the check
        (9, 10, 34, {"captured": True}, range(44, 45)),  # by the check, which may wait
        (2, 16, 0, {"refused": True}, range(16, 17)),  # the refused call's record has them
    ):
        arguments = {"odd": odd, "calls": calls, "passes": passes, **how}
        for message, count in pool.run(numbers_on_gpus, 2, **arguments):
            assert "numbers of torch.float32 sin 3x5x400 of call " in message, message
            assert ", checksum: " in message and " cos" not in message, message
            assert f"call {2 * odd + 1}: layer {odd % 4}" in message, message
            assert message.count("\nin call") == 1 and count in found, (count, message)
    # Where a record is too short for a checksum of each: the first calls that may be meant.
    for message, count in pool.run(numbers_on_gpus, 2, odd=2, calls=20, more=20):
        assert "call 5: layer 2" in message and message.count("\nin call") == 4, message
        assert "equal on all ranks: " not in message and count == 17, message


def test_a_digest_tells_any_bits_apart():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 1500, generator=generator, dtype=torch.float64)
    whole[0, :3] = torch.tensor([0.0, math.nan, 1.0])
    tables = [whole, whole.float(), whole.bfloat16(), torch.complex(whole, whole.flip(1)).cfloat()]
    for table in (*tables, whole[0, :9], torch.eye(64)):
        changed = [table.clone() for _ in range(5)]
        changed[0].view(-1)[-1] *= 2
        changed[1].view(-1)[0] = -changed[1].view(-1)[0]
        changed[2].view(-1)[0:2] = changed[2].view(-1)[0:2].flip(0)
        changed[3].copy_(-table)  # an even number of signs in each row
        changed[4] = table.flip(-1)
        fields = [SharedNumbers({"x": x}).fields()[0] for x in (table, table.clone(), *changed)]
        assert fields[0] == fields[1] and len(set(fields)) == 6, (table.dtype, table.shape, fields)
        numbers = SharedNumbers({"x": table})
        table += 1  # they are those of the call, whenever they are read
        assert numbers.fields()[0] == fields[0]
    square = torch.randn(1025, 1024, generator=generator)
    swapped = square.clone()
    swapped[0, 1], swapped[1, 0] = square[1, 0], square[0, 1]
    assert SharedNumbers({"x": square}).fields() != SharedNumbers({"x": swapped}).fields()


def verified_passes_wait_for_nobody(ctx: RankContext) -> int:
    """How many verified passes rank 0 begins before the others begin one."""
    consistency = checker_of(ctx, True)
    consistency.check_call("a call", wait=False)
    consistency.check_backward(1, wait=False)
    consistency.check()
    dist.barrier(ctx.group)
    count = 0
    for turn in (True, False):
        for _ in range(3 if turn == (ctx.rank == 0) else 0):
            consistency.check_backward(1, wait=False)
            count += turn
        dist.barrier(ctx.group)
    consistency.check()
    return count


def test_a_verified_pass_waits_for_nobody(pool):
    assert pool.run(verified_passes_wait_for_nobody, 3, timeout=20.0)[0] == 3


def skip_one(ctx: RankContext, calls: list[int]) -> list[str]:
    """The errors of a check after as many calls on each rank, and of the next check."""
    consistency = checker_of(ctx, False)
    messages = []
    for _ in range(2):
        try:
            while consistency._calls < calls[ctx.rank]:
                consistency.check_call("a call")
            consistency.check()
        except ds_usp.MeshError as error:
            messages.append(str(error))
            calls = [2] * ctx.world
    return messages


def test_a_check_finds_a_call_that_one_rank_skipped(pool):
    assert pool.run(skip_one, 3, calls=[3, 3, 3]) == [[]] * 3
    for messages in pool.run(skip_one, 3, calls=[3, 2, 3]):
        assert len(messages) == 1, messages
        assert "ranks 0, 2: a call\n" in messages[0]
        assert "rank 1: a check of the mesh, after 2 calls, after 0 backward passes" in messages[0]


def continued_after(ctx: RankContext, use_mailbox: bool, odd: str, others_wait: bool) -> list[str]:
    """What each step says if every rank catches errors and continues: a call in which rank 1 is
    wrong, another call, its backward pass, a check."""
    # As on GPUs in a group of its own, in which a failed mesh may leave collectives behind.
    checker = checker_of(replace(ctx, group=dist.new_group()), use_mailbox)
    checker.check_call("a", wait=False)
    wrong = ValueError() if odd == "error" and ctx.rank == 1 else None
    text = "b" if odd == "call" and ctx.rank == 1 else "a"
    steps = [
        lambda: checker.check_call(text, error=wrong, wait=others_wait),
        lambda: checker.check_call("a", wait=False),
        lambda: checker.check_backward(checker.number, wait=False),
        checker.check,
    ]
    messages = []
    for step in steps:
        try:
            step()
            messages.append("")
        except (ds_usp.MeshError, ValueError) as error:
            messages.append(str(error) or repr(error))
    return [*messages, str(checker.number)]


@both_transports
@pytest.mark.parametrize(
    ("odd", "shown"), [("call", "b on rank 1"), ("error", "rank 1: ValueError")]
)
def test_ranks_can_continue_together_or_none_can(pool, use_mailbox, odd, shown):
    """None, where ranks had started a verified call that rank 1 refuses."""
    kwargs = {"use_mailbox": use_mailbox, "odd": odd}
    for first, *later in pool.run(continued_after, 3, others_wait=True, **kwargs):
        assert shown in first or first == "ValueError()"
        assert later == ["", "", "", "4"]
    results = pool.run(continued_after, 3, timeout=20.0, others_wait=False, **kwargs)
    for rank, (first, call, backward, check, _) in enumerate(results):
        assert (shown in first or first == "ValueError()") == (rank == 1)
        # Without gradients ranks that had started it would find out some calls later.
        assert call == "" or (rank == 1 and shown in call)
        assert shown in backward and backward == check


def collected_with_a_comparison_in_flight(ctx: RankContext) -> float:
    """How long rank 0 takes to free a mesh's checker whose last comparison nobody answers yet."""
    checker = checker_of(replace(ctx, group=dist.new_group()), False)
    checker.check_call("a", wait=False)
    seconds = 0.0
    if ctx.rank == 0:
        checker.check_call("a", wait=False)
        start = time.perf_counter()
        del checker
        gc.collect()
        seconds = time.perf_counter() - start
    dist.barrier(ctx.group)
    if ctx.rank == 1:
        checker.check_call("a", wait=False)
    return seconds


def test_a_mesh_that_is_collected_waits_for_nobody(pool):
    assert pool.run(collected_with_a_comparison_in_flight, 2)[0] < 2.0


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


all_kernel_calls = cache(partial(kernel_calls, stop=-1))


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
FAILED_WAITS = [(u, 2, stop, False) for u in (1, 2) for stop in (1, 2)]
FAILED_WAITS += [(2, 4, stop, True) for stop in (1, 3, 6, 7)]


@pytest.mark.parametrize(("ulysses", "chunks", "stop", "forward"), FAILED_WAITS)
def test_a_failed_wait_leaves_no_kv_exchange_in_flight(pool, ulysses, chunks, stop, forward):
    case = {"ulysses": ulysses, "chunks": chunks, "stop": stop, "forward": forward}
    results = pool.run(exchange_interrupted, WORLD, timeout=TIMEOUT_S, **case)
    assert [message for message, _ in results] == [MESSAGE] * WORLD, results
    assert max(error for _, error in results) < 1e-5, results


def interrupted(
    ctx: RankContext, ulysses: int, tuning: Tuning, method: str, part: int, at: int
) -> tuple[str, float]:
    """What a call said that broke off in a part of the heads, and the error of the next one."""
    case = Case(batch=1, kernel="sdpa", tuning=tuning)
    each, rest = divmod(all_kernel_calls(ctx, case, ulysses, method), int(tuning.chunks))
    message = "nothing" if rest == 0 else "parts of different lengths"
    try:
        kernel_calls(ctx, case, ulysses, method, stop=part * each + at % each)
    except RuntimeError as error:
        message = str(error)
    # Other numbers in tensors of the same shape: a message of the first call would spoil them.
    return message, max(run_case(ctx, replace(case, seed=1), ulysses).values())


# Ulysses degree, parts of the heads, the part in which it happens: between others where it can be.
CHUNKS = [(1, 1, 0), (1, 2, 1), (2, 3, 1), (4, 2, 0)]

# Without a ring nothing is gathered, and a part is one call.
CALLS = [
    (*each, gather) for gather in (False, True) for each in CHUNKS if not gather or each[0] < 4
]


@pytest.mark.parametrize("method", ["tile_forward", "tile_backward"])
@pytest.mark.parametrize(("ulysses", "chunks", "part", "gather"), CALLS)
def test_a_kernel_that_raises_leaves_no_exchange_in_flight(
    pool, ulysses, chunks, part, gather, method
):
    # In the own block while the next one comes, in the first one that came, and at the end. All
    # ranks break off in the same step; where the own block ends a part, that is counted from there.
    own_ends = method == "tile_backward" and chunks > 1 and part == chunks - 1
    case = {"ulysses": ulysses, "tuning": Tuning(chunks, gather)}
    case |= {"method": method, "part": part}
    for at in (0, -2 if own_ends else 1, -1) if ulysses < WORLD else (0,):
        results = pool.run(interrupted, WORLD, timeout=TIMEOUT_S, **case, at=at)
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
def test_all_to_alls_in_flight_are_waited_for_after_an_error(pool, method, posted):
    """Nothing may be received into memory that is allocated again."""
    results = pool.run(waits_after_an_error, 2, timeout=TIMEOUT_S, method=method)
    assert results == [(MESSAGE, posted, posted)] * 2


def test_a_pass_that_finds_no_memory_for_its_output_is_an_aborted_one():
    """With copy engines the other ranks wait on the GPU, and hear of it at the next comparison."""
    mesh = SequenceMesh.single()
    real = functional.ForwardPass

    def forward(*args: Any, **more: Any) -> Any:
        with mock.patch.object(torch.Tensor, "new_empty", side_effect=RuntimeError(MESSAGE)):
            return real(*args, **more)

    starts = mock.patch.object(functional, "ForwardPass", forward)
    with starts, pytest.raises(RuntimeError, match=MESSAGE):
        attend(mesh, Case(kernel="eager", tuning=Tuning(chunks=2)))
    assert mesh.consistency.in_pass  # and the next call counts it
    attend(mesh, Case(kernel="eager", tuning=Tuning(chunks=2)))
    assert not mesh.consistency.in_pass
