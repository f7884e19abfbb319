"""What a model on a mesh refuses, on every rank, and what joins and sums shards."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from cases import mesh_of
from harness import RankContext
from model_runs import padded_batch, plain_batch
from tiny_models import build

import ds_usp
from ds_usp import ConfigError, DataError, LayoutError, MeshError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.replicas import join_shards
from ds_usp.integrations.transformers import attach, enable

WORLD = 2


def unlabeled(**more: Any) -> dict[str, Any]:
    """Only tokens, and what is refused."""
    return {"input_ids": plain_batch()["input_ids"], **more}


def padded_with_labels(side: str) -> dict[str, Any]:
    """labels=input_ids.clone(), the padding too."""
    batch = padded_batch(side)
    return {**batch, "labels": batch["input_ids"].clone()}


def first_token_after_padding() -> dict[str, Any]:
    batch = padded_batch("left")
    batch["labels"][1, 13] = 5
    return batch


def a_hole() -> dict[str, Any]:
    batch = padded_batch("right")
    batch["attention_mask"][0, 7] = 0
    return batch


def packed_and_masked() -> dict[str, Any]:
    ids = plain_batch()["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids) % 20
    return unlabeled(position_ids=positions, attention_mask=torch.ones_like(ids))


def with_last(name: str, number: int) -> dict[str, Any]:
    """A batch whose last token, which one rank holds, is another number."""
    batch: dict[str, Any] = plain_batch()
    batch[name] = batch[name].clone()
    batch[name][0, -1] = number
    return batch


BATCHES: Mapping[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "labels of padding on the right": (
        lambda: padded_with_labels("right"),
        DataError,
        "padding to -100",
    ),
    "labels of padding on the left": (
        lambda: padded_with_labels("left"),
        DataError,
        "padding to -100",
    ),
    "a label after padding": (first_token_after_padding, DataError, "first real token"),
    "padding inside": (a_hole, Unsupported, "ends of a row"),
    "a mask of tokens x tokens": (
        lambda: unlabeled(attention_mask=torch.ones(2, 1, 41, 41)),
        Unsupported,
        "[batch, tokens]",
    ),
    "a mask of documents": (
        lambda: unlabeled(attention_mask=torch.full((2, 41), 2)),
        Unsupported,
        "other than 0 and 1",
    ),
    "positions and a mask": (packed_and_masked, DataError, "Leave attention_mask out"),
    "borders that positions contradict": (
        lambda: {
            "input_ids": torch.arange(3, 44)[None],
            "position_ids": (torch.arange(41) % 20)[None],
            "cu_seq_lens_q": torch.tensor([0, 9, 41]),
            "cu_seq_lens_k": torch.tensor([0, 9, 41]),
        },
        DataError,
        "give one of the two",
    ),
    "labels of a shard": (
        lambda: unlabeled(labels=plain_batch()["labels"][:, :21]),
        LayoutError,
        "whole sequence",
    ),
    "too few tokens": (
        lambda: {"input_ids": torch.ones(1, 1, dtype=torch.int64)},
        LayoutError,
        "at least",
    ),
    "tokens without rows": (
        lambda: {"input_ids": torch.arange(3, 44)},
        DataError,
        "of one row or more",
    ),
    "rows of choices": (
        lambda: {"input_ids": torch.ones(2, 3, 41, dtype=torch.int64)},
        DataError,
        "must be a tensor",
    ),
    "no rows": (
        lambda: {"input_ids": torch.ones(0, 41, dtype=torch.int64)},
        DataError,
        "one row or more",
    ),
    "no tokens": (lambda: {"labels": plain_batch()["labels"]}, DataError, "input_ids"),
    "a cache": (
        lambda: unlabeled(past_key_values=transformers.DynamicCache()),
        Unsupported,
        "no KV cache",
    ),
    "use_cache": (lambda: unlabeled(use_cache=True), Unsupported, "no KV"),
    "logits_to_keep": (lambda: unlabeled(logits_to_keep=1), Unsupported, "last tokens"),
    "output_attentions": (lambda: unlabeled(output_attentions=True), Unsupported, "never made"),
    "return_dict": (lambda: unlabeled(return_dict=False), Unsupported, "by their names"),
    "ignore_index": (lambda: {**plain_batch(), "ignore_index": 0}, Unsupported, "-100"),
    "images": (
        lambda: unlabeled(pixel_values=torch.zeros(1, 3, 4, 4)),
        Unsupported,
        "placed by the whole sequence",
    ),
    "a token without an embedding": (
        lambda: with_last("input_ids", 10_000),
        DataError,
        "input_ids contain 10000",
    ),
    "a negative token": (lambda: with_last("input_ids", -1), DataError, "contain -1"),
    "a label without an output": (
        lambda: with_last("labels", 10_000),
        DataError,
        "labels contain 10000",
    ),
    "tensors in a dict": (
        lambda: unlabeled(shared={"keys": (torch.zeros(2),)}),
        Unsupported,
        "not known here",
    ),
}


def every_batch(ctx: RankContext, names: list[str]) -> dict[str, str | None]:
    """What each batch raised, if it was the expected error, and what was sent for it."""
    model, seen = build("llama"), {}
    mesh = mesh_of(WORLD)
    with enable(model, mesh):
        for name in names:
            make, kind, _ = BATCHES[name]
            mesh.ledger.reset()
            try:
                model(**make())
                seen[name] = None
            except kind as error:
                seen[name] = str(error)
            assert not mesh.ledger.calls, f"{name}: {mesh.ledger}"
        model(**plain_batch()).loss.backward()  # the ranks still agree
    return seen


def test_batches_are_refused_on_every_rank_and_nothing_is_sent(pool):
    for seen in pool.run(every_batch, WORLD, names=list(BATCHES)):
        for name, text in seen.items():
            assert text is not None and BATCHES[name][2] in text, (name, text)


def another_batch(ctx: RankContext) -> None:
    batch = plain_batch()
    if ctx.rank:  # two tokens change places: their sum does not
        batch["input_ids"][0, [3, 8]] = batch["input_ids"][0, [8, 3]]
    with enable(build("llama"), mesh_of(WORLD)) as enabled:
        enabled.model(**batch)


def one_rank_cannot_read_its_batch(ctx: RankContext) -> None:
    batch: dict[str, Any] = plain_batch()
    if ctx.rank:
        batch["input_ids"] = "not a tensor"
    with enable(build("llama"), mesh_of(WORLD)) as enabled:
        enabled.model(**batch)


def test_ranks_with_other_batches_raise_everywhere(pool):
    errors = pool.errors(another_batch, WORLD)
    assert all(isinstance(e, MeshError) and "a batch of" in str(e) for e in errors), errors
    first, second = pool.errors(one_rank_cannot_read_its_batch, WORLD)
    assert isinstance(first, MeshError)
    assert isinstance(second, Exception)


def with_another_loss() -> Any:
    model = build("llama")
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    return model


MODELS: Mapping[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two sequences": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
            )
        ),
        Unsupported,
        "two sequences",
    ),
    "a state": (
        lambda: transformers.RwkvForCausalLM(
            transformers.RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2)
        ),
        Unsupported,
        "carry a state",
    ),
    "no positions": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)
        ),
        Unsupported,
        "position_ids",
    ),
    "a loss that is no sum": (with_another_loss, ConfigError, "sum over tokens"),
    "outputs without names": (
        lambda: build("llama", return_dict=False),
        Unsupported,
        "return_dict",
    ),
    "an attention that counts its tokens": (
        lambda: build("llama4_text", no_rope_layers=[1, 0]),
        Unsupported,
        "counts the tokens",
    ),
    "no model of transformers": (lambda: torch.nn.Linear(2, 2), ConfigError, "PreTrainedModel"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_refused(name):
    make, kind, text = MODELS[name]
    with pytest.raises(kind, match=text):
        enable(make(), ds_usp.SequenceMesh.single())


def test_arguments_of_enable_are_checked():
    model, mesh = build("llama"), ds_usp.SequenceMesh.single()
    for changes, kind in (
        ({"layout": "diagonal"}, LayoutError),
        ({"gradients": "max"}, ConfigError),
        ({"logits": "none"}, ConfigError),
        ({"offload_ratio": "half"}, ConfigError),
        ({"mesh": None}, ConfigError),
    ):
        with pytest.raises(kind):
            enable(model, **{"mesh": mesh, **changes})
    with pytest.raises(ConfigError, match="is no Trainer of transformers"):
        attach(model, mesh)
    before = model.config._attn_implementation, model.loss_function
    with enable(model, mesh):
        with pytest.raises(ConfigError, match="enabled already"):
            enable(model, mesh)
        with pytest.raises(Unsupported, match="after disable"):
            model.generate(torch.ones(1, 4, dtype=torch.int64))
    assert (model.config._attn_implementation, model.loss_function) == before
    assert model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2).shape == (1, 6)


def test_models_that_share_a_configuration_are_told_apart():
    config, mesh = build("llama").config, ds_usp.SequenceMesh.single()
    first, second = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    with enable(first, mesh), pytest.raises(ConfigError, match="configuration of its own"):
        enable(second, mesh)
    enable(second, mesh).disable()
    with enable(first, mesh) as enabled:
        first.set_attn_implementation("eager")
        with pytest.raises(ConfigError, match="after enable"):
            enabled.model(**plain_batch())


def test_a_part_of_a_model_has_no_batch():
    model = build("llama")
    with (
        enable(model, ds_usp.SequenceMesh.single()),
        pytest.raises(ConfigError, match="not a part of it"),
    ):
        model.model(**unlabeled())


def test_outputs_of_single_tokens_are_refused():
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_probs_dropout_prob=0.0,
    )
    for pooling in (False, True):
        model = transformers.BertModel(config, add_pooling_layer=pooling)
        with enable(model, ds_usp.SequenceMesh.single()):
            if not pooling:
                assert model(**unlabeled()).last_hidden_state.shape == (2, 41, 16)
                continue
            with pytest.raises(Unsupported, match="pooler_output"):
                model(**unlabeled())
    model = transformers.BertForNextSentencePrediction(config)
    with (
        enable(model, ds_usp.SequenceMesh.single()),
        pytest.raises(Unsupported, match="returns logits"),
    ):
        model(**unlabeled())


def under_autocast(ctx: RankContext, ulysses: int) -> float:
    """The relative difference of logits of bf16 autocast on the mesh from one rank's."""
    model, batch = build("qwen3"), plain_batch()
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**batch, use_cache=False)
        with enable(model, mesh_of(ulysses), logits="whole"):
            have = model(**batch)
            have.loss.backward()
    assert have.logits.dtype == want.logits.dtype
    return float((have.logits - want.logits).norm() / want.logits.norm())


