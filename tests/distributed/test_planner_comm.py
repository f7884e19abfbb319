"""What the planner says attention sends is what a rank's ledger counts, to the byte."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext, WorkerPool
from torch.utils.checkpoint import checkpoint

import ds_usp
from ds_usp.attention.tuning import AUTO_TUNING
from ds_usp.memory import keep_attention
from ds_usp.planner.models import ModelShape, RecurrentMixer
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.traffic import SentBytes, attention_bytes, layer_traffic, recurrent_bytes
from ds_usp.recurrence.conv import causal_conv
from ds_usp.recurrence.scan import PieceMap, Recurrence, affine_scan

B, D, HEADS = 2, 16, 8
LEDGER = dict[str, int]


def counted(ctx: RankContext, mesh: tuple[int, str], call: Any) -> tuple[LEDGER, LEDGER]:
    """The ledger after forward, and after backward, of one tensor-parallel rank's heads."""
    return over(mesh_of(*mesh), *call)


def over(
    mesh: ds_usp.SequenceMesh,
    tp: int,
    shape: ModelShape,
    seq_len: int,
    layout: str,
    recompute: str = "none",
    tuning: ds_usp.Tuning = AUTO_TUNING,
) -> tuple[LEDGER, LEDGER]:
    """The same over any mesh."""
    mesh.ledger.reset()
    tokens = mesh.layout(layout, seq_len)
    q, k, v = (
        torch.randn(
            B, tokens.length(mesh.rank), heads // tp, D, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    options = {"mesh": mesh, "layout": tokens, "mask": ds_usp.MaskSpec.causal(), "tuning": tuning}
    call = partial(ds_usp.usp_attention, **options)
    if recompute == "attention":
        call = partial(checkpoint, keep_attention(call), use_reentrant=False)
    out = call(q, k, v)
    forward = dict(mesh.ledger.bytes)
    out.sum().backward()
    return forward, dict(mesh.ledger.bytes)


def expected_ledgers(sent: SentBytes) -> tuple[LEDGER, LEDGER]:
    return {kind: size for kind, size in sent.forward.items() if size}, sent.ledger()


def model(heads: int, kv_heads: int) -> ModelShape:
    return ModelShape("test", 1, heads * D, 4 * heads * D, heads, kv_heads, 128)


# Every ulysses x ring of a world; a tensor-parallel rank calls with its heads of both kinds, of
# eight ranks in the test below.
EVEN = [
    (world, ulysses, tp, kv_heads)
    for world in (1, 2, 3, 4, 6, 8)
    for tp, kv_heads in ((1, 8), (1, 4), (1, 2), (2, 4), (4, 8))
    for ulysses in range(1, world + 1)
    if world % ulysses == 0 and HEADS // tp >= ulysses and (tp == 1 or world < 8)
]


@pytest.mark.parametrize(("world", "ulysses", "tp", "kv_heads"), EVEN)
def test_comm_is_the_ledger(pool, world, ulysses, tp, kv_heads):
    recompute = ("none", "attention")[(ulysses + tp + kv_heads // 2) % 2]
    compare(pool, world, ulysses, tp, model(HEADS, kv_heads), recompute=recompute)


def on_the_grid(
    ctx: RankContext, tp: int, ulysses: int, shape: ModelShape, seq_len: int
) -> tuple[int, tuple[LEDGER, LEDGER]]:
    """This rank's place among those that share its sequence, and its ledger: tensor-parallel
    ranks are there too, next to each other, and call at the same time."""
    grid = ds_usp.RankGrid({"tp": tp, "ulysses": ulysses, "ring": ctx.world // tp // ulysses})
    mesh = ds_usp.SequenceMesh.build(grid)
    return mesh.rank, over(mesh, tp, shape, seq_len, "zigzag")


# Worlds of odd sizes, whose Ulysses ranks have unequal heads, and every tp x ulysses x ring of 8.
@pytest.mark.parametrize(
    ("world", "tp", "ulysses"),
    [
        *((world, 1, ulysses) for world in (5, 7) for ulysses in (1, world)),
        *((8, tp, u) for tp in (2, 4, 8) for u in (1, 2, 4) if u <= 8 // tp),
    ],
)
def test_comm_is_the_ledger_beside_tensor_parallel_ranks(pool, world, tp, ulysses):
    shape = model(HEADS, 8)
    config = ParallelConfig(tp=tp, ulysses=ulysses, ring=world // tp // ulysses, micro_batch=B)
    results = pool.run(on_the_grid, world, tp=tp, ulysses=ulysses, shape=shape, seq_len=96)
    for rank, (place, ledgers) in enumerate(results):
        assert place == rank // tp
        assert ledgers == expected_ledgers(
            attention_bytes(Workload(shape, 96), config, place, "zigzag")
        )


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "context_parallel"])
@pytest.mark.parametrize("order", ["ulysses-ring", "ring-ulysses"])
@pytest.mark.parametrize("seq_len", [64, 61])
def test_comm_of_every_layout(pool, layout, order, seq_len):
    compare(pool, 4, 2, 1, model(6, 3), seq_len, layout, order)
    compare(pool, 4, 1, 1, model(4, 2), seq_len, layout, order)
    compare(pool, 4, 4, 1, model(10, 5), seq_len, layout, order, "attention")


def compare(
    pool: WorkerPool,
    world: int,
    ulysses: int,
    tp: int,
    shape: ModelShape,
    seq_len: int = 96,
    layout: str = "zigzag",
    order: str = "ulysses-ring",
    recompute: str = "none",
) -> None:
    degrees = {"tp": tp, "ulysses": ulysses, "ring": world // ulysses, "order": order}
    config = ParallelConfig(**degrees, micro_batch=B, recompute=recompute)  # type: ignore[arg-type]
    work, call = Workload(shape, seq_len), (tp, shape, seq_len, layout, recompute)
    results = pool.run(counted, world, mesh=(ulysses, order), call=call)
    for rank, result in enumerate(results):
        assert result == expected_ledgers(attention_bytes(work, config, rank, layout)), rank


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


# 8 ring ranks have 16 pieces in zigzag, whose maps are composed by doubling.
@pytest.mark.parametrize(
    ("world", "ulysses", "layout"),
    [(2, 2, "zigzag"), (4, 2, "zigzag"), (4, 1, "contiguous"), (8, 1, "zigzag")],
)
@pytest.mark.parametrize("borders", [(), (0, 3, 5, 41, 96)], ids=["one document", "packed"])
@pytest.mark.parametrize("name", MIXERS)
def test_states_and_halos_are_the_ledger(pool, name, world, ulysses, layout, borders):
    mixer, seq_len = MIXERS[name], 96
    results = pool.run(
        scanned, world, mixer=mixer, ulysses=ulysses, batch=(seq_len, layout, borders)
    )
    documents = tuple(b - a for a, b in pairwise(borders))
    shape = ModelShape("test", 1, 8, 8, 1, 1, 128, attention=False, recurrent=mixer)
    work = Workload(shape, seq_len, document_lengths=documents)
    config = ParallelConfig(ulysses=ulysses, ring=world // ulysses, micro_batch=B)
    sent = [recurrent_bytes(work, config, rank, layout, mixer) for rank in range(world)]
    for rank, (forward, both) in enumerate(results):
        assert forward == {kind: sent[rank].forward[kind] for kind in forward}, rank
        assert {kind: size for kind, size in both.items() if size} == sent[rank].ledger(), rank
    if layout == "zigzag":  # which plans have
        traffic = layer_traffic(work, config)
        total = sum(sum(ledger.values()) for ledger, _ in results)
        assert total == pytest.approx(world * (traffic.states + traffic.halo), rel=1e-12)
