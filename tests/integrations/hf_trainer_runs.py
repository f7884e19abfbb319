"""A few steps of Trainer and SFTTrainer on tiny random models, by ranks of the harness."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import transformers
from harness import RankContext
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_usp
from ds_usp.geometry.ranks import RankGrid
from ds_usp.integrations.transformers import attach
from ds_usp.training import prepare_deepspeed

with contextlib.suppress(ImportError):  # before transformers 5
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # By the server of ranks, once: whatever loads or saves a model compiles 800 patterns, 0.25 s.
    get_checkpoint_conversion_mapping("qwen3")

WORDS = 97
STEPS = 2
BATCH = 4  # sequences in a step, in micro batches of all replicas


@dataclass(frozen=True)
class Split:
    """How the ranks share sequences and weights."""

    ulysses: int = 1
    ring: int = 1
    engine: str = "ddp"  # or fsdp2, zero0 to zero3

    def __str__(self) -> str:
        return f"u{self.ulysses}r{self.ring}-{self.engine}"


@dataclass
class Run:
    """What a run has logged, by step, and left."""

    losses: list[float]
    norms: list[float]
    weights: list[Tensor]
    state: dict[str, Any]
    evaluation: dict[str, float]


def tiny_model(seed: int = 1, experts: bool = False) -> nn.Module:
    kind, sizes = transformers.Qwen3ForCausalLM, dict[str, Any]()
    if experts:
        kind = transformers.Qwen3MoeForCausalLM
        sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        sizes["router_aux_loss_coef"] = 0.3
    config = kind.config_class(
        **sizes,
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return kind(config)


class Documents(Dataset):
    """Sequences of 5 to 39 random words; the first third of each does not count in the loss."""

    def __init__(self, count: int = 64) -> None:
        draw = torch.Generator().manual_seed(7)
        self.items = [
            torch.randint(
                3, WORDS, (int(torch.randint(5, 40, (1,), generator=draw)),), generator=draw
            ).tolist()
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        x = self.items[index]
        return {"input_ids": x, "labels": [-100] * (len(x) // 3) + x[len(x) // 3 :]}


class Stream(IterableDataset):
    """The same sequences, one after the other."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        items = Documents()
        return (items[index] for index in range(len(items)))


def mesh_of(ctx: RankContext, split: Split) -> ds_usp.SequenceMesh:
    replicas = ctx.world // (split.ulysses * split.ring)
    sizes = {"ulysses": split.ulysses, "ring": split.ring, "dp": replicas}
    return ds_usp.SequenceMesh.build(RankGrid(sizes))


class Record(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def arguments(split: Split, replicas: int, **options: Any) -> dict[str, Any]:
    """Arguments of a trainer; the batch of a step is the same on every split."""
    micro = options.pop("micro", 1)
    accumulation = BATCH // (micro * replicas)
    engine: dict[str, Any] = {}
    if split.engine.startswith("zero"):
        prepare_deepspeed()
        engine["deepspeed"] = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": int(split.engine[-1])},
            "gradient_clipping": options.get("max_grad_norm", 0.0),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    elif split.engine == "fsdp2":
        engine["fsdp"] = True
        engine["fsdp_config"] = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "ddp_backend": "gloo" if dist.get_world_size() > 1 else None,
        **engine,
        **options,
    }


