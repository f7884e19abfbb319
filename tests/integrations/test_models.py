"""Models of transformers on 4 ranks: padded and packed batches, scaled rotary embeddings, dropout,
gradient checkpointing, at every split of ulysses x ring."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from cases import mesh_of
from harness import RankContext
from model_runs import (
    BOUND,
    IGNORED,
    Result,
    counted_attention,
    documents_alone,
    mean_gradients,
    on_the_mesh,
    packed_batch,
    padded_batch,
    plain_batch,
    reference,
    relative,
    take_gradients,
    whole_model,
)
from tiny_models import HAS_BLOCKS, HAS_STATES, build
from tiny_towers import SPECIAL, TOWERS, batch_with_images, build_with_tower, random
from torch import Tensor
from torch.nn.functional import cross_entropy

import ds_usp
from ds_usp import DataError, UnsupportedAttentionError
from ds_usp.integrations.transformers import attention, enable

PAGE = Path(ds_usp.__file__).parents[1] / "docs" / "usage" / "transformers.md"
WORLD = 4
ULYSSES = (4, 2, 1)

# Model types and what makes them tell more than their tiny default.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_attention_heads": 8, "head_dim": 8},  # 2 KV heads for 4 ranks
    "qwen3": {},  # a sliding and a full layer
    "qwen3_moe": {},
    "mistral": {},  # a window in every layer
    "gemma2": {},  # soft cap and window
    "gemma3_text": {},
    "gpt_oss": {},  # sinks and window
    "deepseek_v3": {},  # 24 and 16 as head dims
    "phi": {},
    "phi3": {},
    "gpt2": {},  # learned positions
    "llama4_text": {},  # chunked attention
    "modernbert": {},  # masked: bidirectional, with two-sided windows
}
BATCHES: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "plain": plain_batch,
    "padded on the right": lambda: padded_batch("right"),
    "padded on the left": lambda: padded_batch("left"),
    "packed": packed_batch,
    "two rows packed differently": lambda: packed_batch((9, 21, 11), (30, 1, 10)),
}
Errors = dict[str, float]


def compare(
    ctx: RankContext,
    make: Callable[[], Any],
    batches: Mapping[str, Callable[[], dict[str, Tensor]]],
    truth: Callable[[Any, Mapping[str, Tensor]], Result],
    turn: int | None = None,
) -> Errors:
    """Errors by batch and mesh; ``turn``: of each batch on one mesh, which is another for the next.
    Each rank has the truth of its share of the batches, of a model of its own: some keep what a
    batch has set."""
    model, wants = make(), {}
    for index, (name, batch) in enumerate(batches.items()):
        if index % ctx.world == ctx.rank:
            wants[name] = truth(make(), batch())
    errors = {}
    for at, ulysses in enumerate(ULYSSES):
        with enable(model, mesh_of(ulysses), logits="whole"):
            for index, (name, batch) in enumerate(batches.items()):
                if turn is not None and (at + index + turn) % len(ULYSSES):
                    continue
                have = on_the_mesh(model, mesh_of(ulysses), batch())
                if name in wants:
                    errors[f"{name}, ulysses {ulysses}"] = have.error(wants[name])
    return errors


def all_exact(errors: list[Errors], count: int) -> None:
    joined = {name: error for each in errors for name, error in each.items()}
    assert len(joined) == count
    wrong = {name: error for name, error in joined.items() if not error <= BOUND}
    assert not wrong, wrong


def every_batch(ctx: RankContext, model_type: str) -> Errors:
    def make() -> Any:
        return build(model_type, **MODELS[model_type])

    return compare(ctx, make, BATCHES, reference, list(MODELS).index(model_type))


@pytest.mark.parametrize("model_type", MODELS)
def test_batches_are_exact_at_every_split(pool, model_type):
    all_exact(pool.run(every_batch, WORLD, model_type=model_type), len(BATCHES))


def padded_on_both_sides(ctx: RankContext) -> tuple[float, str, float]:
    """OPT counts positions from the first real token. Qwen3.5 counts from 0; in its file there is a
    model of images that does not."""
    model = build("opt")
    want = whole_model(model, padded_batch("right"))
    want.logits *= padded_batch("right")["attention_mask"][..., None]
    with enable(model, mesh_of(1), logits="whole"):
        error = on_the_mesh(model, mesh_of(1), padded_batch("right")).error(want)
        with pytest.raises(DataError) as refusal:
            model(**padded_batch("left"))
    if not HAS_STATES:
        return error, str(refusal.value), 0.0
    model = build("qwen3_5_text")
    want = documents_alone(model, padded_batch("left"))
    with enable(model, mesh_of(2), logits="whole"):
        return (
            error,
            str(refusal.value),
            on_the_mesh(model, mesh_of(2), padded_batch("left")).error(want),
        )


def test_positions_that_follow_padding_are_exact_or_refused(pool):
    for right, refusal, left in pool.run(padded_on_both_sides, WORLD):
        assert right < BOUND and left < BOUND
        assert "counts positions from the first real token" in refusal


def masked_batch(mask: list[int], **more: Any) -> dict[str, Tensor]:
    """Documents of 9, 21 and 11 tokens beside a mask that has such values in each of them."""
    batch = packed_batch((9, 21, 11))
    values = torch.tensor(mask).repeat_interleave(torch.tensor([9, 21, 11]))[None]
    batch["labels"][values == 0] = IGNORED
    return {**batch, "attention_mask": values, **more}


def jumping_batch() -> dict[str, Tensor]:
    """One document whose positions jump forward, which its lengths say."""
    ends, positions = torch.tensor([0, 41]), torch.arange(41)
    positions[20:] += 50
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return {**plain_batch(1), "position_ids": positions[None], **lengths}


def one_document(model: Any, batch: Mapping[str, Tensor]) -> Result:
    if "cu_seq_lens_q" not in batch:
        return reference(model, batch)
    hidden = torch.full((1, 1, 41, 41), torch.finfo(torch.float32).min).triu(1)
    kept = {name: x for name, x in batch.items() if not name.startswith("cu_")}
    return whole_model(model, {**kept, "attention_mask": hidden})


MASKED: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "positions and ones": lambda: masked_batch([1, 1, 1]),
    "positions and padding": lambda: masked_batch([1, 1, 0]),
    "positions and padding before": lambda: masked_batch([0, 1, 1]),
    "positions and numbers": lambda: masked_batch([1, 2, 0]),
    "numbers alone": lambda: {
        k: x for k, x in masked_batch([1, 2, 3]).items() if k != "position_ids"
    },
    "lengths of positions that jump": jumping_batch,
}


def documents_beside_a_mask(ctx: RankContext) -> Errors:
    return compare(ctx, lambda: build("llama"), MASKED, one_document, 0)


def test_documents_beside_a_mask_are_exact(pool):
    all_exact(pool.run(documents_beside_a_mask, WORLD), len(MASKED))


# ------------------------------------------------------------------ batches with images


def images(model_type: str, batch: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    model = build_with_tower(model_type)
    return model, {**batch_with_images(model, TOWERS[model_type][1](), batch)}


def with_a_video(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Another image in the first row becomes a video of two frames."""
    ids, labels, kinds = (batch[x].clone() for x in ("input_ids", "labels", "mm_token_type_ids"))
    ids[0, 20:28], labels[0, 20:28], kinds[0, 20:28] = SPECIAL["video_token_id"], IGNORED, 2
    frames = {"pixel_values_videos": random(32, 12), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    return {**batch, "input_ids": ids, "labels": labels, "mm_token_type_ids": kinds, **frames}


def images_alone(model: Any, packed: Mapping[str, Tensor], cut: int) -> tuple[Result, Tensor]:
    """Two documents of a row, an image in each, without the other; and their positions: of text,
    time, height and width."""
    logits, positions = [], []
    tokens = packed["input_ids"].shape[1]
    pixel_values, grids = packed["pixel_values"].chunk(2), packed["image_grid_thw"].split(1)
    for at, pixels, grid in zip((slice(cut), slice(cut, tokens)), pixel_values, grids, strict=True):
        given = {name: packed[name][:, at] for name in ("input_ids", "mm_token_type_ids")}
        given |= {"pixel_values": pixels, "image_grid_thw": grid}
        logits.append(model(**given, use_cache=False).logits)
        places = {name: x for name, x in given.items() if name != "pixel_values"}
        each, _ = model.base_model.get_rope_index(**places)
        positions.append(torch.cat([torch.arange(each.shape[-1]).expand(1, 1, -1), each]))
        model.base_model.rope_deltas = None
    joined = torch.cat(logits, 1)
    loss = cross_entropy(joined[0, :-1], packed["labels"][0, 1:])
    loss.backward()
    want = Result(loss.detach(), joined.detach(), take_gradients(model))
    return want, torch.cat(positions, -1)


def packed_images(ctx: RankContext) -> Errors:
    """Documents by positions of 4 rows, of which the first counts a document's tokens, and by this
    one alone. What generation left in the model makes no positions of another batch."""
    model = build_with_tower("qwen2_5_vl")
    two = batch_with_images(model, TOWERS["qwen2_5_vl"][1](), plain_batch())
    row = {name: two[name] for name in ("pixel_values", "image_grid_thw")}
    for name in ("input_ids", "labels", "mm_token_type_ids"):
        row[name] = torch.cat([two[name][:1, :20], two[name][1:, :21]], 1)
    row["labels"][0, 20] = IGNORED
    want, positions = images_alone(model, row, 20)
    padded = {"inputs_embeds": model.get_input_embeddings()(row["input_ids"]).detach()}
    padded["attention_mask"] = torch.arange(41)[None] > 4
    alone = model(**padded, use_cache=False).logits
    errors = {}
    with enable(model, mesh_of(2), logits="whole"):
        for name, given in {"4 rows": positions, "1 row": positions[0]}.items():
            have = on_the_mesh(model, mesh_of(2), {**row, "position_ids": given})
            errors[f"packed by {name} of positions"] = have.error(want)
        with pytest.raises(DataError, match="do not count tokens 0 to 19 from 0"):
            model(**row, position_ids=positions[0] + 1)
        with pytest.raises(DataError, match="mm_token_type_ids"):
            model(**{**row, "mm_token_type_ids": None}, position_ids=positions[0])
        model.base_model.rope_deltas = torch.full((4, 1), 9)  # of other rows than this batch has
        real = padded["attention_mask"][..., None]
        errors["after generation"] = relative(model(**padded).logits * real, alone * real)
        # Left in the model: as stock, by images of whole rows, and else what was there before.
        left = [int(model.base_model.rope_deltas[0])]
        for given in ({"input_ids": row["input_ids"]}, {**row, "position_ids": positions[0]}, two):
            model(**given)
            left.append(int(model.base_model.rope_deltas[0]))
        rows = {x: two[x] for x in ("input_ids", "image_grid_thw", "mm_token_type_ids")}
        made = model.base_model.get_rope_index(**rows)[1]
        errors["deltas"] = float(left != [9, 9, 9, int(made[0])])
    return errors


IMAGES: Mapping[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "padded": ("qwen3_vl", lambda: padded_batch("right")),
    "padded on the left": ("qwen2_5_vl", lambda: padded_batch("left")),
    "text padded on the left": ("qwen2_5_vl", lambda: padded_batch("left")),
    "a video": ("qwen2_5_vl", plain_batch),
    "packed": ("llava", lambda: packed_batch((9, 21, 11), (30, 1, 10))),
    "blocks": ("gemma3", lambda: padded_batch("right")),
    "a prefix": ("paligemma", plain_batch),
}
OF_BLOCKS = frozenset({"gemma3", "paligemma"})


def every_batch_with_images(ctx: RankContext) -> Errors:
    """Padding, documents and blocks, beside images that some ranks have no token of."""
    errors = packed_images(ctx)
    for name, (model_type, batch) in IMAGES.items():
        model, given = images(model_type, batch())
        given = with_a_video(given) if name == "a video" else given
        given = batch() if name.startswith("text") else given
        if model_type in OF_BLOCKS and not HAS_BLOCKS:
            with enable(model, mesh_of(2), logits="whole"):
                del given["labels"]
                with pytest.raises(UnsupportedAttentionError, match="mask function or_masks"):
                    model(**given)
            continue
        real = given.get("attention_mask", torch.ones_like(given["input_ids"]))[..., None]
        want = whole_model(model, given)
        want.logits *= real
        with enable(model, mesh_of(2), logits="whole"):
            have = on_the_mesh(model, mesh_of(2), given)
        errors[name] = have.error(want)
    return errors


def test_batches_with_images_are_exact(pool):
    for errors in pool.run(every_batch_with_images, WORLD):
        assert max(errors.values()) < BOUND, errors


def without_blocks(ctx: RankContext) -> float:
    """The error of a mask that knows no images."""
    model, given = images("gemma3", plain_batch())
    want = whole_model(model, given)
    right = attention._in_blocks
    attention._in_blocks = lambda band, *_: band.mask
    try:
        with enable(model, mesh_of(2), logits="whole"):
            return on_the_mesh(model, mesh_of(2), given).error(want)
    finally:
        attention._in_blocks = right


@pytest.mark.skipif(not HAS_BLOCKS, reason="masks of blocks are refused before transformers 5.9")
def test_images_see_each_other_both_ways(pool):
    assert min(pool.run(without_blocks, 2)) > 1e-2


def run_program_with_images(ctx: RankContext) -> list[float]:
    names: dict[str, Any] = {}
    section = PAGE.read_text(encoding="utf-8").split("## Images and sounds")[1]
    exec(section.split("```python\n")[1].split("```")[0], names)
    losses: list[float] = names["losses"]
    return losses


def test_the_program_with_images_trains_on_four_ranks_as_on_one(pool):
    (one,) = pool.run(run_program_with_images, 1)
    assert one[-1] < one[0] - 0.1
    for losses in pool.run(run_program_with_images, WORLD):
        assert losses == pytest.approx(one, rel=1e-5)


# ------------------------------------------------------------------ losses of routers

ROUTERS: Mapping[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "padded on the right": ("mixtral", lambda: padded_batch("right")),
    "padded on the left": ("gpt_oss", lambda: padded_batch("left")),
    "packed": ("qwen3_moe", packed_batch),
    "with a state": ("jamba", plain_batch),
    "of two kinds": ("jetmoe", plain_batch),
    "images": ("qwen3_vl_moe", lambda: padded_batch("right")),
}


def router_losses(ctx: RankContext) -> Errors:
    """Both reductions of gradients, in turn; of the loss, and of what is returned beside it."""
    errors = {}
    for at, (name, (model_type, batch)) in enumerate(ROUTERS.items()):
        if name == "with a state" and not HAS_STATES:
            continue
        if name == "images":
            model, given = images(model_type, batch())
        else:
            model, given = build(model_type), batch()
        text = model.config.get_text_config()
        text.output_router_logits, text.router_aux_loss_coef = True, 0.5
        if name in ("of two kinds", "images"):  # in old versions their configuration is not read
            given["output_router_logits"] = True
        model.router_aux_loss_coef = model.aux_loss_coef = 0.5
        real = given.get("attention_mask", torch.ones_like(given["input_ids"]))[..., None]
        out = model(**given, use_cache=False)
        out.loss.backward()
        want = Result(out.loss.detach(), out.logits.detach() * real, take_gradients(model))
        gradients, divisor = (("mean", None), ("sum", 1))[at % 2]
        with enable(model, mesh_of(2), logits="whole", gradients=gradients):
            have = model(**given)
            have.loss.backward()
        joined = mean_gradients(model, divisor)
        found = Result(have.loss.detach(), have.logits.detach() * real, joined)
        errors[name] = max(found.error(want), relative(have.aux_loss, out.aux_loss))
        scores = [x.router_logits[0] * real.flatten(0, 1) for x in (have, out)]
        assert relative(*scores) < BOUND
        assert out.aux_loss > 1, "a loss that is large enough to be seen"
    return errors


def test_losses_of_routers_are_exact(pool):
    for errors in pool.run(router_losses, WORLD):
        assert max(errors.values()) < BOUND, errors


def test_enable_changes_the_text_model_only():
    model = build_with_tower("qwen2_5_vl")
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    tower, states = model.model.visual, [model.model.visual.config]
    hooks = [len(m._forward_pre_hooks) for m in tower.modules()]
    before = model.config.text_config._attn_implementation, states[0]._attn_implementation
    with enable(model, ds_usp.SequenceMesh.single(), recompute="full", mlp_chunks=2) as enabled:
        assert states[0]._attn_implementation == "eager"
        added = [len(m._forward_pre_hooks) for m in tower.modules()]
        assert added == [hooks[0] + 1, *hooks[1:]]  # which refuses it on shards
        assert not any("forward" in vars(m) for m in tower.modules())
        enabled._running.is_sharded = True
        with pytest.raises(UnsupportedAttentionError, match="on shards of the tokens"):
            model.model.get_image_features(**TOWERS["qwen2_5_vl"][1]())
        enabled._running.is_sharded = False
        with pytest.raises(
            (RuntimeError, TypeError)
        ):  # a pass that fails leaves the tower as it is
            model(
                **plain_batch(),
                pixel_values=torch.ones(3, 5),
                image_grid_thw=torch.ones(1, 3).long(),
            )
        model.model.get_image_features(**TOWERS["qwen2_5_vl"][1]())
    assert (model.config.text_config._attn_implementation, states[0]._attn_implementation) == before


# ------------------------------------------------------------------ heads and losses of whole rows


def no_sum(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss of one's own: no sum over tokens, and of labels that it shifts itself."""
    each = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return each.mean(1).square().sum()


def with_a_loss_of_its_own() -> Any:
    model = build("llama")
    model.loss_function = no_sum
    return model


def headed(name: str, model_type: str = "llama") -> Callable[[], Any]:
    def make() -> Any:
        base = build(model_type)
        torch.manual_seed(3)
        base.config.num_labels, base.config.pad_token_id = 3, 0
        base.config.classifier_dropout = 0.0
        cls = getattr(transformers, type(base.base_model).__name__.removesuffix("Model") + name)
        model = cls._from_config(base.config, attn_implementation="eager")
        model.base_model.load_state_dict(base.base_model.state_dict())
        return model.train()

    return make


def beside_a_tower() -> Any:
    """A model that makes masks for two kinds of layers, and hands them to its text model."""
    config = build_with_tower("gemma3").config
    config.num_labels, config.text_config.pad_token_id = 3, 0
    torch.manual_seed(3)
    cls = transformers.Gemma3ForSequenceClassification
    return cls._from_config(config, attn_implementation="eager").train()


def rewards(model: Any, batch: Mapping[str, Tensor]) -> Result:
    """A loss of pairs, computed from what the model returns (TRL's RewardTrainer)."""
    scores = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    loss = -torch.nn.functional.logsigmoid(scores[0, 0] - scores[1, 0])
    loss.backward()
    return Result(loss.detach(), scores.detach())


def labeled(model: Any, batch: Mapping[str, Tensor]) -> Result:
    out = model(**batch)
    out.loss.backward()
    logits = out.logits if "logits" in out else torch.stack([out.start_logits, out.end_logits], -1)
    if "attention_mask" in batch and logits.ndim == 3:  # what padding gives is nobody's
        logits = logits * batch["attention_mask"][..., None]
    return Result(out.loss.detach(), logits.detach())


def answers() -> dict[str, Tensor]:
    ids = plain_batch()["input_ids"]
    at = {"start_positions": torch.tensor([3, 30]), "end_positions": torch.tensor([7, 40])}
    return {"input_ids": ids, **at}


def of_rows(side: str | None = None) -> dict[str, Tensor]:
    batch = plain_batch() if side is None else padded_batch(side)
    ids = batch["input_ids"]
    if side is not None:
        ids[batch["attention_mask"] == 0] = 0
    return batch | {"labels": torch.tensor([2, 1])}


def one_row() -> dict[str, Tensor]:
    batch = {name: x[:1] for name, x in of_rows().items()}
    return batch | {"token_type_ids": torch.zeros_like(batch["input_ids"])}


def of_tokens() -> dict[str, Tensor]:
    batch = padded_batch("right")
    return batch | {"labels": (batch["labels"] % 3).where(batch["labels"] >= 0, -100)}


Run = Callable[[Any, Mapping[str, Tensor]], Result]
WHOLE_HEADS: Mapping[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]], Run]] = {
    "rows": (headed("ForSequenceClassification"), of_rows, labeled),
    "rows padded": (headed("ForSequenceClassification"), lambda: of_rows("right"), labeled),
    "rows padded left": (headed("ForSequenceClassification"), lambda: of_rows("left"), labeled),
    "pairs": (headed("ForSequenceClassification"), lambda: of_rows("right"), rewards),
    "tokens": (headed("ForTokenClassification"), of_tokens, labeled),
    "tokens of bert": (headed("ForTokenClassification", "bert"), of_tokens, labeled),
    "answers": (headed("ForQuestionAnswering"), answers, labeled),
    "own loss": (with_a_loss_of_its_own, plain_batch, labeled),
    **({"a row with a tower": (beside_a_tower, one_row, labeled)} if HAS_BLOCKS else {}),
}


