"""What a model on a mesh refuses, on every rank, and that what each refusal advises works: a row of
the page's table, or a place that raises, without a remedy that was tried fails."""

import ast
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from cases import mesh_of
from harness import RankContext
from model_runs import padded_batch, plain_batch
from test_models import answers, headed, of_rows, of_tokens, with_a_loss_of_its_own
from tiny_models import HAS_BLOCKS, HAS_STATES, VOCAB, build
from tiny_towers import batch_with_images, build_with_tower, random
from transformers.models.mixtral import modeling_mixtral

import ds_usp
from ds_usp import ConfigError, DataError, LayoutError, MeshError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.replicas import join_shards
from ds_usp.integrations.transformers import attach, enable, refusals, whole_arguments
from ds_usp.integrations.transformers.__main__ import main
from ds_usp.training import PrefixTree

WORLD = 2
PAGE = Path(__file__).resolve().parents[2] / "docs" / "usage" / "transformers.md"
Act = Callable[[], Any]
Batch = Callable[[], dict[str, Any]]


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


def jumping_and_masked() -> dict[str, Any]:
    ids = plain_batch()["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids).clone()
    positions[:, 20:] += 50
    return unlabeled(position_ids=positions, attention_mask=torch.ones_like(ids))


def numbered(*numbers: int, **more: Any) -> dict[str, Any]:
    """Documents of 9, 21 and 11 tokens that a mask numbers."""
    mask = torch.tensor(numbers).repeat_interleave(torch.tensor([9, 21, 11]))
    return unlabeled(attention_mask=mask.expand(2, 41), **more)


def with_last(name: str, number: int) -> dict[str, Any]:
    """A batch whose last token, which one rank holds, is another number."""
    batch: dict[str, Any] = plain_batch()
    batch[name] = batch[name].clone()
    batch[name][0, -1] = number
    return batch


def run(model: Any, batch: Any = None, **options: Any) -> Any:
    """A pass of an enabled model on one rank, whose loss is finite where it has one."""
    with enable(model, ds_usp.SequenceMesh.single(), **options):
        out = model(**(plain_batch() if batch is None else batch))
    assert out.get("loss") is None or torch.isfinite(out.loss), out.loss
    return out


def llama(**batch: Any) -> Any:
    return run(build("llama"), batch)


def llama_plain() -> Any:
    return llama(**plain_batch())


def without(name: str, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in batch.items() if key != name}


def labels_of_padding_ignored(side: str) -> dict[str, Any]:
    """As the message says: labels[attention_mask == 0] = -100; on the left pad on the right."""
    batch = padded_with_labels(side)
    if side == "left":
        batch = {name: x.flip(1) for name, x in batch.items()}
    batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def hole_as_documents() -> dict[str, Any]:
    ids = a_hole()["input_ids"]
    return unlabeled(position_ids=(torch.arange(ids.shape[1]) % 20).expand_as(ids))


def generate(enabled: bool) -> Any:
    model, ids = build("llama"), torch.ones(1, 4, dtype=torch.int64)
    with enable(model, ds_usp.SequenceMesh.single()):
        if enabled:
            return model.generate(ids, max_new_tokens=2)
        with torch.no_grad():
            model.generate(ids, max_new_tokens=2)
    return model.generate(ids, max_new_tokens=2, use_cache=False)


def phi4(as_embeddings: bool) -> Any:
    """Images beside the tokens, or in embeddings of the enabled model's own tower."""
    model = build("phi4_multimodal")
    ids = plain_batch()["input_ids"]
    config = model.config.vision_config
    if not as_embeddings:
        return run(model, unlabeled(image_pixel_values=random(1, 1, 3, 28, 28)))
    with enable(model, ds_usp.SequenceMesh.single()) as enabled, torch.no_grad():
        image = random(1, 3, config.image_size, config.image_size)
        tower = model.model.embed_tokens_extend.image_embed.img_processor
        hidden = tower(pixel_values=image).last_hidden_state.flatten(0, -2)
        embeds = model.get_input_embeddings()(ids).clone()
        embeds[:, 5 : 5 + len(hidden)] = hidden
        return enabled.model(inputs_embeds=embeds, labels=plain_batch()["labels"])


class WithALossOfItsOwn(transformers.LlamaForCausalLM):
    def forward(
        self, input_ids: Any, position_ids: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        out = super().forward(input_ids, position_ids=position_ids, labels=labels, **more)
        if labels is not None:
            out["loss"] = out.loss + out.logits.square().mean()
        return out


class AddsToItsLoss(transformers.LlamaForCausalLM):
    def forward(
        self, input_ids: Any, position_ids: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        out = super().forward(input_ids, position_ids=position_ids, labels=labels, **more)
        if labels is not None:
            out.loss.add_(out.logits.square().mean())
        return out


def own_forward(kind: Any = WithALossOfItsOwn, **batch: Any) -> Any:
    return run(kind(build("llama").config), batch)


class WithRoutersOfItsOwn(transformers.MixtralForCausalLM):
    def forward(
        self, input_ids: Any, position_ids: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        asked = more.pop("output_router_logits", False)
        out = super().forward(input_ids, position_ids=position_ids, labels=labels, **more)
        out["aux_loss"] = out.logits.std() if asked else None
        return out


def another_router_loss(*_: Any) -> torch.Tensor:
    return torch.ones(())


def routers(own: bool, asked: bool) -> Any:
    """A loss of the routers in a model's own way, or by another function than is known."""
    model = build("mixtral")
    if own:
        model.__class__ = WithRoutersOfItsOwn
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(modeling_mixtral, "load_balancing_loss_func", another_router_loss)
        out = run(model, {**plain_batch(), "output_router_logits": asked})
        assert own or modeling_mixtral.load_balancing_loss_func is another_router_loss
    return out


class WritesIntoItsLabels(transformers.LlamaForCausalLM):
    def forward(
        self, input_ids: Any, position_ids: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        if labels is not None:
            labels.masked_fill_(labels == labels[0, 0], -100)
        return super().forward(input_ids, position_ids=position_ids, labels=labels, **more)


def loss_of_whole_logits() -> Any:
    logits = own_forward(input_ids=plain_batch()["input_ids"]).logits
    assert logits.shape == (2, 41, VOCAB)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.ones(80).long())


def bert(pooling: bool) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return run(transformers.BertModel(config, add_pooling_layer=pooling).eval(), unlabeled())


def next_sentence() -> Any:
    return transformers.BertForNextSentencePrediction(
        transformers.BertConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()


class OwnAttention(torch.nn.Module):
    """Attention to this many times its keys, by transformers' interface or by its own way."""

    def __init__(self, keys: int, called: bool) -> None:
        super().__init__()
        self.keys, self.called, self.is_causal = keys, called, True

    def forward(self, hidden_states: torch.Tensor, usp: Any, **_: Any) -> tuple[torch.Tensor, None]:
        x = hidden_states[:, None]
        if self.called:
            keys = torch.cat([x] * self.keys, 2)
            attend = transformers.AttentionInterface().get_interface("usp", None)
            return attend(self, x, keys, keys, None, usp=usp)[0].flatten(2), None
        return x[:, 0], None


def own_attention(*, keys: int = 1, called: bool = True) -> Any:
    model = build("llama")
    model.model.layers[1].self_attn = OwnAttention(keys, called)
    return run(model)


def part(alone: bool) -> Any:
    model = build("llama")
    with enable(model, ds_usp.SequenceMesh.single()):
        return (model.model if alone else model)(**unlabeled())


def roberta_decoder() -> Any:
    config = build("roberta").config
    config.is_decoder = True
    return transformers.RobertaForCausalLM(config)


def shared_after_padding(name: str) -> Any:
    rows, mask = IDS[:1].repeat(2, 1), torch.ones(2, 41, dtype=torch.long)
    rows[1, -1], mask[:, :5] = 3 + (rows[1, -1] == 3), 0
    return run(build(name), {"input_ids": rows, "attention_mask": mask}, share_prefixes=True)


def positioned(first: int) -> dict[str, Any]:
    return unlabeled(position_ids=torch.arange(first, first + 41).expand(2, 41))


def share_a_configuration(copy: bool) -> None:
    config = build("llama").config
    first = transformers.LlamaForCausalLM(config)
    other = transformers.LlamaConfig(**config.to_dict()) if copy else config
    with enable(first, ds_usp.SequenceMesh.single()):
        run(transformers.LlamaForCausalLM(other))


def set_attention(disable: bool) -> Any:
    model = build("llama")
    handle = enable(model, ds_usp.SequenceMesh.single())
    if disable:
        handle.disable()
    model.set_attn_implementation("eager")
    return model(**plain_batch())


def roberta(**more: Any) -> Any:
    model = build("roberta")
    return run(model, {**plain_batch(), **more})


def begin_after_padding() -> Any:
    first = build("roberta").config.pad_token_id + 1
    return roberta(position_ids=torch.arange(first, first + 41).expand(2, 41))


def opt(side: str, **more: Any) -> Any:
    return run(build("opt"), {**padded_batch(side), **more})


def prefix(whole: bool) -> Any:
    """A prefix whose tokens see each other, in two runs or in one."""
    model = build_with_tower("paligemma")
    batch = batch_with_images(model, {"pixel_values": random(2, 3, 28, 28)})
    if not whole:
        batch["token_type_ids"][:, -3:] = 0
    return run(model, batch)


def rows(side: str = "right", pad: int | None = 0) -> Any:
    model = headed("ForSequenceClassification")()
    model.config.pad_token_id = pad
    return run(model, of_rows(side))


def first_of_rows(side: str) -> Any:
    base = build("roberta").config
    base.num_labels = 3
    model = transformers.RobertaForSequenceClassification(base)
    batch = {**of_rows(side), "position_ids": torch.arange(2, 43).expand(2, 41)}
    return run(model, batch)


def padded_answers(one_by_one: bool) -> None:
    model = headed("ForQuestionAnswering")()
    batch = answers()
    if not one_by_one:
        run(model, {**batch, "attention_mask": padded_batch("right")["attention_mask"]})
    for row, tokens in ((0, 41), (1, 28)):  # without their padding
        at = {name: x[row : row + 1] for name, x in batch.items()}
        at["input_ids"] = at["input_ids"][:, :tokens]
        run(model, {name: x.clamp(max=tokens - 1) if x.ndim == 1 else x for name, x in at.items()})


def labels_of_tokens(ignored: bool) -> Any:
    batch = of_tokens()
    if not ignored:
        batch["labels"] = batch["labels"].clamp(min=0)
    return run(headed("ForTokenClassification")(), batch)


def command(name: str) -> None:
    if main([name]) == 1:
        raise ds_usp.UnsupportedAttentionError(name)


def with_loha(**settings: Any) -> Any:
    config = peft.LoHaConfig(target_modules=["v_proj"], **settings)
    return peft.inject_adapter_in_model(config, build("llama").train())


def whole_rows(**options: Any) -> Any:
    return run(headed("ForSequenceClassification")(), of_rows(), **options)


def version(installed: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals.transformers, "__version__", installed)
        refusals.check_version()


def llama4(**changes: Any) -> Any:
    return run(build("llama4_text", no_rope_layers=[1, 0], **changes))


def hooked_head(hooked: bool) -> Any:
    model = build("llama")
    if hooked:
        model.lm_head.register_forward_hook(lambda *_: None)
    return run(model, loss_chunks=2)


class HandsOn(transformers.LlavaForConditionalGeneration):
    """Gives its text model more than the embeddings of an image, as Mllama does."""

    def forward(
        self, input_ids: Any, position_ids: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        if "pixel_values" in more:
            more |= self.handed
        return super().forward(input_ids, position_ids=position_ids, labels=labels, **more)


def hands_on(images: bool, **handed: Any) -> Any:
    model = HandsOn(build_with_tower("llava").config)
    model.handed = handed
    batch = batch_with_images(model, {"pixel_values": random(2, 3, 28, 28)})
    return run(model, batch if images else without("pixel_values", batch))


def prompts(learned: bool) -> Any:
    model = build("llama")
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=learned)}
    return run(model)


def see(mask: ds_usp.MaskSpec) -> Any:
    """Attention of 16 tokens under a mask."""
    mesh, q = ds_usp.SequenceMesh.single(), random(1, 16, 2, 8)
    layout = mesh.layout("zigzag", 16)
    return ds_usp.usp_attention(q, q, q, mesh=mesh, layout=layout, mask=mask)


def drop_in(mask: ds_usp.MaskSpec) -> Any:
    mesh = ds_usp.SequenceMesh.single()
    return ds_usp.USPAttention(torch.nn.Identity(), mesh=mesh, mask=mask, dropout_p=0.0)


ROOT = (0, 8, None)
TREE = (ROOT, (8, 12, 0), (12, 16, 0))
ROWS_OF_TREE = ds_usp.MaskSpec.causal([0, 8, 12, 16])


def tree(*segments: tuple[int, int, int | None]) -> Act:
    return lambda: see(ds_usp.MaskSpec.tree(segments))


def rectangles(*given: tuple[int, int, int, int, str]) -> Act:
    return lambda: see(ds_usp.MaskSpec.rectangles(given, 16))


SQUARES = (0, 8, 0, 8, "causal"), (8, 16, 8, 16, "full")
IDS = plain_batch()["input_ids"]
NUMBERS = torch.tensor([9 * [0] + 32 * [1]])  # of two documents
PACKED = torch.tensor([[*range(9), *range(32)]])


def weighted(weight: float, **others: Any) -> Any:
    given = {"input_ids": IDS, "labels": IDS, "loss_weights": torch.full((2, 41), weight)}
    return llama(**given, **others)


WEIGHTS = {"loss_weights": torch.ones(2, 41)}


def in_tree(**others: Any) -> dict[str, Any]:
    """A prompt and two answers, a batch of one row."""
    segments = [(0, 20, None), (20, 30, 0), (30, 41, 0)]
    return {"input_ids": IDS[:1], "tree": segments, **others}


def loaded_tree() -> Any:
    loader = ds_usp.training.SequenceParallelDataLoader
    batch = PrefixTree()([{"prompt": list(range(20)), "answers": [[1, 2], [3]]}])
    return next(iter(loader([batch], ds_usp.SequenceMesh.single())))


def t5() -> Any:
    sizes = {
        "vocab_size": 97,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def rwkv() -> Any:
    config = transformers.RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2)
    return transformers.RwkvForCausalLM(config)


def borders() -> dict[str, Any]:
    ends = torch.tensor([0, 9, 41])
    return {"input_ids": torch.arange(3, 44)[None], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def ids_of(*shape: int) -> dict[str, Any]:
    return {"input_ids": torch.ones(shape, dtype=torch.int64)}


# Batches of Llama that every rank refuses before it sends anything: the error, a word of it, what
# is refused, and what to give instead.
BATCHES: Mapping[str, tuple[type[Exception], str, Batch, Batch]] = {
    "labels of padding on the right": (
        DataError,
        "-100",
        lambda: padded_with_labels("right"),
        lambda: labels_of_padding_ignored("right"),
    ),
    "labels of padding on the left": (
        DataError,
        "-100",
        lambda: padded_with_labels("left"),
        lambda: labels_of_padding_ignored("left"),
    ),
    "a label after padding": (
        DataError,
        "first real token",
        first_token_after_padding,
        lambda: padded_batch("left"),
    ),
    "padding inside": (Unsupported, "ends of a row", a_hole, hole_as_documents),
    "a mask of tokens x tokens": (
        Unsupported,
        "[batch, tokens]",
        lambda: unlabeled(attention_mask=torch.ones(2, 1, 41, 41)),
        hole_as_documents,
    ),
    "a mask of numbers that fall": (
        DataError,
        "0 and 1",
        lambda: numbered(2, 1, 0),
        lambda: numbered(1, 2, 0),
    ),
    "a mask of numbers and positions": (
        DataError,
        "contradict each other in row 0 at token 9",
        lambda: numbered(1, 2, 0, position_ids=torch.arange(41).expand(2, 41) % 20),
        lambda: numbered(
            1, 2, 0, position_ids=torch.cat([*map(torch.arange, (9, 21, 11))]).expand(2, 41)
        ),
    ),
    "positions that jump and a mask": (
        DataError,
        "attention_mask",
        jumping_and_masked,
        lambda: without("attention_mask", jumping_and_masked()),
    ),
    "borders that positions contradict": (
        DataError,
        "the wrong one",
        lambda: {**borders(), "position_ids": (torch.arange(41) % 20)[None]},
        borders,
    ),
    "labels of a shard": (
        LayoutError,
        "whole sequence",
        lambda: unlabeled(labels=plain_batch()["labels"][:, :21]),
        plain_batch,
    ),
    "labels of other rows": (
        LayoutError,
        "must be",
        lambda: unlabeled(labels=IDS[:1]),
        lambda: unlabeled(labels=IDS),
    ),
    "too few tokens": (LayoutError, "at least", lambda: ids_of(1, 1), lambda: ids_of(1, 2)),
    "tokens of floats": (
        DataError,
        "whole numbers",
        lambda: {"input_ids": IDS.float()},
        unlabeled,
    ),
    "embeddings of whole numbers": (
        DataError,
        "torch.int64",
        lambda: {"inputs_embeds": torch.ones(2, 41, 64, dtype=torch.int64)},
        lambda: {"inputs_embeds": random(2, 41, 64)},
    ),
    "numbers of documents as text": (
        DataError,
        "seq_idx='x'",
        lambda: unlabeled(seq_idx="x"),
        unlabeled,
    ),
    "tokens without rows": (
        DataError,
        "one row or more",
        lambda: ids_of(41),
        lambda: ids_of(1, 41),
    ),
    "rows of choices": (
        DataError,
        "must be a tensor",
        lambda: ids_of(2, 3, 41),
        lambda: ids_of(6, 41),
    ),
    "no rows": (DataError, "one row or more", lambda: ids_of(0, 41), lambda: ids_of(1, 41)),
    "no tokens": (DataError, "input_ids", lambda: without("input_ids", plain_batch()), plain_batch),
    "a cache": (
        Unsupported,
        "KV cache",
        lambda: unlabeled(past_key_values=transformers.DynamicCache()),
        unlabeled,
    ),
    "use_cache": (Unsupported, "no KV", lambda: unlabeled(use_cache=True), unlabeled),
    "logits_to_keep": (Unsupported, "last tokens", lambda: unlabeled(logits_to_keep=1), unlabeled),
    "output_attentions": (
        Unsupported,
        "never made",
        lambda: unlabeled(output_attentions=True),
        unlabeled,
    ),
    "return_dict": (Unsupported, "by their names", lambda: unlabeled(return_dict=False), unlabeled),
    "ignore_index": (
        Unsupported,
        "-100",
        lambda: {**plain_batch(), "ignore_index": 0},
        plain_batch,
    ),
    "images": (
        Unsupported,
        "whole sequence",
        lambda: unlabeled(pixel_values=torch.zeros(1, 3, 4, 4)),
        lambda: {"inputs_embeds": random(2, 41, 64)},
    ),
    "a token without an embedding": (
        DataError,
        "10000",
        lambda: with_last("input_ids", 10_000),
        plain_batch,
    ),
    "a negative token": (DataError, "-1", lambda: with_last("input_ids", -1), plain_batch),
    "a label without an output": (
        DataError,
        "10000",
        lambda: with_last("labels", 10_000),
        plain_batch,
    ),
    "tensors in a dict": (
        Unsupported,
        "not known",
        lambda: unlabeled(shared={"keys": (torch.zeros(2),)}),
        unlabeled,
    ),
}

# Models that enable refuses: the error, a word of it, the model, and what is enabled instead.
MODELS: Mapping[str, tuple[type[Exception], str, Act, Act]] = {
    "two sequences": (Unsupported, "two sequences", t5, lambda: command("llama")),
    "a state": (Unsupported, "carry a state", rwkv, lambda: command("llama")),
    "no positions": (
        Unsupported,
        "position_ids",
        lambda: build("cpmant"),
        lambda: command("llama"),
    ),
    "outputs without names": (
        Unsupported,
        "return_dict",
        lambda: build("llama", return_dict=False),
        llama_plain,
    ),
    "an attention that counts its tokens": (
        Unsupported,
        "counts the tokens",
        lambda: build("llama4_text", no_rope_layers=[1, 0]),
        lambda: llama4(attn_temperature_tuning=False),
    ),
    "a model of diffusers": (
        ConfigError,
        "LTXVideoTransformer3DModel is a model of diffusers",
        lambda: type("LTXVideoTransformer3DModel", (), {"__module__": "diffusers.models"})(),
        lambda: run(build("llama")),
    ),
    "layers left out at random": (
        Unsupported,
        "layerdrop=0.5",
        lambda: build("opt", layerdrop=0.5),
        lambda: run(build("opt", layerdrop=0.0)),
    ),
    "parts of an adapter dropped at random": (
        Unsupported,
        "(module_dropout)",
        lambda: with_loha(module_dropout=0.5),
        lambda: run(with_loha(module_dropout=0)),
    ),
    "no model of transformers": (
        ConfigError,
        "PreTrainedModel",
        lambda: torch.nn.Linear(2, 2),
        llama_plain,
    ),
}

# Other refusals: a word of the error, what is refused, what to do.
CASES: Mapping[str, tuple[str, Act, Act]] = {
    "borders of a tree": (
        "Give attention mask=batch.mask",
        lambda: loaded_tree().documents,
        lambda: loaded_tree().mask,
    ),
    "attention dropout": (
        "attention_dropout=0.25 of its configuration",
        lambda: run(build("llama", attention_dropout=0.25)),
        lambda: (llama_plain(), run(build("llama", attention_dropout=0.25).eval())),
    ),
    "attention dropout of GPT-2": (
        "attn_pdrop=0.25 of its configuration",
        lambda: run(build("gpt2", attn_pdrop=0.25)),
        lambda: run(build("gpt2")),
    ),
    "generate": ("generate: a new token", lambda: generate(True), lambda: generate(False)),
    "images without a text model": ("Give inputs_embeds", lambda: phi4(False), lambda: phi4(True)),
    "a prefix in two runs": (
        "other tokens between its own",
        lambda: prefix(False),
        lambda: prefix(True),
    ),
    "a router loss of its own": (
        "leave output_router_logits out",
        lambda: routers(True, True),
        lambda: routers(True, False),
    ),
    "another router loss": (
        "leave output_router_logits out",
        lambda: routers(False, True),
        lambda: routers(False, False),
    ),
    "more added to its loss": (
        "in its own way",
        lambda: own_forward(AddsToItsLoss, **plain_batch()),
        loss_of_whole_logits,
    ),
    "labels changed in place": (
        "changes its labels",
        lambda: own_forward(WritesIntoItsLabels, **plain_batch()),
        lambda: own_forward(WritesIntoItsLabels, input_ids=plain_batch()["input_ids"]),
    ),
    "a loss of its own": (
        "in its own way",
        lambda: own_forward(**plain_batch()),
        loss_of_whole_logits,
    ),
    "a masked head's loss of its own": (
        f"AlbertForMaskedLM of transformers {transformers.__version__} computes its loss",
        lambda: run(build("albert")),
        lambda: run(build("albert"), unlabeled()),
    ),
    "own loss function": (
        "logits='whole'",
        lambda: run(with_a_loss_of_its_own()),
        lambda: run(with_a_loss_of_its_own(), logits="whole"),
    ),
    "summed gradients": ("gradients='sum'", lambda: whole_rows(gradients="sum"), whole_rows),
    "shards of rows": ("logits='shard'", lambda: whole_rows(logits="shard"), whole_rows),
    "chunks of rows": ("loss_chunks=2", lambda: whole_rows(loss_chunks=2), whole_rows),
    "another pad token": ("pad_token_id", lambda: rows(pad=96), rows),
    "padding on the left of first tokens": (
        "first token",
        lambda: first_of_rows("left"),
        lambda: first_of_rows("right"),
    ),
    "padded answers": (
        "all tokens of a row",
        lambda: padded_answers(False),
        lambda: padded_answers(True),
    ),
    "labels of padded tokens": (
        "padding to -100",
        lambda: labels_of_tokens(False),
        lambda: labels_of_tokens(True),
    ),
    "a head with hooks": ("forward hooks", lambda: hooked_head(True), lambda: hooked_head(False)),
    "chunks without a head": (
        "no output embeddings",
        lambda: run(build("llama").model, unlabeled(), loss_chunks=2),
        lambda: run(build("llama").model, unlabeled()),
    ),
    "chunks of queries": (
        "query_chunks=2",
        lambda: run(build("llama"), query_chunks=2),
        lambda: run(build("llama")),
    ),
    "attention in one's own way": (
        "OwnAttention in the place of a layer's attention",
        lambda: own_attention(called=False),
        own_attention,
    ),
    "keys of others": ("from 41 tokens to 82 keys", lambda: own_attention(keys=2), own_attention),
    "neighbors in embeddings": (
        "trigram_input=False",
        lambda: run(build("mobilebert", masked=True), unlabeled()),
        lambda: run(build("mobilebert", masked=True, trigram_input=False), unlabeled()),
    ),
    "states of images": (
        "cross_attention_states",
        lambda: hands_on(True, cross_attention_states=torch.ones(2, 3)),
        lambda: hands_on(False),
    ),
    "a mask of one's own": (
        "mask of its own",
        lambda: hands_on(True, attention_mask=torch.ones(2, 1, 41, 41).tril()),
        lambda: hands_on(True),
    ),
    "learned prompts": ("prompt learning", lambda: prompts(True), lambda: prompts(False)),
    "an unknown layout": (
        "unknown token layout",
        lambda: run(build("llama"), layout="diagonal"),
        llama_plain,
    ),
    "a mask of other tokens": (
        "as the tokens are",
        lambda: llama(input_ids=IDS, attention_mask=torch.ones(2, 40)),
        lambda: llama(input_ids=IDS, attention_mask=torch.ones(2, 41)),
    ),
    "borders of two rows": (
        "borders of one row",
        lambda: llama(input_ids=IDS, cu_seq_lens_q=torch.tensor([0, 9, 41])),
        lambda: llama(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor([0, 9, 41])),
    ),
    "borders beside other padding": (
        "end at 38, and attention_mask keeps 30",
        lambda: llama(
            input_ids=IDS[:1],
            cu_seq_lens_q=torch.tensor([0, 9, 38]),
            attention_mask=(torch.arange(41) < 30)[None],
        ),
        lambda: llama(
            input_ids=IDS[:1],
            cu_seq_lens_q=torch.tensor([0, 9, 38]),
            attention_mask=(torch.arange(41) < 38)[None],
        ),
    ),
    "labels behind the last border": (
        "what comes after the last of cu_seq_lens_q is padding",
        lambda: llama(input_ids=IDS[:1], labels=IDS[:1], cu_seq_lens_q=torch.tensor([0, 9, 38])),
        lambda: llama(
            input_ids=IDS[:1],
            labels=IDS[:1].masked_fill(torch.arange(41) >= 38, -100),
            cu_seq_lens_q=torch.tensor([0, 9, 38]),
        ),
    ),
    "numbers of documents alone": (
        "position_ids that start anew in each document",
        lambda: llama(input_ids=IDS[:1], seq_idx=NUMBERS),
        lambda: llama(input_ids=IDS[:1], seq_idx=NUMBERS, position_ids=PACKED),
    ),
    "numbers of other tokens": (
        "must be",
        lambda: llama(input_ids=IDS[:1], seq_idx=NUMBERS[:, :8], position_ids=PACKED),
        lambda: llama(input_ids=IDS[:1], seq_idx=NUMBERS, position_ids=PACKED),
    ),
    "one sentence after another": (
        "returns logits",
        lambda: run(next_sentence(), unlabeled()),
        lambda: bert(False),
    ),
    "a part of a model": ("not a part of it", lambda: part(True), lambda: part(False)),
    "positions of a tree": (
        "padding_idx",
        lambda: run(roberta_decoder(), in_tree()),
        lambda: llama(**in_tree()),
    ),
    "shared prefixes with padding before": (
        "first real token",
        lambda: shared_after_padding("opt"),
        lambda: shared_after_padding("llama"),
    ),
    "pooled": ("pooler_output", lambda: bert(True), lambda: bert(False)),
    "a shared configuration": (
        "configuration of its own",
        lambda: share_a_configuration(False),
        lambda: share_a_configuration(True),
    ),
    "another attention": (
        "after enable",
        lambda: set_attention(False),
        lambda: set_attention(True),
    ),
    "roberta": ("padding_idx", roberta, begin_after_padding),
    "left padding": ("first real token", lambda: opt("left"), lambda: opt("right")),
    "left padding, positions given": (
        "first real token",
        lambda: opt("left"),
        lambda: opt("left", position_ids=torch.arange(41).expand(2, 41)),
    ),
    "another kind of layers": ("zaya", lambda: command("zaya"), lambda: command("llama")),
    "a layout without neighbours": (
        "layout='striped'",
        lambda: run(build("lfm2"), layout="striped"),
        lambda: run(build("lfm2"), layout="auto"),
    ),
    "documents from another position": (
        "begins at token 13 with position 13",
        lambda: run(build("recurrent_gemma"), padded_batch("left")),
        lambda: run(build("recurrent_gemma"), padded_batch("right")),
    ),
    "a cache of states": (
        "cache_params: there is no KV cache",
        lambda: run(build("mamba"), unlabeled(cache_params=transformers.DynamicCache())),
        lambda: run(build("mamba"), unlabeled()),
    ),
    "a document that begins later": (
        "begins at token 0 with position 5",
        lambda: run(build("recurrent_gemma"), positioned(5)),
        lambda: run(build("recurrent_gemma"), positioned(0)),
    ),
    "documents of recurrent_gemma": (
        "begins at token 9 with position 9",
        lambda: run(build("recurrent_gemma"), borders()),
        lambda: run(build("recurrent_gemma"), {"input_ids": IDS[:1]}),
    ),
    "a tree in layers that see later tokens": (
        "tokens that come later",
        lambda: run(build("modernbert", layer_types=["full_attention"] * 2), in_tree()),
        lambda: run(build("modernbert"), {"input_ids": IDS}),
    ),
    "a tree beside images": (
        "is given more than tokens",
        lambda: run(build_with_tower("gemma3"), in_tree(token_type_ids=torch.zeros(1, 41).long())),
        lambda: run(build_with_tower("gemma3"), {"input_ids": IDS}),
    ),
    "a tree in a head of whole rows": (
        "single tokens of a row",
        lambda: run(headed("ForSequenceClassification")(), in_tree()),
        lambda: run(headed("ForSequenceClassification")(), {"input_ids": IDS}),
    ),
    "a tree with a loss of routers": (
        "leave output_router_logits out",
        lambda: run(build("mixtral"), in_tree(output_router_logits=True)),
        lambda: run(build("mixtral"), in_tree()),
    ),
    "a tree and padding": (
        "a root of its own",
        lambda: llama(**in_tree(attention_mask=torch.ones(1, 41).triu(3))),
        lambda: llama(
            **{**in_tree(), "tree": [(0, 20, None), (20, 30, 0), (30, 38, 0), (38, 41, -1)]}
        ),
    ),
    "a tree and borders": (
        "both say where documents end",
        lambda: llama(**in_tree(cu_seq_lens_q=torch.tensor([0, 41]))),
        lambda: llama(**in_tree()),
    ),
    "a tree and labels": (
        "give 'shift_labels'",
        lambda: llama(**in_tree(labels=IDS[:1])),
        lambda: llama(**PrefixTree()([{"prompt": IDS[0, :30], "answers": [IDS[0, 30:]]}])),
    ),
    "a tree and other positions": (
        "go from 29 to 30 at token 30",
        lambda: llama(**in_tree(position_ids=torch.arange(41)[None])),
        lambda: llama(**in_tree()),
    ),
    "a tree and positions of three kinds": (
        "must be [batch, tokens]",
        lambda: llama(**in_tree(position_ids=torch.arange(41).expand(3, 1, 41))),
        lambda: llama(**in_tree()),
    ),
    "weights without labels": (
        "this pass has no labels",
        lambda: llama(input_ids=IDS, loss_weights=torch.ones(2, 41)),
        lambda: llama(input_ids=IDS),
    ),
    "weights and a loss of rows": (
        "the model's own of whole rows",
        lambda: run(headed("ForSequenceClassification")(), {**of_rows(), **WEIGHTS}),
        lambda: run(headed("ForSequenceClassification")(), of_rows()),
    ),
    "a count beside weights": (
        "divided by the sum of the weights",
        lambda: weighted(2.0, num_items_in_batch=torch.tensor(80)),
        lambda: weighted(2.0, num_items_in_batch=torch.tensor(160.0)),
    ),
    "rounded weights": (
        "whole numbers",
        lambda: llama(input_ids=IDS, labels=IDS, loss_weights=torch.ones(2, 41).bfloat16()),
        lambda: llama(input_ids=IDS, labels=IDS, loss_weights=torch.ones(2, 41).long()),
    ),
    "weights below 0": ("finite and 0 or more", lambda: weighted(-1.0), lambda: weighted(0.5)),
    "shared prefixes of embeddings": (
        "rows are compared by their tokens",
        lambda: run(build("llama"), {"inputs_embeds": random(2, 41, 64)}, share_prefixes=True),
        lambda: run(build("llama"), {"inputs_embeds": random(2, 41, 64)}),
    ),
    "a tree that ends early": ("must be 16 (padding", tree(*TREE[:2]), tree(*TREE)),
    "a gap in a tree": (
        "in no segment",
        tree(ROOT, (9, 16, 0)),
        tree(ROOT, (8, 9, None), (9, 16, 0)),
    ),
    "segments that overlap": ("do not overlap", tree(ROOT, (7, 16, 0)), tree(ROOT, (8, 16, 0))),
    "an empty segment": ("leave it out", tree(ROOT, (8, 8, 0), (8, 16, 0)), tree(ROOT, (8, 16, 0))),
    "a later parent": (
        "comes after its parent",
        tree((0, 4, 1), (4, 12, None), (12, 16, 1)),
        tree((0, 8, None), (8, 12, 0), (12, 16, 0)),
    ),
    "no such parent": ("None for a root", tree(ROOT, (8, 16, 4)), tree(ROOT, (8, 16, None))),
    "a window over a tree": (
        "MaskSpec.tree(segments)",
        lambda: ds_usp.MaskSpec(3, 2, [0, 8, 12, 16], parents=((-1, 0, 0),)),
        tree(*TREE),
    ),
    "parents of a zigzag": (
        "leave them to the mask",
        lambda: ds_usp.TokenLayout("contiguous", 16, documents=ds_usp.MaskSpec.tree(TREE)),
        lambda: see(ds_usp.MaskSpec.tree(TREE)),
    ),
    "a module of a tree": (
        "call ds_usp.usp_attention with it",
        lambda: drop_in(ds_usp.MaskSpec.tree(TREE)),
        tree(*TREE),
    ),
    "rectangles that share a pair": (
        "cut one of them",
        rectangles(*SQUARES, (6, 16, 0, 8, "full")),
        rectangles(*SQUARES, (8, 16, 0, 8, "full")),
    ),
    "a token without itself": (
        "(8, 16, 8, 16, 'causal')",
        rectangles(SQUARES[0]),
        rectangles(*SQUARES),
    ),
    "another transformers": ("5.4.1", lambda: version("5.4.1"), lambda: version("5.5.0")),
}
# Of layers that carry a state, in transformers that has them as they are served.
OF_STATES = ("another kind of layers", "a layout without neighbours")
OF_STATES += ("documents from another position", "a cache of states")
OF_STATES += ("a document that begins later", "documents of recurrent_gemma")

# The rows of the page's table, by the left cell: the cases above that do what the right cell says,
# or the test that does, where that takes a trainer or several ranks.
ROWS: Mapping[str, tuple[str, ...]] = {
    "weights and settings that differ": (
        "test_weights.py::test_what_one_rank_changes_is_refused_in_the_next_pass",
        "test_weights.py::test_other_weights_are_refused_until_they_are_equal",
    ),
    "layers that carry a state": ("another kind of layers", "a state", "no positions"),
    '`layout="striped"`': ("a layout without neighbours",),
    "documents of RecurrentGemma": ("documents from another position",),
    "KV caches, `logits_to_keep`": ("a cache", "use_cache", "logits_to_keep"),
    "`generate` where": ("generate",),
    "images and sounds of models without": ("images without a text model", "images"),
    "blocks of tokens that see": ("a prefix in two runs", "states of images"),
    "masks of tokens x tokens": ("a mask of tokens x tokens", "padding inside"),
    "two descriptions of documents": (
        "positions that jump and a mask",
        "a mask of numbers and positions",
        "borders that positions contradict",
        "borders beside other padding",
    ),
    "labels of padding": ("labels of padding on the right", "labels of padding on the left"),
    "left padding where": ("left padding", "left padding, positions given"),
    "another `ignore_index`": ("ignore_index",),
    "RoBERTa": ("roberta",),
    "`tree` or `share_prefixes` in layers": (
        "a tree in layers that see later tokens",
        "a tree beside images",
        "a tree in a head of whole rows",
        "a tree with a loss of routers",
        "shared prefixes of embeddings",
    ),
    "`tree` beside": (
        "a tree and padding",
        "a tree and borders",
        "a tree and labels",
        "a tree and other positions",
        "a tree and positions of three kinds",
    ),
    "`loss_weights` below 0": (
        "weights below 0",
        "rounded weights",
        "weights without labels",
        "weights and a loss of rows",
        "a count beside weights",
    ),
    "a model that computes its loss": (
        "a loss of its own",
        "a masked head's loss of its own",
        "more added to its loss",
    ),
    "a `model.loss_function` of your own": ("own loss function",),
    '`gradients="sum"`': ("summed gradients", "shards of rows", "chunks of rows"),
    "padding that a head": ("another pad token", "padded answers"),
    "router losses": ("a router loss of its own", "another router loss"),
    "`output_attentions`": ("output_attentions",),
    "attention dropout": ("attention dropout", "attention dropout of GPT-2"),
    "outputs that are not one value": ("pooled",),
    "layers that count": ("an attention that counts its tokens",),
    "models that share": ("a shared configuration", "another attention"),
    "`ParallelismConfig` with": ("test_trainer.py::test_what_would_not_train_alike_is_refused",),
    "a trainer's `model_init`": ("test_trainer.py::test_a_trainer_trains_as_one_process_does",),
    "transformers before": ("another transformers",),
}


def acts(name: str) -> tuple[type[Exception], str, Act, Act]:
    """Of a case of any table: the error, a word of it, what is refused, and the remedy."""
    if name in BATCHES:
        kind, word, batch, instead = BATCHES[name]
        return kind, word, lambda: llama(**batch()), lambda: llama(**instead())
    if name in MODELS:
        kind, word, make, remedy = MODELS[name]
        return kind, word, lambda: run(make()), remedy
    word, refused, remedy = CASES[name]
    return ds_usp.USPError, word, refused, remedy


def is_served(name: str) -> bool:
    return (HAS_STATES or name not in OF_STATES) and (HAS_BLOCKS or name != "a prefix in two runs")


ALL = [*BATCHES, *MODELS, *CASES]
SERVED = list(filter(is_served, ALL))


@pytest.mark.parametrize("name", SERVED)
def test_what_a_refusal_advises_works(name):
    acts(name)[3]()


def test_each_case_is_refused_and_each_place_that_refuses_has_a_case():
    """Places that raise in what reads models and batches, against those that the cases reach."""
    reached = set()
    for name in SERVED:
        kind, word, refused, _ = acts(name)
        if name == "too few tokens":  # for two ranks
            continue
        with pytest.raises(kind) as error:
            refused()
        assert word in str(error.value), f"{name}: {error.value}"
        for frame in traceback.extract_tb(error.value.__traceback__):
            reached.add((Path(frame.filename).name, frame.lineno))
    for module in (refusals, whole_arguments) if HAS_STATES else ():
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Raise):
                continue
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            places = {(Path(str(module.__file__)).name, line) for line in lines}
            text = ast.get_source_segment(source, node)
            assert places & reached, f"no remedy was tried of: {text}"


def test_each_row_of_the_page_was_tried():
    table = PAGE.read_text(encoding="utf-8").split("| refused | what to do |")[1].split("\n\n")[0]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert len(cells) == len(ROWS)
    for cell, (start, cases) in zip(cells, ROWS.items(), strict=True):
        assert cell.startswith(start), f"{cell}: no remedy was tried"
        for case in cases:
            assert case in ALL or is_a_test(case), case


def is_a_test(name: str) -> bool:
    file, _, function = name.partition("::")
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    return f"\ndef {function}(" in source


# One for each way in which a batch is read, on ranks; what is refused is the same on one.
ON_RANKS = ("labels of padding on the right", "padding inside", "a mask of numbers and positions")
ON_RANKS += ("labels of a shard", "too few tokens", "rows of choices", "a cache", "images")
ON_RANKS += ("a token without an embedding", "a label without an output")


def every_batch(ctx: RankContext) -> None:
    model, mesh = build("llama"), mesh_of(WORLD)
    with enable(model, mesh):
        for name in ON_RANKS:
            kind, word, make, _ = BATCHES[name]
            mesh.ledger.reset()
            with pytest.raises(kind, match=re.escape(word)):
                model(**make())
            assert not mesh.ledger.calls, f"{name}: {mesh.ledger}"
        model(**plain_batch()).loss.backward()  # the ranks still agree


def test_batches_are_refused_on_every_rank_and_nothing_is_sent(pool):
    pool.run(every_batch, WORLD)


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


def test_arguments_of_enable_are_checked():
    model, mesh = build("llama"), ds_usp.SequenceMesh.single()
    for changes, kind in (
        ({"layout": "diagonal"}, LayoutError),
        ({"kernel": "flsh"}, Unsupported),
        ({"tuning": 3}, ConfigError),
        ({"share_prefixes": "yes"}, ConfigError),
        ({"gradients": "max"}, ConfigError),
        ({"logits": "none"}, ConfigError),
        ({"offload_ratio": "half"}, ConfigError),
        ({"mesh": None}, ConfigError),
    ):
        with pytest.raises(kind):
            enable(model, **{"mesh": mesh, **changes})
    with pytest.raises(ConfigError, match="exchange the two") as swapped:
        enable(mesh, model)
    assert len(str(swapped.value)) < 200  # a model's repr is pages
    with pytest.raises(ConfigError, match="is no Trainer of transformers"):
        attach(model, mesh)
    before = model.config._attn_implementation, model.loss_function
    with enable(model, mesh):
        with pytest.raises(ConfigError, match="enabled on this mesh already"):
            enable(model, mesh)
        with pytest.raises(Unsupported, match="after disable"):
            model.generate(torch.ones(1, 4, dtype=torch.int64))
    assert (model.config._attn_implementation, model.loss_function) == before
    assert model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2).shape == (1, 6)
    nemotron = build("nemotron")
    with enable(nemotron, mesh), pytest.raises(ConfigError, match="not a part of it"):
        nemotron.model.layers[0].self_attn(torch.ones(1, 8, 64), (torch.ones(1, 8, 8),) * 2)


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
