"""``--ulysses-degree auto``: the planner is asked before anything else, on rank 0 for all."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from ds_usp.planner import AUTO, Choice, choose_ulysses, engine
from ds_usp.training import this_cluster
from usp_trainer.launch import from_rank0
from usp_trainer.memory import planned
from usp_trainer.validate_args import check


def decide(args: Namespace, world_size: int) -> tuple[Namespace, tuple[str, ...]]:
    """:func:`check`, after ``auto`` has become a number. Collective.

    Returns:
        The checked arguments, and why the planner chose so, in lines; none without ``auto``.

    Raises:
        ConfigError, LayoutError: on every rank; also where the planner finds that nothing fits.
    """
    if args.ulysses_degree != AUTO:
        return check(args, world_size), ()
    trial = check(_with_ulysses(args, None), world_size)
    choice: Choice = from_rank0(lambda: choose(trial, world_size))
    return check(_with_ulysses(args, choice.ulysses), world_size), choice.why


def _with_ulysses(args: Namespace, degree: int | None) -> Namespace:
    return Namespace(**{**vars(args), "ulysses_degree": degree})


def choose(args: Namespace, world_size: int) -> Choice:
    """What the planner says of a run whose other flags are checked."""
    cluster = this_cluster(args.usp_cluster, world_size, on_gpu=args.device == "cuda")
    work, split = planned(args)
    # "auto" is solved when the degrees are known; a ratio that is given stays.
    ours = replace(engine("megatron-deepspeed"), offloads=args.usp_offload_ratio == "auto")
    return choose_ulysses(cluster, work, ours, replace(split, ulysses=1, ring=1), world_size)
