"""Starts the ranks: joins a launcher's world, or forks ranks, or runs torchrun.

The only file of the trainer that writes environment variables.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_usp import ConfigError, allocator_variables
from ds_usp.training import prepare_deepspeed
from usp_trainer import environment
from usp_trainer.failures import Failure, describe, exit_failure, report, summary
from usp_trainer.local_ranks import end_with_parent, fork_and_wait

Main = Callable[[Namespace], None]


def select_device(device: str) -> str:
    """``cuda`` or ``cpu``, also set for DeepSpeed; must be called before DeepSpeed is imported.

    Raises:
        ConfigError: GPUs were requested and there are none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    # megatron-core warns of optional packages, DeepSpeed calls deprecated functions of torch.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return device


def set_allocator_options(args: Namespace) -> None:
    """Let torch pin host memory faster and use GPU memory in growing segments, if the flags keep
    activations or optimizer states in host memory; must be called before the first use of a GPU.

    A variable of the user's keeps what it names."""
    if args.device == "cuda" and (args.usp_offload_ratio or args.usp_states_on_host):
        os.environ.update(allocator_variables(os.environ, expandable_segments=True))


def run_rank(main: Main, args: Namespace) -> int:
    """Run ``main`` as one rank of a launcher's world.

    Returns:
        0, or 1 if it failed; ranks that fail with the same error print it once.
    """
    if environment.launcher_is_parent():
        end_with_parent(os.getppid())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, *_ = next(dist.rendezvous("env://", rank, world))
    try:
        _init_process_group(args, store=dist.PrefixStore("ranks", store))
        main(args)
        dist.destroy_process_group()
    except Exception as error:
        failure = describe(error, args, rank)
        report(dist.PrefixStore("failures", store), rank, world, failure, args)
        return 1
    return 0


def run_on_gpus(script: str, argv: list[str], processes: int | None) -> int:
    """Start one process per GPU through torchrun, which runs ``script`` in each."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    processes = processes or torch.cuda.device_count()
    try:
        torchrun(["--standalone", f"--nproc-per-node={processes}", script, *argv])
    except ChildFailedError as error:  # ranks that were not killed have printed their error
        killed = {r: exit_failure(f.exitcode) for r, f in error.failures.items() if f.exitcode < 0}
        cause, _ = error.get_first_failure()
        if cause in killed:
            print(f"[rank {cause}] {killed[cause].text}", file=sys.stderr)
        return 1
    return 0


def spawn_ranks(main: Main, args: Namespace, processes: int) -> int:
    """Fork the ranks from this process, so that they share its imports; they rendezvous by a file.

    Returns:
        0, or 1 if a rank failed; the reports are printed on stderr, equal ones once.
    """
    prepare_deepspeed()

    def body(rank: int, folder: str, send: Callable[[Failure], None]) -> None:
        """One rank: sets torchrun's environment variables and trains; sends its failure, if any."""
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_SIZE": processes}
        os.environ.update({name: str(value) for name, value in names.items()})
        try:
            _init_process_group(args, init_method=f"file://{folder}/store")
            main(args)
            dist.destroy_process_group()
        except Exception as error:
            send(describe(error, args, rank))
            sys.exit(1)

    try:
        failures = fork_and_wait(body, processes)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if not failures:
        return 0
    print(*summary(failures, processes, args), sep="\n", file=sys.stderr)
    return 1


def _init_process_group(args: Namespace, **rendezvous: Any) -> None:
    """Initialize the default process group: NCCL on GPUs, gloo on CPU. Collective.

    ``rendezvous``: further arguments of ``init_process_group``. RANK, WORLD_SIZE and, on GPUs,
    LOCAL_RANK are read from the environment."""
    prepare_deepspeed()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group(
        backend="nccl" if args.device == "cuda" else "gloo",
        **rendezvous,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if args.device != "cuda":  # else a rank that fails at once would end while others connect to it
        dist.barrier()


def broadcast_from_rank0(compute: Callable[[], Any]) -> Any:
    """Run ``compute`` on rank 0 and broadcast its result, or raise its error on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
