"""Table 2 of the USP paper (arXiv 2405.07719) by the planner's formulas, as docs/planner.md has it.

What each kind of parallelism sends and holds, for a GPT-2-like block of 12 d^2 elements in bf16 on
N ranks. Where a value differs from the printed one, the docs page states why.
"""

from __future__ import annotations

import pytest

from ds_usp.planner.formulas import saved_elements, stage_elements
from ds_usp.planner.memory import states_bytes
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.traffic import layer_traffic, step_traffic

RANKS, SIDE = 4096, 64  # N large enough for the printed limits
WIDTH, LENGTH = 8192, 65536
BLOCK = ModelShape("block", 1, WIDTH, 4 * WIDTH, WIDTH // 2, WIDTH // 2, 128, gated=False)
UNIFIED = {"ulysses": SIDE, "ring": SIDE}
UNIFIED_SENT = 8 / RANKS + 4.5 / SIDE  # all-to-all, and the ring's volume over the Ulysses degree

# Method -> degrees; elements sent for parameters in d^2 and for activations in b s d, straight and
# relayed around the ring; fractions held of weights and gradients, and of optimizer states.
ROWS = {
    "SP-Ulysses": ({"ulysses": RANKS, "zero": 0}, 24, 8 / RANKS, 8 / RANKS, 1, 1),
    "SP-Ring": ({"ring": RANKS, "zero": 0}, 24, 4.5, 6, 1, 1),
    "DP": ({"dp": RANKS, "zero": 0}, 24, 0, 0, 1, 1),
    "ZeRO-1": ({"dp": RANKS, "zero": 1}, 24, 0, 0, 1, 1 / RANKS),
    "Unified, ZeRO-1": ({**UNIFIED, "zero": 1}, 24, UNIFIED_SENT, None, 1, 1 / RANKS),
    "Unified, ZeRO-2": ({**UNIFIED, "zero": 2}, 24, UNIFIED_SENT, None, 0.5, 1 / RANKS),
    "Unified, ZeRO-3": ({**UNIFIED, "zero": 3}, 36, UNIFIED_SENT, None, 1 / RANKS, 1 / RANKS),
    "TP": ({"tp": RANKS, "tp_sequence": False, "zero": 0}, 0, 8, 8, 1 / RANKS, 1 / RANKS),
    "TP-sp": ({"tp": RANKS, "zero": 0}, 0, 10, 10, 1 / RANKS, 1 / RANKS),
}


@pytest.mark.parametrize("method", ROWS)
def test_the_table_of_the_usp_paper(method: str) -> None:
    degrees, parameters, activations, relayed, weights_held, optimizer_held = ROWS[method]
    config = ParallelConfig(**degrees, grad_bytes=2)
    work = Workload(BLOCK, LENGTH, config.dp)
    block = BLOCK.matrix_elements
    of_block = block / config.tp / stage_elements(work, config, 0)  # without embedding and head
    sent = step_traffic(work, config).total * of_block / (2 * WIDTH**2)
    assert sent == pytest.approx(parameters, rel=0.001, abs=1e-9)
    for relay, expected in ((False, activations), (True, relayed)):
        if expected is not None:
            layer = layer_traffic(work, config, relay)
            both = layer.tp_forward + layer.tp_backward + 2 * layer.ulysses
            total = both + layer.ring_forward + layer.ring_backward
            assert total / (2 * LENGTH * WIDTH) == pytest.approx(expected, rel=0.05, abs=1e-9)
    weights, gradients, optimizer = states_bytes(block / config.tp, config)
    held = (weights + gradients) / (4 * block), optimizer / (12 * block)
    assert held == pytest.approx((weights_held, optimizer_held), rel=0.001)


def test_tensor_parallelism_alone_replicates_what_norms_save() -> None:
    sharded, replicated = saved_elements(BLOCK, ParallelConfig(tp=RANKS, tp_sequence=False))
    assert (sharded / RANKS + replicated) / (sharded + replicated) > 0.2
    assert saved_elements(BLOCK, ParallelConfig(tp=RANKS))[1] == 0
