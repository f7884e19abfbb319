"""Layouts of two sequences as one."""

from __future__ import annotations

from itertools import product

import pytest

from ds_usp.errors import LayoutError
from ds_usp.geometry.joint import ContinuedLayout, JointLayout
from ds_usp.geometry.layout import TokenLayout


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (2, 2), (1, 4), (3, 2)])
def test_continued_shards_are_even_with_those_before(ulysses: int, ring: int) -> None:
    ranks = range(ulysses * ring)
    for image, text in product(range(6, 20), range(6, 14)):
        one = TokenLayout("contiguous", image, ulysses, ring)
        other = ContinuedLayout.after(one, text)
        assert [p for rank in ranks for p in other.positions(rank)] == list(range(text))
        both = TokenLayout("contiguous", image + text, ulysses, ring)
        lengths = [one.length(rank) + other.length(rank) for rank in ranks]
        assert lengths == [both.length(rank) for rank in ranks]
        for front in (True, False):
            joint = JointLayout.of(one, text, front, continued=True)
            shift = {True: (0, text), False: (image, 0)}[front]
            for rank in ranks:
                texts = [p + shift[0] for p in other.positions(rank)]
                images = [p + shift[1] for p in one.positions(rank)]
                assert joint.positions(rank) == (texts + images if front else images + texts)


def test_fewer_tokens_than_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 tokens leave a rank"):
        ContinuedLayout.after(TokenLayout("contiguous", 6, 4, 1), 3)


def test_a_joint_layout_says_whether_it_continues() -> None:
    one = TokenLayout("contiguous", 6, 4, 1)
    assert "continued" in str(JointLayout.of(one, 5, True, continued=True))
    assert "continued" not in str(JointLayout.of(one, 5, True))