def whole_heads(ctx: RankContext) -> Errors:
    errors = {}
    for name, (make, batch, run) in WHOLE_HEADS.items():
        model = make()
        want = run(model, batch())
        want.gradients = take_gradients(model)
        with enable(model, mesh_of(2), logits="whole"):
            have = run(model, batch())
        have.gradients = mean_gradients(model)
        errors[name] = have.error(want)
    return errors


def test_heads_and_losses_of_whole_rows_are_exact(pool):
    for errors in pool.run(whole_heads, WORLD):
        assert max(errors.values()) < BOUND, errors


# ------------------------------------------------------------------ scaled rotary embeddings

TRAINED = 32  # tokens; beyond, frequencies change with the largest position
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": TRAINED,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [3.0 + 0.5 * i for i in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = DYNAMIC | {"rope_type": "yarn", "original_max_position_embeddings": TRAINED}
SCALED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "longrope": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": TRAINED},
    ),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": TRAINED}),
    "yarn": ("llama", {"rope_parameters": YARN}),
}
LENGTHS: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    # In their order, a rank has the truth of one. "dynamic" keeps what the longest batch has set
    # until one is short: lengths ascend.
    "long document": lambda: packed_batch((3, 38)),
    "long": plain_batch,
    "short": lambda: plain_batch(tokens=TRAINED - 1),
    "short documents": packed_batch,
}


