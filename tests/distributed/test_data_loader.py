"""One batch for every sequence-parallel group, and the right shard of it for each rank."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankContext, logged_lines

from ds_usp import ConfigError, DataError, LayoutError, MeshError, RankGrid, SequenceMesh
from ds_usp.training import ParallelGroups, SequenceParallelDataLoader, data_parallel_ranks
from ds_usp.training.data_loader import BatchBroadcast

WORLD = 4


def samples(replica: int, count: int, seq_len: int = 13) -> list[dict[str, Any]]:
    """A replica's batches, of another length each."""
    draw = torch.Generator().manual_seed(replica)
    return [
        {
            "input_ids": torch.randint(2, 99, (2, seq_len + i), generator=draw),
            "weights": torch.rand(2, seq_len + i, 3, generator=draw),
            "name": f"{replica}.{i}",
        }
        for i in range(count)
    ]


def mesh_of(ulysses: int, ring: int) -> SequenceMesh:
    replicas = WORLD // (ulysses * ring)
    return SequenceMesh.build(RankGrid({"ulysses": ulysses, "ring": ring, "dp": replicas}))


def sharded(ctx: RankContext, *, ulysses: int, ring: int, layout: str) -> list[Any]:
    mesh = mesh_of(ulysses, ring)
    dp = data_parallel_ranks(mesh)
    assert dp.size == WORLD // mesh.sp_degree and dp.rank == ctx.rank // mesh.sp_degree
    loader = None
    if mesh.rank == 0:  # the others need none
        loader = samples(dp.rank, 3)
    shards = []
    for batch in SequenceParallelDataLoader(loader, mesh, layout):
        full_batch = {
            name: batch.layout.positions(mesh.rank) for name in ("tokens", "labels", "positions")
        }
        shards.append((dp.rank, batch, full_batch["tokens"]))
    return shards


@pytest.mark.parametrize(
    ("ulysses", "ring", "layout"),
    [
        (2, 1, "contiguous"),
        (1, 2, "zigzag"),
        (2, 2, "striped"),
        (1, 2, "balanced"),
        (1, 1, "zigzag"),
    ],
)
def test_every_rank_gets_its_shard_of_its_groups_batch(ulysses, ring, layout, pool):
    replicas = WORLD // (ulysses * ring)
    full = [samples(replica, 3) for replica in range(replicas)]
    for rank in pool.run(sharded, WORLD, ulysses=ulysses, ring=ring, layout=layout):
        assert len(rank) == 3
        for step, (replica, batch, positions) in enumerate(rank):
            tokens = full[replica][step]["input_ids"]
            labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
            assert torch.equal(batch.tokens, tokens[:, positions])
            assert torch.equal(batch.labels, labels[:, positions])
            assert batch.positions.tolist() == [positions] * 2
            weights = full[replica][step]["weights"]
            assert torch.equal(batch.others["weights"], weights[:, positions])
            assert batch.others["name"] == f"{replica}.{step}"
            assert batch.loss_tokens == replicas * 2 * (tokens.shape[1] - 1)


def changed_in_place(ctx: RankContext) -> tuple[Any, Any]:
    kept = torch.ones(3)
    batches = [{"input_ids": torch.arange(8)[None], "scales": kept}] * 2
    seen = []
    for batch in SequenceParallelDataLoader(batches, mesh_of(2, 2), whole=("scales",)):
        seen.append(batch.others["scales"].tolist())
        batch.others["scales"].zero_()
    return seen, kept.tolist()


def test_whole_tensors_are_not_the_loaders_own(pool):
    assert pool.run(changed_in_place, WORLD) == [([[1.0] * 3] * 2, [1.0] * 3)] * WORLD


def something() -> dict[str, Any]:
    """A batch with whatever loaders put into one."""
    draw = torch.Generator().manual_seed(0)
    return {
        "ids": (torch.arange(6).view(2, 3).t(), [torch.ones(2, dtype=torch.bfloat16)]),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64, generator=draw),
        "trained": torch.randn(2, generator=draw).requires_grad_(),
        "text": Case(name="a", weights=torch.rand(2, 5, generator=draw)),
        "nothing": None,
    }


