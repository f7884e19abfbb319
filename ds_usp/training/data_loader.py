"""Data loader for sequence parallelism: rank 0 of a mesh reads, all ranks get their shards."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes, transport_device
from ds_usp.errors import ConfigError, DataError, LayoutError, warn_once
from ds_usp.geometry.layout import KINDS, TokenLayout
from ds_usp.geometry.masks import Borders
from ds_usp.training.batch import local_document_positions
from ds_usp.training.full_batch import POSITIONS, SHIFTED, TOKENS, FullBatch, full_batch

_STATUS = struct.Struct("cq8s480s")
_NO_LOADER, _BATCH, _END, _ERROR = b"-", b"b", b"e", b"!"


@dataclass(frozen=True, kw_only=True)
class ShardedBatch:
    """What one sequence-parallel rank holds of a batch.

    Shapes:
        tokens, labels, positions: ``[b, s_local]``, int64.

    Attributes:
        labels: of every token the next one, -100 where none counts. They are shifted: a loss that
            shifts by itself (``labels=`` of a Hugging Face model) would shift twice.
        positions: in the sequence, or in the token's document, for RoPE or learned positions.
        layout: which tokens these are; to be passed to attention.
        documents: for ``MaskSpec.causal(documents)``; () if every sequence is one document.
        loss_tokens: labels that count in the batches of all data-parallel replicas together; with
            several micro batches a step, their sum is the step's.
        others: the batch's other entries; tensors ``[b, s_local, ...]``, those named in ``whole``
            as they were.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    layout: TokenLayout
    documents: tuple[Borders, ...]
    loss_tokens: int
    others: dict[str, Any]