def every_length(ctx: RankContext, scaling: str) -> Errors:
    model_type, changes = SCALED[scaling]

    # Before transformers 5.14 a short batch resets nothing: the truth has seen what the mesh has.
    def in_its_turn(model: Any, batch: Mapping[str, Tensor]) -> Result:
        for earlier in list(LENGTHS.values())[: ctx.rank]:
            model(**earlier())
        return whole_model(model, batch)

    return compare(ctx, lambda: build(model_type, **changes), LENGTHS, in_its_turn)


@pytest.mark.parametrize("scaling", SCALED)
def test_frequencies_follow_the_largest_position_of_the_batch(pool, scaling):
    all_exact(pool.run(every_length, WORLD, scaling=scaling), len(LENGTHS) * len(ULYSSES))


def other_rotary(model: Any) -> None:
    model.model.rotary_emb = build("llama", **SCALED["dynamic"][1]).model.rotary_emb


def other_kind(model: Any) -> None:
    dynamic = build("llama", **SCALED["dynamic"][1]).model.rotary_emb
    names = "rope_type", "config", "original_max_seq_len", "max_seq_len_cached"
    vars(model.model.rotary_emb).update({name: vars(dynamic)[name] for name in names})


def changed_later(ctx: RankContext) -> dict[str, float]:
    errors = {}
    for change in (other_rotary, other_kind):
        model, alone = build("llama"), build("llama")
        change(alone)
        with enable(model, mesh_of(1), logits="whole"):
            model(**plain_batch(tokens=9))
            change(model)
            have = on_the_mesh(model, mesh_of(1), plain_batch())
        errors[change.__name__] = have.error(whole_model(alone, plain_batch()))
    return errors


