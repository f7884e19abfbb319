"""DeepSpeed's data loader adapter for ALST: every rank's batch in turn, as shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_usp.errors import ConfigError, DataError, warn_once
from ds_usp.geometry.layout import TokenLayout
from ds_usp.integrations.transformers.alst import REGISTRATIONS, token_dim
from ds_usp.training.batch import IGNORE_INDEX


class UlyssesSPDataLoaderAdapter:
    """In the place of DeepSpeed's adapter: every rank's batch in turn, sharded over all ranks.

    Each rank of a sequence-parallel group reads its own batches; all ranks compute the batch of
    the first, then that of the second, and so on. Yielded are shards, on the CPU, with
    ``shift_labels`` instead of ``labels``. A pass ends with the rank that ends first.

    Args:
        dl: a loader of dicts of whole sequences: ``input_ids [b, tokens]``, ``labels``, and
            ``position_ids`` that start anew in packed documents; any length, padded or not.
        sp_rank, sp_group, sp_world_size: of this rank, as the ``mpu`` gives them.
        device: whence the ranks exchange batches; not used.

    Raises:
        ConfigError: the group is not registered.
        DataError, LayoutError: on every rank of the group, a batch that cannot be sharded.

    Collective over the group at every ``sp_world_size``-th batch.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any):
        self._registration = REGISTRATIONS.get(sp_group)
        if self._registration is None:
            raise ConfigError(
                "no model was registered for this group: call "
                "UlyssesSPAttentionHF.register_with_transformers of this package first"
            )
        self.dl, self.sp_rank, self.sp_group = dl, sp_rank, sp_group
        self.sp_world_size, self.device = sp_world_size, device
        self.iter: Iterator[Any] = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        """Itself, as DeepSpeed's adapter is."""
        return self

    def __next__(self) -> dict[str, Any]:
        """This rank's shard of the next batch."""
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchange the next batch of every rank.

        Raises:
            StopIteration: a rank has no batch left; the next pass begins.
        """
        read: dict[str, Any] | None = next(self.iter, None)
        batches: list[Any] = [None] * self.sp_world_size
        dist.all_gather_object(batches, _on_cpu(read), group=self.sp_group)
        if None in batches:
            if any(batch is not None for batch in batches):
                warn_once(
                    f"{batches.count(None)} of {self.sp_world_size} ranks have no batch left: "
                    "those of the others are dropped. Give all ranks as many batches",
                    rank=dist.get_rank(),
                )
            self.iter = iter(self.dl)
            raise StopIteration
        self.micro_batches.extend(self._shard(batch) for batch in batches)

    def _shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's shard of one batch, with shifted labels."""
        if "input_ids" not in batch:
            raise DataError(f"a batch needs input_ids; it has {', '.join(batch)}")
        seq_len = batch["input_ids"].shape[1]
        assert self._registration is not None  # noqa: S101 - for mypy
        layout = self._registration.layout(seq_len)
        if batch.get("position_ids") is None and "attention_mask" not in batch:
            rows = len(batch["input_ids"])
            batch["position_ids"] = torch.arange(seq_len).expand(rows, -1)
        labels = batch.pop("labels", None)
        if labels is not None and batch.get("shift_labels") is None:
            batch["shift_labels"] = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
        return {name: self._shard_entry(name, x, layout) for name, x in batch.items()}

    def _shard_entry(self, name: str, x: Any, layout: TokenLayout) -> Any:
        dim = token_dim(name, x)
        if dim is None:
            return x
        return layout.shard(x, dim, self.sp_rank).contiguous()


def _on_cpu(batch: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if batch is None:
        return None
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items()}
