"""Fail-stop: a rank that leaves alone ends the mesh for all; where all leave, they go on."""

import contextlib
import datetime
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, attend, errors_of
from harness import RankContext, logged_lines
from programs import python

import ds_usp
from ds_usp.comm import consistency, process_groups, shm_mailbox
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.comm.process_groups import align_group_counters
from ds_usp.kernels.sdpa import SdpaKernel

TIMEOUT_S = 60.0
both_transports = pytest.mark.parametrize("nodes", [1, 2], ids=["mailbox", "group"])


def checker_of(ctx: RankContext, nodes: int, timeout_s: float = 180.0) -> ConsistencyChecker:
    """As a mesh has it whose ranks are on so many nodes, over a group of its own."""
    align_group_counters(ctx.group)  # tests before may have made others
    each = [b"%d" % (rank % nodes) for rank in range(ctx.world)]
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    checker = ConsistencyChecker.for_mesh(group, each)
    assert (checker.mailbox is None) == (nodes > 1)
    return checker


def said_by(call: Callable[..., object], *arguments: object, **options: object) -> str:
    """What a call raises; "" where it returns."""
    try:
        call(*arguments, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def left(ctx: RankContext, nodes: int, leaving: dict[int, int], known: bool) -> list[str]:
    """What calls say where ranks leave a pass, each after so many more calls; ``known``: calls that
    are compared while they run, as on GPUs."""
    checker = checker_of(ctx, nodes)
    for _ in range(2):
        checker.check_call("a", wait=False)
    checker.drain()
    for _ in range(leaving.get(ctx.rank, 0)):
        checker.check_call("a", wait=not known)
    texts = []
    if ctx.rank in leaving:
        checker.leave_forward_pass("Llama", RuntimeError(f"no memory {ctx.rank}"))
        checker.leave_forward_pass("a model around it", RuntimeError(f"no memory {ctx.rank}"))
    else:
        texts = [said_by(checker.check_now, "its next call")]
    texts += [said_by(checker.check_now, text) for text in ("one", "two")]
    return [*texts, said_by(checker.check), str(checker.number)]


@both_transports
def test_a_rank_that_leaves_alone_ends_the_mesh_for_all(pool, nodes):
    reason = "rank 1: it has left a forward pass of Llama: RuntimeError: no memory 1"
    for texts in pool.run(left, 3, nodes=nodes, leaving={1: 0}, known=False):
        assert len(set(texts[:-1])) == 1, texts  # each call for the same reason
        assert reason in texts[0] and "has failed for good" in texts[0]
    # On GPUs ranks may leave the same pass at other calls: what one has started others refuse.
    for texts in pool.run(left, 3, nodes=nodes, leaving={0: 1, 1: 0, 2: 1}, known=True):
        assert reason in texts[0] and len(set(texts[:-1])) == 1, texts


@both_transports
def test_ranks_that_all_leave_the_same_pass_go_on(pool, nodes):
    for known in (False, True):
        case = {"nodes": nodes, "leaving": {0: 0, 1: 0, 2: 0}, "known": known}
        assert pool.run(left, 3, **case) == [["", "", "", "5"]] * 3


def known_to_all(ctx: RankContext) -> list[str]:
    """A pass that all ranks leave by the error of a comparison is not declared once more."""
    checker = checker_of(ctx, 1)
    wrong = ValueError("mine") if ctx.rank == 1 else None
    texts = []
    with contextlib.suppress(ValueError), checker.forward_pass_of("Llama"):
        checker.check_call("a", error=wrong)
    with contextlib.suppress(ValueError), checker.raising_everywhere():
        if ctx.rank == 2:
            raise ValueError("its own, before any comparison")
        checker.check_now("b")
    return [*texts, said_by(checker.check_now, "c"), str(checker.number)]


def test_what_a_comparison_refused_leaves_the_mesh_usable(pool):
    assert pool.run(known_to_all, 3) == [["", "1"]] * 3


def broken_call(ctx: RankContext, failing: list[int], stop: int) -> tuple[list[str], float]:
    """What a call says whose kernel raises on some ranks, and each of two calls after it; and the
    error of one over the mesh that is there then."""
    group = dist.new_group()
    mesh = ds_usp.SequenceMesh.from_group(group, 1)
    case = Case(batch=1, kernel="sdpa", tuning=ds_usp.Tuning(1, False))
    intact, calls = SdpaKernel.tile_forward, 0

    def failing_call(self: SdpaKernel, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise RuntimeError("the kernel gave up")
        return intact(self, *args)

    fails = mock.patch.object(SdpaKernel, "tile_forward", failing_call)
    with fails if ctx.rank in failing else contextlib.nullcontext():
        texts = [said_by(attend, mesh, case)]
    texts += [said_by(mesh.agree, "a call after it") for _ in range(2)]
    mesh = ds_usp.SequenceMesh.from_group(group, 1)
    return texts, max(errors_of(mesh, case, attend(mesh, case)).values())


def test_a_call_that_one_rank_left_ends_the_mesh_and_a_new_one_is_exact(pool):
    """After its last exchange: an earlier one its neighbours would wait for."""
    for rank, (texts, error) in enumerate(pool.run(broken_call, 2, failing=[1], stop=2)):
        assert (texts[0] == "the kernel gave up") == (rank == 1) and error < 1e-5
        assert "aborted passes: 0" in texts[1] and "after 1 exchanges" in texts[1], texts
        assert "has failed for good" in texts[1] and texts[1] == texts[2]
    for texts, error in pool.run(broken_call, 2, failing=[0, 1], stop=2):
        assert texts == ["the kernel gave up", "", ""] and error < 1e-5


def late(ctx: RankContext, nodes: int, seconds: float) -> tuple[list[str], list[str]]:
    """What ranks log and say of a call to which rank 1 comes late, over a group that waits 2 s."""
    checker, waits = checker_of(ctx, nodes, 2.0), {"WARN_AFTER_S": 0.4, "_LOOK_S": 0.1}
    patched = [mock.patch.multiple(file, **waits) for file in (shm_mailbox, consistency)]
    checker.check_now("all are here")
    with patched[0], patched[1], logged_lines() as lines:
        time.sleep(seconds if ctx.rank == 1 else 0.0)
        texts = [said_by(checker.check_now, text) for text in ("late", "again")]
    dist.barrier(ctx.group)
    return lines, texts


@both_transports
def test_a_late_rank_is_named_once_and_waited_for(pool, nodes):
    results = pool.run(late, 3, nodes=nodes, seconds=1.0)
    assert [texts for _, texts in results] == [["", ""]] * 3
    for lines, _ in (results[0], results[2]):
        assert len(lines) == 1 and "s for rank 1 of the sequence-parallel group" in lines[0]
        assert "raises after 2 s" in lines[0]
    assert results[1][0] == []


@both_transports
def test_ranks_wait_as_long_as_their_group_and_then_none_goes_on(pool, nodes):
    for rank, (_, texts) in enumerate(pool.run(late, 3, nodes=nodes, seconds=3.0)):
        assert all("failed for good" in text for text in texts), (rank, texts)
        assert texts[0] == texts[1]
        assert rank == 1 or "no call" in texts[0] or "given the mesh up" in texts[0], texts


def given_up(ctx: RankContext) -> str:
    """What rank 2 hears, far from the timeout, when rank 0's wait for rank 1 has failed."""
    checker = checker_of(ctx, 2)
    if ctx.rank == 0:
        checker._transport.abort()
    with mock.patch.object(consistency, "_LOOK_S", 0.2):
        said = "" if ctx.rank != 2 else said_by(checker.check_now, "a call")
    dist.barrier(ctx.group)
    if ctx.rank != 2:  # or the process would wait for its all-gather when it ends
        said_by(checker.check_now, "a call")
    return said


def test_who_waits_over_a_group_hears_that_another_has_given_up(pool):
    assert "have given the mesh up: by rank 0" in pool.run(given_up, 3, timeout=TIMEOUT_S)[2]


def forked(ctx: RankContext) -> tuple[str, str]:
    """What a call says in a child that a rank has forked, and in the rank after it."""
    mesh = ds_usp.SequenceMesh.from_group(dist.new_group(), 2)
    ends = os.pipe()
    if (child := os.fork()) == 0:
        os.write(ends[1], said_by(attend, mesh, Case(batch=1)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(ends[0], 4096).decode(), said_by(attend, mesh, Case(batch=1))


def test_a_forked_child_is_refused(pool):
    for child, parent in pool.run(forked, 2, timeout=TIMEOUT_S):
        assert "forked from a rank" in child and parent == ""


def kept_by_a_failure(ctx: RankContext) -> bool:
    """Whether a mesh that has failed keeps the tensors of the call that found it."""
    checker = checker_of(ctx, 1)

    def call() -> weakref.ref[torch.Tensor]:
        x = torch.ones(3)
        with pytest.raises(ds_usp.MeshError):
            checker.check_call("a" if ctx.rank else "b", error=None)
        with pytest.raises(ds_usp.MeshError):
            checker._fail(ds_usp.MeshError("for good"))
            checker.check_call("a")
        return weakref.ref(x)

    kept = call()
    gc.collect()
    return kept() is not None


def test_a_failed_mesh_keeps_no_tensors(pool):
    assert pool.run(kept_by_a_failure, 2) == [False, False]


def test_a_process_ends_while_its_thread_asks_the_store():
    """A thread that comes back to Python while it ends aborts the process (SIGABRT)."""
    program = """if True:
        import datetime, threading, time, torch.distributed as dist
        from types import SimpleNamespace
        from ds_usp.comm import consistency
        store = dist.HashStore()
        def ask(*_):  # as long as a slow network takes
            store.wait(["never"], datetime.timedelta(seconds=0.5))
        class Slow:  # to take down, as a large program is
            def __del__(self, sleep=time.sleep):
                sleep(1)
        slow, group = Slow(), SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        transport = consistency.GroupTransport(group, SimpleNamespace(set=ask))
        transport._look_at_store(1, threading.Event())
    """
    done = python("-c", program)
    assert done.returncode == 0, done


def test_a_rank_that_cannot_reach_the_store_gives_up_and_speaks(monkeypatch):
    """Where the host of the store is cut off, a request ends after a quarter of an hour."""
    answer, never = threading.Event(), SimpleNamespace(set=lambda *_: answer.wait(60))
    never.add = never.set
    monkeypatch.setattr(consistency, "_LOOK_S", 0.1)
    monkeypatch.setattr(process_groups, "_STORE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(process_groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_groups.c10d, "_get_default_store", lambda: never)
    group, start = SimpleNamespace(size=lambda: 2, rank=lambda: 0), time.monotonic()
    consistency.GroupTransport(group, never).abort()
    assert process_groups._is_speaker("an error")
    assert time.monotonic() - start < 10
    answer.set()


GLOO_THREADS_AT_THE_END = """
import atexit
import os
import sys
from pathlib import Path

def tell():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    os.write(1, b"threads of gloo: %d\\n" % sum("gloo" in name for name in names))
    if "mesh" in globals():
        os.write(1, f"{mesh} has sent {mesh.ledger}\\n".encode())

atexit.register(tell)  # the first one runs last
import torch
import torch.distributed as dist
import ds_usp.training

store, rank = sys.argv[1:]
dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
mesh = ds_usp.SequenceMesh.from_group(None, 1)
x = torch.randn(1, 8, 2, 4, requires_grad=True)
out = ds_usp.usp_attention(x, x, x, mesh=mesh, layout="zigzag", mask=ds_usp.MaskSpec.causal())
out.sum().backward()
tell()
dist.destroy_process_group()
"""


def test_no_thread_of_a_destroyed_group_outlives_it(tmp_path):
    """One that frees a tensor while Python ends aborts the process; nothing but ds_usp holds the
    groups here, its mesh a name of the program, which an older handler of the program may print."""
    program = tmp_path / "program.py"
    program.write_text(GLOO_THREADS_AT_THE_END)
    with ThreadPoolExecutor(2) as ranks:
        ended = list(ranks.map(lambda rank: python(program, tmp_path / "store", rank), "01"))
    for done in ended:
        counts = [int(line.split()[-1]) for line in done.stdout.splitlines() if "of gloo" in line]
        assert done.returncode == 0 and len(counts) == 2 and counts[0] > counts[1] == 0, done
        assert done.stdout.count(" of 2: ulysses 0 of 1, ring ") == 2, done


A_TENSOR_IS_FREED_AT_THE_END = """
import datetime
import hashlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import ds_usp.comm.mesh

class Slow:  # to take down, as a large program is
    def __del__(self, sleep=time.sleep):
        sleep(2)

def freed(_):  # as slow as on a machine with other work, and without the GIL
    began.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)

def group_of(rank):
    return dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))

slow, began, store = Slow(), threading.Event(), dist.HashStore()
with ThreadPoolExecutor(2) as ranks:
    groups = list(ranks.map(group_of, range(2)))
x = torch.zeros(3)
watch = weakref.ref(x, freed)
groups[0].allreduce([x])
del x  # its last owner is a thread of gloo
groups[1].allreduce([torch.zeros(3)]).wait()
assert began.wait(60)
"""


def test_python_does_not_end_while_gloo_frees_a_tensor():
    """Whoever holds a group keeps its threads, as default arguments of torch and DeepSpeed do."""
    done = python("-c", A_TENSOR_IS_FREED_AT_THE_END)
    assert done.returncode == 0, done
