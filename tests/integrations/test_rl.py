"""GRPO and RLOO on ulysses x ring: rollouts, rewards, losses and what they log as on one process."""

from typing import Any

import pytest
from hf_trainer_runs import Split
from rl_runs import Rollouts, run_rl, saved_reference


def same_logs(got: Rollouts, want: Rollouts) -> None:
    for log, expected in zip([*got.logs, got.evaluation], [*want.logs, want.evaluation]):
        assert log.keys() == expected.keys()
        for name, value in expected.items():
            if "time" in name or "per_second" in name:
                continue
            assert log[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("split", [Split(2, 1), Split(1, 2, "zero2"), Split(2, 1, "zero3")])
def test_grpo(pool, split, tmp_path):
    want = pool.run(run_rl, 1, micro=4)[0]
    got = pool.run(run_rl, 2, split=split, micro=4)[0]
    print(want.logs, want.shapes, got.shapes)
    assert got.completions == want.completions
    same_logs(got, want)
