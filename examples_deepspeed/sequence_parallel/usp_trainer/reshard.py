"""Resharding: loads a checkpoint under another parallel config, parameter by parameter.

Reads the files that DeepSpeed's ZeRO-0 to 2 write for each tensor-parallel rank, joins the shards
of each parameter, and takes this rank's shard. DeepSpeed's universal checkpoints need a converted
copy of the checkpoint first and support no optimizer but Adam.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_usp import CheckpointError

MASTER = "fp32"  # key of the fp32 master weights, beside the keys of the optimizer's states
_OPTIMIZER_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class SavedParameters:
    """The weights and optimizer states in the files of one checkpoint, by parameter name.

    Args:
        folder: of the checkpoint.
        files: the names of its files.
        names: the parameters of each group of the optimizer, in its order.
        gated: ``linear_fc1`` of an MLP holds two matrices, gates and values, along dim 0.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        names: list[list[str]],
        *,
        gated: bool,
    ) -> None:
        self._gated = gated
        optimizer_files = sorted(
            (int(match[3]), int(match[2]), match[0])
            for match in map(_OPTIMIZER_FILE.fullmatch, files)
            if match
        )
        models = sorted(name for name in files if name.endswith("_model_states.pt"))
        self._models = [_open(folder / name) for name in models]
        self._fragments: list[dict[tuple[str, str], list[Tensor]]] = [{} for _ in models]
        self.scalars: dict[str, Any] = {}
        if not optimizer_files:
            for rank, model in enumerate(self._models):
                self._add_states(rank, model["optimizer"]["state"], names)
        for rank, _, name in optimizer_files:
            self._add_partition(rank, _open(folder / name)["optimizer_state_dict"])

    def _add_states(
        self, rank: int, states: Mapping[int, Mapping[str, Any]], names: list[list[str]]
    ) -> None:
        """Add ZeRO-0's optimizer states, one for each parameter, by its number."""
        for number, name in enumerate(name for group in names for name in group):
            self._fragments[rank][name, MASTER] = [self._models[rank]["module"][name].flatten()]
            for key, value in states.get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    self._fragments[rank][name, key] = [value.flatten()]
                else:
                    self.scalars[key] = value

    def _add_partition(self, rank: int, partition: Mapping[str, Any]) -> None:
        """Add the fragments of parameters and optimizer states that one rank's ZeRO-1 or 2 file
        holds."""
        states = partition["base_optimizer_state"]["state"]
        groups = zip(
            partition["single_partition_of_fp32_groups"],
            partition["param_slice_mappings"],
            strict=True,
        )
        for number, (master, fragments) in enumerate(groups):
            flat = {MASTER: master}
            for key, value in states.get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    flat[key] = value
                else:
                    self.scalars[key] = value
            for name, span in fragments.items():
                for key, values in flat.items():
                    fragment = values.narrow(0, span.start, span.numel)
                    self._fragments[rank].setdefault((name, key), []).append(fragment)

    @property
    def state_keys(self) -> list[str]:
        """The names of the optimizer states saved for each parameter."""
        return sorted({key for _, key in self._fragments[0]} - {MASTER})

    def shard(self, name: str, key: str, parameter: nn.Parameter, rank: int, size: int) -> Tensor:
        """One tensor-parallel rank's shard of a parameter's weights or states.

        Args:
            parameter: the local one, for its shape and partition dimension.
            rank, size: in and of the tensor-parallel group.

        Raises:
            CheckpointError: the saved shape does not fit the parameter.
        """
        shards = [
            torch.cat(fragments[name, key]).reshape(model["module"][name].shape)
            for fragments, model in zip(self._fragments, self._models, strict=True)
        ]
        split = getattr(parameter, "tensor_model_parallel", False)
        dim = getattr(parameter, "partition_dim", 0)
        matrices = 2 if self._gated and ".linear_fc1." in name else 1
        full = join_shards(shards, dim, matrices) if split else shards[0]
        shard = shard_of_rank(full, dim, matrices, rank, size) if split else full
        if shard.shape != parameter.shape:
            raise CheckpointError(
                f"{name} was saved with shape {tuple(full.shape)}; its shard for tensor-parallel "
                f"rank {rank} of {size} would be {tuple(shard.shape)}, not {tuple(parameter.shape)}"
            )
        return shard


def join_shards(shards: list[Tensor], dim: int, matrices: int) -> Tensor:
    """The full parameter from the shards of all tensor-parallel ranks.

    Args:
        matrices: how many matrices each shard holds, concatenated along ``dim``.
    """
    by_matrix = zip(*(shard.chunk(matrices, dim) for shard in shards), strict=True)
    return torch.cat([torch.cat(shards_of_matrix, dim) for shards_of_matrix in by_matrix], dim)


def shard_of_rank(full: Tensor, dim: int, matrices: int, rank: int, size: int) -> Tensor:
    """The shard of one rank: the inverse of :func:`join_shards`."""
    return torch.cat([shard.chunk(size, dim)[rank] for shard in full.chunk(matrices, dim)], dim)


def load(engine: Any, saved: SavedParameters, rank: int, size: int) -> None:
    """Load the saved weights and optimizer states into an engine of ZeRO-0 to 2.

    Args:
        rank, size: in and of the tensor-parallel group.
    """
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    partitioned = base is not engine.optimizer
    with torch.no_grad():
        for group, members in zip(base.param_groups, _groups(engine), strict=True):
            for target in group["params"]:
                states = {key: torch.zeros_like(target) for key in saved.state_keys}
                base.state[target] = copy.deepcopy(saved.scalars) | states  # e.g. Adam's step
            for number, parameter in enumerate(members):
                target = group["params"][0 if partitioned else number]
                for key in (MASTER, *saved.state_keys):
                    shard = saved.shard(names[parameter], key, parameter, rank, size)
                    if key == MASTER:
                        parameter.copy_(shard)
                    values = target if key == MASTER else base.state[target][key]
                    if partitioned:
                        _copy_fragment(parameter, shard, values)
                    else:
                        values.copy_(shard)


def _copy_fragment(parameter: nn.Parameter, shard: Tensor, partition: Tensor) -> None:
    """Copy the fragment of a parameter that is in this rank's flat partition of its group."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is not None:  # None: no element of the parameter is in this partition
        source, target = mapping.lp_fragment_address, mapping.hp_fragment_address
        values = shard.flatten().narrow(0, source.start, source.numel)
        partition.narrow(0, target.start, target.numel).copy_(values)


def _groups(engine: Any) -> list[list[nn.Parameter]]:
    """The model's parameters of each group of the optimizer."""
    optimizer = engine.optimizer
    for name in ("bit16_groups", "bf16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return [list(group["params"]) for group in optimizer.param_groups]


def group_names(engine: Any) -> list[list[str]]:
    """The names of the parameters of each group of the optimizer."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return [[names[parameter] for parameter in group] for group in _groups(engine)]


def _open(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
