"""GRPO and RLOO on ulysses x ring: rollouts, rewards, losses and what they log as on one process.

With several meshes, as on as many processes as there are meshes: each has random numbers of its own.
"""

from typing import Any

import pytest
import torch
from hf_trainer_runs import Split
from rl_runs import Rollouts, run_rl, saved_reference

SLOW = pytest.mark.slow
KL: dict[str, Any] = {
    "beta": 0.1,
    "num_iterations": 2,
    "steps_per_generation": 2,
    "mask_truncated_completions": True,
    "gradient_checkpointing": True,
    "evaluate": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
}
# A prompt's completions are in two meshes.
ACROSS: dict[str, Any] = {
    "num_generations": 4,
    "loss_type": "bnpo",
    "top_entropy_quantile": 0.5,
    "scale_rewards": "batch",
    "log_completions": True,
}
AGAIN = {"num_iterations": 2}  # by the probabilities of a model that has changed since
RLOO: dict[str, Any] = {"name": "rloo", "beta": 0.1, "normalize_advantages": True, **AGAIN}
SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence"}
CASES: list[Any] = [
    (2, Split(2, 1), KL),
    (4, Split(1, 2, "zero3"), ACROSS),
    (4, Split(2, 1, "zero2"), RLOO),
    (2, Split(1, 2), {"rollouts": True, "loss_type": "grpo"}),
    (4, Split(2, 1), {"vllm": True, "num_generations": 4}),
]
OTHERS: dict[str, dict[str, Any]] = {
    "kl": KL,
    "across": ACROSS,
    "rloo": {**RLOO, "evaluate": True},
    "lora": {"lora": True, **KL},
    "reward model": {"reward_model": True, **AGAIN},
    "gspo": {"loss_type": "grpo", **SEQUENCE, **AGAIN},
    "dr_grpo": {"loss_type": "dr_grpo", "num_generations": 4, "entropy_coef": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, **AGAIN},
    "sapo": {"loss_type": "sapo", "beta": 0.1, **AGAIN},
    "synced": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "vespo": {"loss_type": "vespo", "off_policy_mask_threshold": 0.1, **AGAIN},
    "luspo": {"loss_type": "luspo", "use_adaptive_entropy": True, **SEQUENCE, **AGAIN},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}
SPLITS = [
    (2, Split(2, 1)),
    (4, Split(2, 2)),
    (4, Split(1, 2, "zero2")),
    (4, Split(2, 1, "zero3")),
    (2, Split(1, 2, "fsdp2")),
]
for world, split in SPLITS:
    for options in OTHERS.values():
        # TRL adds the shards of one model to the weights of the other.
        if "sync_ref_model" not in options or split.engine != "fsdp2":
            CASES.append(pytest.param(world, split, options, marks=SLOW))


def same_logs(got: Rollouts, want: Rollouts) -> None:
    assert len(got.logs) == len(want.logs)
    for log, expected in zip([*got.logs, got.evaluation], [*want.logs, want.evaluation]):
        assert log.keys() == expected.keys()
        for name, value in expected.items():
            if "time" in name or "per_second" in name:
                continue
            if value is None:
                assert log[name] is None, name
            else:
                assert log[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("world", "split", "options"), CASES, ids=str)
def test_a_trainer_that_generates_trains_as_one_process_does(pool, split, world, options, tmp_path):
    options = {"folder": saved_reference(str(tmp_path)), **options}
    size = split.ulysses * split.ring
    wanted = pool.run(run_rl, world // size, **options)
    ranks = pool.run(run_rl, world, split=split, **options)
    for rank, got in enumerate(ranks):
        assert got.completions == wanted[rank // size].completions
        for model, tokens in wanted[0].tokens.items():
            assert bool(tokens) <= got.tokens[model] <= -(-tokens // size) + 1
    assert len({tuple(x.completions) for x in wanted}) == len(wanted)
    got, want = ranks[0], wanted[0]
    same_logs(got, want)
    assert got.table == want.table
    for weight, expected in zip(got.weights, want.weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
