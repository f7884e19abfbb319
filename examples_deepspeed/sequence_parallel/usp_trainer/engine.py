"""One interface to train and evaluate a step with either of DeepSpeed's engines."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_usp import DataError
from ds_usp.planner import LEAST_BUCKET_ELEMENTS, bucket_elements
from ds_usp.training import (
    ParallelGroups,
    initialize_deepspeed,
    keep_states_on_host,
    loss_token_weight,
    mean_loss,
)
from usp_trainer.auto_args import planned_run
from usp_trainer.data import TrainingBatch
from usp_trainer.signals import ASKING, StopRequested, StopSignals, stop_text


class Trainer:
    """Trains and evaluates global batches; every number it returns is the same on every rank.

    Attributes:
        engine: DeepSpeed's.
        states: keeps optimizer states in host memory between steps; None: they stay.
    """

    def __init__(
        self,
        args: Namespace,
        model: nn.Module,
        groups: ParallelGroups,
        device: torch.device,
        vocab_size: int,
        signals: StopSignals | None = None,
    ) -> None:
        self._signals = signals
        self._groups, self._device, self._vocab_size = groups, device, vocab_size
        self.engine, rule = initialize_deepspeed(
            model, make_optimizer(args, model), deepspeed_config(args), groups
        )
        self.states = keep_states_on_host(self.engine) if args.usp_states_on_host else None
        self._scale = rule.loss_scale(args.accumulation_steps)

    def states_on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self.states is None else self.states.on_device()

    def train(self, batches: Sequence[TrainingBatch], lr: float) -> tuple[float, float]:
        """One optimizer step over this rank's micro batches; the mean loss over the global batch
        before it, and the gradient norm.

        Raises:
            StopRequested: on every rank, before the step; a rank has received a signal.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        weighted, asked = self._with_loss_weights(batches)
        if asked:
            raise StopRequested(asked)
        self.engine.train()
        if self._groups.stages > 1:
            loss = self.engine.train_batch(_pipeline_batches(weighted)).item()
        else:
            losses = []
            for batch in weighted:
                losses.append(self.engine(*batch))
                self.engine.backward(losses[-1])
                self.engine.step()
            loss = mean_loss(losses, self._scale, self._groups.sp_dp)
        return loss, float(self.engine.get_global_grad_norm())

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TrainingBatch]) -> float:
        weighted, _ = self._with_loss_weights(batches)
        self.engine.eval()
        if self._groups.stages > 1:
            return self.engine.eval_batch(_pipeline_batches(weighted)).item()
        losses = [self.engine(*batch) for batch in weighted]
        return mean_loss(losses, self._scale, self._groups.sp_dp)

    def _with_loss_weights(
        self, batches: Sequence[TrainingBatch]
    ) -> tuple[list[tuple[Any, ...]], str]:
        """The batches as the engine takes them, and which signals ask the run to stop, by the one
        exchange that a step begins with."""
        local_batches = [batch.local for batch in batches]
        largest = max(int(torch.maximum(b.tokens.max(), b.labels.max())) for b in local_batches)
        count = sum(float(b.loss_mask.sum()) for b in local_batches)
        flags = self._signals.flags() if self._signals else [False] * len(ASKING)
        totals = torch.tensor(
            [count, largest >= self._vocab_size, *flags], dtype=torch.float64, device=self._device
        )
        # A signal may reach any rank, and all have to know: also those that hold other weights, and
        # the same tokens.
        copies = dist.get_world_size(self._groups.model)
        dist.all_reduce(totals, group=self._groups.sp_dp if copies == 1 else None)
        tokens_of_copies, ranks_beyond, *asked = totals.tolist()
        loss_tokens = tokens_of_copies / copies
        if ranks_beyond:
            raise DataError(
                f"{ranks_beyond:.0f} ranks read token ids of {self._vocab_size} or more (here up "
                f"to {largest}). The data was encoded with more ids than --vocab-size "
                f"{self._vocab_size}"
            )
        weight = loss_token_weight(loss_tokens, self._scale)
        rows = []
        for batch, local in zip(batches, local_batches, strict=True):
            tensors = local.tokens, local.labels, local.loss_mask * weight, batch.positions
            moved = [None if x is None else x.to(self._device) for x in tensors]
            rows.append((*moved, batch.documents))
        return rows, stop_text(asked, dist.get_world_size())


def _pipeline_batches(weighted: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, Any]]:
    return ((tokens, (labels, weights)) for tokens, labels, weights, *_ in weighted)


def make_optimizer(args: Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on matrices only, not on norms and biases."""
    matrices, vectors = [], []
    for p in model.parameters():
        (matrices if p.ndim > 1 else vectors).append(p)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, args.weight_decay), (vectors, 0.0))
        if params
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
    # Not fused, it allocates 4 bytes a parameter of a ZeRO-3 sub-group for each step.
    options: dict[str, Any] = {"fused": True} if args.device == "cuda" else {}
    options["betas"] = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, **options)


def deepspeed_config(args: Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration, without the keys that ds_usp.training sets."""
    zero: dict[str, Any] = {"stage": args.zero_stage}
    if args.zero_stage and args.pipeline_model_parallel_size == 1:
        # Gradients are reduced under backward. In bf16 only under ZeRO-2 and 3: under ZeRO-1
        # DeepSpeed's bf16 optimizer, which alone accumulates in fp32 there, reduces all at the end.
        model = planned_run(args).model_shape()
        degrees = args.tensor_model_parallel_size, args.zero_stage
        zero["reduce_bucket_size"] = bucket_elements(model, *degrees)
        if args.zero_stage < 3:
            zero |= {"overlap_comm": True, "allgather_bucket_size": LEAST_BUCKET_ELEMENTS}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation_steps,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
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
