"""Losses and gradients without logits, against torch's own over the whole vocabulary."""

import math

import pytest
import torch
from harness import RankContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ds_usp import ConfigError
from ds_usp import testing as oracle
from ds_usp.training import chunked_token_losses, chunked_weighted_loss
from ds_usp.training.loss import Logits

S, B, H, V = 13, 2, 16, 24
LIMIT = 2e-5


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=generator).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    labels = torch.randint(0, V, (S, B), generator=generator)
    weights = torch.rand(S, B, generator=generator)
    weights[3:6] = 0
    return hidden, weight, labels, weights


def reference(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Loss, token losses and both gradients in fp64."""
    hidden, weight, labels, weights = inputs(dtype)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = (hidden @ weight.t()).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    loss = (losses.view(S, B) * weights).sum()
    return loss.detach(), losses.detach().view(S, B), *torch.autograd.grad(loss, (hidden, weight))


def errors(ctx: RankContext, chunks: int, dtype: torch.dtype) -> list[float]:
    """Relative errors of both ways, on this rank's words."""
    hidden, weight, labels, weights = inputs(dtype)
    words = slice(V // ctx.world * ctx.rank, V // ctx.world * (ctx.rank + 1))
    loss, losses, dhidden, dweight = reference(dtype)
    errors_of_cases = []
    for token_wise in (False, True):
        h, w = hidden.clone().requires_grad_(), weight[words].clone().requires_grad_()
        if token_wise:
            each = chunked_token_losses(h, w, labels, chunks=chunks, tp_group=ctx.group)
            errors_of_cases.append(oracle.relative_error(each.detach(), losses))
            got = (each * weights).sum()
        else:
            got = chunked_weighted_loss(h, w, labels, weights, chunks=chunks, tp_group=ctx.group)
        (got * 3).backward()
        errors_of_cases.append(oracle.relative_error(got.detach(), loss))
        errors_of_cases.append(oracle.relative_error(h.grad / 3, dhidden))
        errors_of_cases.append(oracle.relative_error(w.grad / 3, dweight[words]))
    return errors_of_cases


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("chunks", [1, 4, 100])
def test_losses_and_gradients_are_those_of_the_whole(pool, world, chunks):
    for rank in pool.run(errors, world, chunks=chunks, dtype=torch.float32):
        assert max(rank) < LIMIT, rank


def test_fp64_is_not_rounded(pool):
    (of_rank,) = pool.run(errors, 1, chunks=4, dtype=torch.float64)
    assert max(of_rank) < 1e-12, of_rank


@pytest.mark.parametrize("token_wise", [False, True])
def test_a_label_of_minus_100_has_no_loss(token_wise):
    hidden, weight, labels, weights = inputs()
    labels[2:5], weights = -100, weights + 1
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = (losses.view(S, B) * weights).sum()
    if token_wise:
        got = (chunked_token_losses(hidden, weight, labels, chunks=3) * weights).sum()
    else:
        got = chunked_weighted_loss(hidden, weight, labels, weights, chunks=3)
    for x, y in zip(
        (got, *torch.autograd.grad(got, (hidden, weight))),
        (expected, *torch.autograd.grad(expected, (hidden, weight))),
        strict=True,
    ):
        assert oracle.relative_error(x.detach(), y.detach()) < LIMIT


def test_bf16_adds_chunks_in_fp32(pool):
    one, many = (pool.run(errors, 1, chunks=c, dtype=torch.bfloat16)[0] for c in (1, 26))
    assert max(one) < 0.01
    assert max(many) < 1.2 * max(one)


def impossible_words(ctx: RankContext) -> list[float]:
    """Logits of minus infinity: all of rank 1's words, and some of rank 0's."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, V, generator=generator)
    scores[:, V // 2 :] = scores[:, 3] = -math.inf
    labels = torch.tensor([0, 1, 2, 4, 5, 6])
    wide = scores.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    dlosses = torch.rand(6, generator=generator)
    (want,) = torch.autograd.grad(losses, wide, dlosses.double())
    words = slice(V // 2 * ctx.rank, V // 2 * (ctx.rank + 1))
    mine = Logits(scores[:, words].clone(), labels, ctx.group)
    assert oracle.relative_error(mine.losses, losses.detach()) < LIMIT
    return [float((mine.gradient(dlosses) - want[:, words]).abs().max())]


def test_words_that_cannot_be_do_not_count(pool):
    for error in pool.run(impossible_words, 2):
        assert error[0] < 1e-6


class Largest(TorchDispatchMode):
    """The most elements that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_no_tensor_is_as_large_as_the_logits():
    hidden, weight, labels, weights = inputs()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    for chunks, most in ((1, S * B * V), (7, S * B * H)):
        with Largest() as seen:
            chunked_weighted_loss(hidden, weight, labels, weights, chunks=chunks).backward()
            chunked_token_losses(hidden, weight, labels, chunks=chunks).sum().backward()
        assert seen.elements == most


def test_what_would_lack_a_gradient_is_refused():
    hidden, weight, labels, weights = inputs()
    hidden.requires_grad_()
    losses = (
        chunked_weighted_loss(hidden, weight, labels, weights, chunks=3),
        chunked_token_losses(hidden, weight, labels, chunks=3).sum(),
    )
    for loss in losses:
        with pytest.raises(ConfigError, match="create_graph"):
            torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(ConfigError, match="detach"):
        chunked_weighted_loss(hidden, weight, labels, weights.requires_grad_(), chunks=3)


def test_an_empty_batch_has_no_loss():
    hidden, weight, labels, weights = inputs()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    total = chunked_weighted_loss(hidden, weight, labels[:0], weights[:0], chunks=3)
    each = chunked_token_losses(hidden, weight, labels[:0], chunks=3)
    assert each.shape == labels[:0].shape and total == 0
    for loss in (total, each.sum()):
        assert not any(x.any() for x in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label):
    hidden, weight, labels, weights = inputs()
    labels[4, 0] = label  # its weight is 0
    chunked_weighted_loss(hidden, weight, labels, weights, chunks=3)
    labels[0, 1] = label
    with pytest.raises(ConfigError, match=f"a label is {label}, and the vocabulary has {V}"):
        chunked_weighted_loss(hidden, weight, labels, weights, chunks=3)


def test_without_gradients_none_are_computed():
    hidden, weight, labels, weights = inputs()
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        loss = chunked_weighted_loss(hidden, weight, labels, weights, chunks=3)
    assert flops.get_total_flops() == 2 * S * B * H * V
    assert oracle.relative_error(loss, reference()[0]) < LIMIT


def test_what_does_not_fit_is_refused():
    hidden, weight, labels, weights = inputs()
    for arguments, words in (
        ((hidden, weight, labels[:3], weights), "labels"),
        ((hidden, weight[:, :3], labels, weights), "weight"),
        ((hidden.half(), weight.half(), labels, weights), "fp16"),
        ((hidden, weight, labels, weights[:2]), "loss_weights"),
    ):
        with pytest.raises(ConfigError, match=words):
            chunked_weighted_loss(*arguments, chunks=2)
    with pytest.raises(ConfigError, match="chunks=0"):
        chunked_token_losses(hidden, weight, labels, chunks=0)


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_in_bf16_a_mean_over_steps_is_not_rounded_before_the_gradients(steps):
    """1 / 3 in bf16 is 0.2 % too large, and would make all gradients of a model so."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16(), (torch.randn(96, 32) * 0.3).bfloat16()
    labels, weights = torch.randint(96, (64,)), torch.full((64,), steps / 64)
    learned = [x.clone().requires_grad_() for x in (hidden, weight)]
    (chunked_weighted_loss(*learned, labels, weights, chunks=4) / steps).backward()
    true = [x.double().requires_grad_() for x in (hidden, weight)]
    losses = torch.nn.functional.cross_entropy(true[0] @ true[1].t(), labels, reduction="none")
    ((losses * weights).sum() / steps).backward()
    for mine, wide in zip(learned, true, strict=True):
        assert mine.grad is not None and wide.grad is not None
        bias = float((mine.grad.double() * wide.grad).sum() / wide.grad.square().sum()) - 1
        assert abs(bias) < 5e-4, bias
