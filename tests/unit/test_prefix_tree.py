"""Rows that begin alike as a tree: what stands for each token, what it sees, labels and weights."""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_usp import ConfigError, DataError, MaskSpec, TokenLayout
from ds_usp.training import PrefixTree
from ds_usp.training.prefix_tree import SharedPrefixes
from ds_usp.training.whole_batch import read_batch


def some_rows(seed: int) -> list[Tensor]:
    """Rows of a few tokens, so that many begin alike, some are equal and some begin others."""
    draw = random.Random(seed)
    rows = [
        [draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(1, 7))
    ]
    prefix = [draw.randrange(2) for _ in range(draw.randint(0, 5))]
    return [torch.tensor(prefix + row if draw.random() < 0.7 else row) for row in rows]


@pytest.mark.parametrize("seed", range(40))
def test_each_token_sees_what_it_sees_in_its_row(seed):
    rows = some_rows(seed)
    shared = SharedPrefixes.of(rows, min_shared=2)
    mask, tokens = MaskSpec.tree(shared.segments), shared.tokens
    positions = TokenLayout("contiguous", tokens).positions(0, mask=mask)
    values = shared.gather_from(rows).tolist()
    for row, place in zip(rows, shared.places, strict=True):
        for at, token in enumerate(place.tolist()):
            seen = [key for key in range(tokens) if mask.allows(token, key)]
            assert seen == place[: at + 1].tolist()
            assert values[token] == row[at] and positions[token] == at


def test_what_is_shared_is_there_once():
    rows = [torch.arange(20), torch.cat([torch.arange(18), torch.tensor([7, 7])]), torch.arange(9)]
    # 17 of 18 tokens once; the third row begins both, and 9 are too few for the default.
    assert SharedPrefixes.of(rows).segments == ((0, 17, -1), (17, 20, 0), (20, 23, 0), (23, 32, -1))
    assert SharedPrefixes.of(rows, min_shared=8).tokens == 8 + 9 + 3 + 3 + 1
    assert SharedPrefixes.of(rows, starts=[0, 1, 0]).tokens == 49  # other positions


def test_thousands_of_nested_rows_are_found_at_once():
    """4,096 rows, each of which begins all longer ones; 1,500 took half a minute row by row."""
    text = torch.arange(8192)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [text[: 2 * i + 2] for i in order]
    begun = time.process_time()
    shared = SharedPrefixes.of(rows)
    assert time.process_time() - begun < 2
    values = shared.gather_from(rows)
    assert all(torch.equal(values[x], row) for row, x in zip(rows, shared.places, strict=True))
    assert shared.row_tokens > 2000 * len(text) and shared.tokens < 5 * len(text)


EXAMPLE = {
    "prompt": list(range(10, 30)),
    "answers": [[1, 2], [3], {"prompt": [1], "answers": [[5]]}],
}


def test_weights_are_the_rows_below():
    """Answers are [1, 2], [3] and [1, 5] after a prompt of 20: its last token is in each branch."""
    batch = PrefixTree()([EXAMPLE])
    assert batch["tree"].tolist() == [[0, 19, -1], [19, 22, 0], [22, 25, 0], [25, 27, 0]]
    assert "loss_weights" not in batch and batch["labels"] is not None
    labels = batch["shift_labels"][0]
    assert labels[:19].tolist() == [-100] * 19
    # The last answer first, which begins as the first one. Its own prompt is no answer.
    assert labels[19:].tolist() == [1, 2, -100, -100, 5, -100, 3, -100]
    weights = PrefixTree(train_on_prompt=True)([EXAMPLE])["loss_weights"][0]
    assert weights[:19].tolist() == [3] * 19 and weights[19:].tolist() == [1, 1, 0, 1, 1, 0, 1, 0]
    rows = PrefixTree(reduction="rows")([EXAMPLE])["loss_weights"][0]
    assert rows[19:].tolist() == [0.5, 0.5, 0, 0, 1, 0, 1, 0]


def test_rows_of_ones_own_are_the_same_tree():
    rows = [[*EXAMPLE["prompt"], *x] for x in ([1, 2], [3], [1, 5])]
    given = [{"input_ids": x} for x in rows]
    for name, x in PrefixTree(train_on_prompt=True)([EXAMPLE]).items():
        assert torch.equal(PrefixTree()(given)[name], x), name


REFUSED: list[tuple[str, Any, Any]] = [
    ("no answers", {"prompt": [1, 2], "answers": []}, EXAMPLE),
    ("give a dict of 'prompt' and 'answers'", {"prompt": [1, 2]}, EXAMPLE),
    ("without padding", {"prompt": [[1, 2]], "answers": [[3]]}, EXAMPLE),
    ("not its tokens", {"input_ids": [1, 2], "labels": [2, -100]}, {"input_ids": [1, 2]}),
    ("leave them out", {"prompt": [], "answers": [[]]}, EXAMPLE),
    ("a token to learn from", {"prompt": [1, 2], "answers": [[]]}, EXAMPLE),
]


@pytest.mark.parametrize(("text", "example", "instead"), REFUSED, ids=[x[0] for x in REFUSED])
def test_examples_that_are_none_are_refused(text, example, instead):
    with pytest.raises(DataError, match=text):
        PrefixTree()([example])
    PrefixTree()([instead])


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="reduction='sum' must be 'tokens' or 'rows'"):
        PrefixTree(reduction="sum")
    with pytest.raises(ConfigError, match="min_shared=1 must be a whole number of 2 or more"):
        PrefixTree(min_shared=1)


# ------------------------------------------------------------------ plain loops


def test_a_loader_reads_a_tree():
    batch = PrefixTree(reduction="rows")([EXAMPLE])
    read = read_batch(batch)
    assert read.mask == MaskSpec.tree(batch["tree"]) and read.loss_tokens == 3.0  # rows
    assert read_batch(PrefixTree()([EXAMPLE])).loss_tokens == 4


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a root of its own", {"attention_mask": (torch.arange(27) < 25)[None].long()}),
        ("both say where documents end", {"cu_seqlens": torch.tensor([0, 27])}),
        ("give 'shift_labels'", {"shift_labels": None}),
        ("after the parent's last position", {"position_ids": torch.arange(27)[None]}),
    ],
)
def test_what_contradicts_a_tree_is_refused(text, changes):
    batch = PrefixTree()([EXAMPLE])
    with pytest.raises(DataError, match=text):
        read_batch({**batch, **changes})
    read_batch(batch)