class SequenceParallelDataLoader:
    """Broadcasts one batch to every sequence-parallel group and shards it over the ranks.

    Rank 0 of every mesh reads and sends the batch to the other ranks. So the ranks of a group
    cannot see different data, whatever is random in reading or in augmentation, only one of them
    needs worker processes, and storage is read once.

    Data-parallel replicas must read different samples::

        dp = data_parallel_ranks(mesh)
        sampler = DistributedSampler(data, num_replicas=dp.size, rank=dp.rank)
        loader = SequenceParallelDataLoader(DataLoader(data, sampler=sampler), mesh)

    The wrapped loader gives dicts of full sequences:

    * ``input_ids [b, seq_len]``; lengths may change from batch to batch and need not divide.
    * ``labels [b, seq_len]``, at the index of its own token, as Hugging Face has them; here
      they are shifted, before sharding. Absent: the tokens themselves. Labels that are the next
      tokens already are named ``shift_labels``.
    * ``position_ids [b, seq_len]``, which start anew at 0 in every packed document; or
      ``cu_seqlens``: cumulative borders, for all samples or a list for each. Absent: one document.
    * ``attention_mask [b, seq_len]``: 0 where a sequence is padded, on the right. Padding becomes
      a document of its own, without labels.
    * any other tensor ``[b, seq_len, ...]`` is sharded too, other values are copied.

    All ranks end with the loader that ends first; batches that others have read by then are
    dropped, with one warning.

    Args:
        loader: any iterable of such dicts; it may be None except on rank 0 of a mesh.
        mesh: the ranks that share each batch.
        layout: kind of token layout, which attention must be given too (``batch.layout``): the
            default is the one that :class:`ds_usp.USPAttention` takes by default, which refuses
            batches in another one. ``zigzag``
            balances the causal work of a ring. ``balanced`` is made anew from the documents of
            each batch.
        device: where shards go; None: where the mesh's ranks exchange tensors.
        whole: names of tensors that every rank gets as they are.
        group: the ranks that train together, a whole number of meshes; None: the default group.

    Raises:
        ConfigError, LayoutError: at construction, on every rank of the mesh.
        DataError, LayoutError: at the batch that cannot be used, on every rank of ``group``.

    Collective over the mesh when it is made, and over ``group`` at each batch.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]] | None,
        mesh: SequenceMesh,
        layout: str = TokenLayout.CALLERS_KIND,
        *,
        device: torch.device | str | None = None,
        whole: tuple[str, ...] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        error: Exception | None = None
        if layout not in KINDS:
            error = LayoutError(f"unknown token layout {layout!r}; there are {', '.join(KINDS)}")
        elif mesh.rank == 0 and loader is None:
            error = ConfigError(
                "loader=None on rank 0 of a sequence mesh, which reads for the others: pass the "
                "loader of full sequences there"
            )
        mesh.agree(f"a data loader, layout {layout}, whole {sorted(whole)}", error)
        self.mesh, self.layout = mesh, layout
        self._loader, self._whole = loader, whole
        # A single process may run without torch.distributed.
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._group = group or dist.group.WORLD
        self._transport = None if mesh.sp_group is None else transport_device(mesh.sp_group)
        self._device = device if device is not None else self._transport

    def __len__(self) -> int:
        """Batches of this replica's loader; fewer come where another replica has fewer."""
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[ShardedBatch]:
        """One pass over the loader, as sharded batches; collective."""
        batches = _batches(self._loader) if self.mesh.rank == 0 else None
        while True:
            local = self._read(batches)
            statuses = self._gather_statuses(local)
            if statuses is None:
                return
            loss_tokens = sum(status.loss_tokens for status in statuses)
            yield self._shard(self._broadcast(local.batch, local.header), loss_tokens)

    def _layout_of(self, batch: FullBatch) -> TokenLayout:
        """The batch's token layout; ``balanced`` depends on its documents, one if it has none."""
        documents: Any = ()
        if self.layout == "balanced":
            documents = batch.documents or ((0, batch.seq_len),)
        return self.mesh.layout(self.layout, batch.seq_len, documents)

    def _read(self, batches: Iterator[Mapping[str, Any]] | None) -> _LocalRead:
        """The next batch of the rank that reads, checked; an error is raised later, on all."""
        if batches is None:
            return _LocalRead(_Status(_NO_LOADER))
        try:
            entries = next(batches)
            batch = full_batch(entries, self._whole)
            self._layout_of(batch)
            header = _header(batch)
            status = _Status(_BATCH, batch.loss_tokens, batch.digest())
        except StopIteration:
            return _LocalRead(_Status(_END))
        except Exception as error:  # any: the other ranks would wait for this one
            return _LocalRead(_failed(error), error=error)
        return _LocalRead(status, batch, header)

    def _gather_statuses(self, local: _LocalRead) -> list[_Status] | None:
        """Statuses of all ranks' reads; None where a loader has ended.

        Raises:
            DataError: another rank cannot use its batch.
            Exception: this rank cannot use its own.
        """
        statuses = [local.status]
        if self._group is not None and dist.get_world_size(self._group) > 1:
            gathered = all_gather_bytes(_STATUS.pack(*local.status), self._group)
            statuses = [_Status(*_STATUS.unpack(data)) for data in gathered]
        if local.error is not None:
            raise local.error
        for rank, status in enumerate(statuses):
            if status.kind == _ERROR:
                text = status.text.rstrip(b"\0").decode(errors="ignore")
                raise DataError(f"rank {rank} of {len(statuses)} could not read its batch: {text}")
        kinds = [status.kind for status in statuses]
        if _END in kinds:
            if _BATCH in kinds:
                self._notice(
                    f"{kinds.count(_END)} of {len(kinds) - kinds.count(_NO_LOADER)} data-parallel "
                    "replicas have no batch left: this pass ends on all ranks, and a batch of "
                    f"each of {kinds.count(_BATCH)} others is dropped. Give all replicas as many "
                    "batches (DistributedSampler with drop_last)"
                )
            return None
        digests = [status.digest for status in statuses if status.kind == _BATCH]
        if len(set(digests)) < len(digests):
            self._notice(
                f"{len(digests)} data-parallel replicas read {len(set(digests))} different "
                "batches: give each its own samples, DistributedSampler(data, num_replicas=dp.size,"
                " rank=dp.rank) with dp = ds_usp.training.data_parallel_ranks(mesh)"
            )
        return statuses

    def _notice(self, text: str) -> None:
        warn_once(text, rank=0 if self._group is None else dist.get_rank(self._group))

    def _broadcast(self, batch: FullBatch | None, header: bytes) -> FullBatch:
        """Broadcast the batch that rank 0 of the mesh has read, and its header."""
        group = self.mesh.sp_group
        if group is None or dist.get_world_size(group) == 1:
            return cast(FullBatch, batch)
        source = dist.get_global_rank(group, 0)
        headers = [header]
        dist.broadcast_object_list(headers, source, group, self._transport)
        shapes, whole, documents = pickle.loads(headers[0])
        sharded: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            if batch is None:
                tensor = torch.empty(shape, dtype=dtype, device=self._transport)
            else:
                tensor = batch.sharded[name].contiguous().to(self._transport)
            # As bytes: not every backend sends every type.
            dist.broadcast(tensor.view(-1).view(torch.uint8), source, group)
            sharded[name] = tensor
        return FullBatch(sharded=sharded, whole=whole, documents=documents)

    def _shard(self, batch: FullBatch, loss_tokens: int) -> ShardedBatch:
        """This rank's shard of a batch, on the device; registers its layout with the mesh.

        Args:
            batch: the full batch, the same on every rank.
            loss_tokens: labels that count, of all data-parallel replicas; stored in the shard.
        """
        layout = self._layout_of(batch)
        self.mesh.batch_layouts[batch.seq_len] = layout
        shards = {
            name: layout.shard(x, dim=1, rank=self.mesh.rank).to(self._device)
            for name, x in batch.sharded.items()
        }
        whole = {
            name: x.to(self._device) if isinstance(x, Tensor) else x
            for name, x in batch.whole.items()
        }
        if POSITIONS not in shards:
            borders = batch.documents or ((0, batch.seq_len),)
            own = local_document_positions(layout, self.mesh.rank, borders, self._device)
            shards[POSITIONS] = own.expand(shards[TOKENS].shape)
        return ShardedBatch(
            tokens=shards.pop(TOKENS),
            labels=shards.pop(SHIFTED),
            positions=shards.pop(POSITIONS),
            layout=layout,
            documents=batch.documents,
            loss_tokens=loss_tokens,
            others={**shards, **whole},
        )


