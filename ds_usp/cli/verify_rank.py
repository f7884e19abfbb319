"""What each rank of ``ds-usp verify`` does: the call under test, the oracle, and their distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import ds_usp
from ds_usp.cli.oracle import Question, Tensors, dense_attention, expected_positions
from ds_usp.cli.ranks import Progress
from ds_usp.cli.verify_case import DOORS, DTYPES, VerifyCase
from ds_usp.config import TorchrunEnv
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.registry import select_kernel
from ds_usp.kernels.score_mod import ScoreMod

_ROW_DIM: Mapping[str, int] = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
# Gradients of a query that sees one key are 0: they are compared with a share of dout then.
_FEW_KEYS, _LEAST_OF_DOUT = 16, 0.05
_SCORES_HELD: Mapping[str, int] = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class TensorErrors:
    """One result's relative errors, each the largest of all ranks.

    Args:
        name: out, lse, dq, dk, dv or dsinks.
        error: of the call over the ranks.
        own: of the same kernel run dense on one device.
        ratio: of the two on one rank; None where the kernel alone has no error there.
    """

    name: str
    error: float
    own: float
    ratio: float | None


@dataclass(frozen=True)
class Report:
    """How one case ended.

    Args:
        kernel: the one that was taken.
        refusal: the error's text where the package refused the call.
        positions: what is wrong with where the tokens are; None: nothing.
        errors: by tensor; empty where the call was refused.
    """

    case: VerifyCase
    kernel: str
    refusal: str | None = None
    positions: str | None = None
    errors: tuple[TensorErrors, ...] = ()


def run_cases(
    cases: list[VerifyCase], here: TorchrunEnv, device: torch.device, progress: Progress
) -> list[Report]:
    """Run the cases one after the other; collective over the default group."""
    reports = []
    for number, case in enumerate(cases, 1):

        def stage(text: str, head: str = f"[{number}/{len(cases)}] {case.short_name}") -> None:
            if here.rank == 0:
                progress(f"{head}: {text}")

        reports.append(_run(case, here, device, stage))
    return reports


def _run(case: VerifyCase, here: TorchrunEnv, device: torch.device, stage: Progress) -> Report:
    stage("attention")
    kernel, refusal = case.kernel, None
    try:
        mesh = _mesh(case.ulysses, case.order, here.world)
        layout = _layout(mesh, case)
        tensors = _tensors(replace(case, layout=""), device)
        kernel = _kernel_name(case, device)
        got = _attend(mesh, layout, case, tensors)
        single = ds_usp.SequenceMesh.single()
        dense = _attend(single, single.layout("contiguous", case.seq_len), case, tensors)
    except ds_usp.USPError as error:
        refusal = f"{type(error).__name__}: {error}"
    refusals: list[str | None] = _gathered(refusal, here)
    texts = {rank: text for rank, text in enumerate(refusals) if text is not None}
    if texts:
        ranks = "" if len(texts) == here.world else f"rank {min(texts)}: "
        return Report(case, kernel, refusal=ranks + texts[min(texts)])
    stage("dense reference")
    want = _truth(replace(case, layout="", kernel="", door="", ulysses=0, ring=0), device, here)
    rows = torch.as_tensor(layout.positions(mesh.rank), device=device)
    measured = _gathered(_errors(case, got, dense, want, tensors, rows), here)
    names = list(measured[0])
    errors = tuple(_worst(name, [each[name] for each in measured]) for name in names)
    return Report(case, kernel, positions=_misplaced(case, layout), errors=errors)


def _gathered(value: Any, here: TorchrunEnv) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [value] * here.world
    if here.world > 1:
        dist.all_gather_object(values, value)
    return values


@lru_cache(maxsize=64)
def _mesh(ulysses: int, order: str, world: int) -> ds_usp.SequenceMesh:
    if world == 1 and not dist.is_initialized():
        return ds_usp.SequenceMesh.single()
    return ds_usp.SequenceMesh.from_group(None, ulysses, order)


def _layout(mesh: ds_usp.SequenceMesh, case: VerifyCase) -> ds_usp.TokenLayout:
    documents = case.borders[0] if case.layout == "balanced" and case.documents else ()
    return mesh.layout(case.layout, case.seq_len, documents)


def _mask(case: VerifyCase, documents: bool = True) -> ds_usp.MaskSpec:
    """The mask by the constructor that a user would call."""
    left, right, prefix = case.mask
    borders = case.borders if documents else ()
    if prefix and not borders:
        return ds_usp.MaskSpec.prefix_lm(prefix)
    if prefix:  # refused, with the reason
        return ds_usp.MaskSpec(left, right, borders, prefix)
    if left is not None:
        return ds_usp.MaskSpec.window(left, right, borders)
    return ds_usp.MaskSpec.causal(borders) if right == 0 else ds_usp.MaskSpec.full(borders)


@lru_cache(maxsize=1)
def _tensors(case: VerifyCase, device: torch.device) -> Tensors:
    """Global tensors, drawn on the CPU so that they are the same on every rank and device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, DTYPES[case.dtype])
    drawn = torch.promote_types(dtype, torch.float32)
    sizes = {
        "q": (case.heads, case.head_dim),
        "k": (case.kv_heads, case.head_dim),
        "v": (case.kv_heads, case.value_dim),
        "dout": (case.heads, case.value_dim),
    }
    made = {
        name: torch.randn(case.batch, case.seq_len, *size, generator=generator, dtype=drawn)
        for name, size in sizes.items()
    }
    heads = torch.arange(1, case.heads + 1, device=device, dtype=drawn)
    return Tensors(
        **{name: x.to(device, dtype) for name, x in made.items()},
        slopes=2.0 ** (-8.0 * heads / case.heads) if case.alibi else None,
        sinks=(6.0 * heads / case.heads - 2.0) if case.sinks else None,
    )


