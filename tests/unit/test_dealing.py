"""What is dealt: each sample once, in memory, no slower than one degree for all, cut no more than
it must be."""

from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ds_usp import ConfigError, DataError
from ds_usp.geometry.dealing import (
    MOST_SIZES,
    Dealer,
    SampleCost,
    group_sizes,
    groups_of_size,
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Dealer, list[int]]:
    world, max_tokens = draw(st.integers(1, 13)), draw(st.integers(1, 3000))
    sizes = {world, *draw(st.lists(st.integers(1, world), max_size=5))}
    cost = SampleCost(
        hidden=draw(st.sampled_from((1, 64, 4096))),
        exchange=draw(st.sampled_from((0.0, 0.05, 0.5))),
        latency=draw(st.sampled_from((0, 100))),
    )
    dealer = Dealer(world, max_tokens, cost, draw(st.sampled_from(((), tuple(sizes)))))
    lengths = draw(st.lists(st.integers(1, 3 * max_tokens), min_size=1, max_size=24))
    return dealer, [min(x, dealer.longest) for x in lengths]


@given(steps())
@examples(100)
def test_every_sample_is_dealt_once_to_ranks_that_hold_it(step):
    dealer, lengths = step
    try:
        dealt = dealer.deal(lengths)
    except DataError as error:  # a sample shorter than the one size of groups
        assert "fewer than" in str(error) and min(lengths) < min(dealer.sizes)
        return
    assert sorted(chain(*(x.samples for x in dealt.groups))) == list(range(len(lengths)))
    for groups in dealt.micro_batches:
        assert [rank for x in groups for rank in x.ranks] == list(range(dealer.world))
        for group in groups:
            size, tokens = len(group.ranks), sum(lengths[i] for i in group.samples)
            assert tokens <= size * dealer.max_tokens
            if not group.samples:
                assert size == 1 and group.seconds == 0.0
                continue
            assert tokens >= size and group.ranks in groups_of_size(dealer.world, size)
            start = dealer.cost(0, size)
            seconds = start + sum(dealer.cost(lengths[i], size) - start for i in group.samples)
            assert group.seconds == pytest.approx(seconds)
    assert dealt == replace(dealer).deal(list(lengths))
    for size in dealer.sizes:
        if max(lengths) <= size * dealer.max_tokens and min(lengths) >= size:
            assert dealt.seconds <= replace(dealer, sizes=(size,)).deal(lengths).seconds
    count = len(dealt.micro_batches) + 2
    filled = replace(dealer, micro_batches=count).deal(lengths)
    assert len(filled.micro_batches) == count


@given(st.integers(1, 200), st.data())
@examples(100)
def test_groups_are_disjoint_and_nested_in_windows(world, data):
    size = data.draw(st.integers(1, world))
    groups = groups_of_size(world, size)
    assert groups and groups[-1].stop <= world
    assert all(a.stop <= b.start for a, b in pairwise(groups))
    assert all(len(group) == size for group in groups)
    assert len(group_sizes(world)) <= MOST_SIZES and {1, world} <= set(group_sizes(world))


def test_groups_of_eight_ranks():
    assert group_sizes(8) == (1, 2, 3, 4, 6, 8)
    assert groups_of_size(8, 3) == (range(3), range(4, 7))
    assert groups_of_size(7, 2) == (range(2), range(2, 4), range(4, 6))
    assert groups_of_size(6, 3) == (range(3), range(3, 6))


def test_long_samples_take_many_ranks_and_short_ones_none_but_their_own():
    lengths = [16000, 8900, 5600, *[1000] * 6]
    dealt = Dealer(8, 7000, SampleCost(exchange=0.3)).deal(lengths)
    sizes = [len(x.ranks) for i in range(len(lengths)) for x in dealt.groups if i in x.samples]
    assert sizes == [4, 2, 1, *[1] * 6]
    assert len(dealt.micro_batches) == 1
    # Nothing is cut where it is no faster.
    assert Dealer(4, 4096).deal([1000] * 4).cuts([1000] * 4) == 0


def test_a_long_sample_is_cut_as_far_as_balance_needs_it():
    lengths = [8000, *[500] * 8]
    whole = Dealer(4, 16000, sizes=(1,)).deal(lengths)
    dealt = Dealer(4, 16000).deal(lengths)
    assert dealt.seconds < 0.5 * whole.seconds
    assert next(len(x.ranks) for x in dealt.groups if 0 in x.samples) == 3


@pytest.mark.parametrize(
    ("arguments", "lengths", "match"),
    [
        ({"max_tokens": 0}, [1], "max_tokens=0 must be"),
        ({"max_tokens": True}, [1], "max_tokens=True must be"),
        ({"sizes": (1, 9)}, [1], r"sizes=\(1, 9\) must be at most 16 different sizes .* 1 to 8"),
        ({"sizes": (2, 2)}, [1], "different sizes"),
        ({"micro_batches": -1}, [1], "micro_batches=-1"),
        ({}, [], "0 samples"),
        ({}, [3, 0], "none empty"),
        (
            {},
            [7, 801],
            "sample 1 of the step has 801 tokens: 8 ranks, .* hold 800 .* Cut it to 800",
        ),
        ({"sizes": (1, 4)}, [401], "4 ranks, the largest group, hold 400 .*max_tokens=101"),
        ({"sizes": (2, 4)}, [1], "sample 0 .* has 1 tokens, fewer than the 2 ranks"),
        ({"micro_batches": 1}, [100] * 9, r"900 tokens do not fit into 1 .*100, 800 tokens"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_numbers(arguments, lengths, match):
    with pytest.raises((ConfigError, DataError), match=match):
        Dealer(**{"world": 8, "max_tokens": 100, **arguments}).deal(lengths)
