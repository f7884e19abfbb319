"""Trees of shared prefixes in models and trainers against a row for each answer."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from cases import LaterMask, mesh_of
from harness import RankContext
from hf_trainer_runs import (
    Record,
    Run,
    Split,
    arguments,
    finish,
    restored_environment,
    run_trl,
    tiny_model,
    tokenizer,
)
from model_runs import BOUND, IGNORED, MESHES, Result, mean_gradients, take_gradients
from rl_runs import run_rl, saved_reference
from test_recurrent_layers import FUNCTIONS, OTHERS
from test_recurrent_layers import build as with_long_memory
from test_rl import same_logs
from test_trainer import assert_same, assert_same_logs
from tiny_models import VOCAB, build
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import ds_usp
from ds_usp.integrations.transformers import attention, decoders, enable
from ds_usp.integrations.transformers.refusals import check_loss
from ds_usp.training import PrefixTree
from ds_usp.training.prefix_tree import SharedPrefixes
from ds_usp.training.whole_batch import Packing, read_tree, tree_positions

FULL = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
STATES = sorted({*FUNCTIONS, *OTHERS} - {"qwen3_next", "nemotron_h"})
# Of each the mesh, the layout, what else is asked of enable, and how losses are averaged.
CASES: list[tuple[str, dict[str, Any], int, dict[str, Any], dict[str, Any]]] = [
    (
        "llama",
        {"num_attention_heads": 8, "head_dim": 8},
        4,
        {"recompute": "attention", "offload_ratio": 0.5},
        {},
    ),
    ("qwen3", FULL, 2, {"layout": "auto", "recompute": "full"}, {"train_on_prompt": True}),
    ("gemma3_text", FULL, 1, {"layout": "zigzag", "loss_chunks": 3}, {"reduction": "rows"}),
    (
        "gpt2",
        {},
        2,
        {"layout": "striped", "mlp_chunks": 2},
        {"train_on_prompt": True, "reduction": "rows"},
    ),
    ("deepseek_v3", {}, 1, {"layout": "balanced"}, {"train_on_prompt": True}),
    ("mistral", {"sliding_window": 7}, 2, {"layout": "balanced", "recompute": "attention"}, {}),
    ("gemma3_text", {"sliding_window": 11}, 1, {"layout": "zigzag"}, {"train_on_prompt": True}),
    ("gpt_oss", {"sliding_window": 9}, 2, {"layout": "contiguous"}, {"train_on_prompt": True}),
    ("llama4_text", {"attention_chunk_size": 9}, 2, {}, {"train_on_prompt": True}),
]


def words(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB - 2, (count,), generator=generator).tolist()


def examples() -> list[dict[str, Any]]:
    """Two prompts; the second's answers branch twice more, one of them of one token."""
    last = {"prompt": words(18, 1), "answers": [words(2, 2), words(1, 3)]}
    inner = {"prompt": words(17, 4), "answers": [words(4, 5), last, words(3, 6)]}
    return [
        {"prompt": words(20, 7), "answers": [words(5, 8), words(3, 9), words(7, 10)]},
        {"prompt": words(19, 11), "answers": [words(6, 12), inner]},
    ]


def rows_of(example: Mapping[str, Any], before: list[int]) -> Iterator[tuple[list[int], int]]:
    """The rows of a tree, written down without PrefixTree: tokens, and those of prompts."""
    prompt = before + example["prompt"]
    for answer in example["answers"]:
        if isinstance(answer, dict):
            yield from rows_of(answer, prompt)
        else:
            yield prompt + answer, len(prompt)


def all_rows() -> list[tuple[list[int], int]]:
    return [row for example in examples() for row in rows_of(example, [])]


def separate_rows(model: Any, train_on_prompt: bool = False, reduction: str = "tokens") -> Result:
    """Each row by itself, without ds_usp."""
    losses, counts, logits = [], [], []
    for tokens, prompt in all_rows():
        ids = torch.tensor([tokens])
        labels = ids.clone()
        labels[0, : 0 if train_on_prompt else prompt] = IGNORED
        scores = model(input_ids=ids, use_cache=False).logits
        losses.append(cross_entropy(scores[0, :-1], labels[0, 1:], reduction="sum"))
        counts.append(int((labels[0, 1:] != IGNORED).sum()))
        logits.append(scores[0].detach())
    loss = sum(losses) / sum(counts)
    if reduction == "rows":
        loss = sum(x / n for x, n in zip(losses, counts, strict=True)) / len(losses)
    loss.backward()
    return Result(loss.detach(), torch.cat(logits), take_gradients(model))


