"""A few steps of TRL's trainers that generate, on tiny random models, by ranks of the harness."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import RankContext
from hf_trainer_runs import (
    Record,
    Split,
    arguments,
    mesh_of,
    restored_environment,
    text,
    tiny_model,
    tokenizer,
    use_fsdp2,
    weights_of,
)
from torch import Tensor

from ds_usp.integrations.transformers import attach

STEPS = 3


@dataclass
class Rollouts:
    """What a run has logged of each step, what it was rewarded for, and its weights."""

    logs: list[dict[str, float]]
    completions: list[str]
    table: list[str]
    evaluation: dict[str, float]
    weights: list[Tensor]
    shapes: set[tuple[bool, int]]  # of the policy's passes: with a gradient, tokens of a row


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word[1:]) for word in x.split()) % 17 / 17 for x in completions]


def rl_trainer(
    name: str, split: Split, replicas: int, folder: str, record: Record, **options: Any
) -> Any:
    import datasets
    import trl

    datasets.disable_progress_bars()
    kinds: dict[str, tuple[Any, Any]] = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }
    trainer, config = kinds[name]
    made = options.pop("made", {})
    rewards = options.pop("rewards", reward)
    model = tiny_model()
    model.config._name_or_path = folder
    rows = [{"prompt": text([(i * 7 + j) % 90 + 3 for j in range(4 + i % 5)])} for i in range(32)]
    defaults = {
        "max_steps": STEPS,
        "bf16": False,
        "num_generations": 2,
        "max_completion_length": 9,
        "top_k": 20,
        "gradient_checkpointing": False,
    }
    return trainer(
        model=model,
        reward_funcs=rewards,
        args=config(**arguments(split, replicas, **{**defaults, **options})),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:4]),
        processing_class=tokenizer(),
        callbacks=[record],
        **made,
    )


def saved_reference(folder: str) -> None:
    """What a trainer makes its reference model of: other weights than the policy's."""
    if not Path(folder, "config.json").exists():
        tiny_model(2).save_pretrained(folder)


def run_rl(
    ctx: RankContext, name: str = "grpo", split: Split = Split(), folder: str = "", **options: Any
) -> Rollouts:
    with restored_environment():
        size = split.ulysses * split.ring
        evaluate = options.pop("evaluate", False)
        record = Record()
        seen: list[str] = []
        shapes: set[tuple[bool, int]] = set()

        def noted(completions: list[str], **kwargs: Any) -> list[float]:
            seen.extend(completions)
            return reward(completions, **kwargs)

        trainer = rl_trainer(
            name, split, ctx.world // size, folder, record, rewards=noted, **options
        )
        if split.engine == "fsdp2":
            use_fsdp2(trainer)
        layer = trainer.model.model.layers[0]
        layer.register_forward_pre_hook(
            lambda _, x: shapes.add((torch.is_grad_enabled(), x[0].shape[1]))
        )
        if size > 1:
            attach(trainer, mesh_of(ctx, split))
        trainer.train()
        return Rollouts(
            [log for log in record.logs if "loss" in log],
            seen,
            list(trainer._logs["completion"]),
            trainer.evaluate() if evaluate else {},
            weights_of(trainer.model),
            shapes,
        )
