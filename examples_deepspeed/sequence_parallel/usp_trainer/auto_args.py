"""``--ulysses-degree auto``: the planner chooses on rank 0, before anything is built."""

from __future__ import annotations

from argparse import Namespace

from ds_usp.planner import AUTO, Choice
from megatron_patches.flags import PlannedRun
from usp_trainer.launch import broadcast_from_rank0
from usp_trainer.run_files import TEXT_VOCAB_SIZE
from usp_trainer.validate_args import model_parallel_size, validate_and_derive


def planned_run(args: Namespace) -> PlannedRun:
    """Validated arguments for the planner; before the data is read, with the flags' vocabulary."""
    return PlannedRun(
        args=args,
        zero=args.zero_stage,
        world_size=model_parallel_size(args) * args.data_parallel_size,
        default_vocab=TEXT_VOCAB_SIZE,
    )


def resolve_auto_args(args: Namespace, world_size: int) -> tuple[Namespace, tuple[str, ...]]:
    """:func:`validate_and_derive` after ``auto`` is replaced by a degree. Collective.

    Returns:
        The validated arguments, and the planner's reasons, one a line; none where nothing was
        decided.

    Raises:
        ConfigError, LayoutError: on every rank; also where the planner finds that nothing fits.
    """
    if args.ulysses_degree != AUTO:
        return validate_and_derive(args, world_size), ()
    run = planned_run(validate_and_derive(_with_ulysses(args, None), world_size))
    on_gpu = args.device == "cuda"
    choice: Choice = broadcast_from_rank0(lambda: run.choose_degree(on_gpu=on_gpu))
    return validate_and_derive(_with_ulysses(args, choice.ulysses), world_size), choice.why


def _with_ulysses(args: Namespace, degree: int | None) -> Namespace:
    return Namespace(**{**vars(args), "ulysses_degree": degree})
