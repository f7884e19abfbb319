"""A state and a convolution over ranks equal the loop over tokens of one process, each document
alone; ranks that differ are refused on all of them."""

import contextlib
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import mesh_of, tokens_by_document
from harness import RankContext
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp import MaskSpec, PieceMap, PieceMaps, Recurrence, SequenceMesh, TokenLayout
from ds_usp.geometry import state_chains
from ds_usp.geometry.state_chains import Piece
from ds_usp.geometry.state_chains import state_chains as chains
from ds_usp.recurrence import conv, exchange, scan

WORLD, TIMEOUT_S = 4, 60.0
ROWS, HEADS, N, M, TAPS = 2, 2, 3, 4, 4
CHANNELS = HEADS * N
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
Tensors = Sequence[torch.Tensor]

# Three kinds of transition, each S = a S + b and out = read S, a token at a time. All of a layer's
# tensors have tokens along `DIM`, heads and channels after that.
DIM = {"matrix": 1, "head": 1, "element": 3}


def inputs_of(kind: str, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """a, b and read of a whole sequence, with decays near 1; and the convolution's x."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    near_one = 1 - 0.02 * normal(ROWS, tokens, HEADS, N).sigmoid()
    a = near_one if kind == "element" else near_one[..., 0]
    if kind == "matrix":
        a = torch.eye(N) * near_one[..., None] + 0.02 * normal(ROWS, tokens, HEADS, N, N)
    b = normal(ROWS, tokens, HEADS, N, *[M] * (kind != "element"))
    read = normal(ROWS, tokens, HEADS, N)
    x = normal(ROWS, CHANNELS, tokens)
    tensors = [y.movedim(1, DIM[kind]).to(dtype) for y in (a, b, read)]
    return [*tensors, x.to(dtype)]


def advance(kind: str, a: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    if kind == "matrix":
        return a @ s
    return a.reshape(*a.shape, *[1] * (s.ndim - a.ndim)) * s


def outputs(kind: str, read: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """What a token reads of the state, ``[rows, heads, m]``; ``[rows, heads, n]`` of elements."""
    return read * s if kind == "element" else (read[..., None, :] @ s)[..., 0, :]


def run_tokens(kind: str, tensors: Tensors, state: torch.Tensor | None = None) -> tuple[Any, ...]:
    """The loop: outputs, the last state, the product of all a, and a response to a state."""
    a, b, read = (x.unbind(DIM[kind]) for x in tensors)
    s, across, outs, products = state, None, [], []
    for a_t, b_t, read_t in zip(a, b, read, strict=True):
        s = b_t if s is None else advance(kind, a_t, s) + b_t  # a piece of one token needs no a
        across = a_t if across is None else (a_t @ across if kind == "matrix" else a_t * across)
        products.append(across)
        outs.append(outputs(kind, read_t, s))

    def respond(incoming: torch.Tensor) -> torch.Tensor:
        seen = [advance(kind, product, incoming) for product in products]
        return torch.stack(
            [outputs(kind, r, x) for r, x in zip(read, seen, strict=True)], DIM[kind]
        )

    return torch.stack(outs, DIM[kind]), s, across, respond


def recurrence_of(kind: str, form: str = "piecewise") -> Recurrence:
    """By one piece at a time; or by all pieces of a rank, states first."""
    state = (HEADS, N) if kind == "element" else (HEADS, N, M)
    transition = {"matrix": (HEADS, N, N), "head": (HEADS,), "element": (HEADS, N)}[kind]

    def of_piece(tensors: Tensors, piece: Piece) -> PieceMap:
        return PieceMap(*run_tokens(kind, tensors))

    def of_all(tensors: Tensors, pieces: Sequence[Piece]) -> PieceMaps:
        lengths = [piece.length for piece in pieces]
        parts = list(zip(*(x.split(lengths, DIM[kind]) for x in tensors), strict=True))
        maps = [run_tokens(kind, part) for part in parts]

        def finish(states: Sequence[torch.Tensor | None]) -> torch.Tensor:
            again = [run_tokens(kind, part, s) for part, s in zip(parts, states, strict=True)]
            return torch.cat([x[0] for x in again], DIM[kind])

        return PieceMaps([x[1] for x in maps], [x[2] for x in maps], finish)

    run = of_piece if form == "piecewise" else of_all
    return Recurrence(run, state, transition, kind == "matrix", piecewise=form == "piecewise")


WEIGHT = torch.linspace(-1, 1, CHANNELS * TAPS, dtype=torch.float64).view(CHANNELS, 1, TAPS)


def convolve(x: torch.Tensor) -> torch.Tensor:
    """``[rows, channels, tokens]``, as if zeros were before the first token."""
    padded = F.pad(x, (TAPS - 1, 0))
    return F.silu(F.conv1d(padded, WEIGHT.to(x.dtype), groups=CHANNELS))


def alone(kind: str, tensors: Tensors, x: torch.Tensor, documents: Any) -> Tensors:
    """Scan and convolution of whole sequences, of each document by itself, behind its ancestors, in
    fp64."""
    lines = []
    for row, of_row in enumerate(tokens_by_document(documents, ROWS, x.shape[2])):
        outs, convolved = [], []
        for tokens, own in of_row:
            whole = torch.tensor(tokens)
            part = [y[row : row + 1].index_select(DIM[kind], whole) for y in tensors]
            outs.append(run_tokens(kind, part)[0].narrow(DIM[kind], len(whole) - own, own))
            convolved.append(convolve(x[row : row + 1, :, whole])[..., -own:])
        lines.append((torch.cat(outs, DIM[kind]), torch.cat(convolved, 2)))
    return [torch.cat(parts) for parts in zip(*lines, strict=True)]


@contextlib.contextmanager
def direct_up_to(pieces: int) -> Iterator[None]:
    """Chains of more pieces are folded by doubling."""
    chains.cache_clear()  # of another number
    with mock.patch.object(state_chains, "MAX_DIRECT_PIECES", pieces):
        yield
    chains.cache_clear()


def another_tree(fault: str, given: MaskSpec) -> MaskSpec:
    """A tree whose documents go on from others than their parents."""
    (parents,) = given.parents
    instead = {
        "nothing": lambda index, parent: -1,
        "the document before": lambda index, parent: index - 1,
        "a sibling": lambda index, parent: max(
            [x for x in range(index) if parents[x] == parent >= 0], default=parent
        ),
    }[fault]
    wrong = tuple(instead(index, parent) for index, parent in enumerate(parents))
    return replace(given, parents=(wrong,))


def twice(transfer: Any, own: Sequence[Piece], maps: PieceMaps) -> dict[Piece, torch.Tensor]:
    """States of which a branch has all that its parent's document adds to it twice."""
    states = _STATES(transfer, own, maps)
    return {piece: s * (1 + (piece.start == piece.first)) for piece, s in states.items()}


_STATES = scan.Transfer.states


@contextlib.contextmanager
def planted(error: str) -> Iterator[None]:
    """What a wrong implementation would do."""
    lost: dict[str, tuple[object, str, Callable[..., Any]]] = {
        "no state": (scan.Transfer, "states", lambda *_: {}),
        "no halo": (
            conv._Shard,
            "exchange",
            lambda shard, call: shard.tokens.new_zeros(
                *shard.tokens.shape[:2], sum(shard.halo.received)
            ),
        ),
        "no backward exchange": (
            exchange._Exchange,
            "backward",
            staticmethod(lambda ctx, grad: (grad.new_zeros(sum(ctx.sent)), *[None] * 4)),
        ),
    }
    lost["a prefix twice"] = (scan.Transfer, "states", twice)
    with contextlib.ExitStack() as stack:
        if error in lost:
            stack.enter_context(mock.patch.object(*lost[error]))
        what, _, fault = error.partition(" of ")
        if fault:
            call = {"a state": scan, "a halo": conv}[what]

            def begin(*given: Any) -> exchange.ExchangeCall:
                return exchange.ExchangeCall(*given[:-1], another_tree(fault, given[-1]))

            stack.enter_context(mock.patch.object(call, "ExchangeCall", begin))
        if error == "A off by 1 %":
            whole = Recurrence.compose
            stack.enter_context(
                mock.patch.object(
                    Recurrence,
                    "compose",
                    lambda self, later, earlier: whole(self, (later[0] * 1.01, later[1]), earlier),
                )
            )
        yield


def worst_error(
    kind: str,
    layout: TokenLayout,
    mesh: SequenceMesh,
    documents: Any,
    dtype: torch.dtype = torch.float64,
    form: str = "piecewise",
    error: str = "",
    checkpointed: str = "",
) -> float:
    """Of outputs and gradients of both, relative to the largest element of each whole tensor."""
    rank, dim = mesh.rank, DIM[kind]
    whole = inputs_of(kind, layout.seq_len, dtype)
    leaves = [x.double().clone().requires_grad_() for x in whole]
    wanted = alone(kind, leaves[:3], leaves[3], documents)
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in wanted]
    sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)).backward()
    dims = [dim, dim, dim, 2]
    local = [layout.shard(x, d, rank).requires_grad_() for x, d in zip(whole, dims, strict=True)]
    where: dict[str, Any] = {"mesh": mesh, "layout": layout, "documents": documents}

    def both(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recurrence = recurrence_of(kind, form)
        out = ds_usp.affine_scan(recurrence, tensors[:3], dims=[dim] * 3, out_dim=dim, **where)
        return out, ds_usp.causal_conv(convolve, tensors[3], TAPS, **where)

    with planted(error):
        got = (
            checkpoint(both, *local, use_reentrant=checkpointed == "reentrant")
            if checkpointed
            else both(*local)
        )
        parts = [layout.shard(w.to(dtype), d, rank) for w, d in zip(weights, (dim, 2), strict=True)]
        sum((x * w).sum() for x, w in zip(got, parts, strict=True)).backward()
    pairs = [*zip(got, wanted, (dim, 2), strict=True)]
    pairs += [(x.grad, y.grad, d) for x, y, d in zip(local, leaves, dims, strict=True)]
    worst = 0.0
    for x, y, d in pairs:
        y = y.detach()
        difference = x.detach().double() - layout.shard(y, d, rank)
        worst = max(worst, float(difference.abs().max() / y.abs().max()))
    return worst


# A prompt and its answers, one of which branches again; segments of one token; and a second tree.
_TREE = [
    (0, 9, None),
    (9, 10, 0),
    (10, 17, 0),
    (17, 18, 2),
    (18, 24, 2),
    (24, 25, 0),
    (25, 29, None),
]
# Tokens and documents: whole; packed with documents of one token; other ones in each row; fewer
# tokens than the convolution's halo on a rank; trees.
BATCHES: dict[str, tuple[int, Any]] = {
    "one document": (29, ()),
    "packed": (29, [0, 1, 2, 5, 23, 28, 29]),
    "rows": (29, [[0, 20, 29], [0, 3, 4, 29]]),
    "short": (9, ()),
    "short packed": (11, [0, 1, 9, 11]),
    "tree": (29, MaskSpec.tree(_TREE)),
    "trees": (
        29,
        MaskSpec.tree(
            [
                _TREE,
                [
                    (0, 20, None),
                    (20, 21, 0),
                    (21, 22, 1),
                    *((n, n + 1, 2) for n in range(22, 27)),
                    (27, 29, 0),
                ],
            ]
        ),
    ),
}


def sweep(
    ctx: RankContext, kind: str, ulysses: int, dtype: torch.dtype, layouts: Sequence[str]
) -> dict[str, float]:
    mesh, errors = mesh_of(ulysses), {}
    for name, (tokens, documents) in BATCHES.items():
        for layout_kind in layouts:
            if layout_kind != "balanced":
                layout = mesh.layout(layout_kind, tokens)
            elif name in ("packed", "short packed", "tree"):
                layout = mesh.layout(layout_kind, tokens, documents)
            else:
                continue
            errors[f"{name}, {layout}"] = worst_error(kind, layout, mesh, documents, dtype)
    layout = mesh.layout("zigzag", 29)
    errors["states first"] = worst_error(kind, layout, mesh, (), dtype, form="all")
    for use in ("reentrant", "not reentrant"):
        errors[use] = worst_error(kind, layout, mesh, (), dtype, checkpointed=use)
    with direct_up_to(2):
        for name in ("packed", "tree"):
            tokens, documents = BATCHES[name]
            layout = mesh.layout("context_parallel", tokens)
            errors[f"doubling {name}"] = worst_error(kind, layout, mesh, documents, dtype)
    return errors


@pytest.mark.parametrize(
    ("kind", "ulysses", "dtype", "layouts"),
    [
        ("matrix", 2, torch.float64, ["contiguous", "zigzag", "context_parallel", "balanced"]),
        ("head", 4, torch.float32, ["contiguous"]),
        ("element", 1, torch.float32, ["zigzag"]),
    ],
)
def test_a_scan_and_a_convolution_equal_the_loop_over_tokens(pool, kind, ulysses, dtype, layouts):
    options = {"kind": kind, "ulysses": ulysses, "dtype": dtype, "layouts": layouts}
    for errors in pool.run(sweep, WORLD, timeout=TIMEOUT_S, **options):
        assert len(errors) == (29 if len(layouts) == 4 else 12), errors
        assert max(errors.values()) <= TOLERANCE[dtype], errors


PLANTED = ["no state", "no halo", "no backward exchange", "A off by 1 %"]
IN_TREES = ["a prefix twice"]
IN_TREES += [
    f"{what} of {which}"
    for what in ("a state", "a halo")
    for which in ("nothing", "a sibling", "the document before")
]


def wrong(ctx: RankContext, doubling: bool) -> dict[str, float]:
    mesh, errors = mesh_of(2), {}
    layout = mesh.layout("zigzag", 29)  # 8 pieces in the chain
    with direct_up_to(2 if doubling else 8):
        for kind in DIM:
            for error in PLANTED:
                key = f"{kind}: {error}"
                errors[key] = worst_error(kind, layout, mesh, (), torch.float32, error=error)
        tree = BATCHES["tree"][1]
        for error in IN_TREES:
            errors[error] = worst_error("head", layout, mesh, tree, torch.float32, error=error)
    return errors


@pytest.mark.parametrize("doubling", [False, True])
def test_an_error_in_the_mechanism_is_seen(pool, doubling):
    """Decays near 1 and chains of several pieces: what tests with others would not see. In trees
    the state, or the tokens before, of another document than the parent."""
    by_rank = pool.run(wrong, WORLD, timeout=TIMEOUT_S, doubling=doubling)
    worst = {key: max(errors[key] for errors in by_rank) for key in by_rank[0]}
    assert len(worst) == 19 and min(worst.values()) > 1e-4, worst


def said(call: Callable[[], object]) -> str:
    """What it raises, with its class; "" where it returns."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def no_memory(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of memory in conv")


def narrow(tensors: Tensors, piece: Piece) -> PieceMap:
    ran = PieceMap(*run_tokens("head", tensors))
    return ran._replace(out=ran.out[..., 1:])


def disagreeing(ctx: RankContext) -> list[tuple[str, str, str]]:
    """What this rank is told where rank 1 does something else than the others, the numbers that it
    must have, and what it is told in a call of all."""
    mesh, odd = mesh_of(2), ctx.rank == 1
    layout = mesh.layout("zigzag", 29)
    local = [layout.shard(x, 1, ctx.rank) for x in inputs_of("head", 29, torch.float32)[:3]]
    base = recurrence_of("head")
    where: dict[str, Any] = {"mesh": mesh, "layout": layout, "dims": [1] * 3, "out_dim": 1}

    def run(recurrence: Recurrence = base, tensors: Any = None, **changed: Any) -> torch.Tensor:
        tensors = [x.clone().requires_grad_() for x in local] if tensors is None else tensors
        return ds_usp.affine_scan(recurrence, tensors, **(where | changed))

    def breaks(place: str) -> Recurrence:
        def of_piece(tensors: Tensors, piece: Piece) -> PieceMap:
            if place == "run":
                raise RuntimeError("out of memory in run")
            ran = PieceMap(*run_tokens("head", tensors))

            def respond(state: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("out of memory in respond")

            return ran._replace(respond=respond)

        return replace(base, run=of_piece)

    def convolved(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.ones(2, CHANNELS, layout.length(ctx.rank), requires_grad=True)
        return ds_usp.causal_conv(of, x, 4, mesh=mesh, layout=layout)

    tall = replace(base, state_shape=(HEADS, N, M + 1))
    at_once = recurrence_of("head", "states first")

    def good() -> None:
        run().sum().backward()

    def good_conv() -> None:
        convolved(convolve).sum().backward()

    def with_parameter(factor: float) -> None:
        first = replace(base, run=lambda tensors, piece: base.run(tensors[:3], piece))
        run(first, [*local, torch.full((HEADS,), factor)], dims=[1, 1, 1, None])

    wrong_dims, narrower = ["x", 1, 1], replace(base, run=narrow)
    other_mesh = TokenLayout("zigzag", 29, 4, 1)
    # What rank 1 does, what the others do, what every rank is told.
    rows: list[tuple[Callable[[], object], Callable[[], object], str]] = [
        (lambda: run(documents=[0, 5, 29]), good, "documents 0-5-29 on rank 1"),
        (lambda: run(tensors=local), good, "with on ranks 0, 2-3, without on rank 1"),
        (lambda: run(tensors=[x.double() for x in local]), good, "torch.float64"),
        (lambda: run(recurrence=tall), good, "[2, 3, 5], transitions [2] elementwise on rank 1"),
        (lambda: run(tensors=[x[:, 1:] for x in local]), good, "tensor 0 has 6 tokens"),
        (lambda: run(layout=other_mesh), good, "ulysses 4 x ring 1"),
        (lambda: run(breaks("run")), good, "out of memory in run"),
        (lambda: run(breaks("finish")), good, "out of memory in respond"),
        (lambda: run(narrower), good, "[2, 's', 2, 3] on rank 1"),
        (lambda: with_parameter(2.0), lambda: with_parameter(1.0), "float32 tensor 3 2, digest"),
        (lambda: run(out_dim=2), good, "out_dim=2: it needs 2 rows"),
        (
            lambda: run(at_once, out_dim=2),
            lambda: run(at_once).sum().backward(),
            "1 on ranks 0, 2-3, 2 on rank 1",
        ),
        (lambda: run(None), good, "recurrence=None"),  # type: ignore[arg-type]
        (lambda: run(tensors=(x for x in local)), good, "generator"),
        (lambda: run(dims=wrong_dims), good, "dims[0]='x'"),
        (lambda: convolved(no_memory), good_conv, "out of memory in conv"),
        (lambda: convolved(lambda x: x[:, :, 1:]), good_conv, "conv gave [2, 6, "),
        (lambda: convolved(convolve), good, "rank 1: causal_conv, "),
        (run, good, "backward pass of call"),
    ]
    told = []
    for action, others, numbers in rows:
        text = said(action if odd else others)
        if odd and action is run:  # a backward pass left out: it meets the others' in its next call
            text = said(good)
        told.append((text, numbers, said(good)))
    return told


def test_a_rank_that_differs_is_refused_on_all(pool):
    for told in pool.run(disagreeing, WORLD, timeout=TIMEOUT_S):
        assert len(told) == 19
        for text, numbers, then in told:
            assert numbers in text and then == "", (numbers, text, then)


def around_a_scan(ctx: RankContext, enters: bool) -> str:
    """What the backward passes of two forward passes say, where rank 0 needs no transition, and so
    nothing of the convolution that makes them."""
    mesh = mesh_of(2)
    layout = mesh.layout("contiguous", WORLD)
    where: dict[str, Any] = {"mesh": mesh, "layout": layout}
    generator, passes = torch.Generator().manual_seed(1), []

    def without_enter(call: Any, tensors: Tensors) -> list[torch.Tensor]:
        call.needs_grad, call._anchor = True, tensors[-1].flatten()[:0]
        return list(tensors)

    with contextlib.ExitStack() as stack:
        if not enters:
            stack.enter_context(mock.patch.object(exchange.ExchangeCall, "_enter", without_enter))
        for _ in range(2):
            whole = torch.randn(3, ROWS, CHANNELS, WORLD, generator=generator, dtype=torch.float64)
            local = [layout.shard(x, 2, ctx.rank).requires_grad_() for x in whole]
            mixed = [ds_usp.causal_conv(convolve, x, TAPS, **where).sigmoid() for x in local]
            tensors = [x.unflatten(1, (HEADS, N)) for x in mixed]
            recurrence = recurrence_of("element")
            out = ds_usp.affine_scan(recurrence, tensors, dims=[3] * 3, out_dim=3, **where)
            passes.append((whole, local, out))
        for whole, local, out in passes:
            text = said(lambda: (out.sum().backward(), mesh.check()))  # noqa: B023
            if text:
                return text
            leaves = [x.clone().requires_grad_() for x in whole]
            tensors = [convolve(x).sigmoid().unflatten(1, (HEADS, N)) for x in leaves]
            run_tokens("element", tensors)[0].sum().backward()
            for x, y in zip(local, leaves, strict=True):
                torch.testing.assert_close(x.grad, layout.shard(y.grad, 2, ctx.rank))
    return ""


def test_every_exchange_before_a_scan_has_a_backward_exchange_on_every_rank(pool):
    assert pool.run(around_a_scan, WORLD, timeout=TIMEOUT_S, enters=True) == [""] * WORLD
    for text in pool.run(around_a_scan, WORLD, timeout=TIMEOUT_S, enters=False):
        assert "backward pass of call" in text


def refused(ctx: RankContext) -> list[tuple[str, str]]:
    """What is said of what is wrong on all ranks alike, and the numbers that it must have."""
    mesh = mesh_of(2)
    layout = mesh.layout("zigzag", 29)
    a, b, read = (layout.shard(x, 1, ctx.rank) for x in inputs_of("head", 29, torch.float32)[:3])
    base = recurrence_of("head")
    parameter = torch.ones(HEADS, requires_grad=True)
    dims: list[int | None] = [1, 1, 1]

    def run(recurrence: Recurrence = base, tensors: Any = (a, b, read), **changed: Any) -> object:
        where = {"mesh": mesh, "layout": layout, "dims": dims, "out_dim": 1} | changed
        return ds_usp.affine_scan(recurrence, tensors, **where)

    def with_parameter(tensors: Tensors, piece: Piece) -> PieceMap:
        return PieceMap(*run_tokens("head", [tensors[0] * parameter, *tensors[1:3]]))

    def lacking(field: str) -> Recurrence:
        def of_piece(tensors: Tensors, piece: Piece) -> PieceMap:
            return PieceMap(*run_tokens("head", tensors))._replace(**{field: None})

        return replace(base, run=of_piece)

    first_states = recurrence_of("head", "states first")

    def short(tensors: Tensors, pieces: Sequence[Piece]) -> PieceMaps:
        maps = first_states.run(tensors, pieces)
        return maps._replace(finish=lambda states: maps.finish(states)[:, 1:])

    outside = replace(base, run=with_parameter)
    tall, rows = replace(base, state_shape=(HEADS, N, M + 1)), [[0, 10, 29], [0, 20, 29]]
    conv = {"mesh": mesh, "layout": layout}
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: run(layout=mesh.layout("striped", 29)), "striped(29 tokens"),
        (lambda: run(layout="zigzag"), "layout='zigzag'"),
        (lambda: run(documents=[0, 28]), "sample 0 end at 28"),
        (lambda: run(dims=[1, 1]), "3 tensors have 2 dims"),
        (lambda: run(tensors=(a, b[:1], read)), "tensor 1 of affine_scan is [1, "),
        (lambda: run(tall), "the recurrence gave piece"),
        (lambda: replace(base, matrix=True), "A [2] does not fit a state [2, 3, 4]"),
        (lambda: run(outside), "gradient"),
        # of some ranks: the others quote it
        *((lambda f=f: run(lacking(f)), "gave piece") for f in ("state", "transition", "respond")),
        *((lambda n=n: run(out_dim=n), f"out_dim={n}: it needs 2 rows") for n in (0, 2, 7)),
        (lambda: run(out_dim=2, documents=rows), "out_dim=2: it needs 1 rows"),
        (lambda: run(replace(first_states, run=short)), "the output of rank "),
        (lambda: ds_usp.causal_conv(convolve, a, 0, **conv), "LayoutError"),
        (lambda: ds_usp.causal_conv(F.relu, a.transpose(1, 2), 0, **conv), "taps=0"),
    ]
    texts = [(said(call), numbers) for call, numbers in calls]
    run(outside, (a, b, read, parameter), dims=[*dims, None]).sum().backward()
    return texts


def test_what_is_wrong_on_all_ranks_is_refused(pool):
    for texts in pool.run(refused, WORLD, timeout=TIMEOUT_S):
        assert len(texts) == 18
        for text, numbers in texts:
            assert numbers in text and "Error: " in text, (numbers, text)


def ledger(ctx: RankContext, pieces: int, kind: str, documents: Any) -> tuple[list[int], list[int]]:
    """Bytes of states and halos that a forward and a backward pass count, and the formula's."""
    mesh = mesh_of(2)
    layout = mesh.layout("context_parallel", 29)
    counted, said_by_formula = list[int](), list[int]()
    state, transition = recurrence_of(kind).state_shape, recurrence_of(kind).transition_shape
    with direct_up_to(pieces):
        mask = documents if isinstance(documents, MaskSpec) else MaskSpec.causal(documents)
        of_batch = chains(layout, mask.documents, ROWS, mask.parents)
        local = [
            layout.shard(x, DIM[kind], ctx.rank) for x in inputs_of(kind, 29, torch.float32)[:3]
        ]
        x = layout.shard(inputs_of(kind, 29, torch.float32)[3], 2, ctx.rank).bfloat16()
        where: dict[str, Any] = {"mesh": mesh, "layout": layout, "documents": documents}
        options = {"dims": [DIM[kind]] * 3, "out_dim": DIM[kind]} | where
        tensors = [x.requires_grad_() for x in local]
        mesh.ledger.reset()
        compared = mesh.consistency.number
        out = ds_usp.affine_scan(recurrence_of(kind), tensors, **options)
        convolved = ds_usp.causal_conv(convolve, x.requires_grad_(), TAPS, **where)
        for backward in (False, True):
            counted += [mesh.ledger.bytes["states"], mesh.ledger.bytes["halo"]]
            sizes = math.prod(state), math.prod(transition)
            said_by_formula += [
                of_batch.sent_bytes(ctx.rank, *sizes, backward=backward),
                of_batch.halo_bytes(ctx.rank, TAPS - 1, CHANNELS, 2, backward=backward),
            ]
            if not backward:
                mesh.ledger.reset()
                (out.sum() + convolved.sum()).backward()
    # One comparison a call and a backward pass, however many exchanges there are.
    assert mesh.consistency.number - compared == 4
    return counted, said_by_formula


@pytest.mark.parametrize("documents", [BATCHES[x][1] for x in ("packed", "rows", "tree")])
@pytest.mark.parametrize("pieces", [2, 8])
def test_bytes_are_those_of_the_formula(pool, pieces, documents):
    options = {"pieces": pieces, "kind": "matrix", "documents": documents}
    results = pool.run(ledger, WORLD, timeout=TIMEOUT_S, **options)
    for counted, formula in results:
        assert counted == formula
    assert all(sum(counted[i] for counted, _ in results) > 0 for i in range(4))


def kept_by_the_graph(ctx: RankContext) -> list[bool]:
    """Whether something of a call outlives its output, without a collection of cycles."""
    mesh = mesh_of(2)
    layout = mesh.layout("zigzag", 29)
    tensors = [
        layout.shard(x, 1, ctx.rank).requires_grad_()
        for x in inputs_of("head", 29, torch.float32)[:3]
    ]
    calls, whole = [], exchange.ExchangeCall.begin

    def begin(call: Any, compute: Any) -> Any:
        calls.append(weakref.ref(call))
        return whole(call, compute)

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(exchange.ExchangeCall, "begin", begin):
            out = ds_usp.affine_scan(
                recurrence_of("head"), tensors, mesh=mesh, layout=layout, dims=[1] * 3, out_dim=1
            )
        node = weakref.ref(out.grad_fn)
        out.sum().backward()
        del out
        until = time.monotonic() + 20  # a thread that watches the ranks may hold its last word
        while (calls[0]() or node()) and time.monotonic() < until:
            time.sleep(0.01)
        return [calls[0]() is None, node() is None]
    finally:
        gc.enable()


def test_a_call_is_freed_with_its_output(pool):
    assert pool.run(kept_by_the_graph, WORLD, timeout=TIMEOUT_S) == [[True, True]] * WORLD


def in_autocast(ctx: RankContext) -> tuple[bool, bool]:
    """Whether states are folded in fp32 under autocast; and where it stays on, as a wrong one."""
    mesh = mesh_of(2)
    layout = mesh.layout("zigzag", 29)
    tensors = [layout.shard(x, 1, ctx.rank) for x in inputs_of("matrix", 29, torch.float32)[:3]]
    base = recurrence_of("matrix")

    def of_piece(tensors: Tensors, piece: Piece) -> PieceMap:
        with torch.autocast("cpu", enabled=False):
            return base.run(tensors, piece)

    def run() -> torch.Tensor:
        options: dict[str, Any] = {"mesh": mesh, "layout": layout, "dims": [1] * 3, "out_dim": 1}
        return ds_usp.affine_scan(replace(base, run=of_piece), tensors, **options)

    wanted = run()
    with torch.autocast("cpu", torch.bfloat16):
        exact = torch.equal(run(), wanted)
        with mock.patch.object(scan, "no_autocast", lambda _: contextlib.nullcontext()):
            return exact, torch.equal(run(), wanted)


def test_states_are_folded_outside_of_autocast(pool):
    results = pool.run(in_autocast, WORLD, timeout=TIMEOUT_S)
    assert [exact for exact, _ in results] == [True] * WORLD
    assert not all(wrong for _, wrong in results)
