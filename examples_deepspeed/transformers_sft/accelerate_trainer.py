"""Accelerate's ``parallelism_config`` on Ulysses x ring: an unedited Trainer and one call.

    accelerate launch --config_file accelerate.yaml accelerate_trainer.py --output_dir out
    python accelerate_trainer.py --output_dir alone --compare_with out   # one process: same losses

On GPUs, with a model and data of your own, ``patch_accelerate`` is all that a script adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import transformers as hf
from accelerate import ParallelismConfig
from tiny import losses_match, tiny_model

import ds_usp
from ds_usp.integrations.transformers import patch_accelerate
from ds_usp.training import prepare_deepspeed

SP_SIZE = ParallelismConfig().sp_size  # of the YAML; without accelerate launch 1
# Of this comparison: plain SGD, and the accumulation of the YAML. Flags go before them.
DEFAULTS: Mapping[str, object] = {
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": not torch.cuda.is_available(),  # else Accelerate starts no process group there
}


@dataclass
class Flags:
    """The flags that are not the trainer's."""

    ulysses_degree: int = field(default=2, metadata={"help": "of sp_size ranks; a ring: the rest"})
    compare_with: str = field(default="", metadata={"help": "output_dir of a run to compare with"})


def rows(tokens: int, count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Rows of any length: a multiple of the ranks is not needed."""
    every = [(torch.arange(tokens) * (row + 3)) % 250 + 1 for row in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in every]


def main() -> int:
    """Train; 1 if ``--compare_with`` finds a difference."""
    parser = hf.HfArgumentParser((Flags, hf.TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    flags, args = parser.parse_args_into_dataclasses()
    hf.set_seed(args.seed)
    model, _ = tiny_model()
    if SP_SIZE > 1:
        patch_accelerate(ulysses_degree=flags.ulysses_degree)  # the only line for ds_usp
    trainer = hf.Trainer(model, args, train_dataset=rows(203))
    trainer.train()
    trainer.save_state()
    if flags.compare_with and trainer.is_world_process_zero():
        return int(not losses_match(trainer.state.log_history, flags.compare_with))
    return 0


if __name__ == "__main__":
    if SP_SIZE > 1 and not torch.cuda.is_available():  # DeepSpeed takes NCCL, and compiles an op
        import deepspeed.comm

        prepare_deepspeed()
        deepspeed.comm.init_distributed(dist_backend="gloo")
    with ds_usp.one_line_errors():
        raise SystemExit(main())
