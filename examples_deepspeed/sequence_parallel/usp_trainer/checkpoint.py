"""Checkpoints: DeepSpeed's own files, and one of ours that is written last.

``SAVE/latest`` names the newest folder ``step_N``; its ``trainer.json`` lists every file with its
size, so that a copy that broke off is known by it. As many ranks load the files as they are, on any
split into Ulysses, ring and replicas; other numbers of ranks what DeepSpeed's ``ds_to_universal``
makes of them.
"""

from __future__ import annotations

import json
import os
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ds_usp import CheckpointError

LATEST, LATEST_UNIVERSAL, LIST = "latest", "latest_universal", "trainer.json"
# Flags without which the weights are another model's.
MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "use_rotary_position_embeddings", "rotary_base", "normalization"),
    "layernorm_epsilon",
    *("swiglu", "disable_bias_linear", "untie_embeddings_and_output_weights", "padded_vocab_size"),
)


class Progress(NamedTuple):
    """Where a run is: steps done, and samples that they have read."""

    step: int = 0
    samples: int = 0


def save(engine: Any, args: Namespace, progress: Progress) -> Path:
    """Write a checkpoint; its folder. Collective."""
    tag = f"step_{progress.step}"
    state = {
        **progress._asdict(),
        "model": {name: getattr(args, name) for name in MODEL},
        "ranks": dist.get_world_size(),
        "zero_stage": args.zero_stage,
        "optimizer": args.optimizer,
        "bf16": args.bf16,
    }
    root, folder = Path(args.save), Path(args.save, tag)
    if dist.get_rank() == 0:
        (folder / LIST).unlink(missing_ok=True)  # of the same step, saved before
    # ``latest`` moves when all ranks have written theirs; DeepSpeed moves it when rank 0 has.
    # What ds_to_universal asks of a client: that no parameter is split by tensor parallelism.
    client_state = {"trainer": state, "universal_checkpoint_info": {}}
    engine.save_checkpoint(args.save, tag, client_state=client_state, save_latest=False)
    if dist.get_rank() == 0:
        files = {path.name: path.stat().st_size for path in sorted(folder.glob("*.pt"))}
        _replace(folder / LIST, json.dumps({**state, "files": files}, indent=1))
        _replace(root / LATEST, tag)
    dist.barrier()
    return folder


def _replace(path: Path, text: str) -> None:
    """Write a file such that it is there whole or as it was."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    os.replace(written, path)


def load(engine: Any, args: Namespace) -> Progress:
    """Load the newest checkpoint of ``--load``; where its run was. Collective.

    The optimizer's settings stay those of the flags.

    Raises:
        CheckpointError: on every rank, before anything is loaded: there is none, it is of another
            model, ZeRO stage or number of ranks, or files are missing or cut off.
    """
    # Every rank has looked before the first one loads.
    problem, folder = "", Path(args.load)
    try:
        folder = _newest(args)
        problem = _problem(folder, args, [name for name, _ in engine.module.named_parameters()])
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # a damaged list may be any JSON, or none
        problem = f"{folder} cannot be read: {type(error).__name__}: {error}"
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise CheckpointError(found)
    groups = engine.optimizer.param_groups
    flags = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    _, client_state = engine.load_checkpoint(args.load, folder.name)
    for group, values in zip(engine.optimizer.param_groups, flags, strict=True):
        group.update(values)
    # DeepSpeed 0.19 gives all parts of a universal ZeRO-3 checkpoint one tensor of Adam's step,
    # which each part would then count up.
    for values in getattr(engine.optimizer, "optimizer", engine.optimizer).state.values():
        if isinstance(values.get("step"), Tensor):
            values["step"] = values["step"].clone()
    state = client_state["trainer"]
    return Progress(state["step"], state["samples"])


def _newest(args: Namespace) -> Path:
    latest = Path(args.load, LATEST_UNIVERSAL if args.universal_checkpoint else LATEST)
    if not latest.is_file():
        raise CheckpointError(
            f"--load {args.load}: there is no {latest.name}, which names the newest checkpoint. "
            "Leave --load out for the first run"
        )
    return Path(args.load, latest.read_text().strip())


def _problem(folder: Path, args: Namespace, parameters: list[str]) -> str:
    """What keeps this rank from loading a checkpoint, and what would do; empty: nothing does."""
    # A universal checkpoint lies beside the one that it was made of.
    source = folder.with_name(folder.name.removesuffix("_universal"))
    if not (source / LIST).is_file():
        return (
            f"{source} has no {LIST}, which is written last: it was not saved, or copied, to its "
            f"end. Copy it again, or write the name of an earlier folder into {args.load}/{LATEST}"
        )
    saved, ranks = json.loads((source / LIST).read_text()), dist.get_world_size()
    same = {name: getattr(args, name) for name in MODEL}
    here = {"zero_stage": args.zero_stage, "bf16": args.bf16, "optimizer": args.optimizer}
    others = [
        f"{name} {before.get(name)} in the checkpoint, {now} now"
        for flags, before in ((same, saved["model"]), (here, saved))
        for name, now in flags.items()
        if before.get(name) != now
    ]
    if others:
        return f"{folder} is of other flags: {'; '.join(others)}"
    if args.universal_checkpoint:
        names = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")
        files = [folder / "zero" / weight / name for weight in parameters for name in names]
        broken = [file for file in files if not file.is_file() or not zipfile.is_zipfile(file)]
        return f"{broken[0]} is missing or cut off: convert {source} again" if broken else ""
    for name, size in saved["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            return f"{folder / name} has {found} bytes, {size} were saved: copy it again"
    if saved["ranks"] != ranks and args.zero_stage > 0:
        if args.optimizer == "sgd":
            return f"{folder} is of {saved['ranks']} ranks, and here are {ranks}: start as many"
        return (
            f"{folder} is of {saved['ranks']} ranks, and here are {ranks}. Convert it, python -m "
            f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder "
            f"{folder}_universal, and add --universal-checkpoint"
        )
    return ""
