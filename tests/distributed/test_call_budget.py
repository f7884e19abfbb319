"""Budgets of the Python calls inside ds_usp that a warm attention call makes.

Short calls are launch-bound: their time on a GPU is what the CPU spends on them. The count is the
same on every machine, so it needs no GPU and no clock.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext

import ds_usp
from ds_usp.comm import consistency

PACKAGE = os.path.dirname(ds_usp.__file__) + os.sep
WARM_UP = 3
BUDGETS = [  # world, Ulysses degree, Python calls forward and backward
    (4, 1, 119, 262),
    (4, 2, 99, 180),
    (4, 4, 60, 79),
    (2, 1, 76, 149),
    (2, 2, 60, 79),
]
# Of a forward pass: what a reader opens (the mailbox too, as on GPUs), and how far down.
MAX_FILES, MAX_DEPTH = 16, 10


class Calls(Counter[str]):
    """How often each function of ds_usp was called, as ``file:name``; the deepest stack of them."""

    stack: tuple[str, ...] = ()


def python_calls(run: Callable[[], Any]) -> tuple[Any, Calls]:
    """The result of ``run`` and its calls of ds_usp on this thread."""
    calls, stack = Calls(), list[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            stack.pop()
            return
        stack.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")
        calls[stack[-1]] += 1
        calls.stack = max(calls.stack, tuple(stack), key=len)

    sys.setprofile(count)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, calls


def count_warm_calls(ctx: RankContext, *, ulysses: int) -> tuple[Calls, Calls, Calls]:
    """Calls of a forward pass, of its backward pass and of a forward pass under no_grad."""
    mesh = mesh_of(ulysses)
    layout = mesh.layout("zigzag", 64 * ctx.world)
    q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (8, 4, 4))

    def attend() -> torch.Tensor:
        return ds_usp.usp_attention(
            q, k, v, mesh=mesh, layout=layout, mask=ds_usp.MaskSpec.causal(), kernel="sdpa"
        )

    for _ in range(WARM_UP):
        out = attend()
        out.backward(torch.ones_like(out))
    out, forward = python_calls(attend)
    dout = torch.ones_like(out)
    # A pass has its call's number, which is new in training: another mesh's pass had it here.
    consistency._encode.cache_clear()
    _, backward = python_calls(lambda: out.backward(dout))  # on CPUs autograd has no other thread
    with torch.no_grad():
        attend()
        _, no_grad = python_calls(attend)
    return forward, backward, no_grad


@pytest.mark.parametrize(("world", "ulysses", "forward", "backward"), BUDGETS)
def test_a_warm_call_keeps_its_budget(pool, world, ulysses, forward, backward):
    for counts in pool.run(count_warm_calls, world, ulysses=ulysses):
        limits = {"forward": forward, "backward": backward, "no grad": forward}
        for (name, limit), calls in zip(limits.items(), counts, strict=True):
            table = "\n".join(f"{n:5d} {function}" for function, n in calls.most_common())
            assert 0 < calls.total() <= limit, f"{name}: {calls.total()} calls\n{table}"
        files = sorted({function.partition(":")[0] for function in counts[0]})
        assert len(files) <= MAX_FILES, files
        assert len(counts[0].stack) <= MAX_DEPTH, " > ".join(counts[0].stack)