def _kernel_name(case: VerifyCase, device: torch.device) -> str:
    request = KernelRequest(
        device=device.type,
        dtype=getattr(torch, DTYPES[case.dtype]),
        head_dim=case.head_dim,
        mask=_mask(case).band,
        documents=bool(case.documents),
        value_dim=case.value_dim,
        score_mod=ScoreMod(softcap=case.softcap, alibi=case.alibi),
    )
    return select_kernel(request, case.kernel).name


class _LocalAttention(torch.nn.Module):
    """A user's local attention for the drop-in module: torch's, with the case's mask."""

    def __init__(self, case: VerifyCase) -> None:
        super().__init__()
        self.bounds = case.mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        left, right, prefix = self.bounds
        groups = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        at = torch.arange(q.shape[2], device=q.device)
        seen, causal = None, self.bounds == (None, 0, 0)
        if not causal and self.bounds != (None, None, 0):
            distance = at[None, :] - at[:, None]
            seen = distance >= (-len(at) if left is None else -left)
            seen &= distance <= (len(at) if right is None else right)
            seen |= at[None, :] < prefix
        out: torch.Tensor = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)
        return out.transpose(1, 2)


def _attend(
    mesh: ds_usp.SequenceMesh, layout: ds_usp.TokenLayout, case: VerifyCase, tensors: Tensors
) -> dict[str, torch.Tensor]:
    """This rank's results of the call under test, and the whole gradient of the sinks."""
    wanted = [
        layout.shard(x, 1, mesh.rank).requires_grad_(case.backward)
        for x in (tensors.q, tensors.k, tensors.v)
    ]
    dout = layout.shard(tensors.dout, 1, mesh.rank)
    q, k, v = wanted
    results: dict[str, torch.Tensor] = {}
    if case.door == DOORS[0]:
        sinks = tensors.sinks
        if sinks is not None:
            sinks = sinks.detach().requires_grad_(case.backward)
            wanted.append(sinks)
        out, lse = ds_usp.usp_attention(
            q,
            k,
            v,
            mesh=mesh,
            layout=layout,
            mask=_mask(case),
            kernel=case.kernel,
            return_lse=True,
            scores=ds_usp.Scores(case.softcap, tensors.slopes, sinks),
        )
        results |= {"out": out.detach(), "lse": lse}
    else:
        attention = ds_usp.USPAttention(
            _LocalAttention(case),
            mesh=mesh,
            layout=layout,
            mask=_mask(case, documents=False),
            dropout_p=0.0,
            kernel=case.kernel,
        )
        out = attention(q, k, v, 0, documents=case.borders or None)
        results["out"] = out.detach()
    if case.backward:
        grads = list(torch.autograd.grad(out, wanted, dout))
        if len(grads) > 3 and mesh.sp_degree > 1:  # a rank's gradient is of its own tokens
            dist.all_reduce(grads[3], group=mesh.sp_group)
        results |= dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
    return results