def as_a_tree(model: Any, batch: Mapping[str, Tensor]) -> Result:
    try:
        check_loss(model)
        out = model(**batch)
        loss, scores = out.loss, out.logits
    except ds_usp.UnsupportedAttentionError as refusal:
        if "computes its loss" not in str(refusal):
            raise
        learned = {"labels", "shift_labels", "loss_weights"}
        scores = model(**{name: x for name, x in batch.items() if name not in learned}).logits
        losses = cross_entropy(scores[0], batch["labels"][0], reduction="none")
        weights = batch.get("loss_weights", torch.ones(1, 1)) * (batch["labels"] != IGNORED)
        loss = (losses * weights[0]).sum() / weights.sum()
    loss.backward()
    logits = torch.zeros(1)
    if scores is not None:
        shared = SharedPrefixes.of([torch.tensor(tokens) for tokens, _ in all_rows()])
        logits = scores[0, torch.cat(shared.places)].detach()
    return Result(loss.detach(), logits, mean_gradients(model))


def models_as_trees(ctx: RankContext) -> dict[str, float]:
    """Each rank has the reference of its share of the cases."""
    errors = {}
    for index, (name, changes, ulysses, options, losses) in enumerate(CASES):
        model = build(name, **changes)
        want = separate_rows(model, **losses) if index % ctx.world == ctx.rank else None
        batch = PrefixTree(**losses)(examples())
        logits = "auto" if "loss_chunks" in options else "whole"
        with enable(model, mesh_of(ulysses), logits=logits, **options):
            have = as_a_tree(model, batch)
        if want is not None:
            if logits == "auto":
                want.logits = have.logits = torch.ones(1)
            errors[f"{name} {changes}"] = have.error(want)
    return errors


def test_models_of_a_tree_are_those_of_separate_rows(pool):
    """Loss, logits and every gradient; three levels of branches."""
    errors = {name: x for each in pool.run(models_as_trees, 4) for name, x in each.items()}
    assert len(errors) == len(CASES)
    assert max(errors.values()) < BOUND, errors


def tree_case(ctx: RankContext, model_type: str) -> dict[str, float | str]:
    """How a type fares with a tree on two ranks, by mesh: its error, or why it is refused."""
    model, outcomes = build(model_type), dict[str, float | str]()
    want = separate_rows(model, train_on_prompt=True)
    batch = PrefixTree(train_on_prompt=True)(examples())
    if "roberta" in model_type or model_type in ("camembert", "data2vec-text", "xmod"):
        packing = read_tree({"tree": batch["tree"]}, *batch["input_ids"].shape)
        first = model.config.pad_token_id + 1  # where these begin to count
        batch["position_ids"] = tree_positions(packing, torch.device("cpu")) + first
    for name, ulysses in MESHES.items():
        try:
            with enable(model, mesh_of(ulysses), logits="whole"):
                outcomes[name] = as_a_tree(model, batch).error(want)
        except ds_usp.USPError as refusal:
            outcomes[name] = str(refusal)
            take_gradients(model)
    return outcomes


def tree_at_splits(ctx: RankContext, model_type: str) -> dict[str, float]:
    """Errors by layout and mesh. Rank 0 has the reference."""
    model, errors = with_long_memory(model_type), {}
    want = separate_rows(model, train_on_prompt=True) if ctx.rank == 0 else None
    batch = PrefixTree(train_on_prompt=True)(examples())
    for ulysses, layout in ((4, "contiguous"), (2, "zigzag"), (1, "balanced"), (1, "zigzag")):
        options = {"recompute": "full"} if layout == "balanced" else {}
        with enable(model, mesh_of(ulysses), layout=layout, logits="whole", **options):
            have = as_a_tree(model, batch)
        if want is not None:
            errors[f"ulysses {ulysses}, {layout}"] = have.error(want)
    return errors


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_next",
        "nemotron_h",
        *(pytest.param(x, marks=pytest.mark.slow) for x in STATES),
    ],
)
def test_states_of_a_tree_are_those_of_separate_rows(pool, model_type):
    errors = pool.run(tree_at_splits, 4, model_type=model_type)[0]
    assert len(errors) == 4 and max(errors.values()) < BOUND, errors


