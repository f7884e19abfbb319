#!/usr/bin/env python3
"""Pretrain a GPT with unified sequence parallelism, on CPUs or GPUs.

Under a launcher:  torchrun --nproc-per-node 4 pretrain_gpt_usp.py --ds-sequence-parallel-size 4
                   deepspeed --num_gpus 4 pretrain_gpt_usp.py --ds-sequence-parallel-size 4
Demonstration:     python pretrain_gpt_usp.py --quickstart
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import warnings
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist
from usp_trainer import checkpoint
from usp_trainer.arguments import parse
from usp_trainer.checkpoint import Progress
from usp_trainer.data import Tokens, read_tokens
from usp_trainer.quickstart import proves
from usp_trainer.report import Reporter, describe_run
from usp_trainer.step import Step, Trainer, learning_rate, with_chosen_degree

from ds_usp import ConfigError, DataError, allocator_variables, one_line_errors
from ds_usp.settings import keeps_host_memory
from ds_usp.training import prepare_deepspeed

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start it again to continue
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main(argv: list[str]) -> int:
    """Train as one rank of a launcher; the exit code."""
    with one_line_errors():
        args = parse(argv)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return start_quickstart(args, argv)
        device = join_ranks(args)
        args, why = with_chosen_degree(args, dist.get_world_size())
        tokens = read_tokens(args.data_path, args.vocab_size)
        check_same_data(tokens)
        code = pretrain(args, tokens, device, why)
        if args.quickstart and not code:
            code = int(not proves(args, tokens, device))
        dist.barrier()  # a launcher ends the others as soon as one rank has ended with a code
    dist.destroy_process_group()
    return code


def start_quickstart(args: Namespace, argv: list[str]) -> int:
    """Become the torchrun of ``--quickstart``'s ranks."""
    if not args.quickstart:
        raise ConfigError(
            "this program is one rank: start it with torchrun --nproc-per-node N "
            "pretrain_gpt_usp.py ..., or deepspeed --num_gpus N pretrain_gpt_usp.py ..."
        )
    ranks = args.ds_sequence_parallel_size
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does it too, with a warning
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(ranks), __file__, *argv]
    os.execv(sys.executable, torchrun)


def join_ranks(args: Namespace) -> torch.device:
    """Join the launcher's ranks, with NCCL on GPUs and gloo without; this rank's device."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = args.device == "cuda"
    if on_gpu and keeps_host_memory(args):  # before the GPU's first use
        os.environ.update(allocator_variables(os.environ, expandable_segments=True))
    os.environ["DS_ACCELERATOR"] = args.device  # DeepSpeed reads it when it is imported
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    prepare_deepspeed()
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks share the cores
    minutes = args.distributed_timeout_minutes
    timeout = timedelta(minutes=minutes) if minutes else None
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is in use on {os.environ['MASTER_ADDR']}, as "
            "by another training: give the launcher a free one (torchrun --master-port, deepspeed "
            "--master_port; of the scripts MASTER_PORT)"
        ) from error
    return device


def check_same_data(tokens: Tokens) -> None:
    """DataError, on every rank, where one sees another file than the others."""
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, len(tokens.ids))
    if len(set(sizes)) > 1:
        raise DataError(
            f"the ranks find {sizes} tokens in {tokens.name}: put it on storage that all share"
        )


class Stop:
    """What asks this rank to end: a signal, or ``--exit-duration-in-mins``."""

    def __init__(self, minutes: int | None) -> None:
        self._end = time.monotonic() + 60 * minutes if minutes else math.inf
        self._signalled = False
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        # Python calls it when the running operation has ended. All ranks learn of it at the end of
        # a step; until then one that a launcher signals again must not end.
        self._signalled = True

    def asked(self) -> tuple[bool, bool]:
        return self._signalled, time.monotonic() >= self._end


def pretrain(args: Namespace, tokens: Tokens, device: torch.device, why: tuple[str, ...]) -> int:
    """Train until the last step, or until something asks for an earlier end. Collective.

    Returns:
        0, or ``STOPPED`` where a signal ended the run before its last step.
    """
    stop = Stop(args.exit_duration_in_mins)
    trainer = Trainer(args, tokens, device)
    progress = Progress()
    if args.load:
        progress = checkpoint.load(trainer.engine, args)
        trainer.begin_at(progress.samples)
    reporter, description = None, describe_run(args, tokens, trainer.num_parameters)
    if dist.get_rank() == 0:
        reporter = Reporter(args, progress.step)
        reporter.say("\n".join((*why, description)))
        if args.load:
            reporter.say(f"resumed from step {progress.step} of {args.load}")
    code, reason, every = 0, "", args.save_interval or math.inf
    while progress.step < args.train_iters and not reason:
        begin, lr = time.monotonic(), learning_rate(args, progress.step)
        done = trainer.train(lr, stop.asked())
        progress = Progress(progress.step + 1, progress.samples + args.global_batch_size)
        row = {"step": progress.step, "loss": done.loss, "grad_norm": done.grad_norm, "lr": lr}
        row["seconds"] = time.monotonic() - begin
        if args.eval_interval and progress.step % args.eval_interval == 0:
            row["valid_loss"] = trainer.validate()
        if reporter:
            reporter.step(row)
        reason = end_reason(args, progress.step, done)
        last = bool(reason) or progress.step == args.train_iters
        if args.save and (last or progress.step % every == 0):
            trainer.mesh.check()  # ranks that disagree save nothing
            folder = checkpoint.save(trainer.engine, args, progress)
            if reporter:
                reporter.say(f"saved    {folder}")
        if reason and progress.step < args.train_iters:
            code = STOPPED if done.stops[0] else 0
            if reporter:
                reporter.say(f"stopped  at step {progress.step} of {args.train_iters}: {reason}")
    if reporter:
        reporter.finish()
    return code


def end_reason(args: Namespace, step: int, done: Step) -> str:
    """Why the run ends after this step, the same on every rank; empty: it goes on."""
    if done.stops[0]:
        return f"a signal to {done.stops[0]} of {dist.get_world_size()} ranks"
    if done.stops[1]:
        return f"--exit-duration-in-mins {args.exit_duration_in_mins}"
    if args.exit_interval and step % args.exit_interval == 0:
        return f"--exit-interval {args.exit_interval}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