def test_frequencies_may_become_others_after_enable(pool):
    for errors in pool.run(changed_later, 2):
        assert max(errors.values()) <= BOUND, errors


# ------------------------------------------------------------------ checkpointing


def one_rank() -> ds_usp.SequenceMesh:
    """A mesh of this rank only."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return ds_usp.SequenceMesh.from_group(groups[dist.get_rank()], 1)


def two_passes(model: Any, mesh: ds_usp.SequenceMesh) -> Result:
    """Two forward passes of other lengths before one backward pass."""
    with enable(model, mesh, logits="whole"):
        first, second = model(**plain_batch(tokens=27)), model(**packed_batch())
        loss = first.loss + second.loss
        loss.backward()
    return Result(loss.detach(), second.logits.detach(), mean_gradients(model))


def checkpointed(ctx: RankContext, use_reentrant: bool) -> Errors:
    """Errors against one rank without checkpointing."""
    model = build("qwen3")
    want = two_passes(model, one_rank())
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return {f"ulysses {u}": two_passes(model, mesh_of(u)).error(want) for u in ULYSSES}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_recompute_their_own_batch(pool, use_reentrant):
    for errors in pool.run(checkpointed, WORLD, use_reentrant=use_reentrant):
        all_exact([errors], len(ULYSSES))


def calls_of_layers(ctx: RankContext) -> int:
    """Attention calls of a checkpointed forward and backward pass."""
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with counted_attention(attention) as calls, enable(model, mesh_of(ctx.world)):
        model(**plain_batch()).loss.backward()
    return sum(calls)


def test_checkpointing_recomputes_attention(pool):
    """The tests above would pass without any recomputation."""
    assert pool.run(calls_of_layers, 2) == [4, 4]


def other_logits(ctx: RankContext, logits: Any) -> tuple[int, int, float]:
    """The tokens of the logits beside a loss and of the rank's shard, and the error of the joined
    logits."""
    model = build("llama")
    want = reference(model, plain_batch())
    with enable(model, mesh_of(1), logits=logits) as enabled:
        out = model(**plain_batch()).logits
        whole = enabled.whole(out) if logits != "whole" else out
        own = enabled.layout_of(plain_batch()).length(ctx.rank)
    return out.shape[1], own, float((whole - want.logits).norm() / want.logits.norm())


@pytest.mark.parametrize("logits", ["auto", "shard", "whole"])
def test_logits_are_shards_or_whole(pool, logits):
    tokens, own, errors = zip(*pool.run(other_logits, WORLD, logits=logits), strict=True)
    assert sum(own) == 41 and tokens == ((41,) * WORLD if logits == "whole" else own)
    assert max(errors) < BOUND