@dataclass
class Case:
    name: str
    weights: torch.Tensor


def broadcast(ctx: RankContext, *, source: int) -> Any:
    sender, mine = BatchBroadcast(ctx.group, "cpu"), something()
    batches = iter([mine]) if ctx.rank == source else None
    got, end = sender.next_of(batches, source), sender.next_of(batches, source)
    assert got is not None and end is None
    got[0]["mask"].logical_not_()  # its own, also where it was read
    assert mine["mask"].tolist() == [True, False]
    return got[0]


@pytest.mark.parametrize("source", [0, 2])
def test_every_rank_gets_what_one_has_read(source, pool):
    want = something()
    for got in pool.run(broadcast, WORLD, source=source):
        assert got.keys() == want.keys()
        assert got["mask"].tolist() == [False, True] and got["nothing"] is None
        assert got["text"].name == "a" and torch.equal(got["text"].weights, want["text"].weights)
        (ids, ones), (want_ids, want_ones) = got["ids"], want["ids"]
        assert torch.equal(ids, want_ids) and torch.equal(ones[0], want_ones[0])
        for name in ("scalar", "empty", "complex", "trained"):
            assert torch.equal(got[name], want[name]) and got[name].dtype == want[name].dtype, name


def unpickling_nothing(ctx: RankContext) -> tuple[Any, list[Any]]:
    """What arrives where pickle cannot be used at all."""

    def refused(*args: Any) -> Any:
        raise RuntimeError("unpickled")

    batch = {**something(), "text": "\ud800 \u00e9", "float": float("inf"), "int": 2**70}
    batch["nested"] = {"a": [(1, 2.5), [True, {}]], "": ()}
    mesh, loader = mesh_of(2, 2), [{**samples(0, 1)[0], "documents": [(0, 3)]}]
    modules = "pickle.loads", "ds_usp.training.data_loader._Unpickler"
    with mock.patch(modules[0], refused), mock.patch(modules[1], refused):
        got = BatchBroadcast(ctx.group, "cpu").next_of(iter([batch]) if ctx.rank == 0 else None)
        shards = [shard.others["name"] for shard in SequenceParallelDataLoader(loader, mesh)]
    return got, shards


def test_a_batch_of_tensors_numbers_and_texts_is_not_pickled(pool):
    for (got,), names in pool.run(unpickling_nothing, WORLD):
        assert (got["text"], got["float"], got["int"]) == ("\ud800 \u00e9", float("inf"), 2**70)
        assert got["nested"] == {"a": [(1, 2.5), [True, {}]], "": ()}
        assert type(got["ids"]) is tuple and names == ["0.0"]


def counted(ctx: RankContext, *, counts: list[int], replica: list[int]) -> tuple[int, list[str]]:
    mesh = mesh_of(2, 1)
    dp = data_parallel_ranks(mesh)
    loader = SequenceParallelDataLoader(samples(replica[dp.rank], counts[dp.rank]), mesh)
    with logged_lines() as lines:
        steps = sum(1 for _ in loader) + sum(1 for _ in loader)  # a second pass begins anew
    return steps, lines


def test_all_ranks_end_with_the_shortest_loader(pool):
    ranks = pool.run(counted, WORLD, counts=[3, 2], replica=[0, 1])
    assert [steps for steps, _ in ranks] == [4] * WORLD
    (line,) = ranks[0][1]
    assert "1 of 2 data-parallel replicas have no batch left" in line
    assert all(not lines for _, lines in ranks[1:])


def test_replicas_that_read_the_same_are_told(pool):
    ranks = pool.run(counted, WORLD, counts=[2, 2], replica=[0, 0])
    assert [steps for steps, _ in ranks] == [4] * WORLD
    (line,) = ranks[0][1]
    assert "2 data-parallel replicas read 1 different batches" in line


