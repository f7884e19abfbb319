"""The training loop, as every rank runs it."""

from __future__ import annotations

import math
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_usp import TokenLayout
from ds_usp.training import ParallelGroups, attention_kernel, owned_parameters
from megatron_patches.megatron_core import cpu_fallbacks_patch_set
from megatron_patches.megatron_core.groups import initialize_groups
from usp_trainer import checkpoint, progress, transformer_impl
from usp_trainer.auto_args import resolve_auto_args
from usp_trainer.checkpoint import Progress
from usp_trainer.data import TokenData
from usp_trainer.engine import Trainer, learning_rate
from usp_trainer.launch import broadcast_from_rank0
from usp_trainer.model import Layer, build_model, padded_vocab_size
from usp_trainer.nonfinite import check_weights, not_finite_error
from usp_trainer.run_files import RunFolders
from usp_trainer.signals import STOPPED, StopRequested, StopSignals, machine


class TrainingLoop:
    """Model, data, engine and progress of one rank. Collective, with all of its methods.

    Raises:
        USPError: on every rank; the flags, the data or the checkpoint are invalid.
    """

    def __init__(self, args: Namespace, signals: StopSignals | None = None) -> None:
        self.args = args
        args.attention_kernel = attention_kernel(
            args.usp_kernel,
            device=torch.device(args.device),
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
            head_dim=args.hidden_size // args.num_attention_heads,
            documents=args.reset_attention_mask,
        )
        args.transformer_impl = transformer_impl.chosen(args)
        layout = TokenLayout(
            args.usp_layout, args.seq_length, args.ulysses_degree, args.ring_degree
        )
        cpu_fallbacks_patch_set().apply()
        self.mesh, self.groups = initialize_groups(
            tensor=args.tensor_model_parallel_size,
            sequence=args.ds_sequence_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            ulysses=args.ulysses_degree,
            timeout_minutes=args.distributed_timeout_minutes,
        )
        self.data = TokenData(args, layout, self.mesh.rank, dist.get_rank(self.groups.dp))
        args.padded_vocab_size = padded_vocab_size(args, self.data.vocab_size)
        device = torch.device(args.device)
        model = build_model(args, self.mesh, layout, self.groups, device)
        self.parameters = _count_parameters(model, self.groups, device)
        self.trainer = Trainer(args, model, self.groups, device, self.data.vocab_size, signals)
        self.progress = Progress()
        if args.load:
            with self.trainer.states_on_device():
                self.progress = checkpoint.load(self.trainer.engine, args)

    def step(self) -> dict[str, Any]:
        args, begin = self.args, time.monotonic()
        lr = learning_rate(args, self.progress.step)
        batches = self.data.training_batches(self.progress.samples)
        loss, gradient_norm = self.trainer.train(batches, lr)
        seconds = time.monotonic() - begin
        if args.check_for_nan_in_loss_and_grad and not math.isfinite(loss + gradient_norm):
            again = partial(self.trainer.train, batches, lr)
            step, module = self.progress.step + 1, self.trainer.engine.module
            raise not_finite_error(step, loss, gradient_norm, module, again)
        self.progress = Progress(
            self.progress.step + 1, self.progress.samples + args.global_batch_size
        )
        return {
            "step": self.progress.step,
            "loss": loss,
            "grad_norm": gradient_norm,
            "lr": lr,
            "tokens_per_s": args.global_batch_size * args.seq_length / seconds,
            "memory_bytes": progress.memory_bytes(args.device),
            "seconds": seconds,
        }

    def validate(self) -> float:
        count = self.args.eval_iters
        batches = map(self.data.validation_batches, range(count))
        return sum(map(self.trainer.evaluate, batches)) / count

    def save(self) -> str:
        self.mesh.check()  # ranks that disagree save nothing
        if self.args.check_for_nan_in_loss_and_grad:
            with self.trainer.states_on_device():
                check_weights(self.trainer.engine, self.progress.step)
        return checkpoint.save(self.trainer.engine, self.args, self.progress)


class StopRule:
    """``--exit-interval`` and ``--exit-duration-in-mins``, counted from its construction."""

    def __init__(self, args: Namespace) -> None:
        self._interval, self._minutes = args.exit_interval, args.exit_duration_in_mins
        self._device = torch.device(args.device)
        self._begin = time.monotonic()

    def reason(self, step: int) -> str | None:
        """Why the run ends after this step, the same on every rank; None: it continues."""
        # The ranks' clocks differ, and all must stop at the same step.
        if self._minutes:
            minutes = torch.tensor((time.monotonic() - self._begin) / 60, device=self._device)
            dist.all_reduce(minutes, op=dist.ReduceOp.MAX)
            if minutes.item() >= self._minutes:
                return f"--exit-duration-in-mins {self._minutes}"
        if self._interval and step % self._interval == 0:
            return f"--exit-interval {self._interval}"
        return None