@lru_cache(maxsize=4)
def _truth(case: VerifyCase, device: torch.device, here: TorchrunEnv) -> dict[str, torch.Tensor]:
    """The oracle's results; ``case`` is without what must not change them."""
    left, right, prefix = case.mask
    return dense_attention(
        _tensors(replace(case, kernel="", door=""), device),
        Question(left, right, prefix, case.documents, softcap=case.softcap),
        backward=case.backward,
        block_elements=_SCORES_HELD[device.type],
        rank=here.rank,
        world=here.world,
    )


def _errors(
    case: VerifyCase,
    got: dict[str, torch.Tensor],
    dense: dict[str, torch.Tensor],
    want: dict[str, torch.Tensor],
    tensors: Tensors,
    rows: torch.Tensor,
) -> dict[str, tuple[float, float]]:
    """By tensor: the error of this rank's share, and the kernel's own on the same rows."""
    # The first token of a causal document sees itself alone, and it may be all that a rank holds.
    lengths = (length for sample in case.documents for length in sample)
    shortest = min(len(rows), *lengths, _FEW_KEYS)
    left, right, _ = case.mask
    if left is not None and right is not None:
        shortest = min(shortest, left + right + 1)
    least = 0.0
    if shortest < _FEW_KEYS:
        least = _LEAST_OF_DOUT * float(tensors.dout[:, rows].double().norm())
    measured = {}
    for name, x in got.items():
        truth, own = want[name], dense[name]
        if name in _ROW_DIM:
            truth, own = (y.index_select(_ROW_DIM[name], rows) for y in (truth, own))
        floor = least if name in ("dq", "dk") else 0.0
        measured[name] = (_relative(x, truth, floor), _relative(own, truth, floor))
    return measured


def _relative(x: torch.Tensor, truth: torch.Tensor, least: float) -> float:
    """``norm(x - truth) / max(norm(truth), least)``; infinite for NaN and for another shape."""
    if x.shape != truth.shape:
        return math.inf
    difference = float((x.double() - truth).norm())
    norm = max(float(truth.norm()), least)
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    error = difference / norm
    return math.inf if math.isnan(error) else error


def _worst(name: str, pairs: list[tuple[float, float]]) -> TensorErrors:
    """Of all ranks."""
    ratios = [error / own for error, own in pairs if own > 0]
    errors, owns = zip(*pairs, strict=True)
    return TensorErrors(name, max(errors), max(owns), max(ratios, default=None))


def _misplaced(case: VerifyCase, layout: ds_usp.TokenLayout) -> str | None:
    """What contradicts the documentation in where the layout puts tokens; None: nothing."""
    everywhere = torch.arange(case.seq_len)
    claimed = [torch.as_tensor(layout.positions(rank)) for rank in range(layout.degree)]
    shards = [layout.shard(everywhere, 0, rank) for rank in range(layout.degree)]
    for rank, (positions, shard) in enumerate(zip(claimed, shards, strict=True)):
        if not torch.equal(positions, shard):
            return f"layout.shard gives rank {rank} other tokens than layout.positions says"
    if not torch.equal(torch.cat(claimed).sort().values, everywhere):
        return "the ranks' positions do not hold every token of the sequence once"
    if not torch.equal(layout.gather(shards, 0), everywhere):
        return "layout.gather does not undo layout.shard"
    expected = expected_positions(case.layout, case.seq_len, case.ulysses, case.ring, case.order)
    for rank, positions in enumerate(expected or ()):
        if not torch.equal(positions, claimed[rank]):
            return (
                f"rank {rank} holds {_shown(claimed[rank], positions)}, the layout "
                f"{case.layout!r} is documented to give it {_shown(positions, claimed[rank])}"
            )
    return None


def _shown(positions: torch.Tensor, others: torch.Tensor) -> str:
    """The positions at which two ranks' tokens differ first."""
    if len(positions) != len(others):
        return f"{len(positions)} tokens"
    index = int((positions != others).nonzero()[0])
    return f"token {int(positions[index])} at index {index}"
