"""Data loader that deals the samples of each step to groups of ranks of several sizes.

:class:`~ds_usp.training.SequenceParallelDataLoader` shards every sequence over one mesh. This one
has a mesh of each size, and a sample takes as many ranks as it needs
(:mod:`ds_usp.geometry.dealing` decides). Experimental: timed on 2 GPUs, one degree of balanced rows
was as fast or up to 1.1 x slower (docs/usage/packed-trees-dealt.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.comm.consistency import check_same
from ds_usp.comm.mesh import SequenceMesh, resolve_group
from ds_usp.comm.process_groups import node_ids, transport_device
from ds_usp.errors import ConfigError, DataError, MeshError
from ds_usp.geometry.dealing import Cost, Dealer, DealtStep, SampleCost, groups_of_size, ulysses_of
from ds_usp.geometry.degrees import Degrees
from ds_usp.training.data_loader import ShardedBatch, shard_of
from ds_usp.training.whole_batch import (
    IGNORE_INDEX,
    LOSS_WEIGHTS,
    PADDING,
    POSITIONS,
    SHIFTED,
    TOKENS,
    TREE,
    WholeBatch,
    read_batch,
    real_tokens,
)

_SAME_STEP = (
    "All ranks deal one and the same step. Give every rank the same data, order and seed (a "
    "generator with the same seed, no DistributedSampler, no worker that draws by rank)"
)


@dataclass(frozen=True, kw_only=True)
class DealtBatch(ShardedBatch):
    """What one rank holds of one micro batch: its shard of a packed row, whose documents are the
    samples that its group was dealt.

    A rank without samples gets one token without a label: its pass has the same modules, and
    collectives, as those of all others, and adds nothing to the loss.

    Attributes:
        loss_tokens: labels that count in the whole step: of all ranks and micro batches.
        mesh: the ranks that share the row, which attention must be given.
        samples: their numbers in the step; () in an empty micro batch.
        is_last: of the step: gradients are reduced, the optimizer steps.
    """

    mesh: SequenceMesh
    samples: tuple[int, ...]
    is_last: bool


class DealtBatches:
    """Deals each step's samples to the ranks, in groups of as many as each sample needs.

    Every rank reads the same steps: the loader gives lists of samples, in the same order on all
    ranks::

        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
        loader = DataLoader(data, batch_size=64, sampler=sampler, collate_fn=list)
        for step in DealtBatches(loader, max_tokens=16384, heads=(32, 8)):
            for batch in step:  # as many on each rank
                ...

    A sample is a dict as :class:`SequenceParallelDataLoader` takes it, of one sequence: tensors
    ``[seq_len, ...]`` or ``[1, seq_len, ...]``. Padding is cut off. The loss is the sum over a
    rank's tokens times ``loss_token_weight(batch.loss_tokens, scale)``; summed over the micro
    batches and averaged over all ranks, its gradient is that of one rank on the whole step.

    What is dealt is a function of the lengths: the same samples are dealt alike, also after a
    resume. Collective over ``world`` when it is made, and at each step.

    Args:
        loader: an iterable of steps.
        world: the ranks that train together; None: the default group.
        max_tokens: that a rank can hold in one micro batch.
        heads: of attention, query and key/value heads: Ulysses takes the largest part of a group
            that divides both, a ring the rest. None: a ring takes all.
        cost, sizes, micro_batches: as of :class:`ds_usp.geometry.dealing.Dealer`. DeepSpeed, which
            counts micro batches itself, needs ``micro_batches`` as its accumulation steps.
        device: where shards go; None: where the ranks exchange tensors.
        whole: names of entries that are no tokens': a group gets those of its samples in a list.

    Attributes:
        meshes: by size, those that this rank is in.

    Raises:
        ConfigError: arguments that do not fit each other; on the ranks that have them.
        MeshError: ranks with other arguments, and at the step ranks that read other samples; on
            all of them.
        DataError: at the step: a sample that is too long or cannot be used; on every rank.
    """

    def __init__(
        self,
        loader: Iterable[Sequence[Mapping[str, Any]]],
        world: dist.ProcessGroup | None = None,
        max_tokens: int = 0,
        *,
        heads: tuple[int, int] | None = None,
        cost: Cost | None = None,
        sizes: Sequence[int] = (),
        micro_batches: int = 0,
        device: torch.device | str | None = None,
        whole: tuple[str, ...] = (),
    ) -> None:
        self._loader, self._group, self._whole = loader, None, whole
        if dist.is_initialized():
            self._group = resolve_group(world)
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self.dealer, self.meshes = dealt_meshes(
            self._group,
            heads,
            max_tokens=max_tokens,
            cost=cost or SampleCost(),
            sizes=tuple(sizes),
            micro_batches=micro_batches,
        )
        if device is None and self._group is not None:
            device = transport_device(self._group)
        self._device, self._steps, self._skipped = device, 0, 0

    def __iter__(self) -> Iterator[tuple[DealtBatch, ...]]:
        """One pass over the loader, after the steps that were done before a resume."""
        self._steps, self._skipped = self._skipped, 0
        # The loader is first asked for steps, and may fail, where the first one is read.
        steps = (x for loader in [self._loader] for x in islice(loader, self._steps, None))
        while True:
            samples, dealt, error = list[WholeBatch](), None, None
            try:
                if (step := next(steps, None)) is not None:
                    samples = _read_samples(step, self._whole)
                    dealt = self.dealer.deal([x.seq_len for x in samples])
            except Exception as refused:  # a data set may raise anything
                error = refused
            try:
                # Each step: a rank that cannot go on must not leave the others in it.
                check_same(self._group, _description(samples, dealt), error)
            except MeshError as differ:
                raise MeshError(f"{differ}\n{_SAME_STEP}") from None
            if dealt is None:
                return
            self._steps += 1
            yield tuple(
                self._batch(samples, dealt, number) for number in range(len(dealt.micro_batches))
            )

    def state_dict(self) -> dict[str, int]:
        """How many steps of this pass were given out."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass begin after so many steps: it reads them and leaves them out. The
        loader must give the steps that it gave then (a sampler with the same seed and epoch)."""
        self._skipped = state["steps"]

    def _batch(self, samples: Sequence[WholeBatch], dealt: DealtStep, number: int) -> DealtBatch:
        group = dealt.group_of(number, self._rank)
        mesh = self.meshes[len(group.ranks)]
        row = packed_row([samples[i] for i in group.samples] or [_empty_like(samples[0])])
        layout = mesh.layout("balanced", row.seq_len, row.documents or ((0, row.seq_len),))
        loss_tokens = sum(int(sample.loss_tokens) for sample in samples)
        shard = shard_of(row, mesh, layout, self._device, loss_tokens)
        is_last = number == len(dealt.micro_batches) - 1
        return DealtBatch(**vars(shard), mesh=mesh, samples=group.samples, is_last=is_last)


def dealt_meshes(
    group: dist.ProcessGroup | None, heads: tuple[int, int] | None, **arguments: Any
) -> tuple[Dealer, dict[int, SequenceMesh]]:
    """The dealer, and this rank's mesh of each size. Collective over the group.

    Args:
        group: the ranks; None: this process alone.
        heads: as of :class:`DealtBatches`.
        arguments: of :class:`~ds_usp.geometry.dealing.Dealer`, without ``world``.

    Raises:
        ConfigError, MeshError: as of :class:`DealtBatches`.
    """
    world = 1 if group is None else dist.get_world_size(group)
    dealer, text, error = None, "", None
    try:
        dealer = Dealer(world, **arguments)
        if heads is not None:
            Degrees(sp=1, heads=heads[0], kv_heads=heads[1]).check()
        # Ranks whose costs differ, as of other clusters, would deal differently.
        costs = [dealer.cost(tokens, dealer.sizes[-1]) for tokens in (0, 1, dealer.longest)]
        numbers = dealer.max_tokens, dealer.sizes, dealer.micro_batches
        text = f"max_tokens, sizes, micro_batches {numbers}, heads {heads}, costs {costs}"
    except Exception as refused:
        error = refused
    check_same(group, text, error)
    if dealer is None or error is not None:
        raise error or ConfigError("no dealer")
    if group is None:
        return dealer, {1: SequenceMesh.single()}
    in_node = min(Counter(node_ids(group)).values())
    sizes = {
        size: (groups_of_size(world, size), ulysses_of(size, heads, in_node))
        for size in dealer.sizes
    }
    # A rank without work is alone, whatever the sizes.
    return dealer, {1: SequenceMesh.single(), **SequenceMesh.of_sizes(group, sizes)}


def _description(samples: Sequence[WholeBatch], dealt: DealtStep | None) -> str:
    """What a rank has read, and dealt."""
    if dealt is None:
        return "no step left"
    tokens, loss_tokens = sum(x.seq_len for x in samples), sum(int(x.loss_tokens) for x in samples)
    digests = (b"".join(x.digest() for x in samples), repr(dealt).encode())
    read, groups = (hashlib.blake2b(x, digest_size=8).hexdigest() for x in digests)
    return (
        f"{len(samples)} samples of {tokens} tokens, {loss_tokens} with a label, digest {read}, "
        f"dealt as {groups}"
    )


def _read_samples(step: Any, whole: Sequence[str]) -> list[WholeBatch]:
    """The samples of a step, each checked, with shifted labels."""
    if isinstance(step, (Mapping, str)) or not isinstance(step, Sequence):
        raise DataError(
            f"the loader's step is a {type(step).__name__}: it must be a list of samples, dicts of "
            "one sequence each (DataLoader(..., collate_fn=list))"
        )
    samples = [_read_sample(sample, number, whole) for number, sample in enumerate(step)]
    # A row that cannot be packed would fail on the ranks of its group alone.
    entries = [
        {name: (*x.shape[2:], str(x.dtype)) for name, x in sorted(sample.sharded.items())}
        for sample in samples
    ]
    for number, of_sample in enumerate(entries):
        if of_sample != entries[0]:
            raise DataError(
                f"sample {number} of the step has {of_sample}, sample 0 has {entries[0]}: samples "
                "are packed into rows, and must have the same entries"
            )
    return samples


def _read_sample(sample: Any, number: int, whole: Sequence[str]) -> WholeBatch:
    tokens = sample.get(TOKENS) if isinstance(sample, Mapping) else None
    if tokens is None:
        raise DataError(f"sample {number} of the step is no dict with {TOKENS!r}")
    length = torch.as_tensor(tokens).shape[-1:]
    entries = {}
    for name, value in sample.items():
        x = value
        if isinstance(x, list) and x and len(x) == length[0] and isinstance(x[0], int):
            x = torch.tensor(x)
        if isinstance(x, Tensor) and x.shape[:1] == length and name not in whole:
            x = x[None]
        entries[name] = x
    mask = entries.pop(PADDING, None)
    if isinstance(mask, Tensor) and mask.shape == entries[TOKENS].shape:
        real = real_tokens(mask)[0]
        # In a row of several samples padding would be computed, and have neighbours.
        entries = {
            name: x[:, real.first : real.stop]
            if isinstance(x, Tensor) and x.shape[:2] == mask.shape and name not in whole
            else x
            for name, x in entries.items()
        }
        mask = mask[:, real.first : real.stop]
    if mask is not None:
        entries[PADDING] = mask
    try:
        batch = read_batch(entries, whole)
    except (DataError, ConfigError) as error:
        raise type(error)(f"sample {number} of the step: {error}") from None
    undealt = [TREE] if batch.parents else [x for x in (LOSS_WEIGHTS,) if x in batch.sharded]
    if undealt:
        raise DataError(
            f"sample {number} of the step has {undealt[0]}, and samples are dealt as documents "
            "whose tokens all count once: use SequenceParallelDataLoader for such batches"
        )
    if len(batch.sharded[TOKENS]) > 1:
        raise DataError(
            f"sample {number} of the step has {len(batch.sharded[TOKENS])} rows: give each row as "
            "a sample of its own"
        )
    return batch


def packed_row(samples: Sequence[WholeBatch]) -> WholeBatch:
    """One row ``[1, tokens]`` of several samples, each a document, or several that it has."""
    sharded = {
        name: torch.cat([x.sharded[name] for x in samples], 1) for name in samples[0].sharded
    }
    starts = list(accumulate((x.seq_len for x in samples), initial=0))
    borders = [
        start + border
        for start, x in zip(starts, samples, strict=False)
        for border in (x.documents[0] if x.documents else (0, x.seq_len))[:-1]
    ]
    documents = ((*borders, starts[-1]),)
    whole = {name: [x.whole.get(name) for x in samples] for x in samples[:1] for name in x.whole}
    return WholeBatch(sharded=sharded, whole=whole, documents=documents)


def _empty_like(sample: WholeBatch) -> WholeBatch:
    """One token without a label."""
    sharded = {name: x[:, :1].clone() for name, x in sample.sharded.items()}
    sharded[SHIFTED].fill_(IGNORE_INDEX)
    if POSITIONS in sharded:
        sharded[POSITIONS].zero_()
    return WholeBatch(sharded=sharded)
