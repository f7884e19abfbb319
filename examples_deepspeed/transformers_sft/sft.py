"""Fine-tune a causal language model of transformers on sequences that are sharded over ranks.

    torchrun --nproc-per-node 4 sft.py --model tiny --sequence_parallel_size 4 --ulysses_degree 2 \\
        --output_dir out --max_length 512 --packing

Every other flag is TRL's (SFTConfig) or transformers' (TrainingArguments). Batch sizes are those of
a replica: of ``--sequence_parallel_size`` ranks.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics  # text that every Python carries

import datasets
import torch.distributed as dist
import transformers as hf
import trl
from tiny import losses_match, tiny_model

import ds_usp
from ds_usp import settings
from ds_usp.integrations.transformers import attach, enable


def flag(default, text: str, **more):
    """A flag with a default value and a help text."""
    return field(default=default, metadata={"help": text, **more})


@dataclass
class Flags:
    """The flags that are not the trainer's."""

    model: str = flag("tiny", "a folder, an id of the hub, or tiny: a random Llama of 2 layers")
    data: str = flag("", "JSON lines or an id of the hub, with a column text; empty: Python's help")
    trainer: str = flag("trl", "whose trainer", choices=["trl", "transformers"])
    sequence_parallel_size: int = flag(1, "ranks that share each sequence; 1: without ds_usp")
    ulysses_degree: int = flag(0, "of these, ranks that exchange heads; 0: as the heads allow")
    compare_with: str = flag("", "output_dir of a run whose losses are expected")


USPFlags = settings.dataclass_of("transformers", "USPFlags")  # --usp_recompute and others


def pretrained(name: str) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase]:
    """A model and its tokenizer."""
    model = hf.AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model, hf.AutoTokenizer.from_pretrained(name)


def trainer_of(flags: Flags, args: trl.SFTConfig, model, tokenizer) -> hf.Trainer:
    """TRL's trainer or transformers', on the same texts."""
    if not flags.data:
        data = datasets.Dataset.from_dict({"text": list(topics.values())})
    elif Path(flags.data).exists():
        data = datasets.load_dataset("json", data_files=flags.data, split="train")
    else:
        data = datasets.load_dataset(flags.data, split="train")
    if flags.trainer == "trl":
        return trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    limit = {"truncation": True, "max_length": args.max_length}
    rows = data.map(lambda row: tokenizer(row["text"], **limit), remove_columns=data.column_names)
    padded = hf.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    collator = hf.DataCollatorWithFlattening() if args.packing else padded
    return hf.Trainer(model, args, train_dataset=rows, data_collator=collator)


def mesh_of(flags: Flags, heads: int) -> ds_usp.SequenceMesh:
    """The ranks that share this rank's sequences."""
    size = flags.sequence_parallel_size
    world = dist.get_world_size() if dist.is_initialized() else 1
    ulysses = flags.ulysses_degree or math.gcd(size, heads)
    if world % size or size % ulysses:
        raise ds_usp.ConfigError(
            f"{world} ranks are no multiple of {size} = ulysses {ulysses} x ring"
        )
    if world == 1:
        return ds_usp.SequenceMesh.single()
    axes = {"ulysses": ulysses, "ring": size // ulysses, "dp": world // size}
    return ds_usp.SequenceMesh.build(ds_usp.RankGrid(axes))


def main() -> int:
    """Train; 1 if ``--compare_with`` finds a difference."""
    parser = hf.HfArgumentParser((Flags, USPFlags, trl.SFTConfig))
    flags, usp_flags, args = parser.parse_args_into_dataclasses()
    hf.set_seed(args.seed)
    model, tokenizer = tiny_model() if flags.model == "tiny" else pretrained(flags.model)
    mesh = mesh_of(flags, model.config.num_attention_heads)
    if mesh.sp_degree > 1:  # else transformers alone, unchanged
        options = vars(usp_flags).items()
        enable(model, mesh, **{name.removeprefix("usp_"): value for name, value in options})
    trainer = trainer_of(flags, args, model, tokenizer)
    if mesh.sp_degree > 1:
        attach(trainer, mesh)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    if flags.compare_with and trainer.is_world_process_zero():
        return int(not losses_match(trainer.state.log_history, flags.compare_with))
    return 0


if __name__ == "__main__":
    with ds_usp.one_line_errors():
        raise SystemExit(main())
