"""A few steps of TRL's trainers that generate, on tiny random models, by ranks of the harness."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from PIL import Image
from tiny_towers import IMAGE, build_with_tower
from torch import Tensor

from ds_usp.integrations.transformers import attach

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

    def __call__(self, completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        completions = [x if isinstance(x, str) else x[0]["content"] for x in completions]
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
        {"prompt": text([(i * 7 + j) % 85 + 3 for j in range(length + i % 5)])} for i in range(32)
    ]
    images = options.pop("images", False)
    if images:
        rows = [with_an_image(row, seed) for seed, row in enumerate(rows)]
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
        processing_class=Processor() if images else tokenizer(),
        callbacks=[record],
        **made,
    )


def with_an_image(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """A message with a picture of 4 x 4 patches before its words; each third has none."""
    words: list[dict[str, str]] = [{"type": "text", "text": row["prompt"]}]
    if seed % 3 == 1:
        return {"prompt": [{"role": "user", "content": words}], "images": []}
    shades = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(shades.repeat(4, 0).repeat(4, 1))
    return {
        "prompt": [{"role": "user", "content": [{"type": "image"}, *words]}],
        "images": [picture],
    }


class Processor(transformers.ProcessorMixin):
    """That of Qwen2.5-VL for words and pictures; its own needs torchvision, for videos."""

    image_token_id = IMAGE

    def __init__(self) -> None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as of_qwen

        self.tokenizer = tokenizer()
        self.tokenizer.padding_side = "left"
        self.chat_template = self.tokenizer.chat_template = (
            "{% for message in messages %}{% if message['content'] is string %}"
            "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
            f"{{{{ part['text'] if part['type'] == 'text' else 'w{IMAGE}' }}}} "
            "{% endfor %}{% endif %}{% endfor %}"
        )
        self.image_processor = of_qwen.Qwen2VLImageProcessorPil(
            patch_size=2,
            temporal_patch_size=1,
            merge_size=2,
            size={"shortest_edge": 64, "longest_edge": 64},
        )

    def __call__(self, images: Any = None, text: Any = None, **given: Any) -> Any:
        flat = [x for row in images or [] for x in (row if isinstance(row, list) else [row])]
        of_images = self.image_processor(images=flat, return_tensors="pt") if flat else {}
        pieces = text[:] if isinstance(text, list) else [text]
        pieces = [x.replace(f"w{IMAGE}", f"w{IMAGE} " * 4) for x in pieces]
        asked = {name: x for name, x in given.items() if name in ("padding", "return_tensors")}
        tokens = self.tokenizer(pieces, **asked)
        ids = tokens["input_ids"]
        kinds = [[int(x == IMAGE) for x in row] for row in ids]
        if isinstance(ids, Tensor):
            kinds = torch.tensor(kinds)
        return transformers.BatchFeature({**tokens, **of_images, "mm_token_type_ids": kinds})


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
        model = tiny_model(experts=options.pop("experts", False))
        if options.get("images"):
            model = build_with_tower("qwen2_5_vl")
            model.generation_config.update(eos_token_id=2, pad_token_id=0)
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

                layers = [x for x in counts.modules() if type(x).__name__.endswith("DecoderLayer")]
                layers[0].register_forward_pre_hook(count)
        if mesh:
            attach(trainer, mesh, share_prefixes=share_prefixes)
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
