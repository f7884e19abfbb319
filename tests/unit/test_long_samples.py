"""What preparing one sample of a million tokens allocates: no index of all tokens but its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_usp import TokenLayout
from ds_usp.training import (
    document_borders,
    document_positions,
    local_document_positions,
    local_positions,
    next_token_labels,
    shard_batch,
)
from ds_usp.training.whole_batch import read_batch

TOKENS, EOD = 2**20, 256
KINDS = ("contiguous", "zigzag", "striped", "context_parallel")


class IntegerTensors(TorchDispatchMode):
    """Sizes of the storages of int64 that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if _is_int(x)}
        result = func(*args, **(kwargs or {}))
        for x in filter(_is_int, tree_leaves(result)):
            storage = x.untyped_storage()
            if storage.data_ptr() not in given:
                self._alive.append(storage)  # so that no address comes twice
                self.sizes[storage.data_ptr()] = storage.nbytes() // 8
        return result


def _is_int(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.int64


def whole_tensors(prepare: Callable[[], object]) -> int:
    """Tensors of int64 with as many elements as the sample has tokens that it makes."""
    with IntegerTensors() as made:
        prepare()
    return sum(size >= TOKENS - 1 for size in made.sizes.values())


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    tokens = torch.randint(0, EOD, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    tokens[0, 4095::4096] = EOD
    return tokens


def test_a_shard_needs_no_index_of_the_whole_sample(sample: torch.Tensor) -> None:
    layout = TokenLayout("zigzag", TOKENS, ulysses=2, ring=2)
    labels, mask = sample.roll(-1), torch.ones(sample.shape)

    def prepare() -> None:
        borders = document_borders(sample, EOD)
        assert len(borders[0]) == TOKENS // 4096 + 1
        shard = shard_batch(sample, labels, mask, layout=layout, rank=1)
        positions = local_document_positions(layout, 1, borders)
        assert shard.tokens.shape == positions.shape == (1, TOKENS // 4)
        assert positions.dtype == local_positions(layout, 1).dtype == torch.int64

    assert whole_tensors(prepare) == 0


def test_a_full_batch_makes_the_shifted_labels_alone(sample: torch.Tensor) -> None:
    borders = (0, 4096, TOKENS)
    assert whole_tensors(lambda: read_batch({"input_ids": sample})) == 1
    assert whole_tensors(lambda: read_batch({"input_ids": sample, "cu_seqlens": borders})) == 1
    assert whole_tensors(lambda: next_token_labels(sample)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_a_rank_are_its_shard(kind: str) -> None:
    layout = TokenLayout(kind, 96, ulysses=2, ring=2)
    borders = [[0, 5, 6, 96], [0, 96]]
    whole = document_positions(borders)
    assert whole[0].tolist() == [*range(5), 0, *range(90)]
    for rank in range(4):
        assert local_positions(layout, rank).tolist() == layout.positions(rank)
        own = local_document_positions(layout, rank, borders)
        assert torch.equal(own, layout.shard(whole, dim=1, rank=rank))


def test_positions_beyond_32_bits_are_exact() -> None:
    layout = TokenLayout("striped", 2**33, ring=2**13)
    positions = local_positions(layout, 5)
    assert len(positions) == 2**20 and positions[-1] == 2**33 - 2**13 + 5