@pytest.mark.parametrize("ulysses", [2, 1])
def test_autocast_leaves_queries_and_keys_in_another_dtype(pool, ulysses):
    assert max(pool.run(under_autocast, WORLD, ulysses=ulysses)) < 0.02


def test_positions_that_do_not_count_tokens_from_0_must_be_given():
    mesh = ds_usp.SequenceMesh.single()
    roberta = build("roberta")
    with enable(roberta, mesh), pytest.raises(DataError, match="padding_idx"):
        roberta(**plain_batch())
    with enable(build("opt"), mesh) as enabled:
        enabled.model(**padded_batch("right"))
        with pytest.raises(DataError, match="first real token"):
            enabled.model(**padded_batch("left"))
    # Nor are those that a tree is given, from 0 on, what the model would have counted.
    roberta.config.is_decoder = True
    decoder = transformers.RobertaForCausalLM(roberta.config)
    ids = plain_batch()["input_ids"][:1]
    with enable(decoder, mesh), pytest.raises(DataError, match="padding_idx"):
        decoder(input_ids=ids, tree=[(0, 20, None), (20, 30, 0), (30, 41, 0)])
    rows, mask = ids.repeat(2, 1), torch.ones(2, 41, dtype=torch.long)
    rows[1, -1], mask[:, :5] = 3 + (rows[1, -1] == 3), 0
    opt = build("opt")
    with enable(opt, mesh, share_prefixes=True), pytest.raises(DataError, match="first real token"):
        opt(input_ids=rows, attention_mask=mask)


# ------------------------------------------------------------------ sums and joins of shards


def joined_gradients(ctx: RankContext, gradients: str) -> float:
    """The error of dx, where every rank makes another loss of the whole of a joined tensor."""
    mesh = mesh_of(WORLD)
    layout = mesh.layout("zigzag", 11)
    generator = torch.Generator().manual_seed(3)
    x, *weights = (
        torch.randn(2, 11, 3, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    local = layout.shard(x, 1, mesh.rank).requires_grad_()
    joined = join_shards(local, layout, mesh, 1, gradients)  # type: ignore[arg-type]
    (joined.square() * weights[ctx.rank]).sum().backward()
    # The mean over the ranks of the losses; a parameter's gradient is a sum of such shards.
    want = layout.shard(2 * x * sum(weights) / WORLD, 1, mesh.rank)
    scale = WORLD if gradients == "mean" else 1
    assert local.grad is not None
    return float((local.grad / scale - want).abs().max() + (joined - x).abs().max())


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_a_joined_tensor_has_the_gradient_of_the_mean_loss(pool, gradients):
    assert max(pool.run(joined_gradients, WORLD, gradients=gradients)) < 1e-12
