"""Kernels of other libraries over ranks, in their place loops over tokens that take documents,
states and gradients as the library's do, and lack what those lack."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import mesh_of, tokens_by_document
from harness import RankContext

from ds_usp import MaskSpec
from ds_usp.geometry import state_chains
from ds_usp.recurrence import kernels
from ds_usp.recurrence.recurrences import delta_rule, lightning, mamba1, mamba2

WORLD, TIMEOUT_S, TOKENS = 4, 60.0, 26
_TREE = [(0, 9, None), (9, 10, 0), (10, 17, 0), (17, 18, 2), (18, 22, 2), (22, 26, None)]
BATCHES: dict[str, tuple[int, Any]] = {
    "one document": (1, ()),
    "packed": (1, [0, 1, 2, 5, 21, 25, TOKENS]),
    "rows alike": (2, [0, 9, TOKENS]),
    "rows": (2, [[0, 20, TOKENS], [0, 3, 4, TOKENS]]),
    "tree": (1, MaskSpec.tree(_TREE)),
    "trees": (2, MaskSpec.tree([_TREE, [(0, 12, None), (12, 13, 0), (13, 26, 0)]])),
}
HEADS, KEY_HEADS, N, M = 4, 2, 3, 5
SLOPE = torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=torch.float64)
Tensors = Sequence[torch.Tensor]


def of_library(kernel: Callable[..., Any], module: str, name: str = "") -> Callable[..., Any]:
    """The kernel as that of a library."""
    copy = FunctionType(kernel.__code__, kernel.__globals__, name or kernel.__name__)
    copy.__kwdefaults__, copy.__module__ = kernel.__kwdefaults__, module
    return copy


# ------------------------------------------------------------------ kernels


def delta_loop(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """One document ``[1, t, heads, dim]``."""
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change * beta[:, t, :, None])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def no_state(like: torch.Tensor, width: int = M) -> torch.Tensor:
    return like.new_zeros(1, HEADS, N, width)


def delta_kernel(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **options: Any) -> Any:
    """fla's kernel with a context: documents, and the states before and gradients after them."""
    return DeltaFunction.apply(q, k, v, g, beta, options), None


class DeltaFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *tensors, options = given
        ctx.context = options.get("cp_context")
        ctx.borders = (
            ctx.context.cu_seqlens_cpu if ctx.context else options["cu_seqlens_cpu"]
        ).tolist()
        states = None
        if ctx.context:
            states = ctx.context.states_before(tensors[1], tensors, None)
        ctx.save_for_backward(*tensors)
        ctx.states = states if ctx.context is None else ctx.context.saved(states)
        return torch.cat([out for out, _ in pieces_of(tensors, ctx.borders, states)], 1)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        tensors, context, after = ctx.saved_tensors, ctx.context, None
        states = ctx.states if context is None else context.restored(ctx.states)
        if context:
            after, none = context.gradients_after(tensors[0], tensors[1], tensors, dout, states)
            assert none is None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            ran = pieces_of(leaves, ctx.borders, states)
            outs = [torch.cat([out for out, _ in ran], 1)]
            grads = [dout]
            if after is not None:
                outs.append(torch.cat([state for _, state in ran]))
                grads.append(after)
            return *torch.autograd.grad(outs, leaves, grads), None


def pieces_of(tensors: Tensors, borders: Sequence[int], states: Any) -> list[tuple[Any, Any]]:
    return [
        delta_loop(
            *(x[:, a:b] for x in tensors),
            no_state(tensors[0]) if states is None else states[n, None],
        )
        for n, (a, b) in enumerate(pairwise(borders))
    ]


def maps(
    k: Any, tensors: Any, u: Any, g: Any, gk: Any, chunk: Any, borders: Any, across: bool
) -> Any:
    """What fla's kernel of states computes."""
    into, transitions = [], []
    for a, b in pairwise(borders.tolist()):
        part = [x[:, a:b] for x in tensors]
        into.append(delta_loop(*part, no_state(part[0]))[1])
        part[2] = part[2].new_zeros(*part[2].shape[:3], N)
        identity = torch.eye(N, dtype=part[0].dtype).expand(1, HEADS, N, N)
        transitions.append(delta_loop(*part, identity)[1])
    return torch.cat(into), torch.cat(transitions) if across else None


