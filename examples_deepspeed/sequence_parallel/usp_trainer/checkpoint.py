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
from megatron.core.parallel_state import get_tensor_model_parallel_group

from ds_usp import CheckpointError
from usp_trainer import resplit
from usp_trainer.checksums import checksums, differing, text_checksum
from usp_trainer.files import LATEST, METADATA, UNFINISHED, checkpoint_to_load
from usp_trainer.launch import from_rank0
from usp_trainer.run_folder import saved_step

FORMAT = 2
WITHOUT_CHECKSUMS = 1  # an earlier format, read as it is

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
# What may change of it where whole parameters can be put together (usp_trainer.resplit).
RESPLIT = ("tensor_model_parallel_size", "sequence_x_data_ranks", "zero_stage")
_WRITERS = ("inline_container", "PytorchStreamWriter")  # of torch.save, in its errors
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
    unfinished = f"{UNFINISHED}{tag}"
    from_rank0(lambda: _remove_unfinished(folder))
    try:
        engine.save_checkpoint(str(folder), tag=unfinished, save_latest=False)
    except OSError as error:
        raise _not_written(folder, progress.step, str(error.strerror)) from error
    except RuntimeError as error:  # torch.save's own, which names no file; or another rank is gone
        if not any(name in str(error) for name in _WRITERS):
            raise
        why = "a file could not be written whole"
        raise _not_written(folder, progress.step, why) from error
    dist.barrier()
    made = folder / unfinished
    sizes = from_rank0(lambda: _sizes(made))
    metadata = _describe(args, progress) | {"files": sizes, "sha256": checksums(made, sizes)}
    return from_rank0(lambda: _publish(folder, unfinished, tag, metadata))


def _not_written(folder: Path, step: int, why: str) -> CheckpointError:
    """The same words on every rank that could not write, which are said once."""
    there = saved_step(folder)
    last = "There is no checkpoint yet"
    if there is not None:
        last = f"The checkpoint of step {there} is whole"
    return CheckpointError(
        f"step {step} could not be written to {folder}: {why}. About "
        f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB are free there: make room, or raise the "
        f"limit of file sizes (ulimit -f). {last}"
    )


def load(engine: Any, args: Namespace) -> Progress:
    """Load the latest checkpoint of ``--load`` into the engine.

    The split of a sequence into Ulysses and ring may differ from the run that saved it; so may the
    split of ``sequence x data`` ranks into the two, and without pipeline stages and ZeRO-3 also
    the tensor-parallel size, the number of ranks and the ZeRO stage.

    Raises:
        CheckpointError: on every rank; there is none, a file of it is missing, short or not as it
            was written, or it belongs to another model or is cut in another way.
    """
    tag, progress, metadata = from_rank0(lambda: _checked(args))
    _check_contents(Path(args.load) / tag, metadata)
    if _differences(metadata["cut"], _describe(args, progress)["cut"]):
        _load_resplit(engine, args, Path(args.load) / tag, metadata)
        return progress
    groups = engine.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    path, _ = engine.load_checkpoint(args.load, tag=tag)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {Path(args.load) / tag}")
    for group, asked in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(asked)  # the flags of this run count, not those of the run that saved
    return progress


def _load_resplit(engine: Any, args: Namespace, folder: Path, metadata: Mapping[str, Any]) -> None:
    saved = resplit.SavedParameters(
        folder, list(metadata["files"]), resplit.group_names(engine), gated=args.swiglu
    )
    group = get_tensor_model_parallel_group()
    resplit.load(engine, saved, dist.get_rank(group), dist.get_world_size(group))


