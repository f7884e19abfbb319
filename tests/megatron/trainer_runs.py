"""Tiny runs of the trainer for tests: what ranks execute, as module-level functions."""

import contextlib
import io
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import RankContext, fork_world

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
if str(TRAINER) not in sys.path:
    sys.path.insert(0, str(TRAINER))

Numbers = list[tuple[float, float]]  # loss and gradient norm of each step
Outcome = tuple[Exception | None, str, int | None]  # its error, what it prints, its exit code

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


def degrees(*, sp: int = 1, u: int | str | None = None, zero: int = 0) -> str:
    return f" --ds-sequence-parallel-size {sp} --ulysses-degree {u or sp} --zero-stage {zero}"


def arguments(flags: str, output_dir: Path | str) -> Namespace:
    from usp_trainer.arguments import parse

    return parse([*TINY.split(), "--output-dir", str(output_dir), *flags.split()])


@contextmanager
def patched(patches: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for target, replacement in patches.items():
            stack.enter_context(mock.patch(target, replacement))
        yield


def start(flags: str, output_dir: Path | str) -> Any:
    """The trainer of a run of the tiny model on this rank."""
    return trainer_of(arguments(flags, output_dir))


def trainer_of(args: Namespace) -> Any:
    """The trainer of parsed arguments on this rank."""
    from usp_trainer.data import read_tokens
    from usp_trainer.step import Trainer, with_chosen_degree

    from ds_usp.training import prepare_deepspeed

    prepare_deepspeed()
    args, _ = with_chosen_degree(args, dist.get_world_size())
    return Trainer(args, read_tokens(args.data_path, args.vocab_size), torch.device("cpu"))


def numbers_on_rank(
    ctx: RankContext, *, runs: list[str], output_dir: str, steps: int, patches: Mapping[str, Any]
) -> list[Numbers]:
    """Loss and gradient norm of every step of every run, as this rank sees them."""
    numbers = []
    for flags in runs:
        with patched(patches):
            trainer = start(flags, output_dir)
            done = [trainer.train(trainer.args.lr) for _ in range(steps)]
            numbers.append([(step.loss, step.grad_norm) for step in done])
    return numbers


def train(
    world: int,
    *runs: str,
    output_dir: Path,
    steps: int = 2,
    patches: Mapping[str, Any] | None = None,
) -> list[Numbers]:
    """The numbers of each run, after checking that every rank saw the same."""
    options = {"output_dir": str(output_dir), "steps": steps, "patches": patches or {}}
    ranks = fork_world(numbers_on_rank, world, runs=list(runs), **options)
    assert all(numbers == ranks[0] for numbers in ranks), ranks
    return ranks[0]


def pretrain_on_rank(ctx: RankContext, *, runs: list[str]) -> list[Outcome]:
    """How each run, from its flags to its end, ends on this rank, and what it prints."""
    import pretrain_gpt_usp as program
    from usp_trainer.data import read_tokens
    from usp_trainer.step import with_chosen_degree

    from ds_usp.training import prepare_deepspeed

    prepare_deepspeed()
    outcomes: list[Outcome] = []
    for flags in runs:
        error, code, printed = None, None, io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                args, why = with_chosen_degree(arguments(flags, "unused"), ctx.world)
                tokens = read_tokens(args.data_path, args.vocab_size)
                code = program.pretrain(args, tokens, torch.device("cpu"), why)
        except ValueError as raised:
            error = raised
        outcomes.append((error, printed.getvalue(), code))
    return outcomes


def pretrain(world: int, *runs: str) -> list[list[Outcome]]:
    """The outcome of each run (first index) on each rank (second index), in one start of ranks."""
    ranks = fork_world(pretrain_on_rank, world, runs=list(runs))
    return [list(of_run) for of_run in zip(*ranks, strict=True)]


def numbers_of(folder: Path) -> Numbers:
    """What a run has written into ``metrics.jsonl``."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def relative_difference(numbers: Numbers, expected: Sequence[tuple[float, float]]) -> float:
    """The largest, over losses and gradient norms of all steps."""
    pairs = zip(sum(numbers, ()), sum(expected, ()), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)
