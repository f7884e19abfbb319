"""Head and loss in chunks of tokens: losses and gradients as without, no logits of all tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from peak_memory import LiveBytes
from training_models import (
    VOCAB,
    batch_of,
    cohere,
    difference,
    forward,
    gemma,
    gradients,
    granite,
    llama,
    modernbert,
)
from transformers import LlamaForCausalLM, LlamaModel
from transformers.loss.loss_utils import ForCausalLMLoss

import ds_usp
from ds_usp.errors import ConfigError, LayoutError, UnsupportedAttentionError
from ds_usp.integrations.transformers import enable
from ds_usp.integrations.transformers.attention import RunningPass, Targets
from ds_usp.integrations.transformers.trainer import _join_logits
from ds_usp.integrations.transformers.whole_batch_loss import ChunkedHead, ChunkedLogits

LARGE_VOCAB = 32768
MODELS = {f.__name__: f for f in (llama, gemma, cohere, granite, modernbert)}


def with_and_without(
    ctx: RankContext, ulysses: int, model: str, frozen: bool = False
) -> tuple[float, float, list[str]]:
    """The relative difference of the loss and of gradients, and the keys of the outputs."""
    batches = [batch_of(tokens, tokens) for tokens in (30, 41)]
    batches[0]["labels"] = batches[0]["labels"].masked_fill(batches[0]["labels"] < 20, -100)
    batches[1]["num_items_in_batch"] = torch.tensor(57)
    losses, grads = [], []
    for chunks in (0, 5):
        built = MODELS[model]()
        if frozen:
            built.get_output_embeddings().requires_grad_(False)
        with enable(built, mesh_of(ulysses), loss_chunks=chunks):
            of_batches = []
            for batch in batches:  # the second accumulates
                torch.manual_seed(11)
                out = built(**batch)
                out.loss.backward()
                of_batches.append(out.loss.detach())
            keys = list(out)
            with torch.no_grad():
                of_batches.append(forward(built, batches[0]))
        losses.append(torch.stack(of_batches))
        grads.append(gradients(built))
    error = float((losses[1] - losses[0]).norm() / losses[0].norm())
    return error, difference(grads[1], grads[0]), keys


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_those_without_chunks(pool, model):
    for ulysses in (1, 2):
        for loss, grads, keys in pool.run(with_and_without, 2, ulysses=ulysses, model=model):
            assert loss < 1e-6
            assert grads < 1e-5
            assert keys == ["loss"]


def test_a_frozen_head(pool):
    for loss, grads, _ in pool.run(with_and_without, 2, ulysses=1, model="llama", frozen=True):
        assert loss < 1e-6
        assert grads < 1e-5


def test_a_loss_in_fp64_is_not_rounded():
    head = torch.nn.Linear(4, 7, bias=False, dtype=torch.float64)
    hidden, labels = torch.randn(1, 9, 4, dtype=torch.float64), torch.arange(9).view(1, 9) % 7
    # One ninth has no exact value in fp32. Of fp64 logits transformers' own loss is in fp32.
    want = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    chunked = ChunkedHead(head, 2, RunningPass())
    options = {"vocab_size": 7, "num_items_in_batch": 9, "shift_labels": labels}
    loss = chunked.loss(ChunkedLogits(chunked, hidden), ForCausalLMLoss, labels, **options)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)


def peak(ctx: RankContext, chunks: int, tokens: int) -> int:
    model = llama(vocab_size=LARGE_VOCAB, num_hidden_layers=1)
    with enable(model, mesh_of(2), loss_chunks=chunks):
        forward(model, batch_of(tokens)).backward()  # the gradients are there
        with LiveBytes() as live:
            forward(model, batch_of(tokens)).backward()
        return live.peak


def test_logits_of_all_tokens_never_exist(pool):
    tokens = 128
    all_logits = 4 * tokens * LARGE_VOCAB  # of a rank, 2 rows of half the tokens, in fp32
    whole = pool.run(peak, 2, chunks=0, tokens=tokens)[0]
    chunked = pool.run(peak, 2, chunks=16, tokens=tokens)[0]
    assert whole > 2 * all_logits
    assert chunked < whole - 1.5 * all_logits


def logits_of_an_evaluation(ctx: RankContext) -> tuple[int, ...]:
    """What Trainer's metrics are given."""
    model = llama().eval()
    trainer: Any = SimpleNamespace(model=model, prediction_step=lambda f, x, _: f(**x))
    with enable(model, mesh_of(2), loss_chunks=2) as enabled, torch.no_grad():
        _join_logits(trainer, enabled)
        out = trainer.prediction_step(model, batch_of(30), False)
        assert "logits" not in model(**batch_of(30))
    return tuple(out.logits.shape)


def test_metrics_are_given_logits(pool):
    assert pool.run(logits_of_an_evaluation, 2) == [(2, 30, VOCAB)] * 2


def refused(ctx: RankContext, case: str) -> None:
    class Penalized(LlamaForCausalLM):
        def forward(
            self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **others: Any
        ) -> Any:
            hidden = self.model(input_ids, position_ids=position_ids, **others)[0]
            logits = self.lm_head(hidden)
            return self.loss_function(logits - logits.mean(), labels, VOCAB, **others)

    class Silent(LlamaForCausalLM):
        def forward(
            self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **others: Any
        ) -> Any:
            return super().forward(input_ids, position_ids=position_ids, **others)

    config = llama().config
    mesh = mesh_of(2)
    if case == "no head":
        enable(LlamaModel(config), mesh, loss_chunks=2)
    if case == "too many":
        model = llama()
        enable(model, mesh, loss_chunks=9)
        forward(model, batch_of(17))
    if case == "hook":
        model = llama()
        model.lm_head.register_forward_hook(lambda _, __, logits: logits * 2)
        enable(model, mesh, loss_chunks=2)
    model = (Penalized if case == "penalized" else Silent)(config)
    enable(model, mesh, loss_chunks=2)
    forward(model, batch_of(17))


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("hook", ConfigError, "hooks"),
        ("no head", ConfigError, "no output embeddings"),
        ("too many", LayoutError, "loss_chunks=9, and a rank has 8 of the 17 tokens"),
        ("penalized", UnsupportedAttentionError, "computes with its logits"),
        ("silent", UnsupportedAttentionError, "returns no loss"),
    ],
)
def test_refusals(pool, case, error, words):
    for raised in pool.errors(refused, 2, case=case):
        assert type(raised) is error
        assert words in str(raised)


@pytest.mark.parametrize(
    "options", [{"loss_chunks": -1}, {"mlp_chunks": True}, {"loss_chunks": 2, "logits": "whole"}]
)
def test_options_that_are_no_numbers_of_chunks(options):
    with pytest.raises(ConfigError, match="_chunks="):
        enable(llama(), ds_usp.SequenceMesh.single(), **options)


@pytest.mark.parametrize("writes", [False, True])
def test_a_compiled_model_that_writes_its_labels_is_told(writes):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def are_given(labels: torch.Tensor, targets: Targets) -> bool:
        if writes:
            labels.add_(1)
        return targets.is_given(labels)

    for version in range(3):
        labels = torch.zeros(2, 4, dtype=torch.long)
        for _ in range(version):
            labels.add_(0)
        assert are_given(labels, Targets(labels, labels, 1, False)) is not writes
