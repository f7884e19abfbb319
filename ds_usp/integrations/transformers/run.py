"""``python -m ds_usp.integrations.transformers.run``: run an unedited program that trains by a
Trainer of transformers or TRL, with its sequences sharded.

    torchrun --nproc-per-node 4 -m ds_usp.integrations.transformers.run --ulysses-degree 2 \\
        train.py --its-flags
    torchrun --nproc-per-node 4 -m ds_usp.integrations.transformers.run --ulysses-degree 2 \\
        -m trl.scripts.sft --its-flags

Flags before the program are those below, all after it are the program's.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch.distributed as dist
from transformers import Trainer

import ds_usp
from ds_usp.errors import ConfigError
from ds_usp.integrations.transformers.model import find_enabled
from ds_usp.integrations.transformers.refusals import find_model
from ds_usp.integrations.transformers.trainer import attach
from ds_usp.settings import Integer, add_settings, settings_of


def main(argv: Sequence[str] | None = None) -> None:
    """Run a program whose trainers are given to :func:`attach` before they first compute.

    Raises:
        ConfigError: ranks that are no whole number of meshes; a program without a Trainer, of
            which nothing was sharded; what ``attach`` refuses.
    """
    parser = _parser()
    flags = parser.parse_args(argv)
    arguments: list[str] = flags.program
    is_module = arguments[:1] == ["-m"]
    program, *rest = arguments[is_module:] or [""]
    if not program:
        parser.error("no program to run")
    options = {row.name: getattr(flags, row.dest) for row in settings_of("transformers")}
    options["share_prefixes"] = flags.usp_share_prefixes
    sys.argv = [program, *rest]
    with _attached_trainers(flags, options) as attached:
        try:
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(program).resolve().parent)  # as Python itself does
                runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code or attached:
                raise
    if not attached:
        raise ConfigError(
            f"{program} has trained by no Trainer of transformers or TRL: nothing was sharded. In "
            "a loop of its own call enable(model, mesh)"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ds_usp.integrations.transformers.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ulysses-degree", type=Integer(), required=True, help="ranks that exchange heads"
    )
    parser.add_argument(
        "--sequence-parallel-size", type=Integer(), metavar="N",
        help="ranks that share each sequence, Ulysses x ring; all, unless given. The others are "
        "data parallel",
    )  # fmt: skip
    add_settings(parser, "transformers", "")
    parser.add_argument(
        "--usp-share-prefixes", action="store_true",
        help="a common prefix of rows of a batch is computed once: DPO and GRPO repeat prompts",
    )  # fmt: skip
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a file, or -m and a module")
    return parser


@contextmanager
def _attached_trainers(
    flags: argparse.Namespace, options: dict[str, Any]
) -> Iterator[WeakSet[Trainer]]:
    """Let each Trainer be attached before it first trains, evaluates or predicts."""
    attached, meshes = WeakSet[Trainer](), list[ds_usp.SequenceMesh]()

    def attach_once(trainer: Trainer) -> None:
        if trainer in attached:
            return
        if not meshes:  # the trainer's arguments have started torch.distributed
            meshes.append(_mesh_of(flags.sequence_parallel_size, flags.ulysses_degree))
        attached.add(trainer)
        is_enabled = find_enabled(trainer.model, find_model(trainer.model)) is not None
        attach(trainer, meshes[0], **({} if is_enabled else options))

    def entrance(method: Any) -> Any:
        @functools.wraps(method)
        def call(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            attach_once(trainer)
            return method(trainer, *args, **kwargs)

        return call

    methods = {x: entrance(getattr(Trainer, x)) for x in ("train", "evaluate", "predict")}
    with mock.patch.multiple(Trainer, **methods):
        yield attached


def _mesh_of(size: int | None, ulysses: int) -> ds_usp.SequenceMesh:
    """Make this rank's mesh of ``size`` ranks, None: of all. Collective over the world."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = size or world
    if world % size or size % ulysses:
        raise ConfigError(
            f"--sequence-parallel-size {size} must divide the {world} ranks, and --ulysses-degree "
            f"{ulysses} must divide it"
        )
    if world == 1:
        return ds_usp.SequenceMesh.single()
    axes = {"ulysses": ulysses, "ring": size // ulysses, "dp": world // size}
    return ds_usp.SequenceMesh.build(ds_usp.RankGrid(axes))


if __name__ == "__main__":
    with ds_usp.one_line_errors():
        main()