def _check_cut(folder: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose parameters cannot be joined and cut anew."""
    wrong = _differences(saved, own)
    fixed = {name for name in own if saved.get(name) != own[name]} - set(RESPLIT)
    stages = max(saved["pipeline_model_parallel_size"], own["pipeline_model_parallel_size"])
    zero_3 = 3 in (saved["zero_stage"], own["zero_stage"])
    if wrong and (fixed or stages > 1 or zero_3):
        raise CheckpointError(
            f"the checkpoint {folder} is cut into files for other ranks: {'; '.join(wrong)}. Start "
            "with the settings that saved it: the tensor-parallel size, the number of ranks and "
            "the ZeRO stage may change alone, and only without pipeline stages and ZeRO-3, whose "
            "files do not hold whole parameters by name"
        )


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


def _remove_unfinished(folder: Path) -> None:
    """What runs left that were killed, or found the disk full, while they saved."""
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _sizes(made: Path) -> dict[str, int]:
    files = (path for path in sorted(made.rglob("*")) if path.is_file())
    return {str(path.relative_to(made)): path.stat().st_size for path in files}


def _publish(folder: Path, unfinished: str, tag: str, metadata: dict[str, Any]) -> str:
    made, latest = folder / unfinished, folder / LATEST
    metadata |= {"checksum": text_checksum(_canonical(metadata))}
    (made / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
    # A step that was saved before keeps its folder until the new one is published.
    again = f"{tag}_again"
    taken = latest.is_file() and latest.read_text(errors="replace").strip() == tag
    tag, other = (again, tag) if taken else (tag, again)
    shutil.rmtree(folder / tag, ignore_errors=True)
    made.rename(folder / tag)
    (folder / f"{LATEST}_new").write_text(tag + "\n")
    os.replace(folder / f"{LATEST}_new", latest)
    shutil.rmtree(folder / other, ignore_errors=True)
    return str(folder / tag)


def _canonical(metadata: Mapping[str, Any]) -> str:
    return json.dumps({name: metadata[name] for name in sorted(metadata) if name != "checksum"})


def _check_contents(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Compare every file with its checksum, before DeepSpeed reads any of them. Collective."""
    if metadata["format"] == WITHOUT_CHECKSUMS:
        return
    found = checksums(folder, metadata["files"])
    wrong = differing(metadata["sha256"], found)
    if wrong:
        raise CheckpointError(
            f"{', '.join(str(folder / name) for name in wrong)}: not the bytes that were saved "
            f"(the sha256 is {found[wrong[0]][:16]}..., saved was "
            f"{metadata['sha256'][wrong[0]][:16]}...). Copy it again from where it is whole, or "
            f"write the name of an earlier checkpoint into {folder.parent / LATEST}"
        )


def _checked(args: Namespace) -> tuple[str, Progress, dict[str, Any]]:
    folder = Path(args.load)
    tag, metadata = checkpoint_to_load(folder)
    _check_format(folder / tag, metadata)
    own = _describe(args, Progress())
    wrong = _differences(metadata["model"], own["model"])
    if wrong:
        fix = ""
        if len(wrong) == 1 and wrong[0].startswith("padded_vocab_size"):
            fix = ". Give a --make-vocab-size-divisible-by that both tensor-parallel sizes divide"
        raise CheckpointError(
            f"the checkpoint {folder / tag} is of another model: {'; '.join(wrong)}{fix}"
        )
    _check_cut(folder / tag, metadata["cut"], own["cut"])
    changed = _differences(metadata["data"], own["data"])
    if changed and not args.quiet:
        print(f"the data goes on in another order: {'; '.join(changed)}")
    for name, size in metadata["files"].items():
        path = folder / tag / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes, it was saved with {size}")
    return tag, Progress(**metadata["progress"]), metadata


def _check_format(folder: Path, metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("format")
    if kind == WITHOUT_CHECKSUMS and "checksum" not in metadata:
        print(f"{folder} was saved without checksums; only the sizes of its files are checked")
    elif kind not in (WITHOUT_CHECKSUMS, FORMAT):
        raise CheckpointError(
            f"{folder} has format {kind}, this trainer reads {WITHOUT_CHECKSUMS} and {FORMAT}"
        )
    elif metadata.get("checksum") != text_checksum(_canonical(metadata)):
        raise CheckpointError(f"{folder / METADATA} is not as it was saved")


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in own.items()
        if saved.get(name) != value
    ]