def weights_of(model: nn.Module) -> list[Tensor]:
    """The whole weights, of every rank's partitions."""
    found = []
    for p in model.parameters():
        gathered: Any = contextlib.nullcontext()
        if hasattr(p, "ds_id"):
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([p])
        with gathered:
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            found.append(whole.detach().float().clone())
    return found


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Accelerate hands its options on in the environment, transformers ZeRO-3 to models that are
    loaded later, and the next case is another one."""
    before = dict(os.environ)
    # It asks for these even where torch.distributed runs already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        unset_hf_deepspeed_config()


def run_trainer(ctx: RankContext, **options: Any) -> Run:
    with restored_environment():
        return train_packed(ctx, **options)


def train_packed(ctx: RankContext, split: Split = Split(), **options: Any) -> Run:
    size = split.ulysses * split.ring
    stream = options.pop("stream", False)
    count = options.pop("count", 64)
    extra_draws = options.pop("extra_draws", 0)
    evaluate = options.pop("evaluate", False)
    resume = options.pop("resume", None)
    args = transformers.TrainingArguments(**arguments(split, ctx.world // size, **options))
    model = tiny_model()
    record = Record()
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=Stream() if stream else Documents(count),
        eval_dataset=Documents(6) if evaluate else None,
        data_collator=transformers.DataCollatorWithFlattening(),
        callbacks=[record],
    )
    torch.rand(extra_draws * ctx.rank)  # ranks' random states may differ
    if split.engine == "fsdp2":
        use_fsdp2(trainer)
    return finish(ctx, trainer, split, record, evaluate, resume)


def use_fsdp2(trainer: Any) -> None:
    """Accelerate's FSDP2, which it offers on GPUs alone."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def finish(
    ctx: RankContext,
    trainer: Any,
    split: Split,
    record: Record,
    evaluate: bool = False,
    resume: str | None = None,
    share_prefixes: bool = False,
) -> Run:
    trainer.remove_callback(transformers.PrinterCallback)
    if split.ulysses * split.ring > 1:
        mesh = mesh_of(ctx, split)
        attach(trainer, mesh, share_prefixes=share_prefixes)
    trainer.train(resume_from_checkpoint=resume)
    steps = [log for log in record.logs if "loss" in log]
    return Run(
        losses=[log["loss"] for log in steps],
        norms=[log["grad_norm"] for log in steps if "grad_norm" in log],
        weights=weights_of(trainer.model),
        state={
            "flos": trainer.state.total_flos,
            "tokens": trainer.state.num_input_tokens_seen,
            "epoch": trainer.state.epoch,
            "batch": trainer.get_total_train_batch_size(trainer.args),
            "logs": steps,
            "engine": type(trainer.model_wrapped).__name__,
        },
        evaluation=trainer.evaluate() if evaluate else {},
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def run_sft(ctx: RankContext, **options: Any) -> Run:
    with restored_environment():
        return train_sft(ctx, **options)


def train_sft(ctx: RankContext, split: Split = Split(), lora: bool = False, **options: Any) -> Run:
    import datasets
    import peft
    import trl

    datasets.disable_progress_bars()
    replicas = ctx.world // (split.ulysses * split.ring)
    evaluate = options.pop("evaluate", False)
    args = trl.SFTConfig(
        **arguments(split, replicas, **options),
        bf16=False,
        max_length=48,
        shuffle_dataset=False,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    rows = [{"input_ids": Documents().items[i]} for i in range(64)]
    model = tiny_model()
    model.config._name_or_path = "tiny"
    record = Record()
    trainer = trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:7]) if evaluate else None,
        processing_class=tokenizer(),
        callbacks=[record],
        peft_config=peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM")
        if lora
        else None,
    )
    return finish(ctx, trainer, split, record, evaluate)


def preference_rows(name: str, prompt: int = 4) -> list[dict[str, Any]]:
    """What a trainer of preferences reads, with prompts of so many tokens: for TPO a third answer,
    for KTO one alone."""
    items = Documents().items
    rows: list[dict[str, Any]] = []
    for index, (x, y) in enumerate(pairwise(items)):
        longer = [(index + i) % 90 + 3 for i in range(prompt - 4)]
        row = {"prompt": text([*longer, *x[:4]]), "chosen": text(x[4:20]), "rejected": text(y[:12])}
        if name == "kto":
            row = {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 2 == 0}
        rows.append(row | {"reference": text(y[2:15])} if name == "tpo" else row)
    return rows


def trl_trainer(
    name: str, arguments: dict[str, Any], record: Record, experts: bool = False, prompt: int = 4
) -> Any:
    """One of TRL's trainers of a tiny model, with a second model where it has one. With experts it
    adds a loss of their routers: DPO to what the model returns, KTO in a head of its own."""
    import datasets
    import trl
    from trl.experimental import cpo, gkd, orpo, tpo

    datasets.disable_progress_bars()
    kinds = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
        "cpo": (cpo.CPOTrainer, cpo.CPOConfig),
        "tpo": (tpo.TPOTrainer, tpo.TPOConfig),
        "gkd": (gkd.GKDTrainer, gkd.GKDConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }
    trainer, config = kinds[name]
    model, other = tiny_model(1, experts), tiny_model(2, experts)
    if name == "reward":
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = transformers.Qwen3ForSequenceClassification(model.config)
    model.config._name_or_path = other.config._name_or_path = "tiny"
    second = {"dpo": "ref_model", "kto": "ref_model", "gkd": "teacher_model"}.get(name)
    made: dict[str, Any] = {second: other} if second else {}
    rows = preference_rows(name, prompt)
    if name == "gkd":
        rows = [dict(Documents()[index]) for index in range(64)]
        made["data_collator"] = transformers.DataCollatorForSeq2Seq(tokenizer())
        arguments = {"lmbda": 0.0, **arguments}
    return trainer(
        model=model,
        args=config(**arguments, bf16=False, max_length=64),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=[record],
        **made,
    )


def run_trl(
    ctx: RankContext,
    name: str,
    split: Split = Split(),
    experts: bool = False,
    prompt: int = 4,
    share_prefixes: bool = False,
    **options: Any,
) -> tuple[list[dict[str, float]], int]:
    """What a trainer has logged of each step, and the most tokens that its second model was given
    at once."""
    with restored_environment():
        replicas = ctx.world // (split.ulysses * split.ring)
        record = Record()
        trainer = trl_trainer(name, arguments(split, replicas, **options), record, experts, prompt)
        tokens = [0]
        for second in ("ref_model", "teacher_model"):
            if hasattr(trainer, second):
                embed = getattr(trainer, second).get_input_embeddings()
                embed.register_forward_pre_hook(lambda _, x: tokens.append(x[0].shape[1]))
        finish(ctx, trainer, split, record, share_prefixes=share_prefixes)
    return [log for log in record.logs if "grad_norm" in log], max(tokens)


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)
