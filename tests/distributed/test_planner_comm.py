"""Ledgers of ranks count, in the mean, what the planner says that attention and states send."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp.memory import keep_attention
from ds_usp.planner.models import ModelShape, RecurrentMixer
from ds_usp.planner.parallel_config import ParallelConfig, Workload, exchanges_shards_again
from ds_usp.planner.traffic import layer_traffic
from ds_usp.recurrence.conv import causal_conv
from ds_usp.recurrence.scan import PieceMap, Recurrence, affine_scan

B, D, HEADS = 2, 16, 8
LEDGER = dict[str, int]


def counted(ctx: RankContext, ulysses: int, call: Any) -> tuple[LEDGER, LEDGER]:
    """The ledger after forward, and after backward, of one tensor-parallel rank's heads."""
    return over(mesh_of(ulysses, "ulysses-ring"), *call)


def over(
    mesh: ds_usp.SequenceMesh, tp: int, shape: ModelShape, seq_len: int, recompute: str = "none"
) -> tuple[LEDGER, LEDGER]:
    """The same over any mesh."""
    mesh.ledger.reset()
    tokens = mesh.layout("zigzag", seq_len)
    q, k, v = (
        torch.randn(
            B, tokens.length(mesh.rank), heads // tp, D, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    window = shape.window - 1
    mask = ds_usp.MaskSpec.window(window) if shape.window else ds_usp.MaskSpec.causal()
    call = partial(ds_usp.usp_attention, mesh=mesh, layout=tokens, mask=mask)
    if recompute == "attention":
        call = partial(checkpoint, keep_attention(call), use_reentrant=False)
    out = call(q, k, v)
    forward = dict(mesh.ledger.bytes)
    out.sum().backward()
    return forward, dict(mesh.ledger.bytes)


def check(work: Workload, config: ParallelConfig, results: list[tuple[LEDGER, LEDGER]]) -> None:
    """The planner's bytes are the mean of the ranks' ledgers, and those of the ring's busiest."""
    sent = layer_traffic(work, config)
    forward = [ledger for ledger, _ in results]
    backward = [{k: n - ledger.get(k, 0) for k, n in both.items()} for ledger, both in results]

    def mean(ledgers: list[LEDGER], *kinds: str) -> float:
        return fmean(sum(ledger.get(kind, 0) for kind in kinds) for ledger in ledgers)

    again = 1 + exchanges_shards_again(config)
    assert mean(forward, "all_to_all") == pytest.approx(sent.ulysses)
    assert mean(backward, "all_to_all") == pytest.approx(again * sent.ulysses)
    assert mean(forward, "ring_kv") == pytest.approx(sent.ring_forward)
    assert mean(backward, "ring_kv", "ring_dkv") == pytest.approx(2 * sent.ring_forward)
    gradients = [] if work.model.window else [(backward, "ring_dkv")]
    for ledgers, kind in ((forward, "ring_kv"), (backward, "ring_kv"), *gradients):
        assert max(each.get(kind, 0) for each in ledgers) == pytest.approx(sent.ring_busiest)


def model(heads: int, kv_heads: int) -> ModelShape:
    return ModelShape("test", 1, heads * D, 4 * heads * D, heads, kv_heads, 128)


# Every ulysses x ring of a world whose ranks have equal heads.
EVEN = [
    (world, ulysses, tp, kv_heads)
    for world in (1, 2, 3, 4, 6, 8)
    for tp, kv_heads in ((1, 8), (1, 4), (1, 2), (2, 4), (4, 8))
    for ulysses in (1, 2, 4, 8)
    if world % ulysses == 0 == HEADS // tp % ulysses and (tp == 1 or world < 8)
]


@pytest.mark.parametrize(("world", "ulysses", "tp", "kv_heads"), EVEN)
def test_planned_bytes_are_the_ledgers(pool, world, ulysses, tp, kv_heads):
    """A tensor-parallel rank calls with its heads of both kinds, of eight ranks in the test
    below."""
    shape, degrees = (
        model(HEADS, kv_heads),
        {"tp": tp, "ulysses": ulysses, "ring": world // ulysses},
    )
    recompute = ("none", "attention")[(ulysses + tp + kv_heads // 2) % 2]
    config = ParallelConfig(**degrees, micro_batch=B, recompute=recompute)  # type: ignore[arg-type]
    call = tp, shape, 96, recompute
    check(Workload(shape, 96), config, pool.run(counted, world, ulysses=ulysses, call=call))


def test_planned_bytes_of_a_window(pool):
    shape = replace(model(HEADS, 4), window=20)
    config = ParallelConfig(ulysses=1, ring=4, micro_batch=B)
    results = pool.run(counted, 4, ulysses=1, call=(1, shape, 96, "none"))
    check(Workload(shape, 96), config, results)
    causal = layer_traffic(Workload(replace(shape, window=0), 96), config)
    assert layer_traffic(Workload(shape, 96), config).ring_forward < causal.ring_forward


def on_the_grid(
    ctx: RankContext, tp: int, ulysses: int, shape: ModelShape
) -> tuple[int, tuple[LEDGER, LEDGER]]:
    """This rank's place among those that share its sequence, and its ledger: tensor-parallel
    ranks are there too, next to each other, and call at the same time."""
    grid = ds_usp.RankGrid({"tp": tp, "ulysses": ulysses, "ring": ctx.world // tp // ulysses})
    mesh = ds_usp.SequenceMesh.build(grid)
    return mesh.rank, over(mesh, tp, shape, 96)


@pytest.mark.parametrize(
    ("tp", "ulysses"), [(tp, u) for tp in (2, 4, 8) for u in (1, 2, 4) if u <= 8 // tp]
)
def test_planned_bytes_beside_tensor_parallel_ranks(pool, tp, ulysses):
    shape = model(HEADS, 8)
    config = ParallelConfig(tp=tp, ulysses=ulysses, ring=8 // tp // ulysses, micro_batch=B)
    results = pool.run(on_the_grid, 8, tp=tp, ulysses=ulysses, shape=shape)
    assert [place for place, _ in results] == [rank // tp for rank in range(8)]
    check(Workload(shape, 96), config, [ledgers for _, ledgers in results])


# Layers that carry a state: with a matrix, a number a head and a number an element that act on it,
# of sizes that no two have alike; and a convolution alone.
MIXERS = {
    "delta": RecurrentMixer(1, 1, channels=12, taps=4, heads=2, key=4, value=8, decay="matrix"),
    "mamba2": RecurrentMixer(1, 1, channels=10, taps=3, heads=6, key=4, value=3),
    "mamba1": RecurrentMixer(1, 1, channels=5, taps=2, heads=5, key=4, value=1, decay="element"),
    "conv": RecurrentMixer(1, 1, channels=7, taps=5),
}


def scanned(
    ctx: RankContext, mixer: RecurrentMixer, ulysses: int, batch: tuple[int, str, tuple[int, ...]]
) -> tuple[LEDGER, LEDGER]:
    """The ledger of a mixer after forward, and after backward. What it computes is no recurrence of
    any model, but has the shapes of one and depends on all that comes in."""
    mesh, (seq_len, layout, borders) = mesh_of(ulysses, "ulysses-ring"), batch
    where: Any = {"layout": mesh.layout(layout, seq_len), "documents": borders and (borders,)}
    tokens, h = where["layout"].length(mesh.rank), mixer.heads
    state = h, mixer.key, mixer.value
    across = {"matrix": (h, mixer.key, mixer.key), "head": (h,), "element": state}[mixer.decay]

    def run(inputs: list[torch.Tensor], piece: Any) -> PieceMap:
        (x,) = inputs
        into, through = (
            x.sum((1, 2)).reshape(B, *(1 for _ in shape)).expand(B, *shape)
            for shape in (state, across)
        )
        return PieceMap(
            x,
            into if piece.exports else None,
            through if piece.imports and piece.exports else None,
            (lambda s: x * s.sum()) if piece.imports else None,
        )

    mesh.ledger.reset()
    x = torch.rand(B, mixer.channels, tokens, dtype=torch.bfloat16, requires_grad=True)
    out = causal_conv(lambda y: y, x, mixer.taps, mesh=mesh, **where)
    if h:
        recurrence = Recurrence(run, state, across, mixer.decay == "matrix", piecewise=True)
        out = affine_scan(recurrence, [out.mT.float()], mesh=mesh, dims=(1,), out_dim=1, **where)
    forward = dict(mesh.ledger.bytes)
    out.float().sum().backward()
    return forward, dict(mesh.ledger.bytes)


# 8 ring ranks have 16 pieces, whose maps are composed by doubling.
@pytest.mark.parametrize(("world", "ulysses"), [(2, 2), (4, 2), (8, 1)])
@pytest.mark.parametrize("borders", [(), (0, 3, 5, 41, 96)], ids=["one document", "packed"])
@pytest.mark.parametrize("name", MIXERS)
def test_states_and_halos_are_the_ledgers(pool, name, world, ulysses, borders):
    mixer, seq_len = MIXERS[name], 96
    results = pool.run(
        scanned, world, mixer=mixer, ulysses=ulysses, batch=(seq_len, "zigzag", borders)
    )
    documents = tuple(b - a for a, b in pairwise(borders))
    shape = ModelShape("test", 1, 8, 8, 1, 1, 128, attention=False, recurrent=mixer)
    work = Workload(shape, seq_len, document_lengths=documents)
    config = ParallelConfig(ulysses=ulysses, ring=world // ulysses, micro_batch=B)
    sent = layer_traffic(work, config)
    for kind, each in (("states", sent.states), ("halo", sent.halo)):
        forward, both = (
            fmean(x.get(kind, 0) for x in ledgers) for ledgers in zip(*results, strict=True)
        )
        assert (forward, both) == (pytest.approx(each), pytest.approx(2 * each)), kind
