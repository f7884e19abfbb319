"""What is derived from a loader's batch before it is sharded, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ALL_LAYOUTS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_usp import ConfigError, DataError, LayoutError, SequenceMesh, TokenLayout
from ds_usp.training import (
    SequenceParallelDataLoader,
    ShardedBatch,
    borders_of_positions,
    document_borders,
    document_positions,
    local_document_positions,
    local_positions,
    next_token_labels,
    shard_batch,
)
from ds_usp.training.whole_batch import read_batch

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 4], [1, 2, 3, 4, 5, 6]])


def of(**more: Any) -> dict[str, Any]:
    """A loader's batch."""
    return {"input_ids": TOKENS, **more}


def batches(*given: Any, layout: str = "contiguous", **settings: Any) -> list[ShardedBatch]:
    """What one process makes of them."""
    return list(SequenceParallelDataLoader(given, SequenceMesh.single(), layout, **settings))


def test_labels_are_the_next_tokens_and_the_last_has_none():
    (batch,) = batches(of())
    assert torch.equal(batch.tokens, TOKENS)
    assert batch.labels.tolist() == [[6, 7, 8, 9, 4, -100], [2, 3, 4, 5, 6, -100]]
    assert batch.positions.tolist() == [list(range(6))] * 2
    assert batch.documents == () and batch.loss_tokens == 10


def test_labels_that_do_not_count_stay_out():
    labels = TOKENS.clone()
    labels[:, :3] = -100
    (batch,) = batches(of(labels=labels))
    assert batch.labels.tolist()[0] == [-100, -100, 8, 9, 4, -100]
    assert batch.loss_tokens == 6


def test_shifted_labels_are_taken_as_they_are():
    (batch,) = batches(of(shift_labels=TOKENS + 1))
    assert torch.equal(batch.labels, TOKENS + 1)


def test_the_shifted_label_of_the_last_token_before_padding_counts():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    (batch,) = batches(of(shift_labels=TOKENS + 1, attention_mask=mask))
    assert batch.labels.tolist()[0] == [6, 7, 8, 9, -100, -100]
    assert batch.loss_tokens == 4 + 6


POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]])
PACKED = {
    "positions": {"position_ids": POSITIONS},
    "borders of each sample": {"cu_seqlens": [[0, 2, 6], [0, 4, 6]]},
}


@pytest.mark.parametrize("given", PACKED.values(), ids=PACKED)
def test_documents_end_labels_and_restart_positions(given):
    (batch,) = batches(of(**given))
    assert batch.documents == ((0, 2, 6), (0, 4, 6))
    assert torch.equal(batch.positions, POSITIONS)
    assert batch.labels.tolist() == [[6, -100, 8, 9, 4, -100], [2, 3, 4, -100, 6, -100]]


def test_one_list_of_borders_is_for_all_samples():
    borders = torch.tensor([[0, 4, 6]], dtype=torch.int32)
    (batch,) = batches(of(cu_seq_lens_q=borders, cu_seq_lens_k=borders))
    assert batch.documents == ((0, 4, 6),)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1]] * 2


def test_padding_is_a_document_without_labels():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    (batch,) = batches(of(attention_mask=mask))
    assert batch.documents == ((0, 4, 6), (0, 6))
    assert batch.labels.tolist()[0] == [6, 7, 8, -100, -100, -100]
    assert batch.loss_tokens == 3 + 5
    (batch,) = batches(of(attention_mask=torch.ones_like(TOKENS)))
    assert batch.documents == ()


def test_padding_of_packed_documents():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    positions = torch.tensor([[0, 1, 0, 1, 7, 7]] * 2)  # those of padding do not matter
    (batch,) = batches(of(attention_mask=mask, position_ids=positions))
    assert batch.documents == ((0, 2, 4, 6),)


def test_a_mask_that_numbers_documents_and_positions_that_jump():
    numbers = torch.tensor([[1, 1, 2, 2, 0, 0]] * 2)
    (expected,) = batches(of(attention_mask=numbers != 0, cu_seqlens=[0, 2, 4]))
    jumps = torch.tensor([[0, 7, 0, 5, 1, 1]] * 2)
    for more in ({}, {"position_ids": jumps}, {"cu_seqlens": [0, 2, 6], "position_ids": jumps}):
        (batch,) = batches(of(attention_mask=numbers, **more))
        assert batch.documents == expected.documents == ((0, 2, 4, 6),)
        assert torch.equal(batch.labels, expected.labels)


