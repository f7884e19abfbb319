"""GRPO and RLOO on ulysses x ring: rollouts, rewards, losses and what they log as on one process.

With several meshes, as on as many processes: each mesh has random numbers of its own.
"""

import re
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import RankContext
from hf_trainer_runs import Record, Split, mesh_of, restored_environment, tiny_model
from packaging.version import Version
from rl_runs import Reward, Rollouts, rl_trainer, run_rl, saved_reference

from ds_usp.errors import ConfigError, MeshError
from ds_usp.integrations.transformers import attach

pytestmark = pytest.mark.skipif(
    Version(version("trl")) < Version("1.15"), reason="TRL before 1.15 is refused"
)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "usage" / "rl.md"
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
    (2, Split(2, 1), {x: value for x, value in KL.items() if not x.startswith("eval_")}),
    (2, Split(1, 2), {"rollouts": True, "loss_type": "grpo"}),
    (4, Split(2, 1), {"vllm": True, "num_generations": 4}),
]
OTHERS: dict[str, dict[str, Any]] = {
    "kl": KL,
    "across": ACROSS,
    "rloo": {**RLOO, "evaluate": True},
    "lora": {"lora": True, **KL},
    "reward model": {"reward_model": True, **AGAIN},
    "gmpo": {"name": "gmpo", **AGAIN},
    "gspo": {"loss_type": "grpo", **SEQUENCE, **AGAIN},
    "dr_grpo": {"loss_type": "dr_grpo", "num_generations": 4, "entropy_coef": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, **AGAIN},
    "sapo": {"loss_type": "sapo", "beta": 0.1, **AGAIN},
    "synced": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "vespo": {"loss_type": "vespo", "off_policy_mask_threshold": 0.1, **AGAIN},
    "luspo": {"loss_type": "luspo", "use_adaptive_entropy": True, **SEQUENCE, **AGAIN},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    "router losses": {"experts": True, **AGAIN},
    "images": {"images": True, **AGAIN},
}
SPLITS = [
    (2, Split(2, 1)),
    (4, Split(2, 2)),
    (4, Split(1, 2, "zero2")),
    (4, Split(2, 1, "zero3")),
    (2, Split(1, 2, "fsdp2")),
]
MORE = [
    pytest.param(*split, options, id=f"{name}-{split[1]}")
    for split, (name, options) in zip(cycle(SPLITS), OTHERS.items(), strict=False)
]


def same_logs(got: Rollouts, want: Rollouts) -> None:
    pairs = zip([*got.logs, got.evaluation], [*want.logs, want.evaluation], strict=True)
    for log, expected in pairs:
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
    trains_as_one_process_does(pool, split, world, options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "split", "options"), MORE)
def test_further_losses_and_options_do(pool, split, world, options, tmp_path):
    trains_as_one_process_does(pool, split, world, options, tmp_path)


def trains_as_one_process_does(
    pool: Any, split: Split, world: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"folder": saved_reference(str(tmp_path)), **options}
    size = split.ulysses * split.ring
    wanted = pool.run(run_rl, world // size, **options)
    ranks = pool.run(run_rl, world, split=split, **options)
    for rank, got in enumerate(ranks):
        is_first = rank % size == 0  # of its mesh, which asks for rewards once
        assert got.completions == (wanted[rank // size].completions if is_first else [])
        for model, tokens in wanted[0].tokens.items():
            assert bool(tokens) <= got.tokens[model] <= -(-tokens // size) + 1
    assert len({tuple(x.completions) for x in wanted}) == len(wanted)
    got, want = ranks[0], wanted[0]
    same_logs(got, want)
    assert got.table == want.table
    for weight, expected in zip(got.weights, want.weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ refusals


def tool(x: int) -> int:
    """Double a number.

    Args:
        x: the number.

    Returns:
        Twice the number.
    """
    return 2 * x


def with_tools(trainer: Any) -> None:
    trainer.tools = [tool]


def with_environments(trainer: Any) -> None:
    trainer.environment_factories = {None: object}


def of_older_trl(trainer: Any) -> None:
    trainer.__class__ = type("GRPOTrainer", (transformers.Trainer,), {})


def evaluates(trainer: Any) -> None:
    trainer.args.do_eval, trainer.args.eval_strategy = True, "steps"
    trainer.num_generations_eval = 3


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({}, with_tools, "GRPOTrainer with tools: every rank of a mesh"),
    ({}, with_environments, "GRPOTrainer with environment_factories: every rank of a mesh"),
    ({}, of_older_trl, "use trl>=1.15"),
    ({}, evaluates, "1 meshes evaluate 2 completions at once"),
    ({"num_generations": 4}, id, "1 meshes make 2 completions at once .*num_generations=4"),
]


def refusals(ctx: RankContext) -> list[str]:
    texts = []
    for options, change, _ in REFUSED:
        options = {"gradient_accumulation_steps": 1, "split": Split(), "replicas": 2, **options}
        with restored_environment():
            trainer = rl_trainer("grpo", tiny_model(), Reward(), Record(), **options)
            change(trainer)
            with pytest.raises(ConfigError) as error:
                attach(trainer, mesh_of(ctx, Split(2, 1)))
            texts.append(str(error.value))
    return texts


def test_what_a_mesh_would_not_do_alike_is_refused_on_every_rank(pool):
    for texts in pool.run(refusals, 2):
        for text, (_, _, expected) in zip(texts, REFUSED, strict=True):
            assert re.search(expected, text)


class Fails(Reward):
    def __call__(self, completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        raise KeyError("a judge that does not answer")


def judged(ctx: RankContext) -> str:
    with restored_environment():
        trainer = rl_trainer("grpo", tiny_model(), Fails(), Record(), split=Split(), replicas=2)
        attach(trainer, mesh_of(ctx, Split(1, 2)))
        with pytest.raises((KeyError, MeshError)) as error:
            trainer.train()
        return f"{error.type.__name__} {error.value}"


def test_an_error_of_a_reward_is_one_of_its_mesh(pool):
    """It is called on one rank, and the other waits for its rewards."""
    first, second = pool.run(judged, 2)
    assert first.startswith("KeyError") and second.startswith("MeshError")
    assert "a judge that does not answer" in second


# ------------------------------------------------------------------ the page


def run_first_program(ctx: RankContext) -> list[dict[str, float]]:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    with restored_environment():
        exec(programs[0], names)
    logs: list[dict[str, float]] = names["trainer"].state.log_history[:-1]
    return logs


def test_the_first_program_trains_on_two_ranks_as_on_one(pool):
    (one,), two = pool.run(run_first_program, 1), pool.run(run_first_program, 2)
    for logs in two:
        for name in ("reward", "loss", "grad_norm", "num_tokens"):
            assert [x[name] for x in logs] == pytest.approx([x[name] for x in one], abs=1e-4)
