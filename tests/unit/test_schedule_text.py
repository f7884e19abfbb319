"""The ring's plan as it prints."""

from __future__ import annotations

from ds_usp import MaskSpec, TokenLayout
from ds_usp.experimental.double_ring import double_ring_schedule
from ds_usp.geometry.ring_schedule import ring_schedule

CAUSAL = MaskSpec.causal()


def test_a_schedule_prints_as_a_table() -> None:
    layout = TokenLayout("contiguous", 16, 1, 2)
    first, last = (ring_schedule(layout, CAUSAL, rank) for rank in range(2))
    assert str(first).splitlines() == [
        "ring rank 0 of 2, 36 pairs",
        "  local: q[0:8] k[0:8] causal",
        "  from no rank: nothing, sends 1[0:8]",
    ]
    assert str(last).splitlines()[-1] == "  from 0[0:8]: q[0:8] k[0:8] full"
    windowed = ring_schedule(TokenLayout("zigzag", 16, 1, 2), MaskSpec.window(2, 1), 0)
    assert "q[0:4] k[0:4] window(2,1); q[4:8] k[4:8] window(2,1)" in str(windowed)
    zigzag = TokenLayout("zigzag", 24, 1, 3)
    assert str(
        ring_schedule(zigzag, CAUSAL, 1, gather=True, position="local_first")
    ).splitlines() == [
        "ring rank 1 of 3, 100 pairs",
        "  local: q[0:8] k[0:8] causal",
        "  from 2[0:8] 0[0:4]: q[4:8] k[0:12] full; q[0:4] k[8:12] full, sends 0[0:8] 2[0:4]",
    ]
    assert str(
        ring_schedule(zigzag, CAUSAL, 1, gather=True, position="local_merged")
    ).splitlines() == [
        "ring rank 1 of 3, 100 pairs",
        "  from 2[0:8] 0[0:4] 1[0:8]: q[4:8] k[0:20] causal; q[0:4] k[8:16] causal, "
        "sends 0[0:8] 2[0:4]",
    ]


def test_a_double_ring_prints_its_windows() -> None:
    plan = str(double_ring_schedule(TokenLayout("zigzag", 32, 1, 4), CAUSAL, 3, inner=2))
    assert plan.splitlines()[1:] == [
        "  outer step 1 relays 1[0:4], sends 1[0:8]",
        "  local: q[0:8] k[0:8] causal",
        "  from 2[0:4]: q[0:8] k[0:4] full, sends 2[0:8]",
        "  outer step 1, relayed: q[0:8] k[0:4] full",
        "  outer step 1, from 0[0:4]: q[0:8] k[0:4] full, sends 2[0:4]",
    ]
