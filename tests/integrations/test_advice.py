"""Every refusal of models and batches says what to do, and that is done here: a row of the page's
table, or a place that raises, without a remedy that was tried fails."""

import ast
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from model_runs import padded_batch, plain_batch
from test_models import answers, headed, of_rows, of_tokens, with_a_loss_of_its_own
from test_refusals import (
    BATCHES,
    MODELS,
    a_hole,
    packed_and_masked,
    padded_with_labels,
    unlabeled,
)
from tiny_models import HAS_BLOCKS, HAS_STATES, VOCAB, build
from tiny_towers import batch_with_images, build_with_tower, random
from transformers.models.mixtral import modeling_mixtral

import ds_usp
from ds_usp.integrations.transformers import enable, refusals, whole_arguments
from ds_usp.integrations.transformers.__main__ import main
from ds_usp.training import PrefixTree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "usage" / "transformers.md"
Act = Callable[[], Any]


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


def loss_of_whole_logits() -> Any:
    logits = own_forward(input_ids=plain_batch()["input_ids"]).logits
    assert logits.shape == (2, 41, VOCAB)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.ones(80).long())


def bert(pooling: bool) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return run(transformers.BertModel(config, add_pooling_layer=pooling).eval(), unlabeled())


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


# What the refusal says, what is refused (where that is no row of BATCHES or MODELS), what to do.
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
    "borders and a mask": (
        "both say",
        lambda: llama(
            input_ids=IDS[:1],
            cu_seq_lens_q=torch.tensor([0, 9, 41]),
            attention_mask=torch.ones(1, 41),
        ),
        lambda: llama(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor([0, 9, 41])),
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
    "labels of other rows": (
        "must be",
        lambda: llama(input_ids=IDS, labels=IDS[:1]),
        lambda: llama(input_ids=IDS, labels=IDS),
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
    "a tree in layers with a window": (
        "a window or chunks of 11 tokens",
        lambda: run(build("mistral"), in_tree()),
        lambda: run(build("mistral"), {"input_ids": IDS}),
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
    "shared prefixes with a state": (
        "goes on in one branch only",
        lambda: run(build("lfm2"), share_prefixes=True),
        lambda: run(build("lfm2")),
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
    "weights below 0": (
        "finite and 0 or more",
        lambda: weighted(-1.0),
        lambda: weighted(0.5),
    ),
    "shared prefixes of embeddings": (
        "rows are told apart by their tokens",
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
        lambda: ds_usp.MaskSpec(3, 0, [0, 8, 12, 16], parents=((-1, 0, 0),)),
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
OF_STATES += ("documents from another position", "shared prefixes with a state")
# What is given instead of each batch of BATCHES, to the same model.
INSTEAD: Mapping[str, Callable[[], dict[str, Any]]] = {
    "labels of padding on the right": lambda: labels_of_padding_ignored("right"),
    "labels of padding on the left": lambda: labels_of_padding_ignored("left"),
    "a label after padding": lambda: padded_batch("left"),
    "padding inside": hole_as_documents,
    "a mask of tokens x tokens": hole_as_documents,
    "a mask of documents": hole_as_documents,
    "positions and a mask": lambda: without("attention_mask", packed_and_masked()),
    "borders that positions contradict": lambda: {
        "input_ids": torch.arange(3, 44)[None],
        "cu_seq_lens_q": torch.tensor([0, 9, 41]),
    },
    "labels of a shard": plain_batch,
    "too few tokens": lambda: {"input_ids": torch.ones(1, 2, dtype=torch.int64)},
    "tokens without rows": lambda: {"input_ids": torch.arange(3, 44)[None]},
    "rows of choices": lambda: {"input_ids": torch.ones(6, 41, dtype=torch.int64)},
    "no rows": lambda: {"input_ids": IDS[:1]},
    "no tokens": plain_batch,
    "a cache": unlabeled,
    "use_cache": unlabeled,
    "logits_to_keep": unlabeled,
    "output_attentions": unlabeled,
    "return_dict": unlabeled,
    "ignore_index": plain_batch,
    "images": lambda: {"inputs_embeds": random(2, 41, 64)},
    "a token without an embedding": plain_batch,
    "a negative token": plain_batch,
    "a label without an output": plain_batch,
    "tensors in a dict": unlabeled,
}
# What is enabled instead of each model of MODELS.
OTHER_MODELS: Mapping[str, Act] = {
    **dict.fromkeys(("two sequences", "a state", "no positions"), lambda: command("llama")),
    "outputs without names": lambda: run(build("llama", return_dict=True)),
    "a loss that is no sum": lambda: run(with_a_loss_of_its_own(), logits="whole"),
    "an attention that counts its tokens": lambda: llama4(attn_temperature_tuning=False),
    "no model of transformers": lambda: run(build("llama")),
}

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
    "positions that start anew": ("positions and a mask",),
    "labels of padding": ("labels of padding on the right", "labels of padding on the left"),
    "left padding where": ("left padding", "left padding, positions given"),
    "another `ignore_index`": ("ignore_index",),
    "RoBERTa": ("roberta",),
    "`tree` or `share_prefixes` in layers": (
        "a tree in layers with a window",
        "a tree in layers that see later tokens",
        "shared prefixes with a state",
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


@pytest.mark.parametrize("name", CASES)
def test_what_a_refusal_advises_works(name):
    if name in OF_STATES and not HAS_STATES:
        pytest.skip("layers with a state need a newer transformers")
    if name == "a prefix in two runs" and not HAS_BLOCKS:
        pytest.skip("all blocks are refused")
    text, refused, remedy = CASES[name]
    with pytest.raises(ds_usp.USPError, match=re.escape(text)):
        refused()
    remedy()


@pytest.mark.parametrize("name", BATCHES)
def test_what_is_given_instead_of_a_batch_runs(name):
    llama(**INSTEAD[name]())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_enabled_instead_of_a_model_runs(name):
    OTHER_MODELS[name]()


def test_each_row_of_the_page_was_tried():
    table = PAGE.read_text(encoding="utf-8").split("| refused | what to do |")[1].split("\n\n")[0]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert len(cells) == len(ROWS)
    for cell, (start, cases) in zip(cells, ROWS.items(), strict=True):
        assert cell.startswith(start), f"{cell}: no remedy was tried"
        for case in cases:
            assert case in {*CASES, *BATCHES, *MODELS} or is_a_test(case), case


def is_a_test(name: str) -> bool:
    file, _, function = name.partition("::")
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    return f"\ndef {function}(" in source


@pytest.mark.skipif(not HAS_STATES, reason="the cases of layers with a state do not run")
def test_each_place_that_refuses_has_a_remedy():
    """Places that raise in what reads models and batches, against those that the cases reach."""
    reached = set()
    refused: list[Act] = [first for _, first, _ in CASES.values()]
    refused += [lambda make=make: llama(**make()) for make, *_ in BATCHES.values()]
    refused += [lambda make=make: run(make()) for make, *_ in MODELS.values()]
    for act in refused:
        try:
            act()
        except ds_usp.USPError as error:
            for frame in traceback.extract_tb(error.__traceback__):
                reached.add((Path(frame.filename).name, frame.lineno))
    for module in (refusals, whole_arguments):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Raise):
                continue
            places = {(Path(str(module.__file__)).name, line) for line in lines_of(node)}
            text = ast.get_source_segment(source, node)
            assert places & reached, f"no remedy was tried of: {text}"


def lines_of(node: ast.Raise) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
