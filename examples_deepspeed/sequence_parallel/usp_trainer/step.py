"""One step: its batches, forward and backward passes in DeepSpeed's engine, update and loss."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_usp import ConfigError, RankGrid, SequenceMesh, USPError
from ds_usp.planner import AUTO, LEAST_BUCKET_ELEMENTS, bucket_elements
from ds_usp.training import (
    IGNORE_INDEX,
    ParallelGroups,
    SequenceParallelDataLoader,
    ShardedBatch,
    data_parallel_ranks,
    initialize_deepspeed,
    keep_states_on_host,
    loss_token_weight,
)
from megatron_patches.flags import PlannedRun
from usp_trainer.arguments import validated
from usp_trainer.data import TEXT_VOCAB_SIZE, MicroBatches, Tokens, split_samples
from usp_trainer.model import GPT, inputs_of


class NotFiniteError(USPError):
    """A loss or a gradient norm is NaN or infinite."""


class Step(NamedTuple):
    """What a step gave, the same on every rank.

    Attributes:
        loss: the mean over all loss tokens of the step, before the update.
        grad_norm: of all gradients, before clipping.
        stops: how many ranks asked for each kind of end.
    """

    loss: float
    grad_norm: float
    stops: tuple[int, ...]


class Trainer:
    """Model, data and engine of one rank. Collective, with all of its methods.

    Args:
        args: validated.

    Attributes:
        engine: DeepSpeed's.
        mesh: the ranks that share this rank's sequences.
        states: optimizer states in host memory; None: they stay.

    Raises:
        USPError: what the data or DeepSpeed's configuration do not serve.
    """

    def __init__(self, args: Namespace, tokens: Tokens, device: torch.device) -> None:
        self.args, self.device = args, device
        degrees = {"ulysses": args.ulysses_degree, "ring": args.ring_degree}
        self.mesh = SequenceMesh.build(RankGrid({**degrees, "dp": args.data_parallel_size}))
        self._groups = ParallelGroups.from_mesh(self.mesh)
        self._replica = data_parallel_ranks(self.mesh)
        self._training, self._validation = split_samples(tokens, args)
        model = new_model(args, tokens.vocab_size, device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.engine, rule = initialize_deepspeed(
            model, new_optimizer(args, model), deepspeed_config(args), self._groups
        )
        self._scale = rule.loss_scale(args.accumulation_steps)
        self.states = keep_states_on_host(self.engine) if args.usp_states_on_host else None
        self.begin_at(sample=0)

    def begin_at(self, sample: int) -> None:
        """Let the next step begin with this sample of the run."""
        size = self.args.micro_batch_size
        batches = MicroBatches(self._training, size, self._replica, first=sample)
        self._batches = iter(self._loader(batches))

    def _loader(self, batches: MicroBatches) -> SequenceParallelDataLoader:
        layout = self.args.usp_layout
        return SequenceParallelDataLoader(batches, self.mesh, layout, device=self.device)

    def train(self, lr: float, stops: Sequence[bool] = ()) -> Step:
        """One optimizer step.

        Args:
            stops: kinds of ends that this rank asks for; all ranks learn of them here, so that
                they end after the same step.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        # All micro batches first: the weight of a token is by the loss tokens of the whole step.
        batches = list(islice(self._batches, self.args.accumulation_steps))
        weight = loss_token_weight(sum(batch.loss_tokens for batch in batches), self._scale)
        self.engine.train()
        total = torch.zeros(1 + len(stops), device=self.device)
        total[1:] = torch.tensor(stops)
        for batch in batches:
            loss = self._loss(batch, weight)
            self.engine.backward(loss)
            self.engine.step()
            total[0] += loss.detach()
        dist.all_reduce(total, group=self._groups.sp_dp)
        summed, *asked = total.tolist()
        loss, norm = summed / self._scale, float(self.engine.get_global_grad_norm())
        if not math.isfinite(loss + norm):
            raise NotFiniteError(
                f"step {self.engine.global_steps}: loss {loss}, gradient norm {norm}. Nothing of "
                "it is saved: go on from an earlier checkpoint with a lower --lr or a longer "
                "warm-up, or check the data"
            )
        return Step(loss, norm, tuple(map(int, asked)))

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over all loss tokens of ``--eval-iters`` global batches."""
        args = self.args
        if self._validation is None:
            raise ConfigError("--eval-interval is not given: no data is kept for validation")
        num = args.eval_iters * args.accumulation_steps
        batches = MicroBatches(self._validation, args.micro_batch_size, self._replica, num=num)
        self.engine.eval()
        total, loss_tokens = torch.zeros(1, device=self.device), 0.0
        for batch in self._loader(batches):
            total += self._loss(batch, 1.0)
            loss_tokens += batch.loss_tokens
        dist.all_reduce(total, group=self._groups.sp_dp)
        return total.item() / loss_tokens

    def _loss(self, batch: ShardedBatch, weight: float) -> Tensor:
        weights = (batch.labels != IGNORE_INDEX) * weight
        inputs = inputs_of(batch, self.args, self.mesh)
        return self.engine(batch.tokens, batch.labels, weights, *inputs)


def new_model(args: Namespace, vocab_size: int, device: torch.device) -> GPT:
    """The model, its embedding padded to a multiple of ``--make-vocab-size-divisible-by``."""
    multiple = args.make_vocab_size_divisible_by
    args.padded_vocab_size = math.ceil(vocab_size / multiple) * multiple
    return GPT(args, planned_run(args).layer_memory(device))


def planned_run(args: Namespace) -> PlannedRun:
    """Validated arguments as the planner reads them."""
    ranks = args.data_parallel_size * args.ds_sequence_parallel_size
    return PlannedRun(
        args=args, zero=args.zero_stage, world_size=ranks, default_vocab=TEXT_VOCAB_SIZE
    )


def with_chosen_degree(args: Namespace, ranks: int) -> tuple[Namespace, tuple[str, ...]]:
    """The validated arguments, ``--ulysses-degree auto`` replaced by what the planner chooses, and
    its reasons.

    Raises:
        USPError: of the arguments; or the planner finds that no degree fits.
    """
    valid = validated(args, ranks)
    if args.ulysses_degree != AUTO:
        return valid, ()
    run = planned_run(valid)
    choice = run.choose_degree(on_gpu=args.device == "cuda")
    chosen = {"ulysses_degree": choice.ulysses, "usp_cluster": None}
    return validated(Namespace(**{**vars(args), **chosen}), ranks), choice.why


def new_optimizer(args: Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on matrices only, not on norms and biases."""
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr)
    # Not fused, it allocates 4 bytes a parameter of a ZeRO-3 sub-group for each step.
    options: dict[str, Any] = {"fused": True} if args.device == "cuda" else {}
    options["betas"] = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, **options)