class _Status(NamedTuple):
    """Status of a rank's next batch, exchanged by all ranks."""

    kind: bytes
    loss_tokens: int = 0
    digest: bytes = b""
    text: bytes = b""


class _LocalRead(NamedTuple):
    """What this rank has read, if it is rank 0 of a mesh."""

    status: _Status
    batch: FullBatch | None = None
    header: bytes = b""
    error: Exception | None = None


def _batches(loader: Iterable[Mapping[str, Any]] | None) -> Iterator[Mapping[str, Any]]:
    """One pass over a loader, which is first asked for an iterator where its first batch is."""
    yield from cast(Iterable[Mapping[str, Any]], loader)


def _header(batch: FullBatch) -> bytes:
    """What a batch holds besides its sharded tensors, and their shapes, pickled.

    Raises:
        DataError: an entry that cannot be pickled.
    """
    shapes = {name: (x.shape, x.dtype) for name, x in batch.sharded.items()}
    try:
        return pickle.dumps((shapes, batch.whole, batch.documents))
    except Exception as error:  # pickle's errors have no common class
        raise DataError(
            f"one of the batch's entries {sorted(batch.whole)} cannot be sent to the other ranks "
            f"({error}): leave it out of the batch"
        ) from error


def _failed(error: Exception) -> _Status:
    return _Status(_ERROR, text=f"{type(error).__name__}: {error}".encode())
