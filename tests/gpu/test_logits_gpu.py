"""Losses and gradients of logits in one pass each, beside their definition in fp64."""

from __future__ import annotations

import pytest
import torch

from ds_usp.testing import relative_error
from ds_usp.training.loss import Logits

pytest.importorskip("ds_usp.training.logits_triton", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}  # the gradient's dtype


@pytest.mark.parametrize("words", [1, 24, 4096, 50257])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_losses_and_gradient_are_those_in_fp64(dtype: torch.dtype, words: int) -> None:
    tokens = 37
    scores = (5 * torch.randn(tokens, words + 8, device="cuda")).to(dtype)[:, :words]
    scores[0] += 300  # large as a whole: the losses are not
    labels = torch.randint(0, words, (tokens,), device="cuda")
    labels[1::5] = words + 3  # other ranks' words: no part of the loss here
    dlosses = torch.rand(tokens, device="cuda")
    dlosses[2] = 0
    wide = scores.double().requires_grad_()
    mine = labels < words
    aimed = wide.gather(1, torch.where(mine, labels, 0).unsqueeze(1)).squeeze(1)
    largest = wide.detach().max(dim=1).values  # what a label elsewhere is not compared with
    losses = wide.logsumexp(dim=1) - torch.where(mine, aimed, largest)
    (want,) = torch.autograd.grad(losses, wide, dlosses.double())
    logits = Logits(scores, labels, None)
    assert relative_error(logits.losses, losses.detach()) < 2e-6
    actual = logits.gradient(dlosses)
    assert actual.data_ptr() == scores.data_ptr() and actual.dtype == dtype
    assert relative_error(actual, want) < LIMITS[dtype]


def test_what_is_no_number_stays_one() -> None:
    scores = torch.randn(3, 5000, device="cuda")
    scores[1, 4500] = float("nan")
    losses = Logits(scores, torch.zeros(3, dtype=torch.int64, device="cuda"), None).losses
    assert losses.isnan().tolist() == [False, True, False]


def test_words_that_cannot_be_do_not_count() -> None:
    """A whole block of them, with which a row begins."""
    scores = torch.randn(2, 9000, device="cuda")
    scores[:, :5000] = float("-inf")
    want = scores.double().softmax(dim=1)
    labels = torch.tensor([8000, 6000], device="cuda")
    losses = torch.nn.functional.cross_entropy(scores.double(), labels, reduction="none")
    logits = Logits(scores, labels, None)
    assert relative_error(logits.losses, losses) < 2e-6
    want[torch.arange(2, device="cuda"), labels] -= 1
    assert relative_error(logits.gradient(torch.ones(2, device="cuda")), want) < 2e-6
