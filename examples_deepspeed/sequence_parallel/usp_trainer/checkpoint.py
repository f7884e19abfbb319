"""Saving and resuming: DeepSpeed's files, published whole or not at all, and checked first."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_usp import CheckpointError
from usp_trainer.files import LATEST
from usp_trainer.launch import from_rank0

METADATA = "usp_metadata.json"
FORMAT = 1

MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "padded_vocab_size",
    "max_position_embeddings",
    "use_rotary_position_embeddings",
    "rotary_base",
    "normalization",
    "layernorm_epsilon",
    "swiglu",
    "disable_bias_linear",
    "untie_embeddings_and_output_weights",
)
# What DeepSpeed's files are cut by; the split of a sequence into Ulysses and ring is not.
CUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_x_data_ranks",
    "zero_stage",
    "bf16",
    "optimizer",
)
# What the order of the data follows from; it may change, as to go on with longer sequences.
DATA = ("seed", "seq_length", "split", "data_path")


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    samples: int = 0


def save(engine: Any, args: Namespace, progress: Progress) -> str:
    """Write a checkpoint under another name and publish it when every rank has finished.

    Until the last rename ``latest`` names the previous checkpoint, so a run that is killed at any
    moment leaves one that is whole.
    """
    folder, tag = Path(args.save), f"step_{progress.step}"
    unfinished = f"unfinished_{tag}"
    from_rank0(lambda: shutil.rmtree(folder / unfinished, ignore_errors=True))
    engine.save_checkpoint(str(folder), tag=unfinished, save_latest=False)
    dist.barrier()
    return from_rank0(lambda: _publish(folder, unfinished, tag, _describe(args, progress)))


def load(engine: Any, args: Namespace) -> Progress:
    """Load the latest checkpoint of ``--load`` into the engine.

    The split of a sequence into Ulysses and ring may differ from the run that saved it; so may the
    split of ``sequence x data`` ranks into the two.

    Raises:
        CheckpointError: on every rank; there is none, a file of it is missing or short, or it
            belongs to another model or is cut in another way.
    """
    tag, progress = from_rank0(lambda: _checked(args))
    groups = engine.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    path, _ = engine.load_checkpoint(args.load, tag=tag)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {Path(args.load) / tag}")
    for group, asked in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(asked)  # the flags of this run count, not those of the run that saved
    return progress


def _describe(args: Namespace, progress: Progress) -> dict[str, Any]:
    facts = vars(args) | {"sequence_x_data_ranks": None}
    if args.zero_stage or args.pipeline_model_parallel_size > 1:
        facts["sequence_x_data_ranks"] = args.ds_sequence_parallel_size * args.data_parallel_size
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "model": {name: facts[name] for name in MODEL},
        "cut": {name: facts[name] for name in CUT},
        "data": {name: facts[name] for name in DATA},
    }


def _publish(folder: Path, unfinished: str, tag: str, metadata: dict[str, Any]) -> str:
    made, latest = folder / unfinished, folder / LATEST
    metadata["files"] = {
        str(path.relative_to(made)): path.stat().st_size
        for path in sorted(made.rglob("*"))
        if path.is_file()
    }
    (made / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
    # A step that was saved before keeps its folder until the new one is published.
    again = f"{tag}_again"
    taken = latest.is_file() and latest.read_text().strip() == tag
    tag, other = (again, tag) if taken else (tag, again)
    shutil.rmtree(folder / tag, ignore_errors=True)
    made.rename(folder / tag)
    (folder / f"{LATEST}_new").write_text(tag + "\n")
    os.replace(folder / f"{LATEST}_new", latest)
    shutil.rmtree(folder / other, ignore_errors=True)
    return str(folder / tag)


def _checked(args: Namespace) -> tuple[str, Progress]:
    folder = Path(args.load)
    try:
        tag = (folder / LATEST).read_text().strip()
        metadata = json.loads((folder / tag / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"--load {folder} holds no finished checkpoint of this trainer ({error}). Leave --load "
            "out for the first run"
        ) from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / tag} has format {metadata.get('format')}, this trainer reads {FORMAT}"
        )
    own = _describe(args, Progress())
    for kind, reason in (
        ("model", "is of another model"),
        ("cut", "is cut into files for other ranks; start with the degrees that saved it"),
    ):
        wrong = _differences(metadata[kind], own[kind])
        if wrong:
            raise CheckpointError(f"the checkpoint {folder / tag} {reason}: {'; '.join(wrong)}")
    changed = _differences(metadata["data"], own["data"])
    if changed and not args.quiet:
        print(f"the data goes on in another order: {'; '.join(changed)}")
    for name, size in metadata["files"].items():
        path = folder / tag / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes, it was saved with {size}")
    return tag, Progress(**metadata["progress"])


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in own.items()
        if saved.get(name) != value
    ]
