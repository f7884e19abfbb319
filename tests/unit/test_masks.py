"""MaskSpec: bounds in global positions, and what it says of itself."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import ConfigError, MaskSpec
from ds_usp import testing as oracle

BOUND = st.none() | st.integers(0, 12)


@given(BOUND, BOUND, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 9))
@examples(150)
def test_a_query_sees_its_document_through_its_window_and_the_prefix(
    left: int | None, right: int | None, lengths: list[int], prefix: int
) -> None:
    tokens = range(sum(lengths))
    window = oracle.window(tokens, tokens, left, right)
    mask = MaskSpec(left, right, [0, *accumulate(lengths)])
    allowed = torch.tensor([[mask.allows(q, k) for k in tokens] for q in tokens])
    assert torch.equal(allowed, window & oracle.same_document(tokens, tokens, lengths))
    assert allowed.diagonal().all(), "every token sees itself"
    mask = MaskSpec(left, right, prefix=prefix)
    allowed = torch.tensor([[mask.allows(q, k) for k in tokens] for q in tokens])
    assert torch.equal(allowed, window | (torch.tensor(tokens) < prefix))


@pytest.mark.parametrize(
    ("mask", "bounds", "text", "causal"),
    [
        (MaskSpec.causal(), (None, 0), "causal", True),
        (MaskSpec.full(), (None, None), "full", False),
        (MaskSpec(), (None, None), "full", False),
        (MaskSpec.window(3), (3, 0), "window(3, 0)", False),
        (MaskSpec.window(3, None), (3, None), "window(3, None)", False),
        (MaskSpec.window(None, 2), (None, 2), "window(None, 2)", False),
        (MaskSpec.window(None), (None, 0), "causal", True),
    ],
    ids=str,
)
def test_names(
    mask: MaskSpec, bounds: tuple[int | None, int | None], text: str, causal: bool
) -> None:
    assert ((mask.left, mask.right), str(mask), mask.is_causal) == (bounds, text, causal)
    assert mask == MaskSpec(*bounds) and hash(mask) == hash(MaskSpec(*bounds))


@pytest.mark.parametrize("bound", [-1, 2.0, 2.5, "3", True, float("nan"), float("inf"), [1]])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_no_number_of_tokens_is_refused(side: str, bound: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        MaskSpec(**{side: bound})
    assert f"window {side}={bound!r}" in str(caught.value)
    assert "None leaves that side open" in str(caught.value)
