"""Checkpoints: DeepSpeed's files, renamed into place when complete and verified before loading."""

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
from usp_trainer import reshard
from usp_trainer.checksums import checksums, mismatching_files, text_checksum
from usp_trainer.input_files import LATEST, METADATA, UNFINISHED, checkpoint_to_load
from usp_trainer.launch import broadcast_from_rank0
from usp_trainer.run_folder import saved_step
from usp_trainer.transformer_impl import LOCAL

FORMAT = 2
WITHOUT_CHECKSUMS = 1  # an earlier format that can still be loaded

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
    "transformer_impl",  # names of weights
)
# What the layout of DeepSpeed's files depends on; the Ulysses and ring degrees do not matter.
PARALLEL_CONFIG = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_x_data_ranks",
    "zero_stage",
    "bf16",
    "optimizer",
)
# What of it may differ when loading, where parameters can be resharded (usp_trainer.reshard).
RESHARDABLE = ("tensor_model_parallel_size", "sequence_x_data_ranks", "zero_stage")
_WRITERS = ("inline_container", "PytorchStreamWriter")  # names in errors of torch.save
# What the order of samples depends on; it may differ, for example to train on longer sequences.
DATA = ("seed", "seq_length", "split", "data_path")


@dataclass(frozen=True)
class Progress:
    """Optimizer steps and samples that a run has trained on."""

    step: int = 0
    samples: int = 0


def save(engine: Any, args: Namespace, progress: Progress) -> str:
    """Write a checkpoint under a temporary name and rename it after every rank has finished.

    ``latest`` names the previous checkpoint until the last rename, so a run that is killed at any
    moment leaves a complete one.
    """
    folder, tag = Path(args.save), f"step_{progress.step}"
    unfinished = f"{UNFINISHED}{tag}"
    broadcast_from_rank0(lambda: _remove_leftovers(folder))
    try:
        engine.save_checkpoint(str(folder), tag=unfinished, save_latest=False)
    except OSError as error:
        raise _not_written(folder, progress.step, str(error.strerror)) from error
    except RuntimeError as error:  # of torch.save, which names no file; or of a lost rank
        if not any(name in str(error) for name in _WRITERS):
            raise
        why = "a file could not be written completely"
        raise _not_written(folder, progress.step, why) from error
    dist.barrier()
    written = folder / unfinished
    sizes = broadcast_from_rank0(lambda: _sizes(written))
    metadata = _metadata_of(args, progress) | {"files": sizes, "sha256": checksums(written, sizes)}
    return broadcast_from_rank0(lambda: _mark_latest(folder, unfinished, tag, metadata))


def _not_written(folder: Path, step: int, why: str) -> CheckpointError:
    """The error of a rank that could not write: the same text on each, so it is reported once."""
    saved = saved_step(folder)
    last = "There is no checkpoint yet"
    if saved is not None:
        last = f"The checkpoint of step {saved} is complete"
    return CheckpointError(
        f"step {step} could not be written to {folder}: {why}. About "
        f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB are free: free space, or raise the "
        f"limit of file sizes (ulimit -f). {last}"
    )


def load(engine: Any, args: Namespace) -> Progress:
    """Load the latest checkpoint of ``--load`` into the engine.

    The Ulysses and ring degrees may differ from the run that saved it; so may the sequence- and
    data-parallel sizes if their product stays, and without pipeline stages and ZeRO-3 also the
    tensor-parallel size, the number of ranks and the ZeRO stage.

    Raises:
        CheckpointError: on every rank; there is none, a file of it is missing, truncated or
            changed, it is of another model, or it cannot be resharded to this parallel config.
    """
    tag, progress, metadata = broadcast_from_rank0(lambda: _validate_checkpoint(args))
    _check_contents(Path(args.load) / tag, metadata)
    if _differences(metadata["cut"], _metadata_of(args, progress)["cut"]):
        _load_resharded(engine, args, Path(args.load) / tag, metadata)
        return progress
    groups = engine.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    path, _ = engine.load_checkpoint(args.load, tag=tag)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {Path(args.load) / tag}")
    for group, current_settings in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(current_settings)  # the flags of this run override those that were saved
    return progress


def _load_resharded(
    engine: Any, args: Namespace, folder: Path, metadata: Mapping[str, Any]
) -> None:
    """Load weights and optimizer states that were saved under another parallel config.

    The tensor-parallel size, the number of ranks or the ZeRO stage differ. Only ZeRO-0 to 2 without
    pipeline stages are possible: ``_check_parallel_config`` has refused the rest.
    ``folder``: of the step that is loaded; ``metadata``: its metadata file."""
    saved = reshard.SavedParameters(
        folder, list(metadata["files"]), reshard.group_names(engine), gated=args.swiglu
    )
    group = get_tensor_model_parallel_group()
    reshard.load(engine, saved, dist.get_rank(group), dist.get_world_size(group))


