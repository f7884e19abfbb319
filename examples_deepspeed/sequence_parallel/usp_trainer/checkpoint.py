"""Checkpoints: DeepSpeed's files, renamed into place when complete, verified by SHA-256 before they
are loaded, and resharded to another parallel config parameter by parameter.

Resharding reads the files that DeepSpeed's ZeRO-0 to 2 write for each tensor-parallel rank, joins
the shards of each parameter, and takes this rank's shard. DeepSpeed's universal checkpoints need a
converted copy of the checkpoint first and support no optimizer but Adam.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor, nn

from ds_usp import CheckpointError
from usp_trainer.launch import broadcast_from_rank0
from usp_trainer.run_files import (
    LATEST,
    METADATA,
    UNFINISHED,
    checkpoint_to_load,
    replace_file,
    saved_step,
)
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
# What of it may differ when loading, where parameters can be resharded (``_load_resharded``).
RESHARDABLE = ("tensor_model_parallel_size", "sequence_x_data_ranks", "zero_stage")
_WRITERS = ("inline_container", "PytorchStreamWriter")  # names in errors of torch.save
# What the order of samples depends on; it may differ, for example to train on longer sequences.
DATA = ("seed", "seq_length", "split", "data_path")
_BLOCK_BYTES = 1 << 22  # of a file, read at once
MASTER = "fp32"  # key of the fp32 master weights, beside the keys of the optimizer's states
_OPTIMIZER_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class Progress:
    """Optimizer steps and samples that a run has trained on."""

    step: int = 0
    samples: int = 0


def save(engine: Any, args: Namespace, progress: Progress) -> str:
    """Write a checkpoint under a temporary name and rename it after every rank has finished."""
    # `latest` names the previous checkpoint until the last rename, so a run that is killed at any
    # moment leaves a complete one.
    folder, tag = Path(args.save), f"step_{progress.step}"
    unfinished = f"{UNFINISHED}{tag}"

    def remove_leftovers() -> None:  # of runs that were killed or ran out of disk while saving
        for leftover in folder.glob(f"{UNFINISHED}*"):
            _remove(leftover)

    broadcast_from_rank0(remove_leftovers)
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

    def sizes_of_files() -> dict[str, int]:
        paths = (path for path in sorted(written.rglob("*")) if path.is_file())
        return {str(path.relative_to(written)): path.stat().st_size for path in paths}

    sizes = broadcast_from_rank0(sizes_of_files)
    metadata = _metadata_of(args, progress) | {"files": sizes, "sha256": _checksums(written, sizes)}
    return broadcast_from_rank0(lambda: _mark_latest(folder, unfinished, tag, metadata))


def _remove(path: Path) -> None:
    """Remove a folder; of a symbolic link the link alone, through which files would be written."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _not_written(folder: Path, step: int, why: str) -> CheckpointError:
    # The same text on each rank, so it is reported once.
    saved = saved_step(folder)
    complete = f"The checkpoint of step {saved} is complete"
    last = "There is no checkpoint yet" if saved is None else complete
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
        names = [[name for name, _ in group] for group in _groups(engine)]
        saved = SavedParameters(Path(args.load) / tag, metadata["files"], names, gated=args.swiglu)
        _load_resharded(engine, saved)
        return progress
    groups = engine.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    files = engine.checkpoint_engine  # DeepSpeed's own load runs what a file names
    engine.checkpoint_engine = copy.copy(files)
    engine.checkpoint_engine.load = _read_file
    try:
        path, _ = engine.load_checkpoint(args.load, tag=tag)
    finally:
        engine.checkpoint_engine = files
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {Path(args.load) / tag}")
    for group, current_settings in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(current_settings)  # the flags of this run override those that were saved
    return progress


def _read_file(path: str | Path, map_location: Any = None, *, mmap: bool = False) -> Any:
    """The content of one file of a checkpoint.

    Raises:
        CheckpointError: it holds what no trainer has saved, such as a call; none is made.
    """
    # Checksums lie beside the files: they show damage, and nothing of who wrote them.
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:  # tensors, numbers and texts beside these
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except (UnpicklingError, RuntimeError, ValueError, LookupError, TypeError, EOFError) as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds {named[1]}, which" if named else "cannot be read as tensors and numbers:"
        raise CheckpointError(
            f"{path} {what} is nothing that this trainer saves. It is not run, and nothing is "
            "loaded: copy the checkpoint again from where it was written"
        ) from error


