"""FlashInfer's exchange of heads, which asks for GPUs: its place in a call, by a model of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, attend, errors_of, mesh_of
from harness import RankContext

from ds_usp import MeshError, SequenceMesh, Tuning
from ds_usp.attention.validation import plan_head_exchanges
from ds_usp.comm import fused_exchange
from ds_usp.comm import mesh as meshes
from ds_usp.geometry.heads import HeadSplit

FUSED = Tuning(1, copies="flashinfer")


class UlyssesModel:
    """FlashInfer's ``UlyssesCommunicator`` by all-gathers, with its conditions on tensors."""

    calls = 0
    live = 0

    def __init__(self, group: Any, **options: Any) -> None:
        everyones: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyones, str(options), group)
        assert len(set(everyones)) == 1, everyones
        self.group, self.max_bytes, self.dtype = group, options["max_bytes"], options["dtype"]
        UlyssesModel.live += 1

    def close(self) -> None:
        dist.barrier(self.group)
        UlyssesModel.live -= 1

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.ndim == 4 and x.is_contiguous() and x.dtype == self.dtype
        assert x.numel() * x.element_size() <= self.max_bytes
        UlyssesModel.calls += 1
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x, self.group)
        return parts

    def scatter_heads(self, x: torch.Tensor) -> torch.Tensor:
        rank, parts = dist.get_rank(self.group), self._gathered(x)
        return torch.cat(parts, 1).chunk(len(parts), 2)[rank].contiguous()

    def gather_heads(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        rank, parts = dist.get_rank(self.group), self._gathered(x)
        assert out.is_contiguous() and out.dtype == self.dtype
        return out.copy_(torch.cat([part.chunk(len(parts), 1)[rank] for part in parts], 2))


class NoEngine:
    """In the place of copy engines, whose memory is reserved beside the model's: moves nothing."""

    exchanges = reserved_bytes = 0
    captured = False

    def __init__(self, *args: Any) -> None:
        self.reserve = self.has_capacity = lambda size: True


@contextmanager
def modelled() -> Iterator[None]:
    """Calls on CPUs may ask for FlashInfer's exchange: its model moves the heads, or nothing."""
    with (
        mock.patch.object(fused_exchange, "communicator_class", lambda: UlyssesModel),
        mock.patch.object(Tuning, "_resolve_copy_engines", lambda *args: True),
        mock.patch.object(meshes, "CopyEngine", NoEngine),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.multiple(torch.cuda, synchronize=mock.DEFAULT, current_device=lambda: 0),
    ):
        yield


def exchanged(ctx: RankContext, cases: list[Case], ulysses: int) -> list[Any]:
    """For each case: the worst error, whether its bits are those of the plain way, calls of the
    model, and whether the ledger counts as much; then what is left after a release, and the text of
    the error if a rank does not ask for it."""
    mesh, results = mesh_of(ulysses), list[Any]()
    for case in cases:
        mesh.ledger.reset()
        plain = attend(mesh, replace(case, tuning=Tuning(1)))
        sent, before = dict(mesh.ledger.bytes), UlyssesModel.calls
        mesh.ledger.reset()
        with modelled():
            fused = attend(mesh, case)
        error = max(errors_of(mesh, case, fused).values())
        equal = all(torch.equal(x, plain[name]) for name, x in fused.items())
        calls = UlyssesModel.calls - before
        results.append((error, equal, calls, sent == dict(mesh.ledger.bytes)))
    with modelled():
        mesh.release()
    results.append((UlyssesModel.live, dict(mesh.copy_engines)))
    with modelled(), pytest.raises(MeshError) as caught:
        attend(mesh, replace(cases[0], tuning=FUSED if ctx.rank else Tuning(1)))
    mesh.plans.clear()
    return [*results, str(caught.value)]


CASES = [
    Case(batch=1, tuning=FUSED),
    Case(batch=1, tuning=FUSED, kernel="eager", dtype=torch.bfloat16, kv_heads=4, value_dim=8),
    Case(batch=1, tuning=FUSED, dtype=torch.float64, heads=12, kv_heads=4, seq_len=128),
    Case(batch=1, tuning=FUSED, layout="contiguous", mask="full", head_dim=1, keys=(32, "zigzag")),
]


@pytest.mark.parametrize("ulysses", [2, 4])
def test_a_call_is_the_same_bit_by_bit(pool, ulysses):
    for *cases, left, difference in pool.run(exchanged, ulysses, cases=CASES, ulysses=ulysses):
        for case, (error, equal, calls, counted) in zip(CASES, cases, strict=True):
            assert equal and counted, case
            assert error < {torch.float64: 1e-12, torch.bfloat16: 2e-2}.get(case.dtype, 1e-5)
            assert calls == 9, case  # q, k, v, out, lse; dout, dq, dk, dv
        assert left == (0, {})
        assert "P2P on rank 0" in difference and "FlashInfer on rank" in difference


def carried(kind: str, seq_len: int, heads: int, ulysses: int, **options: bool) -> bool:
    mesh = SequenceMesh(ulysses, 1, rank=0)
    layout = mesh.layout(kind, seq_len)
    (chunk,) = plan_head_exchanges(
        HeadSplit(heads, heads, ulysses), mesh, layout, layout, **options
    )
    return chunk.qkv.is_fused


def test_unequal_shares_go_another_way():
    assert carried("zigzag", 64, 8, 4, use_fused=True)
    assert not carried("zigzag", 64, 8, 4)
    assert not carried("zigzag", 66, 8, 4, use_fused=True)  # tokens
    assert not carried("context_parallel", 64, 8, 4, use_fused=True)  # two slices of a rank
    assert not carried("zigzag", 64, 6, 4, use_fused=True)  # heads
