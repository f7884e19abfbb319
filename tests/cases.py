"""Attention calls as data, and the function that compares one on a rank with the reference.

Every rank makes the same full tensors from the case's seed, keeps its own shard of them, and
compares its shard of the results with the fp64 oracle's.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from harness import RankContext, WorkerPool
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp import MaskSpec
from ds_usp import testing as oracle
from ds_usp.attention.tuning import AUTO_TUNING
from ds_usp.geometry.layout import KINDS
from ds_usp.memory import keep_attention

# Every row of the table of layouts but the one that is made for documents.
ALL_LAYOUTS = tuple(kind for kind in KINDS if kind != "balanced")
ALL_ORDERS = ("ulysses-ring", "ring-ulysses")
RESULTS = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
TOKEN_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}

# (left, right) bounds in tokens, None is open.
MASKS = {
    "causal": (None, 0),
    "full": (None, None),
    "window": (11, 0),
    "window both sides": (7, 3),
    "window ahead": (None, 5),
    "window back": (9, None),
    "neighbours": (1, 1),
}

# (query heads, key/value heads)
HEADS = {
    "MHA": (8, 8),
    "GQA": (8, 2),
    "MQA": (8, 1),
    "6 heads": (6, 6),
    "7 heads": (7, 7),
    "6 heads of 2": (6, 2),
    "9 heads of 3": (9, 3),
}


@dataclass(frozen=True)
class LaterMask(MaskSpec):
    """A mask of a later version, with a field that no reader knows."""

    stride: int = 1


def random_tree(draw: random.Random, tokens: int) -> tuple[tuple[int, int, int | None], ...]:
    """Segments (start, end, parent) that fill a sequence, up to five deep, in any order that has
    parents first: many of one token, few long ones, or one."""
    longest = draw.choice([1, 3, 12, tokens // 2, tokens])
    segments: list[tuple[int, int, int | None]] = []
    depths: list[int] = []
    while not segments or segments[-1][1] < tokens:
        start = segments[-1][1] if segments else 0
        parents = [None, *(index for index, depth in enumerate(depths) if depth < 5)]
        parent = draw.choice(parents[-4:] if draw.random() < 0.8 else parents)
        depths.append(1 if parent is None else depths[parent] + 1)
        segments.append((start, min(tokens, start + draw.randint(1, longest)), parent))
    return tuple(segments)


def tokens_by_document(documents: Any, rows: int, tokens: int) -> list[list[tuple[list[int], int]]]:
    """Of each row of a batch and each of its documents the tokens that its last one has come
    through, and how many of them are the document's own."""
    mask = documents if isinstance(documents, MaskSpec) else MaskSpec.causal(documents)
    borders, found = mask.documents or ((0, tokens),), []
    for sample in range(rows) if len(borders) > 1 else [0] * rows:
        paths = list[list[int]]()
        for index, (first, last) in enumerate(pairwise(borders[sample])):
            parent = mask.parents[sample][index] if mask.parents else -1
            paths.append([*(paths[parent] if parent >= 0 else ()), *range(first, last)])
        lengths = (b - a for a, b in pairwise(borders[sample]))
        found.append(list(zip(paths, lengths, strict=True)))
    return found


def rectangles_of(
    segments: Sequence[tuple[int, int, int | None]],
) -> list[tuple[int, int, int, int, str]]:
    """A tree segment by segment: its own triangle, and a rectangle to each ancestor."""
    rectangles = []
    for start, stop, parent in segments:
        rectangles.append((start, stop, start, stop, "causal"))
        while parent is not None:
            k_start, k_stop, parent = segments[parent]
            rectangles.append((start, stop, k_start, k_stop, "full"))
    return rectangles


ONE_TREE = ((0, 8, None), (8, 16, 0), (16, 24, 0), (24, 32, 2), (32, 40, 2))


