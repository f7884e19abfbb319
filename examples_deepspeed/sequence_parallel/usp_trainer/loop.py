"""One training run, as every rank of it executes it."""

from __future__ import annotations

import time
from argparse import Namespace

import torch
import torch.distributed as dist

from ds_usp import SequenceMesh
from ds_usp.training import ParallelGroups, owned_parameters
from megatron_patches.megatron_core import initialize_groups
from usp_trainer import checkpoint, report
from usp_trainer.arguments import check
from usp_trainer.checkpoint import Progress
from usp_trainer.data import TokenData
from usp_trainer.engine import Trainer, learning_rate
from usp_trainer.model import build_model, padded_vocab_size


def pretrain(args: Namespace) -> None:
    """Train as ``args`` say. Collective: every rank of the default group calls it.

    Raises:
        USPError: on every rank; whatever is wrong with the flags, the data or the checkpoint.
    """
    args = check(args, dist.get_world_size())
    mesh, groups = initialize_groups(
        tensor=args.tensor_model_parallel_size,
        ulysses=args.ulysses_degree,
        ring=args.ring_degree,
        pipeline=args.pipeline_model_parallel_size,
    )
    layout = mesh.layout(args.usp_layout, seq_len=args.seq_length)
    data = TokenData(args, layout, mesh.rank, dist.get_rank(groups.dp))
    args.padded_vocab_size = padded_vocab_size(args, data.vocab_size)
    device = torch.device(args.device)
    model = build_model(args, mesh, layout, groups, device)
    parameters = _count(model, groups, device)
    trainer = Trainer(args, model, groups, device, data.vocab_size)
    progress = checkpoint.load(trainer.engine, args) if args.load else Progress()
    reporter = None
    if dist.get_rank() == 0:
        if not args.quiet:
            print(report.start_block(args, _ranks(mesh, groups), parameters), flush=True)
        reporter = report.Reporter(args, progress.step)
    _run(args, trainer, data, progress, reporter)


def _run(
    args: Namespace,
    trainer: Trainer,
    data: TokenData,
    progress: Progress,
    reporter: report.Reporter | None,
) -> None:
    while progress.step < args.train_iters:
        begin = time.monotonic()
        lr = learning_rate(args, progress.step)
        loss, norm = trainer.train(data.training_batches(progress.samples), lr)
        seconds = time.monotonic() - begin
        step = progress.step + 1
        progress = Progress(step, progress.samples + args.global_batch_size)
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens_per_s": args.global_batch_size * args.seq_length / seconds,
            "memory_bytes": report.memory_bytes(args.device),
            "seconds": seconds,
        }
        if _due(step, args.eval_interval):
            losses = [trainer.evaluate(data.validation_batches(i)) for i in range(args.eval_iters)]
            row["valid_loss"] = sum(losses) / len(losses)
        if reporter:
            reporter.step(row)
        if args.save and (step == args.train_iters or _due(step, args.save_interval)):
            where = checkpoint.save(trainer.engine, args, progress)
            if reporter:
                reporter.say(f"saved    {where}")
    if reporter:
        reporter.finish()


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def _count(model: torch.nn.Module, groups: ParallelGroups, device: torch.device) -> int:
    own = sum(p.numel() for p in owned_parameters(model.parameters(), groups))
    count = torch.tensor(own, device=device)
    dist.all_reduce(count, group=groups.model)
    return int(count)


def _ranks(mesh: SequenceMesh, groups: ParallelGroups) -> dict[str, list[int]]:
    named = {
        "tensor": groups.tp,
        "ulysses": mesh.ulysses_group,
        "ring": mesh.ring_group,
        "data": groups.dp,
        "gradients": groups.sp_dp,
    }
    return {name: dist.get_process_group_ranks(group) for name, group in named.items() if group}
