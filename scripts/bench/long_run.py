"""A GPT of 117M parameters trained for 1,000 steps on real text, sharded and on one rank.

    python scripts/bench/long_run_data.py DATA                  # the text, once
    python scripts/bench/long_run.py all DATA OUT               # every curve, on all GPUs
    python scripts/bench/long_run.py train DATA OUT trainer-2x1 # one of them
    python scripts/bench/long_run.py land OUT                   # curves and the plot into results/
    python scripts/bench/long_run.py all DATA OUT --tiny         # on a CPU, to see that it runs

Four programs train the same model from the same weights on the same batches of one sequence of
16,384 tokens, in bf16, with the same learning rates: the trainer of examples_deepspeed, the
unedited Megatron-DeepSpeed and Megatron-LM (``--mds``, ``--mlm``: their checkouts) and
transformers' Trainer; each on one rank, on Ulysses 2 and on a ring of 2. A second seed draws other
initial weights; one curve reads the text four times, to see what late tokens gain. A curve that is
there whole is not trained again; one that was cut begins anew.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
TRAINER = ROOT / "examples_deepspeed" / "sequence_parallel"
NEVER = 1 << 30
HOSTS = {
    "trainer": "the trainer",
    "mds": "Megatron-DeepSpeed",
    "mlm": "Megatron-LM",
    "hf": "transformers",
}


@dataclass(frozen=True)
class Size:
    """Model and schedule; all programs read them from here."""

    layers: int = 12
    hidden: int = 768
    heads: int = 6
    ffn: int = 2304
    vocabulary: int = 32_000
    seq_len: int = 16_384
    train: int = 1_010  # documents of a sequence each
    validation: int = 16  # sequences, behind which there is one more document for the last label
    steps: int = 1_000
    interval: int = 100  # steps from validation to validation
    warmup: int = 100
    lr: float = 6e-4
    min_lr: float = 6e-5
    decay: float = 0.1
    beta2: float = 0.95
    std: float = 0.02
    bucket: int = 1_024  # tokens
    paired: int = 8  # validation sequences whose tokens are evaluated at every position


TINY = Size(2, 64, 4, 96, 256, 128, 40, 4, 20, 10, 5, 2e-3, 2e-4, bucket=32, paired=2)


@dataclass(frozen=True)
class Curve:
    """One training: a program, its mesh, and the seed of the initial weights."""

    host: str
    ulysses: int = 1
    ring: int = 1
    seed: int = 1
    kernel: str = ""
    epochs: int = 1  # passes over the text, each of the size's steps

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def label(self) -> str:
        mesh = "one rank" if self.ranks == 1 else f"{self.ulysses} x {self.ring}"
        more = f", seed {self.seed}" if self.seed != 1 else ""
        more += f", {self.kernel}" if self.kernel else ""
        more += f", {self.epochs} epochs" if self.epochs > 1 else ""
        return f"{HOSTS[self.host]}, {mesh}{more}"


CURVES = {
    "trainer-1x1": Curve("trainer"),
    "trainer-1x1-seed2": Curve("trainer", seed=2),
    "mlm-1x1": Curve("mlm"),
    "mds-1x1": Curve("mds"),
    "hf-1x1": Curve("hf"),
    **{f"{host}-{u}x{r}": Curve(host, u, r) for host in HOSTS for u, r in ((2, 1), (1, 2))},
    # Rounding alone: the same run on another attention kernel.
    "trainer-1x1-flash2": Curve("trainer", kernel="flash2"),
    # One pass is too little for a model to learn what is far away.
    "trainer-2x1-long": Curve("trainer", 2, 1, epochs=4),
}


# The initial weights: by name, so that every program begins with the same.


class Weights:
    """Draws the initial matrices of the model, rounded to bf16, by layer and name."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size, self.seed = size, seed

    def fill(self, parameter: Any, layer: int, *names: str, by_head: bool = False) -> None:
        """Set a parameter ``[rows, columns]`` to matrices of equal size below each other; by head:
        one head of each in turn."""
        import torch

        rows = parameter.shape[0] // len(names)
        parts = [self._draw(f"{layer} {name}", rows, parameter.shape[1]) for name in names]
        if by_head:
            heads = [part.unflatten(0, (self.size.heads, -1)) for part in parts]
            whole = torch.stack(heads, 1).flatten(0, 2)
        else:
            whole = torch.cat(parts)
        with torch.no_grad():
            parameter.copy_(whole)

    def _draw(self, name: str, rows: int, columns: int) -> Any:
        import torch

        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        std = self.size.std
        if name.endswith((" out", " down")):
            std /= math.sqrt(2 * self.size.layers)
        return (torch.randn(rows, columns, generator=generator) * std).bfloat16().float()

    def fill_megatron(self, model: Any) -> None:
        """Set a model of megatron-core's layers, whose projection has query, key and value of a
        head behind each other, or of Megatron-DeepSpeed's, which has all queries, all keys, all
        values.
        """
        for module in model.modules():
            kind = type(module).__name__
            if kind == "TransformerLayer":
                attention, mlp = module.self_attention, module.mlp
                matrices = (
                    attention.linear_qkv,
                    attention.linear_proj,
                    mlp.linear_fc1,
                    mlp.linear_fc2,
                )
            elif kind == "ParallelTransformerLayer":
                attention, mlp = module.self_attention, module.mlp
                matrices = attention.query_key_value, attention.dense
                matrices += mlp.dense_h_to_4h, mlp.dense_4h_to_h
            else:
                continue
            qkv, out, up, down = (matrix.weight for matrix in matrices)
            number = module.layer_number
            self.fill(qkv, number, "query", "key", "value", by_head=kind == "TransformerLayer")
            self.fill(out, number, "out")
            self.fill(up, number, "gate", "up")
            self.fill(down, number, "down")
        (embedding,) = (
            parameter
            for name, parameter in model.named_parameters()
            if name.endswith("word_embeddings.weight")
        )
        self.fill(embedding, 0, "embedding")

    def fill_llama(self, model: Any) -> None:
        """Set a LlamaForCausalLM with tied embeddings."""
        for number, layer in enumerate(model.model.layers, 1):
            attention, mlp = layer.self_attn, layer.mlp
            for name, matrix in (
                ("query", attention.q_proj),
                ("key", attention.k_proj),
                ("value", attention.v_proj),
                ("out", attention.o_proj),
                ("gate", mlp.gate_proj),
                ("up", mlp.up_proj),
                ("down", mlp.down_proj),
            ):
                self.fill(matrix.weight, number, name)
        self.fill(model.model.embed_tokens.weight, 0, "embedding")


