"""The rows of the support table: each is run on every kind of mesh and found exact or refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import joint_attention_cases
import torch
import torch.nn.functional as F
from cases import (
    ALL_LAYOUTS,
    Case,
    attend_by_module,
    dense_errors,
    errors_of,
    inputs,
    mesh_of,
    run_case,
)
from harness import RankContext

import ds_usp
from ds_usp import testing as oracle

WORLD = 4
MESHES = {"ulysses 4": 4, "ulysses 2 x ring 2": 2, "ring 4": 1}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
EXACT, REFUSED = "exact", "refused"


@dataclass(frozen=True)
class Row:
    """One line of the table: what is asked for, and the function that asks for it on a rank.

    The probe returns its error as a share of what is allowed, or raises a ``USPError``.
    """

    group: str
    label: str
    probe: Callable[..., float]
    kwargs: tuple[tuple[str, Any], ...] = ()


def attention(ctx: RankContext, ulysses: int, case: Case) -> float:
    """usp_attention against the oracle; low precision against the same kernel run dense."""
    worst = run_case(ctx, case, ulysses)
    if case.dtype in TOLERANCE:
        return max(worst.values()) / TOLERANCE[case.dtype]
    dense = dense_errors(case)
    # A rank's shard has fewer tokens than the dense run, so its error scatters about that one's.
    shards = [worst[name] / (1.5 * dense[name]) for name in ("out", "dq", "dk", "dv")]
    return max(*shards, worst["lse"] / TOLERANCE[torch.float32])


class Softmax(torch.nn.Module):
    """A local attention of no known class: dense, with a mask tensor and dropout if it has them."""

    def __init__(self, causal: bool = True, dropout: float = 0.0, tokens_first: bool = False):
        super().__init__()
        self.causal, self.tokens_first = causal, tokens_first
        self.dropout = torch.nn.Dropout(dropout)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        to_heads = (1, 2, 0, 3) if self.tokens_first else (0, 2, 1, 3)
        q, k, v = (x.permute(to_heads) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=self.causal and attention_mask is None
        )
        out = self.dropout(out)
        return out.permute((2, 0, 1, 3) if self.tokens_first else (0, 2, 1, 3))


def drop_in(
    ctx: RankContext,
    ulysses: int,
    *,
    batch_dim: int = 0,
    known: bool = True,
    dropout: float = 0.0,
    mask: str | None = None,
) -> float:
    """USPAttention against the oracle."""
    case = Case(seq_len=32, heads=4, kv_heads=4, batch=1, mask="causal")
    local = Softmax(dropout=dropout, tokens_first=batch_dim == 1)
    seen = torch.ones(32, 32, dtype=torch.bool).tril()
    if mask == "random":
        seen = (torch.rand(32, 32) > 0.5) | torch.eye(32, dtype=torch.bool)
    mesh, options = mesh_of(ulysses), {"layout": "zigzag"}
    if known:
        options |= {"mask": ds_usp.MaskSpec.causal(), "dropout_p": dropout}
    more = (None, seen) if mask else ()
    actual = attend_by_module(mesh, case, local, *more, batch_dim=batch_dim, **options)
    if dropout:  # its own draw: right where the local attention itself ran on all tokens
        return 0.0 if bool((actual["out"] == 0).any()) else float("inf")
    if mask == "random":
        full, place = inputs(case), mesh.layout("zigzag", 32)
        q, k, v = (full[name].double().requires_grad_() for name in "qkv")
        dense, _ = oracle.dense_attention(q, k, v, seen)
        true = {"out": dense, "dq": torch.autograd.grad(dense, q, full["dout"].double())[0]}
        errors = (
            oracle.relative_error(actual[name], place.shard(x.detach(), 1, mesh.rank))
            for name, x in true.items()
        )
        return max(errors) / TOLERANCE[torch.float32]
    return max(errors_of(mesh, case, actual).values()) / TOLERANCE[torch.float32]


def refused_call(ctx: RankContext, ulysses: int, **changes: Any) -> float:
    """usp_attention with one argument that differs from a plain call."""
    mesh = mesh_of(ulysses)
    layout = mesh.layout("zigzag", 64)
    kv_layout = mesh.layout("zigzag", changes.pop("kv_len", 64))
    q, k, v = (torch.randn(1, x.length(mesh.rank), 4, 16) for x in (layout, kv_layout, kv_layout))
    mask = ds_usp.MaskSpec.causal()
    ds_usp.usp_attention(
        q, k, v, mesh=mesh, layout=layout, mask=mask, kv_layout=kv_layout, **changes
    )
    return float("inf")  # computed without an oracle for it: not a row to call exact


def joint_tokens(ctx: RankContext, ulysses: int, *, front: bool) -> float:
    """usp_joint_attention against the oracle."""
    (errors,) = joint_attention_cases.run(ctx, [joint_attention_cases.Joint(front=front)], ulysses)
    return max(errors.values()) / TOLERANCE[torch.float32]


CROSSED = Case(batch=1, mask="full", keys=(29, "contiguous"))


def rows() -> Iterator[Row]:
    """All rows, in the order of the table."""
    base = Case(batch=1)

    def row(group: str, label: str, case: Case) -> Row:
        return Row(group, label, attention, (("case", case),))

    for layout in ALL_LAYOUTS:
        yield row("layout", f"`{layout}`", replace(base, layout=layout))
    lengths = ((1, 7, 30, 26),)
    yield row("layout", "`balanced`", replace(base, layout="balanced", documents=lengths))
    yield row("mask", "causal", base)
    yield row("mask", "full", replace(base, mask="full"))
    yield row("mask", "sliding window, left", replace(base, mask="window"))
    yield row("mask", "sliding window, both sides", replace(base, mask="window both sides"))
    yield row("mask", "prefix language model", replace(base, prefix=23))
    yield row("two sequences", "keys of another one (cross-attention)", CROSSED)
    yield Row("two sequences", "the same, causal", refused_call, (("kv_len", 32),))
    for front in (True, False):
        label = f"joint tokens {'before' if front else 'after'} it, on every rank"
        yield Row("two sequences", label, joint_tokens, (("front", front),))
    packed = replace(base, documents=lengths)
    yield row("documents", "causal, one across all ranks", packed)
    yield row("documents", "full", replace(packed, mask="full"))
    yield row("documents", "sliding window", replace(packed, mask="window both sides"))
    yield row("documents", "striped", replace(packed, layout="striped"))
    own = replace(packed, batch=2, documents=((1, 7, 30, 26), (40, 24)))
    yield row("documents", "of each sample", own)
    yield row("documents", "of another length", replace(packed, documents=((30, 30),)))
    yield row("heads", "MHA", base)
    yield row("heads", "GQA, 8 over 2", replace(base, kv_heads=2))
    yield row("heads", "MQA, fewer KV heads than Ulysses ranks", replace(base, kv_heads=1))
    yield row("heads", "6 heads", replace(base, heads=6, kv_heads=6))
    yield row("heads", "7 heads", replace(base, heads=7, kv_heads=7))
    yield row("heads", "6 heads over 2 KV heads", replace(base, heads=6, kv_heads=2))
    yield row("heads", "3 heads", replace(base, heads=3, kv_heads=3))
    yield row("length", "divides by 2 x ranks", base)
    yield row("length", "does not divide (67 tokens)", replace(base, seq_len=67))
    yield row("length", "fewer tokens than ranks", replace(base, seq_len=3))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        label = str(dtype).removeprefix("torch.")
        yield row("dtype", label, replace(base, dtype=dtype, seq_len=128, head_dim=64))
    for head_dim in (16, 80, 128):
        yield row("head dim", str(head_dim), replace(base, head_dim=head_dim))
    yield row("head dim", "24, values of 16 (MLA)", replace(base, head_dim=24, value_dim=16))
    yield row("scores", "soft cap", replace(base, softcap=2.0))
    yield row("scores", "attention sinks, learned", replace(base, sinks=True))
    yield Row("scores", "dropout", refused_call, (("dropout_p", 0.1),))
    for label, kwargs in {
        "`[b, s, h, d]`": {},
        "`[s, b, h, d]`": {"batch_dim": 1},
        "local attention of an unknown class": {"known": False},
        "the same, with `mask=` and `dropout_p=` given": {},
        "its dropout, in training": {"dropout": 0.1},
        "dense mask tensor that says the same": {"mask": "causal"},
        "dense mask tensor of its own": {"mask": "random"},
    }.items():
        yield Row("drop-in", label, drop_in, tuple(kwargs.items()))


ROWS = tuple(rows())


def probe_rows(ctx: RankContext, ulysses: int) -> list[str]:
    """Each row's cell on this rank: exact, refused, or what went wrong."""
    cells = []
    for row in ROWS:
        try:
            share = row.probe(ctx, ulysses, **dict(row.kwargs))
        except ds_usp.USPError:
            cells.append(REFUSED)
        else:
            cells.append(EXACT if share <= 1.0 else f"wrong by {share:.3g} x the tolerance")
    return cells


def render(cells: dict[str, list[str]]) -> str:
    """The table as Markdown: groups of rows, one column a kind of mesh."""
    head = f"| | | {' | '.join(cells)} |"
    lines = [head, "|---" * (2 + len(cells)) + "|"]
    numbered = list(enumerate(ROWS))
    for group, members in groupby(numbered, key=lambda item: item[1].group):
        for place, (index, row) in enumerate(members):
            values = " | ".join(column[index] for column in cells.values())
            lines.append(f"| {group if not place else ''} | {row.label} | {values} |")
    return "\n".join(lines)