def broken(ctx: RankContext, *, case: str) -> Any:
    mesh = mesh_of(2, 1)

    tokens = torch.ones(2, 8, dtype=torch.int64)
    bad = {
        "length": {"input_ids": tokens[:, :1]},  # fewer tokens than ranks
        "list": {"input_ids": tokens, "labels": tokens.tolist()},
        "cu_seqlens": {"input_ids": tokens, "cu_seqlens": [object()]},
        "pickling": {"input_ids": tokens, "collate": lambda: None},
    }

    def loader() -> Any:
        yield samples(ctx.rank, 1)[0]
        if ctx.rank == 2:
            if case == "reading":
                raise OSError("no such file")
            yield bad[case]
        yield samples(ctx.rank, 1)[0]

    class NoWorkers:
        def __iter__(self) -> Any:
            raise OSError("no worker processes")

    full = NoWorkers() if case == "start" and ctx.rank == 2 else loader()
    return sum(1 for _ in SequenceParallelDataLoader(full, mesh))


@pytest.mark.parametrize(
    ("case", "own", "message"),
    [
        ("reading", OSError, "no such file"),
        ("start", OSError, "no worker processes"),
        ("length", LayoutError, "leave a rank"),
        ("list", DataError, "labels is a list: give a tensor"),
        ("cu_seqlens", Exception, "object"),
        ("pickling", DataError, "entries ['collate'] cannot be sent to the other ranks"),
    ],
)
def test_an_error_of_one_replica_is_raised_on_every_rank(case, own, message, pool):
    for rank, error in enumerate(pool.errors(broken, WORLD, case=case)):
        assert isinstance(error, own if rank == 2 else DataError), error
        assert message in str(error)
        assert rank == 2 or "rank 2 of 4 could not read its batch" in str(error)


def refused(ctx: RankContext, *, case: str) -> None:
    mesh = mesh_of(2, 1)
    if case == "layouts":
        SequenceParallelDataLoader([], mesh, ("zigzag", "contiguous")[mesh.rank])
    elif case == "no loader":
        SequenceParallelDataLoader(None, mesh)
    else:
        ParallelGroups.from_mesh(SequenceMesh.single())


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("layouts", MeshError, "disagree"),
        ("no loader", (ConfigError, MeshError), "loader=None on rank 0"),
        ("groups", ConfigError, "a mesh of one process has no groups"),
    ],
)
def test_bad_settings_are_refused_on_every_rank(case, kind, message, pool):
    for error in pool.errors(refused, WORLD, case=case):
        assert isinstance(error, kind), error
        assert message in str(error)


def uneven(ctx: RankContext) -> None:
    mesh = SequenceMesh.single()
    if ctx.rank < 2:
        import torch.distributed as dist

        group = dist.new_group([0, 1], use_local_synchronization=True)
        mesh = SequenceMesh.from_group(group)
    data_parallel_ranks(mesh)


def test_meshes_of_different_sizes_are_refused(pool):
    for error in pool.errors(uneven, WORLD):
        assert isinstance(error, ConfigError)
        assert "hold 3 sequence meshes of 1 and 2 ranks" in str(error)


def unpickled_but_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("not here")
    return Fussy()


class Fussy:
    def __reduce__(self):
        return unpickled_but_on_rank_1, ()


def sent_twice(ctx: RankContext) -> tuple[str, list[int]]:
    broadcast, first = BatchBroadcast(ctx.group), ctx.rank == 0
    seen = "received"
    try:
        broadcast.send(broadcast.pack((Fussy(), torch.ones(3))) if first else None)
    except ValueError:
        seen = "raised"
    numbers = torch.arange(4.0).to(torch.complex64).requires_grad_()
    number = broadcast.send(broadcast.pack(numbers) if first else None)
    return seen, number.real.tolist() * number.requires_grad


def test_a_batch_that_one_rank_cannot_unpickle_leaves_no_message_behind(pool):
    others = ("received", [0, 1, 2, 3])
    assert pool.run(sent_twice, 3) == [others, ("raised", others[1]), others]
