"""TRL's trainers on long sequences of synthetic books: what ``bench_long_context.py`` times."""

from __future__ import annotations

from typing import Any

import datasets
import torch
import transformers
import trl
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from bench_harness import Session
from tokenizers import Tokenizer, models
from transformers_cases import start_deepspeed


def engine(case: str, session: Session) -> dict[str, Any]:
    """Arguments of a trainer: how weights and, by the peers, sequences are sharded."""
    if case == "ALST":
        start_deepspeed()
        bf16 = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        return {
            "bf16": session.on_gpu,  # transformers refuses another word than DeepSpeed's
            "parallelism_config": ParallelismConfig(sp_size=session.world, sp_handler=handler),
            "deepspeed": {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 1.0,
                "bf16": dict.fromkeys(bf16, session.on_gpu),
                "zero_optimization": {"stage": 3},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        }
    if not session.on_gpu:
        return {"ddp_backend": "gloo"}  # Accelerate has FSDP2 on GPUs alone
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
    found: dict[str, Any] = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, **wrap}}
    if case == "Accelerate":
        found["parallelism_config"] = ParallelismConfig(cp_size=session.world)
    return found


def book(tokens: int, vocabulary: int, seed: int) -> list[int]:
    """Words by a power law, as those of texts are."""
    draw = torch.rand(tokens, generator=torch.Generator().manual_seed(seed))
    return (3 + (vocabulary - 3) * draw**4).long().tolist()


def tokenizer(vocabulary: int) -> Any:
    """A word a token: TRL's trainers want a tokenizer, and GRPO decodes completions by it."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w3"))
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def sft(model: Any, lengths: list[int], copies: int, options: dict[str, Any]) -> Any:
    """TRL's SFTTrainer, a book of each length a step; ``copies`` of each book follow each other."""
    vocabulary = model.config.vocab_size
    books = [book(length, vocabulary, seed) for seed, length in enumerate(lengths)]
    rows = [{"input_ids": x, "labels": x} for x in books for _ in range(copies)]
    config = trl.SFTConfig(
        **options,
        max_length=None,
        packing=False,
        shuffle_dataset=False,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return trl.SFTTrainer(
        model,
        config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(vocabulary),
    )


def grpo(
    model: Any, steps: list[tuple[int, int]], completions: int, share: bool, options: dict[str, Any]
) -> Any:
    """TRL's GRPOTrainer on so many completions to one prompt.

    Args:
        steps: tokens of prompt and completions of each step.
        share: all are one micro batch, which shares its prompt; else each is one.
    """
    vocabulary = model.config.vocab_size
    remaining, micro = iter(steps), 1 if share else completions
    options = options | {"per_device_train_batch_size": completions // micro}

    def rollout(prompts: list[Any], _trainer: Any) -> dict[str, Any]:
        (prompt, length), count = next(remaining), len(prompts)
        return {
            "prompt_ids": [book(prompt, vocabulary, 99)] * count,
            "completion_ids": [book(length, vocabulary, seed) for seed in range(count)],
            "logprobs": [[0.0] * length] * count,  # of vLLM, which is not there
        }

    config = trl.GRPOConfig(
        **options,
        num_generations=completions,
        max_completion_length=max(length for _, length in steps),
        gradient_accumulation_steps=micro,
        steps_per_generation=micro,
        beta=0.0,
    )
    return trl.GRPOTrainer(
        model,
        args=config,
        rollout_func=rollout,
        reward_funcs=lambda completion_ids, **_: [float(sum(x) % 1009) for x in completion_ids],
        train_dataset=datasets.Dataset.from_list([{"prompt": "w9"}] * 4 * completions),
        processing_class=tokenizer(vocabulary),
    )
