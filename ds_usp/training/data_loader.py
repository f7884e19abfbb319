"""Data loader for sequence parallelism: rank 0 of a mesh reads, all ranks get their shards.

:class:`BatchBroadcast` sends every loader's batches, here and in the integrations, collectively.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.mesh import SequenceMesh, check_mesh
from ds_usp.comm.process_groups import all_gather_bytes, byte_tensor, transport_device
from ds_usp.errors import ConfigError, DataError, LayoutError, UnsupportedAttentionError, warn_once
from ds_usp.geometry.layout import KINDS, TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec, has_only
from ds_usp.training.whole_batch import (
    POSITIONS,
    SHIFTED,
    TOKENS,
    Packing,
    WholeBatch,
    local_document_positions,
    read_batch,
    tree_positions,
)

_STATUS = struct.Struct("cd8s480s")  # of a _Status, whose text it cuts
_NO_LOADER, _BATCH, _END, _ERROR = b"-", b"b", b"e", b"!"  # kinds of it


class Message(NamedTuple):
    """A value that can be sent: a header of text, objects of the loader's own classes pickled, and
    tensors, which follow one by one."""

    value: Any
    header: bytes
    tensors: list[Tensor]


# Most batches are numbers, texts and tensors in lists and dicts: those are sent as JSON, and a rank
# unpickles nothing. An object of another class comes by pickle, as in torch's object collectives:
# the ranks of a mesh trust the one that reads for them.
_PLAIN = (type(None), bool, int, float, str)


def _described(x: Any, tensors: list[Tensor], objects: list[Any]) -> Any:
    """``x`` in JSON, with numbers in the places of tensors and of objects, which are appended."""
    if type(x) in _PLAIN:
        return x
    if type(x) is Tensor and x.layout is torch.strided:
        tensors.append(x)
        return {"tensor": len(tensors) - 1}
    if type(x) in (list, tuple):
        return {type(x).__name__: [_described(item, tensors, objects) for item in x]}
    if type(x) is dict and all(type(key) is str for key in x):
        return {"dict": {key: _described(item, tensors, objects) for key, item in x.items()}}
    objects.append(x)
    return {"object": len(objects) - 1}


def _built(described: Any, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Any:
    """The value that :func:`_described` described."""
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "dict":
        return {key: _built(item, tensors, objects) for key, item in content.items()}
    if kind in ("list", "tuple"):
        items = [_built(item, tensors, objects) for item in content]
        return items if kind == "list" else tuple(items)
    return (tensors if kind == "tensor" else objects)[content]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    # Plain tensors are left out of the pickle, with their numbers in their places, and are sent as
    # their bytes: a pickle of a tensor names the device that it was on.
    def persistent_id(self, x: Any) -> Any:
        if type(x) is not Tensor or x.layout is not torch.strided:
            return None
        self._tensors.append(x)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]


class BatchBroadcast:
    """Sends what one rank of a group reads to all its ranks.

    Args:
        group: None: a process by itself, to which nothing is sent.
        device: where tensors arrive; None: where the group can send them from.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None = None
    ) -> None:
        # Whatever is random in reading, shuffling or augmenting, the ranks that share a sequence
        # must have one and the same batch. So one rank reads and sends: no seeds are shared.
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._device = device

    @staticmethod
    def pack(value: Any) -> Message:
        """Make the message of a value; pickle may raise, before any rank waits for a message."""
        tensors: list[Tensor] = []
        objects: list[Any] = []
        described = _described(value, tensors, objects)
        pickled = io.BytesIO()
        if objects:
            _Pickler(pickled, tensors).dump(objects)
        kinds = [
            (list(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad) for x in tensors
        ]
        text = json.dumps((kinds, described)).encode()
        header = struct.pack("<Q", len(text)) + text + pickled.getvalue()
        return Message(value, header, [x.detach() for x in tensors])

    def send(self, message: Message | None, source: int = 0) -> Any:
        """Return on every rank the value that rank ``source`` of the group has packed, its tensors
        copied to the device; ``message`` is None on the others. Collective over the group."""
        if self._group is None:
            return cast(Message, message).value
        group, device = self._group, transport_device(self._group)
        from_rank = dist.get_global_rank(group, source)
        size = torch.tensor([0 if message is None else len(message.header)], device=device)
        dist.broadcast(size, from_rank, group)
        if message is None:
            header = torch.empty(int(size), dtype=torch.uint8, device=device)
        else:
            header = byte_tensor(message.header, group)
        dist.broadcast(header, from_rank, group)
        data = header.cpu().numpy().tobytes()
        end = 8 + int.from_bytes(data[:8], "little")
        kinds, described = json.loads(data[8:end])
        # All of them before the rest is unpickled, which may raise on one rank alone: the others
        # would wait for it in the next broadcast.
        received = []
        for index, (shape, dtype, requires_grad) in enumerate(kinds):
            if message is None:
                x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            else:
                x = message.tensors[index].contiguous().to(device)
            if x.numel():  # as bytes: not every backend sends every type
                real = torch.view_as_real(x) if x.is_complex() else x
                dist.broadcast(real.view(-1).view(torch.uint8), from_rank, group)
            # A copy where it was read: the loader may hold on to its own.
            x = x if self._device is None else x.to(self._device, copy=message is not None)
            received.append(x.requires_grad_(requires_grad))
        objects = _Unpickler(data[end:], received).load() if data[end:] else ()
        return _built(described, received, objects)

    def next_of(self, batches: Iterator[Any] | None, source: int = 0) -> tuple[Any] | None:
        """The next batch of rank ``source`` of the group, in a tuple as a batch may be None, on
        every rank; None at the end. ``batches`` is None on the other ranks. Collective.

        Raises:
            DataError: rank ``source`` could not read its batch; that rank raises its own error.
        """
        message: Message | None = None
        error: Exception | None = None
        if batches is not None:
            try:
                message = self.pack(((next(batches),), ""))
            except StopIteration:
                message = self.pack((None, ""))
            except Exception as failed:  # a data set may raise anything
                error = failed
                message = self.pack((None, f"{type(failed).__name__}: {failed}"))
        entry: tuple[Any] | None
        entry, text = self.send(message, source)
        if error is not None:
            raise error
        if text:
            reader = f"rank {source}" if source else "the first rank"
            raise DataError(f"{reader} of the mesh could not read its batch: {text}")
        return entry


@dataclass(frozen=True, kw_only=True)
class ShardedBatch:
    """The shard of a batch that one sequence-parallel rank holds.

    Attributes:
        tokens: ``[b, s_local]``, int64, as labels and positions are.
        labels: of every token the next one, -100 where none counts. They are shifted: a loss that
            shifts by itself (``labels=`` of a Hugging Face model) would shift twice.
        positions: in the sequence, or in the token's document, for RoPE or learned positions.
        layout: which tokens these are; to be passed to attention.
        mask: what attention must be given: causal in each document, or a tree of them.
        documents: those of the mask; () if every sequence is one document. Of a tree: refused.
        loss_tokens: labels that count in the batches of all data-parallel replicas together; with
            several micro batches a step, their sum is the step's. With ``loss_weights``, which are
            in ``others``, the sum of the weights of these labels.
        others: the batch's other entries; tensors ``[b, s_local, ...]``, those named in ``whole``
            as they were.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    layout: TokenLayout
    mask: MaskSpec
    loss_tokens: float
    others: dict[str, Any]

    @property
    def documents(self) -> tuple[Borders, ...]:
        # A mask made of them alone would let no branch see its prompt.
        if not has_only(self.mask, "right", "documents"):
            raise UnsupportedAttentionError(
                f"the batch is {self.mask}: its segments see their ancestors, which borders of "
                "documents do not say. Give attention mask=batch.mask"
            )
        return self.mask.documents


class SequenceParallelDataLoader:
    """Broadcasts one batch to every sequence-parallel group and shards it over the ranks.

    Rank 0 of every mesh reads and sends: only it needs worker processes. Data-parallel replicas
    must read different samples::

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
    * ``tree``: segments of shared prefixes and their branches, as of ``MaskSpec.tree``, with
      ``shift_labels``: what :class:`ds_usp.training.PrefixTree` makes.
    * ``attention_mask [b, seq_len]``: 0 where a sequence is padded, on the right. Padding becomes
      a document of its own, without labels, whatever positions and borders say of it.
    * any other tensor ``[b, seq_len, ...]`` is sharded too, other values are copied.

    All ranks end with the loader that ends first; batches that others have read by then are
    dropped, with one warning. Collective over the mesh when it is made, and over ``group`` at each
    batch.

    Args:
        loader: any iterable of such dicts; it may be None except on rank 0 of a mesh.
        layout: kind of token layout, contiguous by default, which attention must be given too
            (``batch.layout``); :class:`ds_usp.USPAttention` refuses another one than its own.
            ``zigzag`` balances a ring's causal work, ``balanced`` that of each batch's documents.
        device: where shards go; None: where the mesh's ranks exchange tensors, or, in a mesh of
            one process, where the loader's are.
        whole: names of tensors that every rank gets as they are.
        group: the ranks that train together, a whole number of meshes; None: the default group.

    Raises:
        ConfigError, LayoutError: at construction, on the ranks with such arguments.
        MeshError: at construction, on the mesh's other ranks; on all of them, where ``layout`` or
            ``whole`` differ.
        DataError, LayoutError: at the batch that cannot be used, on every rank of ``group``.
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
        check_mesh(mesh, loader)
        with mesh.agreeing(f"a data loader, layout {layout}, whole {sorted(whole)}"):
            if layout not in KINDS:
                raise LayoutError(f"unknown token layout {layout!r}; there are {', '.join(KINDS)}")
            if mesh.rank == 0 and loader is None:
                raise ConfigError(
                    "loader=None on rank 0 of a sequence mesh, which reads for the others: pass "
                    "the loader of full sequences there"
                )
        self.mesh, self.layout = mesh, layout
        self._loader, self._whole = loader, whole
        # A single process may run without torch.distributed.
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._group = group or dist.group.WORLD
        self._broadcast = BatchBroadcast(mesh.sp_group)
        if device is None and mesh.sp_group is not None:
            device = transport_device(mesh.sp_group)
        self._device = device

    def __len__(self) -> int:
        """Batches of this replica's loader; fewer come where another replica has fewer."""
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[ShardedBatch]:
        batches = _batches(self._loader) if self.mesh.rank == 0 else None
        while True:
            local = self._read(batches)
            statuses = self._gather_statuses(local)
            if statuses is None:
                return
            total = sum((status.loss_tokens for status in statuses), 0.0)
            loss_tokens = int(total) if total.is_integer() else total
            yield self._shard(WholeBatch(**self._broadcast.send(local.message)), loss_tokens)

    def _layout_of(self, batch: WholeBatch) -> TokenLayout:
        documents: Any = ()
        if self.layout == "balanced":
            documents = batch.mask if batch.documents else ((0, batch.seq_len),)
        return self.mesh.layout(self.layout, batch.seq_len, documents)

    def _read(self, batches: Iterator[Mapping[str, Any]] | None) -> _LocalRead:
        # An error is raised by _gather_statuses, on all ranks: raised here, the others would wait.
        if batches is None:
            return _LocalRead(_Status(_NO_LOADER))
        try:
            batch = read_batch(next(batches), self._whole)
            self._layout_of(batch)  # which raises for a length that it does not take
            status = _Status(_BATCH, batch.loss_tokens, batch.digest())
            return _LocalRead(status, _packed(batch))
        except StopIteration:
            return _LocalRead(_Status(_END))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            return _LocalRead(_Status(_ERROR, text=text), error=error)

    def _gather_statuses(self, local: _LocalRead) -> list[_Status] | None:
        """Statuses of the reads of all ranks of the group; None where a loader has ended. Raises on
        every rank what one rank's read has raised, there as DataError. Collective."""
        # One all-gather a batch, before anything else is sent: whether a loader has ended or failed
        # must be known on all ranks, or those of another replica would wait in a later collective
        # for ranks that have left the loop. The number of loss tokens comes with it, so that the
        # loss needs no reduction of its own; the digest shows replicas that read the same samples.
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

    def _shard(self, batch: WholeBatch, loss_tokens: float) -> ShardedBatch:
        """This rank's shard of the full batch, on the device; its layout is noted in the mesh."""
        layout = self._layout_of(batch)
        # Attention that is given no layout is refused where the batch's is not its default.
        self.mesh.batch_layouts[batch.seq_len] = layout
        shards = {
            name: layout.shard(x, dim=1, rank=self.mesh.rank).to(self._device)
            for name, x in batch.sharded.items()
        }
        # Copied where it was read: the loader may hold on to its own. Shards are copies already.
        reads = self.mesh.rank == 0
        whole = {
            name: x.to(self._device, copy=reads) if isinstance(x, Tensor) else x
            for name, x in batch.whole.items()
        }
        if POSITIONS not in shards:
            if batch.parents:
                packing = Packing(batch.documents, batch.parents)
                positions = layout.shard(tree_positions(packing, self._device), 1, self.mesh.rank)
            else:
                borders = batch.documents or ((0, batch.seq_len),)
                positions = local_document_positions(layout, self.mesh.rank, borders, self._device)
            shards[POSITIONS] = positions.expand(shards[TOKENS].shape)
        return ShardedBatch(
            tokens=shards.pop(TOKENS),
            labels=shards.pop(SHIFTED),
            positions=shards.pop(POSITIONS),
            layout=layout,
            mask=batch.mask,
            loss_tokens=loss_tokens,
            others={**shards, **whole},
        )


class _Status(NamedTuple):
    kind: bytes
    loss_tokens: float = 0.0  # of a batch, as its digest
    digest: bytes = b""
    text: bytes = b""  # of an error


class _LocalRead(NamedTuple):
    status: _Status
    message: Message | None = None  # on rank 0 of the mesh, if it has read a batch
    error: Exception | None = None


def _batches(loader: Iterable[Mapping[str, Any]] | None) -> Iterator[Mapping[str, Any]]:
    # A generator: what iter(loader) raises is raised by the first next(), which _read catches.
    yield from cast(Iterable[Mapping[str, Any]], loader)


def _packed(batch: WholeBatch) -> Message:
    """The message of a batch; DataError for an entry that cannot be pickled."""
    try:
        return BatchBroadcast.pack(vars(batch))
    except Exception as error:  # pickle's errors have no common class
        raise DataError(
            f"one of the batch's entries {sorted(batch.whole)} cannot be sent to the other ranks "
            f"({error}): leave it out of the batch"
        ) from error


class DataParallelRanks(NamedTuple):
    """This rank along the data-parallel axis.

    Attributes:
        rank: index of this rank's replica: what ``DistributedSampler(rank=)`` takes.
        size: number of replicas: what ``DistributedSampler(num_replicas=)`` takes.
        ranks: global ranks of all replicas that hold the same shard of their sequences.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]


def data_parallel_ranks(
    mesh: SequenceMesh, group: dist.ProcessGroup | None = None
) -> DataParallelRanks:
    """The data-parallel axis beside ``mesh``: all ranks of a mesh are one replica. Collective.

    Args:
        group: the ranks that train together, a whole number of meshes; None: the default group.

    Raises:
        ConfigError: meshes of different sizes in the group; on every rank.
    """
    check_mesh(mesh)
    if not dist.is_initialized():
        return DataParallelRanks(0, 1, (0,))
    world_group = cast(dist.ProcessGroup, group or dist.group.WORLD)
    rank_here = dist.get_rank()
    members = [rank_here] if mesh.sp_group is None else dist.get_process_group_ranks(mesh.sp_group)
    # Not from the mesh's degrees and the world's size: meshes may have been made of any groups.
    # Each rank says where its mesh begins and where in it it is, and who says the same is a peer.
    payload = struct.pack("qqq", members[0], mesh.rank, mesh.sp_degree)
    rank_infos = [struct.unpack("qqq", data) for data in all_gather_bytes(payload, world_group)]
    sizes = sorted({size for _, _, size in rank_infos})
    firsts = sorted({first for first, _, _ in rank_infos})
    if len(sizes) > 1 or len(firsts) * sizes[0] != len(rank_infos):
        raise ConfigError(
            f"the {len(rank_infos)} ranks of the group hold {len(firsts)} sequence meshes of "
            f"{' and '.join(map(str, sizes))} ranks: every rank must be in one mesh, and all "
            "meshes must have one size. Build them with SequenceMesh.build(RankGrid(...))"
        )
    global_ranks = dist.get_process_group_ranks(world_group)
    peers = [global_ranks[i] for i, (_, rank, _) in enumerate(rank_infos) if rank == mesh.rank]
    return DataParallelRanks(firsts.index(members[0]), len(firsts), tuple(peers))