def deepspeed_config(args: Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration: what the flags say, and what ``--deepspeed_config`` adds.

    Raises:
        ConfigError: the file contradicts a flag.
    """
    name, from_file = args.deepspeed_config, {}
    if name:
        from_file = json.loads(Path(name).read_text())
    flags: dict[str, Any] = {
        "train_batch_size": args.global_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation_steps,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": args.bf16},
    }
    for key, value in flags.items():
        said = from_file.get(key, value)
        if isinstance(value, dict) and isinstance(said, dict):
            said = {entry: said.get(entry, value[entry]) for entry in value}
        if said != value:
            raise ConfigError(
                f"--deepspeed_config {name} has {key} {said}, and the flags say {value}: change "
                "one of the two"
            )
    # Gradients are reduced under backward. In bf16 only under ZeRO-2 and 3: under ZeRO-1
    # DeepSpeed's bf16 optimizer, which alone accumulates in fp32 there, reduces all at the end.
    zero: dict[str, Any] = {}
    if args.zero_stage:
        shape = planned_run(args).model_shape()
        zero["reduce_bucket_size"] = bucket_elements(shape, 1, args.zero_stage)
    if args.zero_stage in (1, 2):
        zero |= {"overlap_comm": True, "allgather_bucket_size": LEAST_BUCKET_ELEMENTS}
    config = {
        "steps_per_print": None,
        "data_types": {"grad_accum_dtype": "fp32"},
        **from_file,
        **flags,
    }
    zero |= {**from_file.get("zero_optimization", {}), **flags["zero_optimization"]}
    config |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    if args.universal_checkpoint:
        config["checkpoint"] = {"load_universal": True}
    del config["train_batch_size"]  # which DeepSpeed counts differently at each stage
    return config


def learning_rate(args: Namespace, step: int) -> float:
    """Learning rate of step ``step`` (from 0): linear warm-up, then decay to ``--min-lr``."""
    if step < args.lr_warmup_iters:
        return args.lr * (step + 1) / args.lr_warmup_iters
    if args.lr_decay_style == "constant":
        return args.lr
    decay_steps = max(1, args.lr_decay_iters - args.lr_warmup_iters)
    progress = min(1.0, (step - args.lr_warmup_iters) / decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    remaining = 1.0 - progress if args.lr_decay_style == "linear" else cosine
    return args.min_lr + (args.lr - args.min_lr) * remaining