def gradient_of_state(
    q: Any, k: Any, tensors: Any, dout: Any, states: Any, g: Any, gk: Any, sizes: Any, borders: Any
) -> Any:
    """What fla's kernel of the gradients of states computes."""
    a, b = borders.tolist()
    with torch.enable_grad():
        state = no_state(q).requires_grad_()
        out, _ = delta_loop(*(x[:, a:b] for x in tensors), state)
        return torch.autograd.grad(out, state, dout[:, a:b])[0][0]


def mamba2_kernel(
    x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any, dt_bias: Any, dt_softplus: bool,
    dt_limit: Any = (0.0, float("inf")), initial_states: Any = None, seq_idx: Any = None,
) -> torch.Tensor:  # fmt: skip
    step = F.softplus(dt + dt_bias).clamp(*dt_limit)
    B, C = (y.repeat_interleave(HEADS // KEY_HEADS, 2) for y in (B, C))
    state = x.new_zeros(len(x), HEADS, M, N) if initial_states is None else initial_states
    outs = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            same = (seq_idx[:, t] == seq_idx[:, t - 1]).to(x.dtype)
            state = state * same[:, None, None, None]
        into = (x[:, t] * step[:, t, :, None])[..., None] * B[:, t, :, None]
        state = state * (step[:, t] * A).exp()[..., None, None] + into
        outs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outs, 1)


def mamba1_kernel(
    x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any, z: Any = None, delta_bias: Any,
    delta_softplus: bool, return_last_state: bool = False,
) -> Any:  # fmt: skip
    if return_last_state:
        raise RuntimeError("its gradient is not considered")
    step = dt if delta_bias is None else dt + delta_bias[:, None]
    step = F.softplus(step) if delta_softplus else step
    state, outs = x.new_zeros(*x.shape[:2], A.shape[1]), []
    for t in range(x.shape[2]):
        state = state * (step[..., t, None] * A).exp()
        state = state + (step * x)[..., t, None] * B[:, None, :, t]
        outs.append((state * C[:, None, :, t]).sum(-1))
    out = torch.stack(outs, -1)
    return out if D is None else out + D[:, None] * x


def lightning_kernel(
    q: Any, k: Any, v: Any, *, g_gamma: Any, scale: float, initial_state: Any = None,
    cu_seqlens: Any, cu_seqlens_cpu: Any,
) -> Any:  # fmt: skip
    outs = []
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        state = 0 if initial_state is None else initial_state[n]
        for t in range(a, b):
            state = state * g_gamma.exp()[:, None, None] + k[0, t, :, :, None] * v[0, t, :, None]
            outs.append(scale * (q[0, t, :, :, None] * state).sum(1))
    return torch.stack(outs)[None], None


# ------------------------------------------------------------------ recurrences


def tensors_of(name: str, rows: int) -> tuple[list[torch.Tensor], int, int]:
    """Random tensors, how many of them have tokens, and along which dim."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name == "delta":
        q, k = (F.normalize(normal(rows, TOKENS, KEY_HEADS, N), dim=-1) for _ in "qk")
        g = -0.02 * normal(rows, TOKENS, HEADS).sigmoid()
        return (
            [q, k, normal(rows, TOKENS, HEADS, M), g, normal(rows, TOKENS, HEADS).sigmoid()],
            5,
            1,
        )
    if name == "lightning":
        return (
            [normal(rows, HEADS, TOKENS, N), *(normal(rows, HEADS, TOKENS, N) for _ in "kv")],
            3,
            2,
        )
    if name == "mamba1":
        inputs = [normal(rows, M, TOKENS), normal(rows, M, TOKENS)]
        inputs += [normal(rows, N, TOKENS) for _ in "BC"]
        return [*inputs, -normal(M, N).square(), normal(M), normal(M) - 3], 4, 2
    inputs = [normal(rows, TOKENS, HEADS, M), normal(rows, TOKENS, HEADS)]
    inputs += [normal(rows, TOKENS, KEY_HEADS, N) for _ in "BC"]
    return [*inputs, -normal(HEADS).square(), normal(HEADS), normal(HEADS) - 3], 4, 1


def alone(name: str, x: Tensors) -> torch.Tensor:
    """One document of one row."""
    if name == "delta":
        return delta_loop(*x, no_state(x[0]))[0]
    if name == "lightning":
        whole = torch.tensor([0, x[0].shape[2]])
        given = {"g_gamma": -SLOPE, "scale": 1.0, "cu_seqlens": whole, "cu_seqlens_cpu": whole}
        return lightning_kernel(*(y.transpose(1, 2) for y in x), **given)[0].transpose(1, 2)
    kernel, bias, softplus = {
        "mamba1": (mamba1_kernel, "delta_bias", "delta_softplus"),
        "mamba2": (mamba2_kernel, "dt_bias", "dt_softplus"),
    }[name]
    return kernel(*x[:2], x[4], *x[2:4], D=x[5], **{bias: x[6], softplus: True})


def over(name: str, x: Tensors, **where: Any) -> torch.Tensor:
    if name == "delta":
        kernel = of_library(
            delta_kernel, "fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"
        )
        return delta_rule(kernel, *x, **where)
    if name == "lightning":
        return lightning(of_library(lightning_kernel, "fla.ops"), *x, SLOPE, **where)
    if name == "mamba1":
        kernel = of_library(mamba1_kernel, "mamba_ssm.ops")
        given = {"D": x[5], "delta_bias": x[6], "delta_softplus": True}
        return mamba1(kernel, *x[:2], x[4], *x[2:4], **given, **where)
    kernel = of_library(mamba2_kernel, "mamba_ssm.ops")
    given = {"D": x[5], "dt_bias": x[6], "dt_softplus": True}
    return mamba2(kernel, *x[:2], x[4], *x[2:4], **given, **where)


@contextlib.contextmanager
def on_a_cpu(planted: str = "") -> Iterator[None]:
    """The delta rule's kernels of states in torch, with an error."""
    scale = 1.01 if planted == "A off by 1 %" else 1.0

    def states(*given: Any) -> Any:
        return maps(*given, False)[0]

    def transitions(
        k: Any, w: Any, g: Any, gk: Any, chunk_size: Any, lengths: Any, numbers: slice
    ) -> Any:
        borders = torch.tensor([0, *accumulate(lengths)])[numbers.start : numbers.stop + 1]
        return scale * maps(k, w, None, g, gk, chunk_size, borders, True)[1]

    def gradient(*given: Any) -> Any:
        return gradient_of_state(*given) * (planted != "no gradient")

    with (
        mock.patch.object(kernels, "_patch_kernels", lambda: True),
        mock.patch.object(kernels, "takes_states", lambda kernel, _: "gated" in kernel.__module__),
        mock.patch.object(kernels, "_states", states),
        mock.patch.object(kernels, "_transitions", transitions),
        mock.patch.object(kernels, "_gradient_of_state", gradient),
    ):
        yield


def worst_error(name: str, layout_kind: str, batch: str) -> float:
    rows, documents = BATCHES[batch]
    mesh, rank = mesh_of(2), dist.get_rank()
    if layout_kind == "balanced":
        layout = mesh.layout(layout_kind, TOKENS, documents)
    else:
        layout = mesh.layout(layout_kind, TOKENS)
    given, sharded, dim = tensors_of(name, rows)

    def shard(x: torch.Tensor) -> torch.Tensor:
        return layout.shard(x, dim, rank)

    leaves = [x.clone().requires_grad_() for x in given]
    lines = []
    for row in range(rows):
        outs = []
        for tokens, count in tokens_by_document(documents, rows, TOKENS)[row]:
            index = torch.tensor(tokens)
            part = [x[row : row + 1].index_select(dim, index) for x in leaves[:sharded]]
            out = alone(name, [*part, *leaves[sharded:]])
            outs.append(out.narrow(dim, len(tokens) - count, count))
        lines.append(torch.cat(outs, dim))
    wanted = torch.cat(lines)
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=wanted.dtype)
    truth = torch.autograd.grad(wanted, leaves, dout)
    own = [shard(x).clone() if i < sharded else x.clone() for i, x in enumerate(given)]
    own = [x.requires_grad_() for x in own]
    out = over(name, own, mesh=mesh, layout=layout, documents=documents)
    grads = torch.autograd.grad(out, own, shard(dout))
    for grad in grads[sharded:]:
        dist.all_reduce(grad)
    pairs = [(out, shard(wanted))]
    pairs += [
        (a, shard(b) if i < sharded else b)
        for i, (a, b) in enumerate(zip(grads, truth, strict=True))
    ]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in pairs)


