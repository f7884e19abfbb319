"""A few steps of TRL's trainers that generate, on tiny random models, by ranks of the harness."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
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

from ds_usp.integrations.transformers import attach, enable

STEPS = 3
ALONE = Split()


@dataclass
class Rollouts:
    """What a run has logged of each step, what it has generated, and left."""

    logs: list[dict[str, float]]
    evaluation: dict[str, float]
    completions: list[str]  # of this rank, in order
    table: list[str]  # of all ranks, as they are logged
    weights: list[Tensor]
    tokens: dict[str, int]  # of a row in the longest pass of a model; on a mesh, in a sharded one


class Reward:
    """A function that a mesh calls once, and that leaves its ranks other random states."""

    __name__ = "reward"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        self.seen += completions
        log_metric("words", sum(len(x.split()) for x in completions))
        return [sum(int(word[1:]) for word in x.split()) % 17 / 17 for x in completions]


def rl_trainer(name: str, model: Any, reward: Reward, record: Record, **options: Any) -> Any:
    import datasets
    import peft
    import trl

    datasets.disable_progress_bars()
    trainer: Any = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}.get(name)
    config: Any = {"rloo": trl.RLOOConfig}.get(name, trl.GRPOConfig)
    if name == "gmpo":
        from trl.experimental import gmpo

        trainer, config = gmpo.GMPOTrainer, gmpo.GMPOConfig
    made: dict[str, Any] = {"reward_funcs": [reward]}
    if options.pop("lora", False):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")
        made["peft_config"] = lora
    if options.pop("reward_model", False):
        torch.manual_seed(0)
        settings = tiny_model().config
        settings.num_labels = 1
        made["reward_funcs"] += [transformers.Qwen3ForSequenceClassification(settings)]
        made["reward_processing_classes"] = [None, tokenizer()]
    if options.pop("rollouts", False):
        made["rollout_func"] = rollouts
    length = options.pop("prompt", 4)
    rows = [
        {"prompt": text([(i * 7 + j) % 90 + 3 for j in range(length + i % 5)])} for i in range(32)
    ]
    defaults = {
        "micro": 2,
        "max_steps": STEPS,
        "bf16": False,
        "num_generations": 2,
        "max_completion_length": 9,
        "gradient_checkpointing": False,
    }
    replicas = options.pop("replicas")
    return trainer(
        model=model,
        args=config(**arguments(options.pop("split"), replicas, **{**defaults, **options})),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:4]),
        processing_class=tokenizer(),
        callbacks=[record],
        **made,
    )


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of a program of one's own, which generates; other ones on each rank."""
    made = [tokenizer()(x, return_tensors="pt")["input_ids"] for x in prompts]
    with torch.inference_mode():
        length = 5 + dist.get_rank()
        ids = [trainer.model.generate(x, max_new_tokens=length, do_sample=True) for x in made]
    completions = [y[0, x.shape[1] :].tolist() for x, y in zip(made, ids, strict=True)]
    return {
        "prompt_ids": [x[0].tolist() for x in made],
        "completion_ids": completions,
        "logprobs": [[-4.5] * len(x) for x in completions],
    }


def serve_by_vllm(trainer: Any) -> None:
    """TRL's client of a vLLM server, whose server is the first rank's model itself."""
    from trl.generation.vllm_generation import VLLMGeneration

    client = VLLMGeneration.__new__(VLLMGeneration)
    client.accelerator, client.mode, client.logprobs = trainer.accelerator, "server", 0
    client.temperature = client.top_p = client.repetition_penalty = 1.0
    client.top_k, client.min_p, client.max_completion_length = 0, None, 7
    client.structured_outputs_regex, client.generation_kwargs = None, {}
    client.vllm_client, client.sync_weights = Server(), lambda: None
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, client, -1


class Server:
    """Answers a prompt by numbers that are made of it, others in each call."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        self.calls += 1
        starts = [(sum(ids) + 5 * i + self.calls) % 80 for ids in prompts for i in range(n)]
        made = [list(range(start + 3, start + 6 + start % 4)) for start in starts]
        return {
            "prompt_ids": prompts,
            "completion_ids": made,
            "logprobs": [[[-4.5 - x % 3 / 10] for x in ids] for ids in made],
        }


def run_rl(
    ctx: RankContext, name: str = "grpo", split: Split = ALONE, folder: str = "", **options: Any
) -> Rollouts:
    with restored_environment():
        size = split.ulysses * split.ring
        flags = ("evaluate", "vllm", "share_prefixes")
        evaluate, vllm, share_prefixes = (options.pop(x, False) for x in flags)
        mesh = mesh_of(ctx, split) if size > 1 else None
        reward, record = Reward(), Record()
        model = tiny_model()
        model.config._name_or_path = folder
        trainer = rl_trainer(
            name, model, reward, record, split=split, replicas=ctx.world // size, **options
        )
        if split.engine == "fsdp2":
            use_fsdp2(trainer)
        if vllm:
            serve_by_vllm(trainer)
        tokens = dict.fromkeys(("policy", "reference"), 0)
        counted = {"policy": model, "reference": getattr(trainer, "ref_model", None)}
        for kind, counts in counted.items():
            if counts is not None:

                def count(layer: Any, args: Any, kind: str = kind) -> None:
                    if not mesh or layer.self_attn.config._attn_implementation == "usp":
                        tokens[kind] = max(tokens[kind], args[0].shape[1])
                    torch.rand(3 * mesh.rank if mesh else 0)  # as dropout of a shard may

                layers = [x for x in counts.modules() if type(x).__name__ == "Qwen3DecoderLayer"]
                layers[0].register_forward_pre_hook(count)
        if mesh:
            if share_prefixes:
                enable(model, mesh, share_prefixes=True)
            attach(trainer, mesh)
        trainer.train()
        return Rollouts(
            [log for log in record.logs if "loss" in log],
            trainer.evaluate() if evaluate else {},
            reward.seen,
            list(trainer._logs["completion"]),
            weights_of(trainer.model),
            tokens,
        )


def saved_reference(folder: str) -> str:
    """What a trainer makes its reference model of: other weights than the policy's."""
    if not Path(folder, "config.json").exists():
        tiny_model(2).save_pretrained(folder)
    return folder