# Of two samples with 4 and 6 real tokens; what the borders say of padding does not matter.
BORDERS = {
    "through the padding": [[0, 2, 6], [0, 2, 6]],
    "padding as a document": [[0, 2, 4, 6], [0, 2, 6]],
    "padding as documents": [[0, 2, 4, 5, 6], [0, 2, 6]],
    "of real tokens": [[0, 2, 4], [0, 2, 6]],
    "for all samples": [0, 2, 6],
}


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
def test_borders_beside_padding_are_those_of_positions(borders):
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    given = of(attention_mask=mask)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]] * 2)
    (expected,) = batches({**given, "position_ids": positions})
    assert expected.documents == ((0, 2, 4, 6), (0, 2, 6))
    for more in ({}, {"position_ids": positions}):  # twice the same is no contradiction
        (batch,) = batches({**given, "cu_seqlens": borders, **more})
        assert batch.documents == expected.documents
        assert torch.equal(batch.labels, expected.labels)
        assert batch.loss_tokens == expected.loss_tokens == 2 + 4


def test_advice_for_documents_that_differ_leaves_padding_out_of_the_loss():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    given = of(attention_mask=mask, position_ids=POSITIONS)
    with pytest.raises(DataError, match=r"Leave out the wrong one, but keep attention_mask"):
        batches({**given, "cu_seqlens": [0, 3, 6]})
    (batch,) = batches({name: x for name, x in given.items() if name != "position_ids"})
    assert batch.loss_tokens == 2 * 3


def test_samples_of_no_tokens_have_no_positions():
    layout = TokenLayout("zigzag", 8, ulysses=2)
    assert local_document_positions(layout, 0, []).shape == (0, 4)
    with pytest.raises(ConfigError, match="a list for each sample, and there is none"):
        document_positions([])


def test_other_entries_are_sharded_or_whole():
    given = of(weights=TOKENS.float(), image=torch.ones(3), ids="a")
    (batch,) = batches(given, whole=("image",))
    assert torch.equal(batch.others["weights"], TOKENS.float())
    assert batch.others["image"].shape == (3,) and batch.others["ids"] == "a"


def test_a_balanced_layout_is_made_from_each_batchs_documents():
    first, second = batches(of(cu_seqlens=[0, 2, 6]), of(), layout="balanced")
    assert first.layout.documents == (0, 2, 6)
    assert second.layout.documents == (0, 6)


def test_a_length_is_the_wrapped_loaders():
    assert len(SequenceParallelDataLoader([{}, {}], SequenceMesh.single())) == 2
    with pytest.raises(TypeError):
        len(SequenceParallelDataLoader(iter([]), SequenceMesh.single()))