@dataclass(frozen=True)
class Case:
    """One attention call, without the mesh that it runs on."""

    seq_len: int = 64
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 16
    batch: int = 2
    layout: str = "zigzag"
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    kernel: str = "auto"
    softmax_scale: float | None = None
    seed: int = 0
    tuning: ds_usp.Tuning = AUTO_TUNING
    # Lengths of documents: once for all samples, or for each of them.
    documents: tuple[tuple[int, ...], ...] = ()
    value_dim: int | None = None
    softcap: float | None = None
    sinks: bool = False
    prefix: int = 0
    # Whose tokens see each other both ways, for each sample that has documents of its own.
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    # Segments (start, end, parent) of a tree, once for all samples or for each of them.
    tree: tuple[tuple[tuple[int, int, int | None], ...], ...] = ()
    as_rectangles: bool = False  # the tree of all samples
    left: int | None = None  # tokens that a token of the tree sees before it, in its row
    # Of another sequence of keys: its tokens and the kind of their layout.
    keys: tuple[int, str] | None = None
    kept: bool = False  # in a checkpoint that keeps attention's results

    @property
    def mask_spec(self) -> ds_usp.MaskSpec:
        """The mask as the package takes it."""
        if self.tree:
            if self.as_rectangles:
                return ds_usp.MaskSpec.rectangles(rectangles_of(self.tree[0]), self.seq_len)
            return ds_usp.MaskSpec.tree(self.tree, self.left)
        return ds_usp.MaskSpec(*MASKS[self.mask], self._borders, self.prefix, self.blocks)

    @property
    def _borders(self) -> tuple[list[int], ...]:
        return tuple([0, *accumulate(lengths)] for lengths in self.documents)

    def layout_on(self, mesh: ds_usp.SequenceMesh) -> ds_usp.TokenLayout:
        """The layout; of documents, for the first sample's."""
        documents = self._borders[:1] if self.layout == "balanced" else ()
        if self.tree and self.layout == "balanced":
            documents = ds_usp.MaskSpec.tree(self.tree[0])
        return mesh.layout(self.layout, self.seq_len, documents)

    @property
    def allowed(self) -> torch.Tensor:
        """The mask as the oracle takes it."""
        positions = range(self.seq_len)
        if self.keys:
            return oracle.full(positions, range(self.keys[0]))
        window = oracle.window(positions, positions, *MASKS[self.mask])
        window |= (torch.arange(self.seq_len) < self.prefix)[None, :]
        if self.tree:
            branches = [oracle.same_branch(positions, positions, each) for each in self.tree]
            seen = window & torch.stack(branches)
            if self.left is not None:  # as many of a row follow a key as lie between the two
                seen &= seen.int().flip(2).cumsum(2).flip(2) <= self.left + 1
            return seen.expand(self.batch, -1, -1)
        if not self.documents:
            return window
        inside = [oracle.same_document(positions, positions, each) for each in self.documents]
        allowed = (window & torch.stack(inside)).clone()
        for sample, blocks in enumerate(self.blocks):
            for start, stop in blocks:
                allowed[sample, start:stop, start:stop] |= torch.ones(
                    stop - start, stop - start, dtype=torch.bool
                ).triu()
        return allowed.expand(self.batch, -1, -1)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.layout}-{self.mask}-S{self.seq_len}-H{self.heads}/{self.kv_heads}"
            f"-D{self.head_dim}-B{self.batch}-{dtype}-{self.kernel}"
            f"-{self.tuning.chunks}-{self.tuning.gather}"
            + "".join(f"-{len(each)}docs{max(each)}" for each in self.documents)
            + "".join(f"-{len(each)}blocks" for each in self.blocks)
            + "".join(f"-tree{len(each)}" for each in self.tree)
            + f"{f'-prefix{self.prefix}' if self.prefix else ''}"
            f"{f'-keys{self.keys[0]}{self.keys[1]}' if self.keys else ''}"
            f"{f'-values{self.value_dim}' if self.value_dim else ''}"
            f"{f'-cap{self.softcap}' if self.softcap else ''}{'-sinks' if self.sinks else ''}"
            f"{'-kept' if self.kept else ''}"
        ).replace(" ", "_")