def _check_parallel_config(
    folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of another parallel config that cannot be resharded."""
    mismatches = _differences(saved, current)
    fixed = {name for name in current if saved.get(name) != current[name]} - set(RESHARDABLE)
    stages = max(saved["pipeline_model_parallel_size"], current["pipeline_model_parallel_size"])
    zero_3 = 3 in (saved["zero_stage"], current["zero_stage"])
    if mismatches and (fixed or stages > 1 or zero_3):
        raise CheckpointError(
            f"the checkpoint {folder} was saved under another parallel config: "
            f"{'; '.join(mismatches)}. Start with the settings that saved it: only the "
            "tensor-parallel size, the number of ranks and the ZeRO stage may change, and only "
            "without pipeline stages and ZeRO-3, whose files do not hold full parameters by name"
        )


def _metadata_of(args: Namespace, progress: Progress) -> dict[str, Any]:
    """Metadata to save: format, progress, and the flags of model, parallel config and data order.

    ``sequence_x_data_ranks`` is None (any number may load) for ZeRO-0 without pipeline
    stages."""
    settings = vars(args) | {"sequence_x_data_ranks": None}
    if args.zero_stage or args.pipeline_model_parallel_size > 1:
        settings["sequence_x_data_ranks"] = args.ds_sequence_parallel_size * args.data_parallel_size
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "model": {name: settings[name] for name in MODEL},
        "cut": {name: settings[name] for name in PARALLEL_CONFIG},
        "data": {name: settings[name] for name in DATA},
    }


def _remove_leftovers(folder: Path) -> None:
    """Delete unfinished checkpoints of runs that were killed or ran out of disk while saving."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sizes(written: Path) -> dict[str, int]:
    paths = (path for path in sorted(written.rglob("*")) if path.is_file())
    return {str(path.relative_to(written)): path.stat().st_size for path in paths}


def _mark_latest(folder: Path, unfinished: str, tag: str, metadata: dict[str, Any]) -> str:
    """Write the metadata, rename the unfinished folder to the step's, and let ``latest`` name it.

    Return the step's folder."""
    written, latest = folder / unfinished, folder / LATEST
    metadata |= {"checksum": text_checksum(_canonical(metadata))}
    (written / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
    # A step that was saved before keeps its folder until ``latest`` names the new one.
    second_name = f"{tag}_again"
    is_latest = latest.is_file() and latest.read_text(errors="replace").strip() == tag
    tag, previous = (second_name, tag) if is_latest else (tag, second_name)
    shutil.rmtree(folder / tag, ignore_errors=True)
    written.rename(folder / tag)
    (folder / f"{LATEST}_new").write_text(tag + "\n")
    os.replace(folder / f"{LATEST}_new", latest)
    shutil.rmtree(folder / previous, ignore_errors=True)
    return str(folder / tag)


def _canonical(metadata: Mapping[str, Any]) -> str:
    return json.dumps({name: metadata[name] for name in sorted(metadata) if name != "checksum"})


def _check_contents(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Verify the checksum of every file before DeepSpeed reads any of them. Collective."""
    if metadata["format"] == WITHOUT_CHECKSUMS:
        return
    digests = checksums(folder, metadata["files"])
    mismatches = mismatching_files(metadata["sha256"], digests)
    if mismatches:
        raise CheckpointError(
            f"{', '.join(str(folder / name) for name in mismatches)}: the content is not what was "
            f"saved (sha256 {digests[mismatches[0]][:16]}..., saved "
            f"{metadata['sha256'][mismatches[0]][:16]}...). Copy it again from an intact copy, or "
            f"write the name of an earlier checkpoint into {folder.parent / LATEST}"
        )


def _validate_checkpoint(args: Namespace) -> tuple[str, Progress, dict[str, Any]]:
    """Check a checkpoint's metadata and file sizes against this run, before any rank loads it.

    Returns:
        The tag (name of its subfolder), the progress to continue from, and the metadata.

    Raises:
        CheckpointError: another format, model, parallel configuration or size of a file.
    """
    folder = Path(args.load)
    tag, metadata = checkpoint_to_load(folder)
    _check_format(folder / tag, metadata)
    current = _metadata_of(args, Progress())
    saved = {"transformer_impl": LOCAL, **metadata["model"]}  # the only one of earlier checkpoints
    mismatches = _differences(saved, current["model"])
    if mismatches:
        fix = ""
        if len(mismatches) == 1 and mismatches[0].startswith("padded_vocab_size"):
            fix = ". Give a --make-vocab-size-divisible-by that both tensor-parallel sizes divide"
        elif len(mismatches) == 1 and mismatches[0].startswith("transformer_impl"):
            fix = f". Give --transformer-impl {saved['transformer_impl']}"
        raise CheckpointError(
            f"the checkpoint {folder / tag} is of another model: {'; '.join(mismatches)}{fix}"
        )
    _check_parallel_config(folder / tag, metadata["cut"], current["cut"])
    changed = _differences(metadata["data"], current["data"])
    if changed and not args.quiet:
        print(f"the order of the data changes: {'; '.join(changed)}")
    for name, size in metadata["files"].items():
        path = folder / tag / name
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != size:
            raise CheckpointError(f"{path} has {found_bytes} bytes, {size} were saved")
    return tag, Progress(**metadata["progress"]), metadata


def _check_format(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Check the metadata's format version and its checksum; print that an old format has none.

    Raises:
        CheckpointError: an unknown format, or metadata that does not match its checksum.
    """
    version = metadata.get("format")
    if version == WITHOUT_CHECKSUMS and "checksum" not in metadata:
        print(f"{folder} was saved without checksums; only the sizes of its files are checked")
    elif version not in (WITHOUT_CHECKSUMS, FORMAT):
        raise CheckpointError(
            f"{folder} has format {version}, this trainer reads {WITHOUT_CHECKSUMS} and {FORMAT}"
        )
    elif metadata.get("checksum") != text_checksum(_canonical(metadata)):
        raise CheckpointError(f"{folder / METADATA} was changed since it was saved")


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A text with both values for each entry that differs from the checkpoint's."""
    return [
        f"{name} {saved.get(name)} in the checkpoint, {value} now"
        for name, value in current.items()
        if saved.get(name) != value
    ]
