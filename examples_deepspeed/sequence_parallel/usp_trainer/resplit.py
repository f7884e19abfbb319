"""A checkpoint loaded under other degrees than those that saved it, parameter by parameter.

Reads the files that DeepSpeed's ZeRO-0 to 2 write for each tensor-parallel rank, joins what belongs
to one parameter, and cuts this rank's part out of it. DeepSpeed's own way, universal checkpoints,
needs a copy of the checkpoint in another format first and takes no other optimizer than Adam.
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

MASTER = "fp32"  # the key of the fp32 weights, beside those of the optimizer's states
_OPTIMIZER_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class SavedParameters:
    """The weights and optimizer states in the files of one checkpoint, by parameter name.

    Args:
        folder: of the checkpoint.
        files: the names of its files.
        names: the parameters of each group of the optimizer, in its order.
        gated: the first matrix of an MLP holds gates and values, one above the other.
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
        self._pieces: list[dict[tuple[str, str], list[Tensor]]] = [{} for _ in models]
        self.scalars: dict[str, Any] = {}
        if not optimizer_files:
            for rank, model in enumerate(self._models):
                self._add_states(rank, model["optimizer"]["state"], names)
        for rank, _, name in optimizer_files:
            self._add_partition(rank, _open(folder / name)["optimizer_state_dict"])

    def _add_states(
        self, rank: int, states: Mapping[int, Mapping[str, Any]], names: list[list[str]]
    ) -> None:
        """Of ZeRO-0: a state for each parameter, by its number."""
        for number, name in enumerate(name for group in names for name in group):
            self._pieces[rank][name, MASTER] = [self._models[rank]["module"][name].flatten()]
            for key, value in states.get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    self._pieces[rank][name, key] = [value.flatten()]
                else:
                    self.scalars[key] = value

    def _add_partition(self, rank: int, partition: Mapping[str, Any]) -> None:
        """Of ZeRO-1 and 2: fragments of parameters in flat groups, data-parallel ranks in order."""
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
            for name, at in fragments.items():
                for key, values in flat.items():
                    piece = values.narrow(0, at.start, at.numel)
                    self._pieces[rank].setdefault((name, key), []).append(piece)

    @property
    def state_keys(self) -> list[str]:
        """The optimizer's states that are saved of each parameter."""
        return sorted({key for _, key in self._pieces[0]} - {MASTER})

    def part(self, name: str, key: str, parameter: nn.Parameter, rank: int, size: int) -> Tensor:
        """One tensor-parallel rank's part of a parameter's weights or states.

        Args:
            parameter: as this rank holds it; its shape and how it is split.
            rank, size: in and of the tensor-parallel group.

        Raises:
            CheckpointError: what is saved does not have the size of the parameter.
        """
        shards = [
            torch.cat(pieces[name, key]).reshape(model["module"][name].shape)
            for pieces, model in zip(self._pieces, self._models, strict=True)
        ]
        split = getattr(parameter, "tensor_model_parallel", False)
        dim = getattr(parameter, "partition_dim", 0)
        parts = 2 if self._gated and ".linear_fc1." in name else 1
        full = join(shards, dim, parts) if split else shards[0]
        mine = cut(full, dim, parts, rank, size) if split else full
        if mine.shape != parameter.shape:
            raise CheckpointError(
                f"{name} is saved with shape {tuple(full.shape)}; its part for tensor-parallel "
                f"rank {rank} of {size} would be {tuple(mine.shape)}, not {tuple(parameter.shape)}"
            )
        return mine


def join(shards: list[Tensor], dim: int, parts: int) -> Tensor:
    """The whole of a split parameter.

    Args:
        parts: how many matrices each shard holds one after the other along ``dim``.
    """
    by_part = zip(*(shard.chunk(parts, dim) for shard in shards), strict=True)
    return torch.cat([torch.cat(same, dim) for same in by_part], dim)


def cut(full: Tensor, dim: int, parts: int, rank: int, size: int) -> Tensor:
    """The inverse of :func:`join`: the shard of one rank."""
    return torch.cat([part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)], dim)


def load(engine: Any, saved: SavedParameters, rank: int, size: int) -> None:
    """Fill an engine of ZeRO-0 to 2 with what was saved.

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
                base.state[target] = copy.deepcopy(saved.scalars) | states  # the step counts in it
            for number, parameter in enumerate(members):
                target = group["params"][0 if partitioned else number]
                for key in (MASTER, *saved.state_keys):
                    part = saved.part(names[parameter], key, parameter, rank, size)
                    if key == MASTER:
                        parameter.copy_(part)
                    values = target if key == MASTER else base.state[target][key]
                    if partitioned:
                        _copy_fragment(parameter, part, values)
                    else:
                        values.copy_(part)


def _copy_fragment(parameter: nn.Parameter, part: Tensor, partition: Tensor) -> None:
    """Into this rank's flat partition of a group, what lies in it of one parameter."""
    here = parameter._hp_mapping  # type: ignore[attr-defined]
    if here is not None:  # some of it does
        source, target = here.lp_fragment_address, here.hp_fragment_address
        values = part.flatten().narrow(0, source.start, source.numel)
        partition.narrow(0, target.start, target.numel).copy_(values)


def _groups(engine: Any) -> list[list[nn.Parameter]]:
    """The parameters of each group of the optimizer, as the model holds them."""
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