def _check_parallel_config(
    folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
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
    """Metadata to save: format, progress, flags of model, parallel config and data order."""
    # Any number of ranks may load what ZeRO-0 without pipeline stages has saved.
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


def _mark_latest(folder: Path, unfinished: str, tag: str, metadata: dict[str, Any]) -> str:
    """Write the metadata, rename the unfinished folder to the step's, which is returned, and let
    ``latest`` name it."""
    written, latest = folder / unfinished, folder / LATEST
    metadata |= {"checksum": _metadata_checksum(metadata)}
    replace_file(written / METADATA, json.dumps(metadata, indent=1) + "\n")
    # A step that was saved before keeps its folder until ``latest`` names the new one.
    second_name = f"{tag}_again"
    is_latest = latest.is_file() and latest.read_text(errors="replace").strip() == tag
    tag, previous = (second_name, tag) if is_latest else (tag, second_name)
    _remove(folder / tag)
    written.rename(folder / tag)
    replace_file(latest, tag + "\n")
    _remove(folder / previous)
    return str(folder / tag)


def _metadata_checksum(metadata: Mapping[str, Any]) -> str:
    facts = {name: metadata[name] for name in sorted(metadata) if name != "checksum"}
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_contents(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse files that are not what was saved. Collective: each rank reads some of the files."""
    if metadata["format"] != WITHOUT_CHECKSUMS:
        _compare_checksums(folder, metadata)
    # Before any is loaded: a rank that refuses its own leaves the others waiting for it.
    problem = None
    try:
        for name in sorted(metadata["files"])[dist.get_rank() :: dist.get_world_size()]:
            if name.endswith(".pt"):
                _read_file(folder / name, "cpu", mmap=True)
    except CheckpointError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise CheckpointError(found)


def _compare_checksums(folder: Path, metadata: Mapping[str, Any]) -> None:
    saved, digests = metadata["sha256"], _checksums(folder, metadata["files"])
    mismatches = sorted(name for name in saved if digests.get(name) != saved[name])
    if mismatches:
        raise CheckpointError(
            f"{', '.join(str(folder / name) for name in mismatches)}: the content is not what was "
            f"saved (sha256 {digests[mismatches[0]][:16]}..., saved "
            f"{saved[mismatches[0]][:16]}...). Copy it again from an intact copy, or "
            f"write the name of an earlier checkpoint into {folder.parent / LATEST}"
        )


def _validate_checkpoint(args: Namespace) -> tuple[str, Progress, dict[str, Any]]:
    """Check a checkpoint's metadata and file sizes against this run, before any rank loads it.

    Returns:
        The tag (name of its subfolder), the progress to continue from, and the metadata.
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
    version = metadata.get("format")
    if version == WITHOUT_CHECKSUMS and "checksum" not in metadata:
        print(f"{folder} was saved without checksums; only the sizes of its files are checked")
    elif version not in (WITHOUT_CHECKSUMS, FORMAT):
        raise CheckpointError(
            f"{folder} has format {version}, this trainer reads {WITHOUT_CHECKSUMS} and {FORMAT}"
        )
    elif metadata.get("checksum") != _metadata_checksum(metadata):
        raise CheckpointError(f"{folder / METADATA} was changed since it was saved")
    parts = ["model", "cut", "data", "files"] + (["sha256"] if version == FORMAT else [])
    wrong = [part for part in parts if not isinstance(metadata.get(part), dict)]
    wrong += sorted({*PARALLEL_CONFIG} - {*metadata["cut"]}) if not wrong else []
    if wrong:
        raise CheckpointError(f"{folder / METADATA} has no {', '.join(wrong)}: copy it again")


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {saved.get(name)} in the checkpoint, {value} now"
        for name, value in current.items()
        if saved.get(name) != value
    ]


def _checksums(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """The SHA-256 of each file, on every rank. Collective: each rank reads some of the files.

    Args:
        sizes: bytes of each file, by its path in ``folder``; the same on every rank.
    """
    ranks = dist.get_world_size()
    files_of_rank: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # to the least loaded rank
        rank = loads.index(min(loads))
        files_of_rank[rank].append(name)
        loads[rank] += sizes[name]
    digests: dict[str, str] = {}
    unreadable = None
    try:
        for name in files_of_rank[dist.get_rank()]:
            digest = hashlib.sha256()
            with (folder / name).open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            digests[name] = digest.hexdigest()
    except OSError as error:
        unreadable = f"rank {dist.get_rank()} cannot read {folder / name}: {error.strerror}"
    all_ranks: list[tuple[dict[str, str], str | None]] = [({}, None)] * ranks
    dist.all_gather_object(all_ranks, (digests, unreadable))
    for rank_digests, problem in all_ranks:
        if problem:
            raise CheckpointError(f"{problem}. All ranks must see the folder")
        digests |= rank_digests
    return digests


class SavedParameters:
    """The weights and optimizer states in the files of one checkpoint, by parameter name.

    Args:
        files: the names of the files in ``folder``.
        names: the parameters of each group of the optimizer, in its order.
        gated: ``linear_fc1`` of an MLP holds two matrices, gates and values, along dim 0.

    Attributes:
        state_keys: names of the optimizer states of each parameter.
        scalars: states that are no tensors of a parameter's size, such as Adam's step.
    """

    def __init__(
        self, folder: Path, files: Iterable[str], names: list[list[str]], *, gated: bool
    ) -> None:
        def open_file(name: str) -> Any:
            return _read_file(folder / name, "cpu", mmap=True)

        self._gated = gated
        models = sorted(name for name in files if name.endswith("_model_states.pt"))
        self._models = [open_file(name) for name in models]
        # Of each tensor-parallel rank: flat pieces of a parameter's weights or states, in order.
        self._fragments: list[dict[tuple[str, str], list[Tensor]]] = [{} for _ in models]
        self.scalars: dict[str, Any] = {}
        partitions = sorted(
            (int(match[3]), int(match[2]), match[0])
            for match in map(_OPTIMIZER_FILE.fullmatch, files)
            if match
        )
        for rank, _, name in partitions:  # of ZeRO-1 and 2
            state = open_file(name)["optimizer_state_dict"]
            masters = state["single_partition_of_fp32_groups"]
            slices = state["param_slice_mappings"]
            for number, (master, fragments) in enumerate(zip(masters, slices, strict=True)):
                flat = self._tensors(state["base_optimizer_state"]["state"].get(number, {}))
                for name_of_fragment, span in fragments.items():
                    for key, values in {MASTER: master, **flat}.items():
                        pieces = self._fragments[rank].setdefault((name_of_fragment, key), [])
                        pieces.append(values.narrow(0, span.start, span.numel))
        for rank, model in enumerate([] if partitions else self._models):  # of ZeRO-0
            for number, name in enumerate(name for group in names for name in group):
                states = self._tensors(model["optimizer"]["state"].get(number, {}))
                for key, values in {MASTER: model["module"][name], **states}.items():
                    self._fragments[rank][name, key] = [values.flatten()]
        self.state_keys = sorted({key for _, key in self._fragments[0]} - {MASTER})

    def _tensors(self, states: Mapping[str, Any]) -> dict[str, Tensor]:
        """The states that are tensors with dims; the others become ``scalars``."""
        tensors = {k: v for k, v in states.items() if isinstance(v, Tensor) and v.ndim}
        self.scalars |= {key: value for key, value in states.items() if key not in tensors}
        return tensors

    def shard(self, name: str, key: str, parameter: nn.Parameter, rank: int, size: int) -> Tensor:
        """One tensor-parallel rank's shard of a parameter's weights or states.

        Args:
            parameter: the local one, for its shape and partition dimension.

        Raises:
            CheckpointError: the saved shape does not fit the parameter.
        """
        shards = [
            torch.cat(fragments[name, key]).reshape(model["module"][name].shape)
            for fragments, model in zip(self._fragments, self._models, strict=True)
        ]
        full = shard = shards[0]
        if getattr(parameter, "tensor_model_parallel", False):
            dim = getattr(parameter, "partition_dim", 0)
            matrices = 2 if self._gated and ".linear_fc1." in name else 1
            # A shard has its rows of each matrix.
            by_matrix = zip(*(shard.chunk(matrices, dim) for shard in shards), strict=True)
            whole = [torch.cat(shards_of_matrix, dim) for shards_of_matrix in by_matrix]
            full = torch.cat(whole, dim)
            shard = torch.cat([matrix.chunk(size, dim)[rank] for matrix in whole], dim)
        if shard.shape != parameter.shape:
            raise CheckpointError(
                f"{name} was saved with shape {tuple(full.shape)}; its shard for tensor-parallel "
                f"rank {rank} of {size} would be {tuple(shard.shape)}, not {tuple(parameter.shape)}"
            )
        return shard


def _load_resharded(engine: Any, saved: SavedParameters) -> None:
    group = get_tensor_model_parallel_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    partitioned = base is not engine.optimizer
    with torch.no_grad():
        for group, members in zip(base.param_groups, _groups(engine), strict=True):
            for target in group["params"]:
                states = {key: torch.zeros_like(target) for key in saved.state_keys}
                base.state[target] = copy.deepcopy(saved.scalars) | states
            for number, (name, parameter) in enumerate(members):
                target = group["params"][0 if partitioned else number]
                for key in (MASTER, *saved.state_keys):
                    shard = saved.shard(name, key, parameter, rank, size)
                    if key == MASTER:
                        parameter.copy_(shard)
                    values = target if key == MASTER else base.state[target][key]
                    if not partitioned:
                        values.copy_(shard)
                    elif (mapping := parameter._hp_mapping) is not None:  # else no element is here
                        source, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                        piece = shard.flatten().narrow(0, source.start, source.numel)
                        values.narrow(0, place.start, place.numel).copy_(piece)


def _groups(engine: Any) -> list[list[tuple[str, Any]]]:
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    groups = [group["params"] for group in optimizer.param_groups]
    for attribute in ("bf16_groups", "bit16_groups"):  # of DeepSpeed's optimizers: not flattened
        groups = getattr(optimizer, attribute, groups)
    return [[(names[parameter], parameter) for parameter in group] for group in groups]
