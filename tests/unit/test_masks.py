"""MaskSpec: bounds in global positions, and what it says of itself."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch

from ds_usp import ConfigError, MaskSpec

BOUNDS = [(None, 0), (None, None), (3, 0), (0, 0), (3, 2), (None, 2), (2, None)]


@pytest.mark.parametrize(("left", "right"), BOUNDS)
def test_allows_is_the_window(left: int | None, right: int | None) -> None:
    mask = MaskSpec(left, right)
    allowed = torch.tensor([[mask.allows(q, k) for k in range(9)] for q in range(9)])
    assert torch.equal(allowed, oracle.window(range(9), range(9), left, right))
    assert all(mask.allows(q, q) for q in range(9)), "every token sees itself"


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