@dataclass
class Record:
    """What one run writes: losses, gradient norms, validation losses by step."""

    path: Path
    head: list[str]
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def step(self) -> int:
        return len(self.rows)

    def add(self, loss: float, norm: float) -> None:
        if not self.rows:
            self.first = time.monotonic()
        self.rows[self.step + 1] = {"loss": loss, "grad_norm": norm}

    def validated(self, loss: float) -> None:
        self.rows[self.step]["valid_loss"] = loss
        if self.is_writer:
            print(f"{self.path.stem} step {self.step} {self.rows[self.step]}", flush=True)
            self.write(whole=False)

    @property
    def is_writer(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    def write(self, *, whole: bool) -> None:
        if not self.is_writer:
            return
        now = time.monotonic()
        times = (
            f"# {now - self.started:.1f} s, of which {now - self.first:.1f} s after the first step"
        )
        lines = [
            *self.head,
            times,
            *(["# whole"] if whole else []),
            "step,loss,grad_norm,valid_loss",
        ]
        for step, row in self.rows.items():
            valid = f"{row['valid_loss']:.6f}" if "valid_loss" in row else ""
            lines.append(f"{step},{row['loss']:.6f},{row['grad_norm']:.5f},{valid}")
        self.path.write_text("\n".join(lines) + "\n")


# The data: sequences in the order of the file, in every program.


def data_in_file_order(size: Size, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
    """``GPTDataset.__init__`` of megatron-core and of Megatron-DeepSpeed without its shuffles,
    which differ. Validations evaluate the same sequences each time; documents are equally long, so
    nothing else depends on their order."""
    original(dataset, *args, **kwargs)
    core = hasattr(dataset, "document_index")
    documents, shuffle = ("document_index", "shuffle_index") if core else ("doc_idx", "shuffle_idx")
    index = getattr(dataset, documents)
    used = numpy.unique(index)
    setattr(dataset, documents, numpy.tile(used, len(index) // len(used)))
    samples = numpy.arange(len(getattr(dataset, shuffle)))
    name = dataset.index_split.name if core else dataset.name
    setattr(dataset, shuffle, samples % size.validation if name == "valid" else samples)


def common_flags(size: Size, curve: Curve, data: Path, device: str) -> str:
    """Flags that the trainer, Megatron-DeepSpeed and Megatron-LM share."""
    return f"""
        --num-layers {size.layers} --hidden-size {size.hidden} --num-attention-heads {size.heads}
        --ffn-hidden-size {size.ffn} --swiglu --disable-bias-linear
        --seq-length {size.seq_len} --max-position-embeddings {size.seq_len}
        --micro-batch-size 1 --global-batch-size 1 --train-iters {size.steps}
        --lr {size.lr} --min-lr {size.min_lr} --lr-decay-style cosine
        --lr-decay-iters {size.steps} --lr-warmup-iters {size.warmup}
        --weight-decay {size.decay} --adam-beta1 0.9 --adam-beta2 {size.beta2} --clip-grad 1
        --attention-dropout 0 --hidden-dropout 0 --init-method-std {size.std}
        --eval-interval {size.interval} --eval-iters {size.validation} --seed 1234
        --split {size.train},{size.validation + 1},0 --data-path {data / "tokens"}
        --usp-kernel {curve.kernel or ("cudnn" if device == "cuda" else "auto")}
        {"--bf16" if device == "cuda" else ""}
    """


# The programs. Each is started as its users start it, with a recorder beside it.


def run_trainer(run: Run) -> None:
    """Train in the trainer of examples_deepspeed."""
    sys.path.insert(0, str(TRAINER))
    import pretrain_gpt_usp
    from usp_trainer import launch

    size, curve = run.size, run.curve
    start = launch.run_rank

    def run_rank(pretrain: Any, args: Any) -> int:
        watch_trainer(run)
        return start(pretrain, args)

    launch.run_rank = run_rank
    flags = common_flags(size, curve, run.data, run.device)
    flags += f"""
        --ds-sequence-parallel-size {curve.ranks} --ulysses-degree {curve.ulysses} --zero-stage 1
        --normalization rmsnorm --layernorm-epsilon 1e-5 --use-rotary-position-embeddings
        --rotary-base 10000 --vocab-size {size.vocabulary} --transformer-impl local
        --device {run.device} --output-dir {run.folder} --overwrite-output --quiet
    """
    code = pretrain_gpt_usp.main(flags.split())
    if code:
        raise SystemExit(code)


def watch_trainer(run: Run) -> None:
    """Set the trainer's weights and order of data, and record its steps."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from usp_trainer import data, loop

    size, record = run.size, run.record
    build, rate = loop.build_model, loop.learning_rate
    step, validate, begin = loop.TrainingLoop.step, loop.TrainingLoop.validate, GPTDataset.__init__

    def build_model(*args: Any) -> Any:
        model = build(*args)
        Weights(size, run.curve.seed).fill_megatron(model)
        return model

    def recorded_step(self: Any) -> Any:
        row = step(self)
        record.add(row["loss"], row["grad_norm"])
        return row

    def recorded_validate(self: Any) -> float:
        loss = validate(self)
        record.validated(loss)
        if record.step == size.steps:
            with torch.no_grad():
                write_losses_by_position(run, self)
        return loss

    # Warm-up as in the other programs, whose first step has a learning rate of 0.
    loop.learning_rate = lambda args, n: (
        args.lr * n / args.lr_warmup_iters if n < args.lr_warmup_iters else rate(args, n)
    )
    GPTDataset.__init__ = lambda *args, **kwargs: data_in_file_order(size, begin, *args, **kwargs)
    data.ShuffledEpochs = lambda dataset, seed: data.InOrder(dataset)
    loop.build_model = build_model
    loop.TrainingLoop.step, loop.TrainingLoop.validate = recorded_step, recorded_validate


class Shifted:
    """Validation text as a circle that is cut into sequences at another place: samples as
    GPTDataset gives them."""

    def __init__(self, text: numpy.ndarray, seq_len: int, shift: int) -> None:
        self.text, self.seq_len, self.shift = text, seq_len, shift

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        place = numpy.arange(self.seq_len + 1) + index * self.seq_len + self.shift
        tokens = torch.from_numpy(self.text[place % len(self.text)].astype("int64"))
        mask = torch.ones(self.seq_len)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask}


def write_losses_by_position(run: Run, loop: Any) -> None:
    """Mean validation loss by position in the sequence. The text is cut at every multiple of the
    bucket, so every token is predicted once in every bucket: buckets differ by what precedes."""
    import torch
    import torch.distributed as dist
    from usp_trainer import model

    size = run.size
    tokens = numpy.fromfile(run.data / "tokens.bin", dtype="<u2").reshape(-1, size.seq_len)
    text = tokens[size.train : size.train + size.paired].flatten()
    buckets = size.seq_len // size.bucket
    sums = torch.zeros(2, buckets, dtype=torch.float64, device=loop.args.device)
    positions: Any = None
    per_token = model.token_losses

    def kept(logits: Any, labels: Any) -> Any:
        losses = per_token(logits, labels)
        place = positions.expand_as(losses).flatten() // size.bucket
        sums[0].index_add_(0, place, losses.detach().double().flatten())
        sums[1].index_add_(0, place, torch.ones_like(place, dtype=torch.float64))
        return losses

    from ds_usp.training import local_positions

    positions = local_positions(loop.data._layout, loop.mesh.rank, torch.device(loop.args.device))
    model.token_losses = kept
    for shift in range(0, size.seq_len, size.bucket):
        samples = Shifted(text, size.seq_len, shift)
        for index in range(size.paired):
            loop.trainer.evaluate([loop.data._batch(samples, [index])])
    model.token_losses = per_token
    dist.all_reduce(sums, group=loop.groups.sp_dp)
    losses, counts = sums.tolist()
    if run.record.is_writer:
        rows = [
            f"{bucket * size.bucket},{loss / count:.6f},{count:.0f}"
            for bucket, (loss, count) in enumerate(zip(losses, counts, strict=True))
        ]
        path = run.record.path.with_suffix(".positions")
        path.write_text("\n".join(["position,valid_loss,tokens", *rows]) + "\n")
        print(run.record.path.stem, "losses by position", *rows, flush=True)


def record_in_megatron(
    run: Run,
    framework: str,
    checkout: str,
    modules: tuple[str, str],
    numbers: Callable[[Any, Sequence[Any]], tuple[float, float]],
) -> Path:
    """Patch an unedited Megatron: the curve's weights, sequences in the file's order, and losses
    and gradient norms into the record. Returns the script to start.

    Args:
        framework: as ``megatron_patches.prepare`` names it.
        modules: those of its training and of its dataset.
        numbers: loss and gradient norm of a step, of its ``lm loss`` and of the arguments of
            ``training_log``, which has no names for them.
    """
    import megatron_patches
    from megatron_patches import Patch, PatchSet

    record, script = run.record, Path(checkout) / "pretrain_gpt.py"
    megatron_patches.prepare(framework, script)

    def set_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
        models = original(*args, **kwargs)
        Weights(run.size, run.curve.seed).fill_megatron(models[0])
        return models

    def log(original: Any, losses: Any, *args: Any, **kwargs: Any) -> Any:
        record.add(*numbers(losses["lm loss"], args))
        return original(losses, *args, **kwargs)

    def evaluate(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        record.validated(float(result[0]["lm loss"]))
        return result

    def dataset(original: Any, *args: Any, **kwargs: Any) -> None:
        data_in_file_order(run.size, original, *args, **kwargs)

    training, data = modules
    wraps = {
        f"{training}:get_model": set_weights,
        f"{training}:training_log": log,
        f"{training}:evaluate": evaluate,
        f"{data}:GPTDataset.__init__": dataset,
    }
    PatchSet("long run", [Patch(target, fn, "wrap") for target, fn in wraps.items()]).apply()
    return script


def run_mds(run: Run) -> None:
    """Train in the unedited Megatron-DeepSpeed."""
    from megatron_patches import run as starter

    size, curve = run.size, run.curve
    script = record_in_megatron(
        run,
        "megatron_deepspeed",
        run.mds,
        ("megatron.training", "megatron.data.gpt_dataset"),
        lambda loss, args: (float(loss), float(args[9][0].get_global_grad_norm())),
    )
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": NEVER,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": run.device == "cuda"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    path = run.folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    flags = common_flags(size, curve, run.data, run.device)
    flags += f"""
        --ds-sequence-parallel-size {curve.ranks} --ulysses-degree {curve.ulysses} --zero-stage 1
        --normalization rmsnorm --layernorm-epsilon 1e-5 --use-rotary-position-embeddings
        --rotary-position-embeddings-theta 10000 --no-pipeline-parallel
        --tokenizer-type NullTokenizer --vocab-size {size.vocabulary - 1}
        --deepspeed --deepspeed_config {path} --data-impl mmap --num-workers 0
        --log-interval {size.interval} --no-gradient-accumulation-fusion
        --no-async-tensor-model-parallel-allreduce --data-cache-path {run.folder}
    """
    if run.device == "cpu":
        import megatron.optimizer
        import torch

        megatron.optimizer.Adam = torch.optim.AdamW  # as on GPUs; else torch's Adam
        flags += """
            --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion
            --no-bias-dropout-fusion
        """
    starter.main([str(script), *flags.split()])


def run_mlm(run: Run) -> None:
    """Train in the unedited Megatron-LM."""
    from importlib.util import find_spec

    from megatron_patches import run as starter

    def numbers(loss: Any, args: Sequence[Any]) -> tuple[float, float]:
        # A pair is a sum and its number of tokens: the mean is Megatron-LM's to take.
        return float(loss[0] / loss[1] if loss.numel() == 2 else loss), float(args[6])

    size, curve = run.size, run.curve
    modules = ("megatron.training.training", "megatron.core.datasets.gpt_dataset")
    script = record_in_megatron(run, "megatron_lm", run.mlm, modules, numbers)
    flags = common_flags(size, curve, run.data, run.device)
    flags += f"""
        --context-parallel-size {curve.ranks} --ulysses-degree {curve.ulysses}
        --normalization RMSNorm --norm-epsilon 1e-5
        --position-embedding-type rope --rotary-base 10000
        --tokenizer-type NullTokenizer --vocab-size {size.vocabulary - 1}
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion
        --log-interval 1 --num-workers 0 --data-cache-path {run.folder}
    """
    if run.device == "cpu" or not find_spec("transformer_engine"):
        flags += """
            --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
            --no-rope-fusion
        """
    if run.device == "cpu":
        flags += "--distributed-backend gloo --disable-jit-fuser"
    starter.main([str(script), *flags.split()])


def run_hf(run: Run) -> None:
    """Train in transformers' Trainer."""
    import torch
    import transformers
    from torch.utils.data import Dataset, SequentialSampler

    import ds_usp
    from ds_usp.integrations.transformers import attach, enable

    size, curve, record = run.size, run.curve, run.record
    tokens = numpy.fromfile(run.data / "tokens.bin", dtype="<u2").reshape(-1, size.seq_len)

    class Documents(Dataset):
        def __init__(self, first: int, count: int) -> None:
            self.first, self.count = first, count

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.from_numpy(tokens[self.first + index].astype("int64"))
            return {"input_ids": ids, "labels": ids}

    class InOrder(transformers.Trainer):
        losses: ClassVar[list[Any]] = []

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.detach())  # logs are rounded
            return loss

    class Recorder(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                record.add(float(InOrder.losses[-1]), float(logs["grad_norm"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            record.validated(float(metrics["eval_loss"]))

    on_gpu = run.device == "cuda"
    args = transformers.TrainingArguments(
        output_dir=str(run.folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=size.steps,
        learning_rate=size.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": size.min_lr},
        warmup_steps=size.warmup,
        weight_decay=size.decay,
        adam_beta2=size.beta2,
        max_grad_norm=1.0,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=size.interval,
        prediction_loss_only=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        ddp_backend=("nccl" if on_gpu else "gloo") if curve.ranks > 1 else None,
        ddp_find_unused_parameters=False if curve.ranks > 1 else None,
    )
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=size.seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    Weights(size, curve.seed).fill_llama(model)
    trainer = InOrder(
        model=model,
        args=args,
        train_dataset=Documents(0, size.train),
        eval_dataset=Documents(size.train, size.validation),
        data_collator=transformers.default_data_collator,
        callbacks=[Recorder()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if curve.ranks > 1:
        mesh = ds_usp.SequenceMesh.from_group(None, ulysses_degree=curve.ulysses)
        enable(trainer.model, mesh, kernel="cudnn" if on_gpu else "auto")
        attach(trainer, mesh)
    trainer.train()


PROGRAMS = {"trainer": run_trainer, "mds": run_mds, "mlm": run_mlm, "hf": run_hf}


@dataclass
class Run:
    """A rank's view of the curve that it trains."""

    size: Size
    curve: Curve
    data: Path
    folder: Path
    record: Record
    device: str
    mds: str
    mlm: str


def rank_main(args: argparse.Namespace) -> None:
    """Train one curve, as one of its ranks."""
    import torch

    curve = CURVES[args.curve]
    size = size_of(args, curve)
    folder = args.out / f"{args.curve}.files"
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, fp32"
    head = [f"# {curve.label}; {curve.ranks} x {where}, torch {torch.__version__}"]
    record = Record(args.out / f"{args.curve}.csv", head)
    sys.path.insert(0, str(ROOT))
    run = Run(size, curve, args.data, folder, record, device, args.mds, args.mlm)
    PROGRAMS[curve.host](run)
    record.write(whole=record.step == size.steps)


def size_of(args: argparse.Namespace, curve: Curve) -> Size:
    """The model and schedule of a curve and a command line."""
    from dataclasses import replace

    size = TINY if args.tiny else Size()
    size = replace(size, steps=size.steps * curve.epochs)
    if args.steps:
        size = replace(
            size, steps=args.steps, interval=max(1, args.steps // 2), warmup=args.steps // 4
        )
    return size


def is_whole(path: Path) -> bool:
    """Whether a curve's file has all its steps."""
    return path.is_file() and "\n# whole\n" in path.read_text()


def start(args: argparse.Namespace, name: str, gpus: Sequence[str] = ()) -> Any:
    """Start the ranks of a curve; their output goes to a file."""
    curve = CURVES[name]
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
    command += ["--nproc-per-node", str(curve.ranks), __file__, "rank", str(args.data)]
    command += [str(args.out), name, "--mds", args.mds, "--mlm", args.mlm]
    command += (["--tiny"] if args.tiny else []) + ["--steps", str(args.steps)]
    # A program that dies while it uses NVLink multicast can leave all GPUs of its node unusable.
    variables = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        variables["DS_ACCELERATOR"] = "cpu"
    # What a killed run left there may be half written, as an index of the data.
    shutil.rmtree(args.out / f"{name}.files", ignore_errors=True)
    log = (args.out / f"{name}.log").open("w")
    environment = {**os.environ, **variables}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def train_all(args: argparse.Namespace) -> int:
    """Train every curve that is not there whole, as many at a time as there are GPUs; the number of
    those that failed."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny and not (args.data / "tokens.bin").is_file():
        tiny_text(args.data)
    waiting = [name for name in args.curves if not is_whole(args.out / f"{name}.csv")]
    free, failed = args.gpus * args.share, 0
    running: dict[str, tuple[Any, list[str], float]] = {}
    begin = time.monotonic()
    # As after Ctrl-C: a time limit that ends this program must not leave ranks on the GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or running:
            for name, (process, gpus, started) in list(running.items()):
                seconds = time.monotonic() - started
                out_of_time = time.monotonic() - begin > args.budget or seconds > args.limit
                if process.poll() is None and not out_of_time:
                    continue
                code = process.poll()
                if code is None:
                    end(process)
                free += gpus
                whole = is_whole(args.out / f"{name}.csv")
                del running[name]
                result = "whole" if whole else f"FAILED ({code})"
                print(f"{name}: {result}, {seconds:.0f} s", flush=True)
                if not whole:
                    failed += 1
                    print(*last_lines(args.out / f"{name}.log", args.tail), sep="\n", flush=True)
            if time.monotonic() - begin >= args.budget:
                failed += len(waiting)
                waiting.clear()
            for name in list(waiting):
                count = CURVES[name].ranks if args.gpus else 0
                idle = sorted(dict.fromkeys(free), key=free.count, reverse=True)
                if len(idle) >= count and (args.gpus or not running):
                    for gpu in idle[:count]:
                        free.remove(gpu)
                    process = start(args, name, idle[:count])
                    running[name] = process, idle[:count], time.monotonic()
                    waiting.remove(name)
            time.sleep(0.2)
    finally:
        for process, *_ in running.values():
            end(process)
    return failed


def end(process: Any) -> None:
    """End torchrun, which ends its ranks; 30 seconds later without asking."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_lines(log: Path, count: int) -> list[str]:
    """The end of what the ranks printed, without torchrun's own traceback."""
    lines = log.read_text(errors="replace").splitlines()
    ends = (n for n, line in enumerate(lines) if "torch/distributed/run.py" in line)
    return lines[: next(ends, len(lines))][-count:]


def tiny_text(folder: Path) -> None:
    """Bytes of CPython's own documentation as the tokens of a tiny run."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(text for _, text in sorted(topics.items())).encode()
    count = TINY.train + TINY.validation + 1
    tokens = numpy.frombuffer(text, dtype=numpy.uint8)[: count * TINY.seq_len]
    from long_run_data import write_documents

    write_documents(folder / "tokens", tokens.reshape(count, TINY.seq_len))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("all", "train", "rank"):
        sub = commands.add_parser(command)
        sub.add_argument("data", type=Path)
        sub.add_argument("out", type=Path)
        sub.add_argument("--tiny", action="store_true")
        sub.add_argument("--steps", type=int, default=0, help="other than 1,000: to try it")
        sub.add_argument("--mds", default=os.environ.get("MEGATRON_DEEPSPEED_PATH", ""))
        sub.add_argument("--mlm", default=os.environ.get("MEGATRON_LM_PATH", ""))
        if command == "all":
            sub.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
        else:
            sub.add_argument("curve", choices=CURVES)
        if command != "rank":
            sub.add_argument(
                "--gpus", type=visible_gpus, default=visible_gpus(), help="how many of the visible"
            )
            sub.add_argument("--share", type=int, default=1, help="curves on a GPU at a time")
            sub.add_argument("--budget", type=float, default=1e9, help="seconds, of all curves")
            sub.add_argument("--limit", type=float, default=1e9, help="seconds, of a curve")
            sub.add_argument("--tail", type=int, default=25, help="lines of a failed log to print")
    sub = commands.add_parser("land")
    sub.add_argument("out", type=Path, nargs="*", help="none: draw again what is landed")
    sub.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.command == "rank":
        rank_main(args)
    elif args.command == "land":
        land(args.out, args.results)
    else:
        if args.command == "train":
            args.curves = [args.curve]
        failed = train_all(args)
        summarize(args.out)
        sys.exit(min(failed, 1))


def visible_gpus(count: str = "") -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the first ``count`` GPUs that this program may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name]
    else:
        try:
            text = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        except OSError:
            text = ""
        names = [str(number) for number in range(text.count("\n"))]
    if count and int(count) > len(names):
        raise argparse.ArgumentTypeError(f"{count} GPUs, but {len(names)} are visible: {names}")
    return names[: int(count)] if count else names


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file below its comments."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def summarize(out: Path) -> None:
    """Print the last validation loss of each curve, and how far it is from its one rank."""
    found = Landed.of_runs([out])
    for name in found.validation:
        steps = list(found.validation[name])
        last = found.validation[name][steps[-1]]
        line = f"{name:20} step {steps[-1]} validation loss {last:.4f}"
        base = f"{CURVES[name].host}-1x1"
        if base in found.validation and base != name:
            valid = differences(found.validation[name], found.validation[base])
            train = differences(found.training[name], found.training[base])
            line += f" to {base}: {max(valid):.5f} at most, mean {sum(valid) / len(valid):.5f}"
            line += f", training mean {sum(train) / len(train):.5f}"
        print(line, found.about[name], flush=True)


def differences(one: dict[int, float], other: dict[int, float]) -> list[float]:
    """Absolute differences where both have a value, in order."""
    return [abs(value - other[at]) for at, value in one.items() if at in other]


# What the results folder holds.


@dataclass
class Landed:
    """Losses by curve: training and validation by step, validation by position; and a line about
    each."""

    about: dict[str, str] = field(default_factory=dict)
    training: dict[str, dict[int, float]] = field(default_factory=dict)
    validation: dict[str, dict[int, float]] = field(default_factory=dict)
    positions: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, dict[str, dict[int, float]]]:
        """Each kind of losses by the name of its file; its first column is the last word."""
        return {
            "long_run_training_by_step.csv": self.training,
            "long_run_validation_by_step.csv": self.validation,
            "long_run_validation_by_position.csv": self.positions,
        }

    @classmethod
    def of_runs(cls, folders: Sequence[Path]) -> Landed:
        """What runs have written so far; of a curve in several folders the longest."""
        found = cls()
        for folder in folders:
            for name in CURVES:
                path = folder / f"{name}.csv"
                rows = read_rows(path) if path.is_file() else []
                if len(rows) <= len(found.training.get(name, ())):
                    continue
                machine, times, *_ = path.read_text(encoding="utf-8").splitlines()
                found.about[name] = f"{machine[2:]}; {len(rows)} steps; {times[2:]}"
                found.training[name] = {int(row["step"]): float(row["loss"]) for row in rows}
                found.validation[name] = {
                    int(row["step"]): float(row["valid_loss"]) for row in rows if row["valid_loss"]
                }
                by_position = path.with_suffix(".positions")
                if is_whole(path) and by_position.is_file():
                    found.positions[name] = {
                        int(row["position"]): float(row["valid_loss"])
                        for row in read_rows(by_position)
                    }
        return found

    @classmethod
    def read(cls, results: Path) -> Landed:
        """What is landed."""
        found = cls()
        for file, table in found.tables.items():
            path = results / file
            if not path.is_file():
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("# ") and ": " in line:
                    name, text = line[2:].split(": ", 1)
                    found.about[name] = text
            key = path.stem.rsplit("_", 1)[1]
            for row in read_rows(path):
                at = int(row.pop(key))
                for name, loss in row.items():
                    if loss:
                        table.setdefault(name, {})[at] = float(loss)
        return found

    def add(self, other: Landed) -> None:
        """Take the curves of another that are not shorter than those here."""
        for name, about in other.about.items():
            if len(other.training[name]) >= len(self.training.get(name, ())):
                self.about[name] = about
                for rows, others in zip(self.tables.values(), other.tables.values(), strict=True):
                    if name in others:
                        rows[name] = others[name]

    def write(self, results: Path) -> None:
        """A file for each kind of losses, a column for each curve."""
        for file, table in self.tables.items():
            names = [name for name in CURVES if table.get(name)]
            key = Path(file).stem.rsplit("_", 1)[1]
            lines = [f"# {name}: {self.about[name]}" for name in names]
            lines.append(",".join([key, *names]))
            for at in sorted({at for name in names for at in table[name]}):
                losses = [f"{table[name][at]:.6f}" if at in table[name] else "" for name in names]
                lines.append(",".join([str(at), *losses]))
            (results / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


BASE = "trainer-1x1"
SEED = "trainer-1x1-seed2"
EARLY = 20  # steps before differences of rounding have grown


def land(folders: Sequence[Path], results: Path) -> None:
    """Add the curves of runs to those in the results folder, and draw all."""
    landed = Landed.read(results)
    landed.add(Landed.of_runs(folders))
    landed.write(results)
    draw(landed, results / "long_run.svg")


def table(results: Path = RESULTS) -> str:
    """Each curve beside one rank of the trainer, in Markdown."""
    landed = Landed.read(results)
    lines = [
        f"| curve | steps | training loss, steps 1 to {EARLY}: at most | validation loss at the end"
        " | each 100 steps: at most | mean |",
        "|---|---|---|---|---|---|",
    ]
    for name in (name for name in CURVES if name in landed.training):
        steps = len(landed.training[name])
        whole = steps == Size.steps * CURVES[name].epochs
        last = f"{landed.validation[name][steps]:.3f}" if whole else "not reached"
        cells = [CURVES[name].label, f"{steps:,}", "", last, "", ""]
        if name != BASE:
            early = differences(landed.training[name], landed.training[BASE])[:EARLY]
            cells[2] = f"{max(early):.5f}"
        if name != BASE and CURVES[name].epochs == 1:  # of the same learning rates
            valid = differences(landed.validation[name], landed.validation[BASE])
            cells[4:] = f"{max(valid):.3f}", f"{sum(valid) / len(valid):.3f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(landed: Landed, path: Path) -> None:
    """Validation losses, differences from one rank of the trainer, losses by position."""
    sys.path.insert(0, str(ROOT))
    from ds_usp.planner.plot import new_figure, save_svg

    figure = new_figure(9.5, 10)
    curves, apart, positions = figure.subplots(3)
    names = [name for name in CURVES if name in landed.training]
    hosts = dict(zip(HOSTS, ("#1558d6", "#15803d", "#c2410c", "#7e22ce"), strict=True))
    dashes = {(1, 1): "-", (2, 1): "--", (1, 2): ":"}
    for name in names:
        steps = len(landed.training[name])
        whole = steps == Size.steps * CURVES[name].epochs
        label = CURVES[name].label + ("" if whole else f" (cut at {steps})")
        curve = CURVES[name]
        color = "#444444" if curve.ranks == 1 else hosts[curve.host]
        color = {SEED: "#a0a0a0", "trainer-2x1-long": "#000000"}.get(name, color)
        look: dict[str, Any] = {"color": color, "label": label}
        look["linestyle"] = dashes[curve.ulysses, curve.ring]
        if landed.validation[name]:
            curves.plot(*zip(*landed.validation[name].items(), strict=True), marker=".", **look)
        if name != BASE and BASE in landed.training and CURVES[name].epochs == 1:
            gaps = differences(landed.training[name], landed.training[BASE])
            window = 10
            means = [
                sum(gaps[first : first + window]) / window
                for first in range(0, len(gaps) - window + 1, window)
            ]
            apart.plot([window * (n + 0.5) for n in range(len(means))], means, **look)
        if name in landed.positions:
            losses = landed.positions[name]
            gains = [loss - losses[0] for loss in losses.values()]
            positions.plot(list(losses), gains, marker=".", **look)
    for axes, title, x in (
        (curves, "Validation loss", "step"),
        (apart, "Training loss: difference from the trainer on one rank, mean of 10 steps", "step"),
        (
            positions,
            "Validation loss of the same tokens, above that at the beginning of the sequence",
            "position of the first of 1,024 tokens",
        ),
    ):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel(x)
        axes.grid(color="#e4e4e4")
        if axes.lines:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    apart.set_yscale("log")
    save_svg(figure, path)


if __name__ == "__main__":
    main()