def _problem_of(case: Case) -> Case:
    """The case without how it is computed: what is true of it is so on every layout, with every
    kernel and in any number of chunks. A dense answer takes as long as attention on the ranks."""
    keys = case.keys and (case.keys[0], "")
    return replace(case, layout="", kernel="", tuning=AUTO_TUNING, keys=keys, kept=False)


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """The full q, k, v and dout ``[b, s, h, d]``, the same on every rank."""
    return _inputs(_problem_of(case))


@lru_cache(maxsize=64)
def _inputs(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.heads}
    dims = {"v": case.value_dim, "dout": case.value_dim}
    tokens = dict.fromkeys("kv", case.keys[0]) if case.keys else {}
    return {
        name: torch.randn(
            case.batch,
            tokens.get(name, case.seq_len),
            count,
            dims.get(name) or case.head_dim,
            generator=generator,
            dtype=torch.float64,
        ).to(case.dtype)
        for name, count in heads.items()
    }


def sinks(case: Case) -> torch.Tensor | None:
    """A sink a head ``[h]``, from negligible to most of the weight."""
    acc_dtype = torch.promote_types(case.dtype, torch.float32)
    return torch.linspace(-2.0, 6.0, case.heads, dtype=acc_dtype) if case.sinks else None


def reference(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The oracle's fp64 results for the full tensors, from the inputs as the ranks see them."""
    return _reference(_problem_of(case), device)


@lru_cache(maxsize=64)
def _reference(case: Case, device: str) -> dict[str, torch.Tensor]:
    full = {name: x.to(device) for name, x in _inputs(case).items()}
    q, k, v = (full[name].double().requires_grad_() for name in "qkv")
    sink = sinks(case)
    sink = None if sink is None else sink.double().to(device).requires_grad_()
    out, lse = oracle.dense_attention(
        q,
        k,
        v,
        case.allowed.to(device),
        case.softmax_scale,
        softcap=case.softcap,
        sinks=sink,
    )
    wanted = [q, k, v] if sink is None else [q, k, v, sink]
    grads = torch.autograd.grad(out, wanted, full["dout"].double())
    names = (*RESULTS, "dsinks")[: 2 + len(wanted)]
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))


@lru_cache(maxsize=64)
def mesh_of(ulysses_degree: int, order: str = ALL_ORDERS[0]) -> ds_usp.SequenceMesh:
    """The mesh over this process's default group, built once."""
    return ds_usp.SequenceMesh.from_group(None, ulysses_degree, order)


def layouts(mesh: ds_usp.SequenceMesh, case: Case) -> tuple[ds_usp.TokenLayout, ds_usp.TokenLayout]:
    """Of the queries and of the keys."""
    layout = case.layout_on(mesh)
    return layout, mesh.layout(case.keys[1], case.keys[0]) if case.keys else layout


