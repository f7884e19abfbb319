"""What surrounds attention in training, without processes."""

import pytest
import torch
from cases import ALL_LAYOUTS
from torch import nn

import ds_usp
from ds_usp import ConfigError, DataError, LayoutError, TokenLayout
from ds_usp.training import (
    GradientRule,
    attention_kernel,
    check_zero_stage,
    local_positions,
    loss_token_weight,
    rotary_frequencies,
    shard_batch,
    weighted_loss,
    with_large_enough_buckets,
)


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
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


@pytest.mark.parametrize(
    ("stage", "stages", "bf16"), [(2, 2, False), (3, 2, False), (3, 4, True), (0, 1, True)]
)
def test_what_deepspeed_trains_wrongly_is_refused(stage, stages, bf16):
    with pytest.raises(ConfigError, match="Use ZeRO-1"):
        check_zero_stage(stage, stages=stages, bf16=bf16)


@pytest.mark.parametrize(
    ("stage", "stages", "bf16"), [(0, 1, False), (3, 1, True), (1, 4, True), (0, 2, False)]
)
def test_what_deepspeed_trains_rightly_is_not(stage, stages, bf16):
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
        ((signature, _),) = mesh.plans.values()
        assert f"kernel {name}" in signature.fields
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