# The frequencies that a batch of 44 positions takes; a tree of its rows has 31.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def rows_of_a_batch(ctx: RankContext, fused: bool) -> dict[str, float]:
    """Errors of rows that run as a tree, where more of their batch counts than their own tokens;
    with TRL's fused head or the model's own."""
    first, other = words(30, 1), words(9, 4)
    longer = [first, first[:20] + words(11, 2)]
    routers = {"output_router_logits": True}
    cases: list[tuple[str, list[list[int]], dict[str, Any], dict[str, Any]]] = [
        ("llama", longer, {"rope_parameters": LONGROPE}, {}),
        ("llama", [words(3, 3)] * 2, {}, {"loss_chunks": 2}),  # fewer than ranks and chunks
        ("mixtral", [first, first, other], routers, {}),  # a tree without branches
        ("mixtral", [*longer, first[:17], other], routers, {"logits": "whole"}),
    ]
    head = {}
    if fused:
        from trl.trainer.utils import add_fused_lm_head

        head, cases = {"fused_lm_head": True}, cases[-1:]
    errors = {}
    for index, (name, rows, changes, options) in enumerate(cases):
        collator = transformers.DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=44)
        batch = dict(collator([{"input_ids": x, "labels": x} for x in rows]))
        model = build(name, **changes)
        if fused:
            add_fused_lm_head(model)
        loss = model(**batch, **head, use_cache=False).loss
        loss.backward()
        want = Result(loss.detach(), torch.ones(1), take_gradients(model))
        model = build(name, **changes)  # without the frequencies that it has taken
        if fused:
            add_fused_lm_head(model)
        with enable(model, mesh_of(2), share_prefixes=True, **options):
            out = model(**batch, **head)
            out.loss.backward()
            have = Result(out.loss.detach(), torch.ones(1), mean_gradients(model))
            for scores in out.get("router_logits") or () if options.get("logits") else ():
                assert len(scores) == batch["input_ids"].numel()
        errors[f"{index} {name}"] = have.error(want)
    return errors


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_as_a_tree_are_those_of_their_batch(pool, fused):
    errors = pool.run(rows_of_a_batch, 4, fused=fused)[0]
    assert len(errors) == (1 if fused else 4) and max(errors.values()) < BOUND, errors


# ------------------------------------------------------------------ trainers


ALONE = Split()