def pretrain(args: Namespace) -> int:
    """Train with ``args`` until the last step; rank 0 reports. Collective.

    Returns:
        0, or ``STOPPED`` where a signal stopped the run before its last step.
    """
    with StopSignals() as signals:
        machines = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(machines, (machine(), os.getpid()))
        signals.siblings = tuple(number for name, number in machines if name == machine())
        code = _pretrain(args, signals)
        if code:  # a launcher ends the others as soon as one rank has ended with it
            dist.barrier()
        return code


def _pretrain(args: Namespace, signals: StopSignals) -> int:
    stop_rule = StopRule(args)
    args, explanation = resolve_auto_args(args, dist.get_world_size())
    locked: list[RunFolders] = []  # on rank 0
    broadcast_from_rank0(lambda: locked.append(RunFolders(args)))
    refused = True
    try:
        loop = TrainingLoop(args, signals)
        refused = False
        return _train(loop, explanation, stop_rule)
    finally:
        for folders in locked:
            folders.close(refused=refused)


def _train(loop: TrainingLoop, explanation: Sequence[str], stop_rule: StopRule) -> int:
    args, reporter, reason = loop.args, None, None
    saved, code = loop.progress.step, 0
    if dist.get_rank() == 0:
        reporter = _build_reporter(loop, explanation)
    watch = _first_step_lines(loop, reporter)
    while loop.progress.step < args.train_iters and not reason:
        try:
            with watch:
                row = loop.step()
        except StopRequested as asked:
            reason, code = str(asked), STOPPED
            break
        watch = nullcontext()
        reason = stop_rule.reason(row["step"])
        last = row["step"] == args.train_iters or reason is not None
        if args.eval_interval and row["step"] % args.eval_interval == 0:
            row["valid_loss"] = loop.validate()
        if reporter:
            reporter.step(row)
        due = args.save_interval and row["step"] % args.save_interval == 0
        if last or due:
            saved = _save(loop, reporter)
    step = loop.progress.step
    if code and step > saved:
        _save(loop, reporter)
    if reporter:
        if reason and step < args.train_iters:
            reporter.print_above(f"stopped  at step {step} of {args.train_iters}: {reason}")
        reporter.finish()
    return code


def _save(loop: TrainingLoop, reporter: progress.ProgressReporter | None) -> int:
    """Write a checkpoint, if there is a folder for it; the step that it is of."""
    if loop.args.save:
        folder = loop.save()
        if reporter:
            reporter.print_above(f"saved    {folder}")
    return loop.progress.step


def _first_step_lines(
    loop: TrainingLoop, reporter: progress.ProgressReporter | None
) -> AbstractContextManager[None]:
    if reporter is None or loop.args.quiet:
        return nullcontext()
    modules = loop.trainer.engine.module.modules()
    layers = [(layer.number, layer) for layer in modules if isinstance(layer, Layer)]
    return progress.first_step_lines(layers, loop.args.num_layers, reporter.print_above)


def _build_reporter(loop: TrainingLoop, explanation: Sequence[str]) -> progress.ProgressReporter:
    args, step = loop.args, loop.progress.step
    if not args.quiet:
        mesh, groups = loop.mesh, loop.groups
        by_name = {
            "tensor": groups.tp,
            "ulysses": mesh.ulysses_group,
            "ring": mesh.ring_group,
            "data": groups.dp,
            "gradients": groups.sp_dp,
        }
        ranks = {name: dist.get_process_group_ranks(g) for name, g in by_name.items() if g}
        description = progress.describe_run(args, ranks, loop.parameters)
        print(*explanation, description, sep="\n", flush=True)
    reporter = progress.ProgressReporter(args, step)
    if args.load:
        reporter.print_above(f"resumed from step {step} of {args.load}")
        if step >= args.train_iters:
            done = f"all {args.train_iters} steps are done"
            if step > args.train_iters:
                done = f"the checkpoint is of step {step}, beyond --train-iters {args.train_iters}"
            reporter.print_above(
                f"{done}: nothing is left to train. More with --train-iters above {step}"
            )
    return reporter


def _count_parameters(model: torch.nn.Module, groups: ParallelGroups, device: torch.device) -> int:
    """Parameters of the whole model; collective over tensor- and pipeline-parallel ranks."""
    local = sum(p.numel() for p in owned_parameters(model.parameters(), groups))
    count = torch.tensor(local, device=device)
    dist.all_reduce(count, group=groups.model)
    return int(count)
