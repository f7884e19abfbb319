"""``--ulysses-degree auto``: the planner chooses the degree on rank 0, before anything is built."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from ds_usp.planner import AUTO, Choice, choose_ulysses, framework_caps
from ds_usp.training import this_cluster
from usp_trainer.launch import broadcast_from_rank0
from usp_trainer.memory import planner_inputs
from usp_trainer.validate_args import validate_and_derive


def resolve_auto_args(args: Namespace, world_size: int) -> tuple[Namespace, tuple[str, ...]]:
    """:func:`validate_and_derive` after ``auto`` is replaced by a degree. Collective.

    Returns:
        The validated arguments, and the planner's reasons, one a line; none without ``auto``.

    Raises:
        ConfigError, LayoutError: on every rank; also where the planner finds that nothing fits.
    """
    if args.ulysses_degree != AUTO:
        return validate_and_derive(args, world_size), ()
    trial = validate_and_derive(_with_ulysses(args, None), world_size)
    choice: Choice = broadcast_from_rank0(lambda: choose_degree(trial, world_size))
    return validate_and_derive(_with_ulysses(args, choice.ulysses), world_size), choice.why


def _with_ulysses(args: Namespace, degree: int | None) -> Namespace:
    return Namespace(**{**vars(args), "ulysses_degree": degree})


def choose_degree(args: Namespace, world_size: int) -> Choice:
    """The planner's Ulysses degree for a run whose other flags are validated."""
    cluster = this_cluster(args.usp_cluster, world_size, on_gpu=args.device == "cuda")
    work, split = planner_inputs(args)
    # An offload ratio "auto" is resolved after the degrees are known; a number is fixed.
    framework = replace(
        framework_caps("megatron-deepspeed"), offloads=args.usp_offload_ratio == "auto"
    )
    return choose_ulysses(cluster, work, framework, replace(split, ulysses=1, ring=1), world_size)
