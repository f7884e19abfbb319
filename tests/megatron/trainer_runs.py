"""Tiny runs of the trainer for tests: what ranks execute, as module-level functions."""

import contextlib
import functools
import io
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from harness import RankContext, fork_world

import megatron_patches
from megatron_patches import guards

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
if str(TRAINER) not in sys.path:
    sys.path.insert(0, str(TRAINER))

Numbers = list[tuple[float, float]]  # loss and gradient norm of each step

TINY = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --num-key-value-heads 2 --seq-length 64 --use-rotary-position-embeddings --swiglu
    --normalization rmsnorm --untie-embeddings-and-output-weights --disable-bias-linear
    --make-vocab-size-divisible-by 2 --global-batch-size 4 --lr-decay-style constant
    --device cpu --quiet
"""
# Sensitive to the scale of gradients, which Adam and clipping hide.
PLAIN_SGD = " --optimizer sgd --lr 0.1 --clip-grad 0 --weight-decay 0"
ADAM = " --optimizer adam --lr 1e-3 --clip-grad 0.5"


def degrees(*, sp: int = 1, u: int | None = None, tp: int = 1, pp: int = 1, zero: int = 0) -> str:
    return (
        f" --ds-sequence-parallel-size {sp} --ulysses-degree {u or sp} --zero-stage {zero}"
        f" --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    )


def arguments(flags: str, output_dir: Path | str) -> Namespace:
    from usp_trainer.arguments import parse

    return parse([*TINY.split(), "--output-dir", str(output_dir), *flags.split()])


@contextmanager
def patched(patches: Mapping[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, replacement in patches.items():
            stack.enter_context(mock.patch(target, replacement))
        yield


@functools.cache
def read_sources_once() -> None:
    """Every run compares megatron-core's sources; of the same function they are the same."""
    guards.fingerprint = functools.cache(guards.fingerprint)


def start(flags: str, output_dir: Path | str) -> Any:
    """A run on this rank; groups of an earlier one on it are forgotten."""
    from megatron.core import parallel_state
    from usp_trainer.auto_args import resolve_auto_args
    from usp_trainer.loop import TrainingLoop

    from ds_usp.training import prepare_deepspeed

    read_sources_once()
    prepare_deepspeed()
    parallel_state.destroy_model_parallel()
    megatron_patches.restore()
    args, _ = resolve_auto_args(arguments(flags, output_dir), dist.get_world_size())
    return TrainingLoop(args)


def pretrain_on_rank(
    ctx: RankContext, *, runs: list[str], output_dir: str
) -> list[tuple[Exception | None, str]]:
    """How each run, from its start to its last step, ends on this rank, and what it prints."""
    from megatron.core import parallel_state
    from usp_trainer.loop import pretrain

    from ds_usp.training import prepare_deepspeed

    read_sources_once()
    outcomes: list[tuple[Exception | None, str]] = []
    for flags in runs:
        prepare_deepspeed()
        parallel_state.destroy_model_parallel()
        megatron_patches.restore()
        error, printed = None, io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                args = arguments(flags, output_dir)
                args.quiet = False
                pretrain(args)
        except (ValueError, OSError) as raised:
            error = raised
        outcomes.append((error, printed.getvalue()))
    return outcomes


def numbers_on_rank(
    ctx: RankContext,
    *,
    runs: list[str],
    output_dir: str,
    steps: int,
    save_at: int | None = None,
    patches: Mapping[str, Any],
) -> list[Numbers]:
    """Loss and gradient norm of every step of every run, as this rank sees them."""
    numbers_of_runs = []
    for flags in runs:
        with patched(patches):
            run, numbers = start(flags, output_dir), []
            for step in range(steps):
                if step == save_at:
                    run.save()
                row = run.step()
                numbers.append((row["loss"], row["grad_norm"]))
        numbers_of_runs.append(numbers)
    return numbers_of_runs


def errors_on_rank(
    ctx: RankContext, *, runs: list[str], output_dir: str, patches: Mapping[str, Any]
) -> list[ValueError | None]:
    """What starting each run, or its first step, raises on this rank."""
    errors: list[ValueError | None] = []
    for flags in runs:
        try:
            with patched(patches):
                start(flags, output_dir).step()
        except ValueError as error:
            errors.append(error)
        else:
            errors.append(None)
    return errors


def errors_of_runs(
    world: int, runs: list[str], output_dir: Path, patches: Mapping[str, Any] | None = None
) -> list[list[ValueError | None]]:
    """What each run (first index) raises on each rank (second index), in one start of ranks."""
    ranks = fork_world(
        errors_on_rank, world, runs=runs, output_dir=str(output_dir), patches=patches or {}
    )
    return [list(of_run) for of_run in zip(*ranks, strict=True)]


def errors(
    world: int, flags: str, output_dir: Path, patches: Mapping[str, Any] | None = None
) -> list[ValueError | None]:
    return errors_of_runs(world, [flags], output_dir, patches)[0]


# Each leaves its groups behind, which share one gloo thread: a twelfth run takes as long as the
# second, and the first takes 0.15 s more on each rank.
_RUNS_OF_A_WORLD = 12


def on_each_rank(
    world: int,
    runs: list[str],
    output_dir: Path,
    *,
    steps: int = 2,
    save_at: int | None = None,
    patches: Mapping[str, Any] | None = None,
) -> list[list[Numbers]]:
    """The numbers of each run (second index) on each rank (first index)."""
    numbers_of_ranks: list[list[Numbers]] = [[] for _ in range(world)]
    for first in range(0, len(runs), _RUNS_OF_A_WORLD):
        ranks = fork_world(
            numbers_on_rank,
            world,
            runs=runs[first : first + _RUNS_OF_A_WORLD],
            output_dir=str(output_dir),
            steps=steps,
            save_at=save_at,
            patches=patches or {},
        )
        for numbers, more in zip(numbers_of_ranks, ranks, strict=True):
            numbers.extend(more)
    return numbers_of_ranks


def train(world: int, *runs: str, output_dir: Path, **kwargs: Any) -> list[Numbers]:
    """The numbers of each run, after checking that every rank saw the same."""
    ranks = on_each_rank(world, list(runs), output_dir, **kwargs)
    assert all(numbers == ranks[0] for numbers in ranks), ranks
    return ranks[0]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def relative_difference(numbers: Numbers, expected: Numbers) -> float:
    """The largest, over losses and gradient norms of all steps."""
    assert len(numbers) == len(expected)
    pairs = zip(sum(numbers, ()), sum(expected, ()), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)
