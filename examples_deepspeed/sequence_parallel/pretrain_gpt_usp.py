#!/usr/bin/env python3
"""Pretrain a GPT with unified sequence parallelism, on CPUs or GPUs.

Alone:             python pretrain_gpt_usp.py --ds-sequence-parallel-size 4 --ulysses-degree 2
Under a launcher:  torchrun --nproc-per-node 4 pretrain_gpt_usp.py ...
                   deepspeed --num_gpus 4 pretrain_gpt_usp.py ...
Demonstration:     python pretrain_gpt_usp.py --quickstart
"""

import sys

from usp_trainer import environment
from usp_trainer.arguments import parse
from usp_trainer.validate_args import check_start, model_parallel_size

from ds_usp import USPError


def main(argv: list[str]) -> int:
    """Start or join the ranks and train; returns the exit code."""
    args = parse(argv)
    try:
        check_start(args)
    except USPError as error:
        if environment.rank() == 0:  # every rank raises the same error
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.check_only:
        return 0
    # Torch is imported only now, so that bad flags are refused in a fraction of a second.
    from usp_trainer import launch

    try:
        args.device = launch.select_device(args.device)
        launch.set_allocator_options(args)
        # DeepSpeed is imported after its device is set, and before the ranks are forked.
        from usp_trainer.loop import pretrain

        if environment.under_launcher():
            return launch.run_rank(pretrain, args)
        if args.quickstart:
            from usp_trainer.quickstart import quickstart

            return quickstart(args, pretrain)
        if args.device == "cuda":
            return launch.run_on_gpus(__file__, argv, args.num_processes)
        return launch.spawn_ranks(pretrain, args, args.num_processes or model_parallel_size(args))
    except USPError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
