"""What surrounds attention in training, without processes: batches, long samples, loss tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_usp
from ds_usp import ConfigError, DataError, LayoutError, SequenceMesh, TokenLayout
from ds_usp.training import (
    GradientRule,
    SequenceParallelDataLoader,
    ShardedBatch,
    attention_kernel,
    borders_of_positions,
    check_zero_stage,
    document_borders,
    document_positions,
    local_document_positions,
    local_positions,
    loss_token_weight,
    next_token_labels,
    rotary_frequencies,
    shard_batch,
    weighted_loss,
    with_large_enough_buckets,
)
from ds_usp.training.full_batch import full_batch

LAYOUTS = ("zigzag", "contiguous", "striped", "context_parallel")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_batch_is_cut_as_its_positions_say(kind):
    layout = TokenLayout(kind, seq_len=22, ulysses=2, ring=2)
    tokens = torch.arange(44).view(2, 22)
    mask = torch.arange(22).remainder(3).eq(0).expand(2, 22)
    for rank in range(4):
        batch = shard_batch(tokens, tokens + 1, mask, layout=layout, rank=rank)
        positions = local_positions(layout, rank)
        assert positions.tolist() == layout.positions(rank)
        assert torch.equal(batch.tokens, tokens[:, positions])
        assert torch.equal(batch.labels, batch.tokens + 1)
        assert torch.equal(batch.loss_mask, mask[:, positions].float())


def test_a_batch_of_unequal_shapes_is_refused():
    layout = TokenLayout("zigzag", seq_len=8, ulysses=1, ring=2)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(LayoutError, match="must have one shape"):
        shard_batch(tokens, tokens[:, 1:], tokens, layout=layout, rank=0)
    with pytest.raises(LayoutError, match="has 7 tokens"):
        shard_batch(*[tokens[:, 1:]] * 3, layout=layout, rank=0)


def test_rotary_frequencies_follow_the_positions():
    full = rotary_frequencies(torch.arange(16), dim=8, base=100.0)
    assert full.shape == (16, 1, 1, 8)
    assert torch.equal(full[..., :4], full[..., 4:])
    expected = [position * 100.0 ** -(2 * i / 8) for position in range(16) for i in range(4)]
    torch.testing.assert_close(full[:, 0, 0, :4].flatten(), torch.tensor(expected))
    some = torch.tensor([3, 4, 15, 0])
    assert torch.equal(rotary_frequencies(some, dim=8, base=100.0), full[some])


def test_the_weighted_losses_of_all_ranks_sum_to_the_scaled_mean():
    losses, mask = torch.rand(3, 10), torch.rand(3, 10).gt(0.3).float()
    rule = GradientRule("sp_dp", divisor=5)
    scale = rule.loss_scale(micro_batches=2)
    weight = loss_token_weight(float(mask.sum()), scale)
    parts = [weighted_loss(losses[:, i::2], mask[:, i::2] * weight) for i in range(2)]
    mean = (losses * mask).sum() / mask.sum()
    torch.testing.assert_close(sum(parts) / scale, mean)


def test_a_step_without_loss_tokens_is_refused():
    with pytest.raises(DataError, match="no token to learn from"):
        loss_token_weight(0.0, 1.0)


def test_what_deepspeed_trains_wrongly_is_refused():
    for stage, stages, bf16 in ((2, 2, False), (3, 2, False), (3, 4, True), (0, 1, True)):
        with pytest.raises(ConfigError, match="--zero-stage 1"):
            check_zero_stage(stage, stages=stages, bf16=bf16)
    for stage, stages, bf16 in ((0, 1, False), (3, 1, True), (1, 4, True), (0, 2, False)):
        check_zero_stage(stage, stages=stages, bf16=bf16)


@pytest.mark.parametrize("documents", [(), ((0, 3, 8),)])
def test_the_kernel_is_known_before_the_first_call(documents):
    q = torch.zeros(1, 8, 2, 4)
    layout = ds_usp.TokenLayout("contiguous", 8)
    for kernel in ("auto", "eager"):
        mesh = ds_usp.SequenceMesh.single()
        mask = ds_usp.MaskSpec.causal(documents)
        ds_usp.usp_attention(q, q, q, mesh=mesh, layout=layout, mask=mask, kernel=kernel)
        name = attention_kernel(
            kernel, device=q.device, dtype=q.dtype, head_dim=4, documents=bool(documents)
        )
        ((text, _),) = mesh.plans.values()
        assert f"kernel {name}" in text
    with pytest.raises(ds_usp.UnsupportedAttentionError, match="flash4"):
        attention_kernel("flash4", device=q.device, dtype=q.dtype, head_dim=4)


OVERLAPPED = {"stage": 2, "overlap_comm": True}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({**OVERLAPPED, "reduce_bucket_size": 11}, 12),
        ({**OVERLAPPED, "reduce_bucket_size": 12}, 12),
        (OVERLAPPED, None),
        ({"stage": 2, "overlap_comm": False, "reduce_bucket_size": 11}, 11),
        ({"stage": 2, "reduce_bucket_size": 11}, 11),
        ({"stage": 1, "overlap_comm": True, "reduce_bucket_size": 11}, 11),
        ({**OVERLAPPED, "reduce_bucket_size": 11, "contiguous_gradients": False}, 11),
    ],
)
def test_overlapped_buckets_hold_the_largest_gradient(zero, expected, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    frozen = nn.Parameter(torch.zeros(50), requires_grad=False)
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5)), frozen]
    config = with_large_enough_buckets({"zero_optimization": zero, "x": 1}, parameters)
    assert config["x"] == 1
    assert config["zero_optimization"].get("reduce_bucket_size") == expected
    assert config["zero_optimization"].keys() == zero.keys()


TOKENS = torch.tensor([[5, 6, 7, 8, 9, 4], [1, 2, 3, 4, 5, 6]])


def batches(*given: Any, layout: str = "contiguous", **settings: Any) -> list[ShardedBatch]:
    """What one process makes of them."""
    return list(SequenceParallelDataLoader(given, SequenceMesh.single(), layout, **settings))


def test_labels_are_the_next_tokens_and_the_last_has_none():
    (batch,) = batches({"input_ids": TOKENS})
    assert torch.equal(batch.tokens, TOKENS)
    assert batch.labels.tolist() == [[6, 7, 8, 9, 4, -100], [2, 3, 4, 5, 6, -100]]
    assert batch.positions.tolist() == [list(range(6))] * 2
    assert batch.documents == () and batch.loss_tokens == 10


def test_labels_that_do_not_count_stay_out():
    labels = TOKENS.clone()
    labels[:, :3] = -100
    (batch,) = batches({"input_ids": TOKENS, "labels": labels})
    assert batch.labels.tolist()[0] == [-100, -100, 8, 9, 4, -100]
    assert batch.loss_tokens == 6


def test_shifted_labels_are_taken_as_they_are():
    (batch,) = batches({"input_ids": TOKENS, "shift_labels": TOKENS + 1})
    assert torch.equal(batch.labels, TOKENS + 1)
    # The label of the last token before padding counts.
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    (batch,) = batches({"input_ids": TOKENS, "shift_labels": TOKENS + 1, "attention_mask": mask})
    assert batch.labels.tolist()[0] == [6, 7, 8, 9, -100, -100]
    assert batch.loss_tokens == 4 + 6


POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]])
PACKED = {
    "positions": {"position_ids": POSITIONS},
    "borders of each sample": {"cu_seqlens": [[0, 2, 6], [0, 4, 6]]},
}


@pytest.mark.parametrize("given", PACKED.values(), ids=PACKED)
def test_documents_end_labels_and_restart_positions(given):
    (batch,) = batches({"input_ids": TOKENS, **given})
    assert batch.documents == ((0, 2, 6), (0, 4, 6))
    assert torch.equal(batch.positions, POSITIONS)
    assert batch.labels.tolist() == [[6, -100, 8, 9, 4, -100], [2, 3, 4, -100, 6, -100]]


def test_one_list_of_borders_is_for_all_samples():
    borders = torch.tensor([[0, 4, 6]], dtype=torch.int32)
    (batch,) = batches({"input_ids": TOKENS, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders})
    assert batch.documents == ((0, 4, 6),)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1]] * 2


def test_padding_is_a_document_without_labels():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    (batch,) = batches({"input_ids": TOKENS, "attention_mask": mask})
    assert batch.documents == ((0, 4, 6), (0, 6))
    assert batch.labels.tolist()[0] == [6, 7, 8, -100, -100, -100]
    assert batch.loss_tokens == 3 + 5
    (batch,) = batches({"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)})
    assert batch.documents == ()


def test_padding_of_packed_documents():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    positions = torch.tensor([[0, 1, 0, 1, 7, 7]] * 2)  # those of padding do not matter
    (batch,) = batches({"input_ids": TOKENS, "attention_mask": mask, "position_ids": positions})
    assert batch.documents == ((0, 2, 4, 6),)


def test_other_entries_are_sharded_or_whole():
    given = {"input_ids": TOKENS, "weights": TOKENS.float(), "image": torch.ones(3), "ids": "a"}
    (batch,) = batches(given, whole=("image",))
    assert torch.equal(batch.others["weights"], TOKENS.float())
    assert batch.others["image"].shape == (3,) and batch.others["ids"] == "a"


def test_a_balanced_layout_is_made_from_each_batchs_documents():
    first, second = batches(
        {"input_ids": TOKENS, "cu_seqlens": [0, 2, 6]}, {"input_ids": TOKENS}, layout="balanced"
    )
    assert first.layout.documents == (0, 2, 6)
    assert second.layout.documents == (0, 6)


def test_a_length_is_the_wrapped_loaders():
    assert len(SequenceParallelDataLoader([{}, {}], SequenceMesh.single())) == 2
    with pytest.raises(TypeError):
        len(SequenceParallelDataLoader(iter([]), SequenceMesh.single()))


REFUSED: dict[str, tuple[Any, str]] = {
    "no dict": (TOKENS, "batch is Tensor: it must be a dict"),
    "no tokens": ({"tokens": TOKENS}, r"batch is \['tokens'\]"),
    "one dim": ({"input_ids": TOKENS[0]}, r"input_ids are \[6\], expected \[batch, sequence\]"),
    "labels of another length": (
        {"input_ids": TOKENS, "labels": TOKENS[:, 1:]},
        r"labels is \[2, 5\], input_ids are \[2, 6\]",
    ),
    "a mask of pairs": (
        {"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 6, 6)},
        "Masks of pairs of tokens are not sharded",
    ),
    "padding on the left": (
        {"input_ids": TOKENS, "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])},
        "sample 1 keeps 4 of 6 tokens, and not the first ones: pad on the right",
    ),
    "an empty sample": (
        {"input_ids": TOKENS, "attention_mask": torch.tensor([[1] * 6, [0] * 6])},
        "sample 1 keeps 0 of 6",
    ),
    "labels that are shifted already": (
        {"input_ids": TOKENS[:, :-1], "labels": TOKENS[:, 1:]},
        "would be shifted twice: name them 'shift_labels'",
    ),
    "labels twice": (
        {"input_ids": TOKENS, "labels": TOKENS, "shift_labels": TOKENS},
        "leave one of the two out",
    ),
    "positions that jump": (
        {"input_ids": TOKENS, "position_ids": torch.tensor([[0, 1, 2, 5, 6, 7]] * 2)},
        "sample 0 go from 2 to 5 at token 3",
    ),
    "documents that differ": (
        {"input_ids": TOKENS, "position_ids": POSITIONS, "cu_seqlens": [0, 3, 6]},
        "cu_seqlens and position_ids name different documents",
    ),
    "a tensor of no sequence": (
        {"input_ids": TOKENS, "image": torch.ones(2, 3)},
        r"'image' is \[2, 3\], not \[2, 6, ...\].*whole=\('image',\)",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_batch_that_cannot_be_used_is_refused(given, message):
    with pytest.raises(DataError, match=message):
        batches(given)


def test_borders_of_other_batches_are_refused():
    with pytest.raises(ConfigError, match="end at 5, the sequence has 6"):
        batches({"input_ids": TOKENS, "cu_seqlens": [0, 5]})
    with pytest.raises(ConfigError, match="the batch has 2"):
        next_token_labels(TOKENS, [[0, 6]] * 3)
    assert borders_of_positions(POSITIONS) == [[0, 2, 6], [0, 4, 6]]


def test_settings_are_checked_at_once():
    with pytest.raises(LayoutError, match="unknown token layout 'zigzig'"):
        SequenceParallelDataLoader([], SequenceMesh.single(), "zigzig")
    with pytest.raises(ConfigError, match="loader=None on rank 0"):
        SequenceParallelDataLoader(None, SequenceMesh.single())


def test_labels_that_are_not_shifted_are_refused_before_sharding():
    layout = SequenceMesh.single().layout("contiguous", 6)
    ones = torch.ones_like(TOKENS)
    with pytest.raises(DataError, match="all 12 labels are the tokens at their own positions"):
        shard_batch(TOKENS, TOKENS, ones, layout=layout, rank=0)
    shard_batch(ones, ones, ones, layout=layout, rank=0)  # all tokens are alike


MILLION, EOD = 2**20, 256


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
    return sum(size >= MILLION - 1 for size in made.sizes.values())


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    tokens = torch.randint(0, EOD, (1, MILLION), generator=torch.Generator().manual_seed(0))
    tokens[0, 4095::4096] = EOD
    return tokens


def test_a_shard_needs_no_index_of_the_whole_sample(sample):
    layout = TokenLayout("zigzag", MILLION, ulysses=2, ring=2)
    labels, mask = sample.roll(-1), torch.ones(sample.shape)

    def prepare() -> None:
        borders = document_borders(sample, EOD)
        assert len(borders[0]) == MILLION // 4096 + 1
        shard = shard_batch(sample, labels, mask, layout=layout, rank=1)
        positions = local_document_positions(layout, 1, borders)
        assert shard.tokens.shape == positions.shape == (1, MILLION // 4)
        assert positions.dtype == local_positions(layout, 1).dtype == torch.int64

    assert whole_tensors(prepare) == 0


def test_a_full_batch_makes_the_shifted_labels_alone(sample):
    borders = (0, 4096, MILLION)
    assert whole_tensors(lambda: full_batch({"input_ids": sample})) == 1
    assert whole_tensors(lambda: full_batch({"input_ids": sample, "cu_seqlens": borders})) == 1
    assert whole_tensors(lambda: next_token_labels(sample)) == 1


@pytest.mark.parametrize("kind", LAYOUTS)
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