PADDED = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
# Batches that cannot be used, and the numbers and names of the message.
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no dict": (TOKENS, ("Tensor",)),
    "no tokens": ({"tokens": TOKENS}, ("['tokens']",)),
    "one dim": ({"input_ids": TOKENS[0]}, ("[6]",)),
    "labels of another length": (of(labels=TOKENS[:, 1:]), ("[2, 5]", "[2, 6]")),
    "a mask of pairs": (of(attention_mask=torch.ones(2, 1, 6, 6)), ("pairs",)),
    "padding on the left": (
        of(attention_mask=torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])),
        ("sample 1", "4 of 6"),
    ),
    "an empty sample": (of(attention_mask=torch.tensor([[1] * 6, [0] * 6])), ("sample 1", "0 of")),
    "numbers of documents that fall": (
        of(attention_mask=torch.tensor([[2, 2, 1, 1, 1, 0]] * 2)),
        ("row 0", "fall at token 2"),
    ),
    "a mask that is added to scores": (of(attention_mask=PADDED - 2.0), ("row 0", "0 and 1")),
    "numbers of documents that are others": (
        of(attention_mask=torch.tensor([[1, 1, 2, 2, 2, 2]] * 2), cu_seqlens=[0, 3, 6]),
        ("cu_seqlens", "attention_mask", "row 0"),
    ),
    "borders that end elsewhere beside padding": (
        of(attention_mask=PADDED, cu_seqlens=[0, 2, 5]),
        ("sample 0 end at 5", "4 of its 6"),
    ),
    "labels that are shifted already": (
        {"input_ids": TOKENS[:, :-1], "labels": TOKENS[:, 1:]},
        ("'shift_labels'",),
    ),
    "labels twice": (of(labels=TOKENS, shift_labels=TOKENS), ("two",)),
    "positions that jump": (
        of(position_ids=torch.tensor([[0, 1, 2, 5, 6, 7]] * 2)),
        ("2 to 5 at token 3",),
    ),
    "documents that differ": (
        of(position_ids=POSITIONS, cu_seqlens=[0, 3, 6]),
        ("cu_seqlens", "position_ids"),
    ),
    "lengths of the last batch beside one document": (
        of(position_ids=torch.arange(6).expand(2, 6), cu_seqlens=[0, 2, 6]),
        ("row 0 at token 2", "0-2-6", "nowhere"),
    ),
    "a tensor of no sequence": (of(image=torch.ones(2, 3)), ("'image'", "[2, 3]", "[2, 6, ...]")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_cannot_be_used_is_refused(name):
    given, numbers = REFUSED[name]
    with pytest.raises(DataError) as caught:
        batches(given)
    assert all(number in str(caught.value) for number in numbers), caught.value


def test_borders_that_end_elsewhere_are_refused():
    with pytest.raises(ConfigError, match="end at 5, the sequence has 6"):
        batches(of(cu_seqlens=[0, 5]))


def test_settings_are_checked_at_once():
    with pytest.raises(LayoutError, match="unknown token layout 'zigzig'"):
        SequenceParallelDataLoader([], SequenceMesh.single(), "zigzig")
    with pytest.raises(ConfigError, match="loader=None on rank 0"):
        SequenceParallelDataLoader(None, SequenceMesh.single())


def test_helpers_by_hand():
    assert next_token_labels(TOKENS, [0, 2, 6])[0].tolist() == [6, -100, 8, 9, 4, -100]
    with pytest.raises(ConfigError, match="the batch has 2"):
        next_token_labels(TOKENS, [[0, 6]] * 3)
    assert borders_of_positions(POSITIONS) == [[0, 2, 6], [0, 4, 6]]


def test_labels_that_are_not_shifted_are_refused_before_sharding():
    layout = SequenceMesh.single().layout("contiguous", 6)
    ones = torch.ones_like(TOKENS)
    with pytest.raises(DataError, match="all 12 labels are the tokens at their own positions"):
        shard_batch(TOKENS, TOKENS, ones, layout=layout, rank=0)
    shard_batch(ones, ones, ones, layout=layout, rank=0)  # all tokens are alike


LONG, EOD = 2**20, 256


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
    return sum(size >= LONG - 1 for size in made.sizes.values())


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    tokens = torch.randint(0, EOD, (1, LONG), generator=torch.Generator().manual_seed(0))
    tokens[0, 4095::4096] = EOD
    return tokens


def test_a_shard_needs_no_index_of_the_whole_sample(sample):
    layout = TokenLayout("zigzag", LONG, ulysses=2, ring=2)
    labels, mask = sample.roll(-1), torch.ones(sample.shape)

    def prepare() -> None:
        borders = document_borders(sample, EOD)
        assert len(borders[0]) == LONG // 4096 + 1
        shard = shard_batch(sample, labels, mask, layout=layout, rank=1)
        positions = local_document_positions(layout, 1, borders)
        assert shard.tokens.shape == positions.shape == (1, LONG // 4)
        assert positions.dtype == local_positions(layout, 1).dtype == torch.int64

    assert whole_tensors(prepare) == 0


def test_a_full_batch_makes_the_shifted_labels_alone(sample):
    borders = (0, 4096, LONG)
    assert whole_tensors(lambda: read_batch({"input_ids": sample})) == 1
    assert whole_tensors(lambda: read_batch({"input_ids": sample, "cu_seqlens": borders})) == 1
    assert whole_tensors(lambda: next_token_labels(sample)) == 1


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
def test_positions_of_a_rank_are_its_shard(kind):
    layout = TokenLayout(kind, 96, ulysses=2, ring=2)
    borders = [[0, 5, 6, 96], [0, 96]]
    whole = document_positions(borders)
    assert whole[0].tolist() == [*range(5), 0, *range(90)]
    for rank in range(4):
        assert local_positions(layout, rank).tolist() == layout.positions(rank)
        own = local_document_positions(layout, rank, borders)
        assert torch.equal(own, layout.shard(whole, dim=1, rank=rank))


def test_positions_beyond_32_bits_are_exact():
    layout = TokenLayout("striped", 2**33, ring=2**13)
    positions = local_positions(layout, 5)
    assert len(positions) == 2**20 and positions[-1] == 2**33 - 2**13 + 5