def attend(mesh: ds_usp.SequenceMesh, case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    """This rank's shard of out, lse, dq, dk and dv as the package computes them, and its sinks'
    full gradient, summed over the ranks as that of a weight is."""
    layout, kv_layout = layouts(mesh, case)
    local_qkv = {
        name: (kv_layout if name in "kv" else layout).shard(x, 1, mesh.rank).to(device)
        for name, x in inputs(case).items()
    }
    q, k, v = (local_qkv[name].requires_grad_() for name in "qkv")
    sink = sinks(case)
    sink = None if sink is None else sink.to(device)
    wanted = [q, k, v] if sink is None else [q, k, v, sink.requires_grad_()]
    call = partial(
        ds_usp.usp_attention,
        mesh=mesh,
        layout=layout,
        mask=case.mask_spec,
        softmax_scale=case.softmax_scale,
        kernel=case.kernel,
        tuning=case.tuning,
        return_lse=True,
        scores=ds_usp.Scores(case.softcap, sink),
        kv_layout=kv_layout,
    )
    if case.kept:
        call = partial(checkpoint, keep_attention(call), use_reentrant=False)
    out, lse = call(q, k, v)
    grads = torch.autograd.grad(out, wanted, local_qkv["dout"])
    if sink is not None and mesh.sp_degree > 1:
        dist.all_reduce(grads[3], group=mesh.sp_group)
    names = (*RESULTS, "dsinks")[: 2 + len(wanted)]
    return dict(zip(names, (out.detach(), lse, *grads), strict=True))


def attend_by_module(
    mesh: ds_usp.SequenceMesh,
    case: Case,
    local: Any,
    *args: Any,
    batch_dim: int = 0,
    call: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """:func:`attend` through a USPAttention, without lse.

    Args:
        local: the local attention.
        args, call: what its call is given behind the batch dim.
        options: of the module.
    """
    layout, kv_layout = layouts(mesh, case)
    shards = {
        name: (kv_layout if name in "kv" else layout).shard(x, 1, mesh.rank)
        for name, x in inputs(case).items()
    }
    qkv = [shards[name].requires_grad_() for name in "qkv"]
    module = ds_usp.USPAttention(local, gather_idx=1 - batch_dim, mesh=mesh, **options)
    given = (x.transpose(0, 1) if batch_dim else x for x in qkv)
    out = module(*given, batch_dim, *args, **call or {})
    out = out.transpose(0, 1) if batch_dim else out
    grads = torch.autograd.grad(out, qkv, shards["dout"])
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def errors_of(
    mesh: ds_usp.SequenceMesh, case: Case, actual: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Relative error of each of this rank's results against its shard of the reference.

    A document of one token has dq = dk = 0, as a difference of numbers of dout's size that are
    each rounded to 6e-8 of it: errors of gradients of documents are relative to a twentieth of
    dout's norm at least, so that 1e-5 allows for some such roundings.
    """
    layout, kv_layout = layouts(mesh, case)
    places = dict.fromkeys(TOKEN_DIM, layout) | {"dk": kv_layout, "dv": kv_layout}
    expected = {
        name: places[name].shard(x, TOKEN_DIM[name], mesh.rank) if name in places else x
        for name, x in reference(case).items()
    }
    dout = layout.shard(inputs(case)["dout"], 1, mesh.rank)
    min_norm = 0.05 * float(dout.double().norm()) if case.documents or case.tree else 0.0
    return {
        name: oracle.relative_error(x, expected[name], min_norm if name in ("dq", "dk") else 0.0)
        for name, x in actual.items()
    }


def run_case(
    ctx: RankContext, case: Case, ulysses_degree: int, order: str = ALL_ORDERS[0]
) -> dict[str, float]:
    """Run one case on this rank of the default group; the relative error of each result."""
    mesh = mesh_of(ulysses_degree, order)
    return errors_of(mesh, case, attend(mesh, case))


def run_cases(
    ctx: RankContext, cases: list[Case], ulysses_degree: int, order: str = ALL_ORDERS[0]
) -> list[dict[str, float]]:
    """:func:`run_case` for many cases, in one call of the pool."""
    return [run_case(ctx, case, ulysses_degree, order) for case in cases]


def check(
    pool: WorkerPool, cases: list[Any], ulysses: int, ring: int, run: Any = run_cases, **more: Any
) -> None:
    """Run cases on every rank: no result is further from the oracle's than its dtype allows."""
    results = pool.run(run, ulysses * ring, cases=cases, ulysses_degree=ulysses, **more)
    for case, *by_rank in zip(cases, *results, strict=True):
        worst = {name: max(errors[name] for errors in by_rank) for name in by_rank[0]}
        assert not isinstance(case, Case) or set(worst) == {*RESULTS, *["dsinks"] * case.sinks}
        assert max(worst.values()) <= TOLERANCE[case.dtype], f"{case}: {worst}"


def dense_errors(case: Case) -> dict[str, float]:
    """The same errors of one process with the full sequence: those of the kernel alone."""
    mesh = ds_usp.SequenceMesh.single()
    return errors_of(mesh, case, attend(mesh, case))
