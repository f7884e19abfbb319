#!/usr/bin/env python3
"""Pretrain a GPT with unified sequence parallelism, on CPUs or GPUs.

Alone:             python pretrain_gpt_usp.py --ds-sequence-parallel-size 4 --ulysses-degree 2
Under a launcher:  torchrun --nproc-per-node 4 pretrain_gpt_usp.py ...
                   deepspeed --num_gpus 4 pretrain_gpt_usp.py ...
Demonstration:     python pretrain_gpt_usp.py --quickstart
"""

import sys

from usp_trainer import launch
from usp_trainer.arguments import parse
from usp_trainer.checks import replica_size
from usp_trainer.quickstart import quickstart

from ds_usp import ConfigError, USPError


def main(argv: list[str]) -> int:
    """Start or join the ranks and train; returns the exit code."""
    args = parse(argv)
    try:
        args.device = launch.select_device(args.device)
        # DeepSpeed is imported after its device is chosen, and once for all forked ranks.
        from usp_trainer.loop import pretrain

        if launch.under_launcher():
            if args.quickstart:
                raise ConfigError("--quickstart starts its own ranks: run it without a launcher")
            if args.num_processes:
                raise ConfigError(
                    "--num-processes is the launcher's to say: leave it out under one"
                )
            return launch.run_rank(pretrain, args)
        if args.quickstart:
            return quickstart(args, pretrain)
        if args.device == "cuda":
            return launch.run_on_gpus(__file__, argv, args.num_processes)
        return launch.run_forked(pretrain, args, args.num_processes or replica_size(args))
    except USPError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