class Questions(Dataset):
    """Prompts of 18 to 24 words, each with one to three answers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        # A replica has the first and the third in one step: no weights there, others have some.
        count = 1 if index in (0, 2) else 2 + index % 2
        answers = [words(2 + (index + i) % 5, 50 * index + i) for i in range(count)]
        return {"prompt": words(18 + index % 7, 1000 + index), "answers": answers}


def as_padded_rows(questions: list[dict[str, Any]]) -> Any:
    rows = [x["prompt"] + answer for x in questions for answer in x["answers"]]
    return transformers.DataCollatorForSeq2Seq(tokenizer())(
        [{"input_ids": x, "labels": x} for x in rows]
    )


def train_on_questions(
    ctx: RankContext, split: Split = ALONE, micro: int = 4, share_prefixes: bool = False
) -> Run:
    """With prompts, whose tokens count once for each answer; on one process without ds_usp."""
    with restored_environment():
        size, record = split.ulysses * split.ring, Record()
        options = {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
        trainer = transformers.Trainer(
            tiny_model(),
            transformers.TrainingArguments(
                **arguments(split, ctx.world // size, micro=micro, **options)
            ),
            train_dataset=Questions(),
            eval_dataset=Questions(),
            data_collator=PrefixTree(train_on_prompt=True)
            if size > 1 and not share_prefixes
            else as_padded_rows,
            callbacks=[record],
        )
        return finish(
            ctx, trainer, split, record, evaluate=not share_prefixes, share_prefixes=share_prefixes
        )


def test_a_trainer_on_trees_trains_as_one_on_rows(pool):
    """Two meshes with two micro batches each: the step's loss is divided by all weights, which the
    collator gives, or by the labels of the rows, of which the model makes a tree."""
    want = pool.run(train_on_questions, 1)[0]
    for share_prefixes in (False, True):
        options = {"split": Split(2, 1), "micro": 1, "share_prefixes": share_prefixes}
        got = pool.run(train_on_questions, 4, **options)[0]
        assert_same(got, want)
        if (
            not share_prefixes
        ):  # each batch is weighed as a Trainer does: by its share of the samples
            loss = got.evaluation["eval_loss"]
            assert loss == pytest.approx(want.evaluation["eval_loss"], rel=2e-3)


def test_dpo_that_shares_prompts_trains_as_one_process_does(pool):
    """Chosen and rejected are a tree: everything that is logged, the loss of routers too, and fewer
    tokens."""
    options = {"name": "dpo", "micro": 2, "max_steps": 1, "prompt": 24, "experts": True}
    want, tokens = pool.run(run_trl, 1, **options)[0]
    logs, local_tokens = pool.run(run_trl, 2, split=Split(1, 2), share_prefixes=True, **options)[0]
    assert_same_logs(logs, want)
    for name in ("loss", "grad_norm"):
        assert logs[0][name] == pytest.approx(want[0][name], rel=1e-5)
    # The reference is given one row: each prompt once for its two answers, and no padding.
    assert 0 < 2 * local_tokens < 4 * tokens - 2 * 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kto", "orpo", "cpo", "tpo"])
def test_trls_other_trainers_that_share_prompts_do(pool, name):
    options = {"name": name, "micro": 2, "max_steps": 1, "prompt": 24}
    want, _ = pool.run(run_trl, 1, **options)[0]
    logs, _ = pool.run(run_trl, 2, split=Split(2, 1), share_prefixes=True, **options)[0]
    # These average logits of padding too.
    assert_same_logs(logs, want, without=("logits/chosen", "logits/rejected"))


@pytest.mark.parametrize("name", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_groups_that_share_prompts_train_as_one_process_does(pool, tmp_path, name):
    """A group is a tree, of prompts that are padded on the left. The second step is of the same
    completions: its ratios to the policy that has made them are not 1, and some are clipped."""
    options = {
        "name": name,
        "micro": 4,
        "num_generations": 4,
        "prompt": 20,
        "beta": 0.1,
        "max_steps": 2,
        "num_iterations": 2,
        "learning_rate": 0.05,
        "experts": name == "grpo",
    }
    options["folder"] = saved_reference(str(tmp_path))
    want = pool.run(run_rl, 1, **options)[0]
    got = pool.run(run_rl, 2, split=Split(2, 1), share_prefixes=True, **options)[0]
    same_logs(got, want)
    clipped = "clip_ratio/region_mean"
    assert want.logs[1][clipped] > want.logs[0][clipped] == 0, want.logs
    for weight, expected in zip(got.weights, want.weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    # One row, and three more completions of 9 with the prompt's last token, which is in each.
    for model, tokens in got.tokens.items():
        assert 0 < 2 * tokens <= want.tokens[model] + 3 * 10 + 2


@pytest.mark.parametrize("documents", [((0, 1, 2, 3),), ((0, 3),)])
def test_layers_refuse_a_mask_with_a_field_that_they_do_not_read(documents):
    mask = attention.LayerMask(attention._Band(LaterMask(None, 0, stride=2)))
    packing = Packing(documents, ((-1, 0, 0),) if len(documents[0]) > 2 else ())
    shard = SimpleNamespace(packing=packing, layout=SimpleNamespace(seq_len=3))
    with pytest.raises(ds_usp.UnsupportedAttentionError, match=r"the mask|compute attention"):
        decoders._mask_of_keys(shard, mask, 1, torch.float32, torch.device("cpu"))