def sweep(ctx: RankContext, name: str, planted: str) -> dict[str, float]:
    errors = {}
    with on_a_cpu(planted):
        for layout_kind in ("zigzag",) if planted else ("contiguous", "zigzag", "balanced"):
            for batch in ("one document", "tree") if planted else BATCHES:
                served = ("packed",) if layout_kind == "balanced" else list(BATCHES)[:4]
                if layout_kind == "zigzag" or batch in served:
                    errors[f"{layout_kind}, {batch}"] = worst_error(name, layout_kind, batch)
        with mock.patch.object(state_chains, "MAX_DIRECT_PIECES", 2):
            state_chains.state_chains.cache_clear()
            for batch in ("one document", "tree"):
                errors[f"doubling, {batch}"] = worst_error(name, "zigzag", batch)
        state_chains.state_chains.cache_clear()
    return errors


# States of the delta rule travel in fp32, whatever the dtype of its tensors.
TOLERANCE = {"delta": 1e-6, "lightning": 1e-12, "mamba1": 1e-9, "mamba2": 1e-12}


@pytest.mark.parametrize("name", TOLERANCE)
def test_all_pieces_of_a_rank_go_through_a_library_s_kernel(pool, name):
    for errors in pool.run(sweep, WORLD, timeout=TIMEOUT_S, name=name, planted=""):
        assert len(errors) == 13 and max(errors.values()) <= TOLERANCE[name], errors


@pytest.mark.parametrize("planted", ["A off by 1 %", "no gradient"])
def test_an_error_of_a_library_s_states_is_seen(pool, planted):
    by_rank = pool.run(sweep, WORLD, timeout=TIMEOUT_S, name="delta", planted=planted)
    for what in by_rank[0]:
        assert max(errors[what] for errors in by_rank) > 1e-4, by_rank


def in_autocast(ctx: RankContext, name: str) -> list[bool]:
    """Whether outputs and gradients are those without autocast, bit by bit: the library's kernels
    compute in fp32 whatever it says, and those above have no product that it would cast."""
    mesh = mesh_of(2)
    layout = mesh.layout("zigzag", TOKENS)
    given, sharded, dim = tensors_of(name, 1)
    given = [x.float() for x in given]
    own = [layout.shard(x, dim, ctx.rank) if i < sharded else x for i, x in enumerate(given)]
    own = [x.clone().requires_grad_() for x in own]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = over(name, own, mesh=mesh, layout=layout)
        results.append([out, *torch.autograd.grad(out.sum(), own)])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("name", ["lightning", "mamba2"])
def test_states_that_a_kernel_starts_from_are_made_outside_of_autocast(pool, name):
    for exact in pool.run(in_autocast, WORLD, timeout=TIMEOUT_S, name=name):
        assert all(exact), exact


class Doubled(torch.autograd.Function):
    """As the library's functions, keeps documents for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(documents)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        return 2 * dout, None


def test_documents_first_needed_in_inference_are_there_for_training():
    lengths, device = (3, 5, 7), torch.device("cpu")
    for made in (kernels.borders_of, kernels.numbers_of):
        made.cache_clear()
        with torch.inference_mode():
            made(lengths, 1, device)
        kept = made(lengths, 1, device)
        for documents in kept if isinstance(kept, tuple) else (kept,):
            x = torch.ones(2, requires_grad=True)
            Doubled.apply(x, documents).sum().backward()
            assert x.grad.tolist() == [2, 2]
