"""Samples of a batch dealt to groups of a mesh's ranks, and outputs put back where they belong.

Every rank is given the whole batch, as ever, and gives back the whole batch's loss and outputs. In
between it computes its shard of a row that its group was dealt (:mod:`ds_usp.geometry.dealing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import DataError, UnsupportedAttentionError
from ds_usp.experimental.dealt_batches import dealt_meshes
from ds_usp.geometry.dealing import Cost, Dealer, SampleCost
from ds_usp.geometry.layout import TokenLayout
from ds_usp.integrations.replicas import Reduction, join_parts
from ds_usp.integrations.transformers.recurrent_layers import recurrent_layers
from ds_usp.integrations.transformers.text_model import text_model
from ds_usp.integrations.transformers.whole_arguments import WholeArguments
from ds_usp.training.whole_batch import IGNORE_INDEX

_NO_BOUND = 2**40  # tokens


@dataclass(frozen=True)
class Dealing:
    """How an enabled model deals its batches.

    Args:
        meshes: by size, those of this rank.
        idle_tokens: of a rank without samples: as many as it makes chunks of.
    """

    dealer: Dealer
    meshes: dict[int, SequenceMesh]
    idle_tokens: int

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        mesh: SequenceMesh,
        whole_head: bool,
        chunks: int,
        max_tokens: int | None,
        cost: Cost | None,
    ) -> Dealing:
        """See :meth:`EnabledModel.deal`.

        Args:
            whole_head: head and loss are computed of whole rows.
            chunks: of tokens, that a layer or the head makes.
        """
        config = text_model(model).config
        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        hidden = getattr(config, "hidden_size", None)
        default = SampleCost(hidden) if isinstance(hidden, int) else SampleCost()
        with mesh.agreeing(f"deal samples of {type(model).__name__}"):
            _check(model, whole_head)
        dealer, meshes = dealt_meshes(
            mesh.sp_group,
            (heads, kv_heads) if isinstance(heads, int) and isinstance(kv_heads, int) else None,
            max_tokens=_NO_BOUND if max_tokens is None else max_tokens,
            cost=cost or default,
            micro_batches=1,
        )
        return cls(dealer, meshes, max(1, chunks))

    def row_of(
        self, batch: WholeArguments, rank: int
    ) -> tuple[SequenceMesh, WholeArguments, Places]:
        """The mesh of this rank's group, the row that it was dealt, and where its tokens belong.

        Raises:
            DataError: samples that the ranks cannot hold in one pass.
            UnsupportedAttentionError: a tree.
        """
        if batch.packing.parents:
            raise UnsupportedAttentionError(
                "the batch is a tree, or its rows share prefixes (share_prefixes), and deal deals "
                "documents out to groups: leave deal out, or tree and share_prefixes"
            )
        samples = batch.samples()
        try:
            dealt = self.dealer.deal([len(x) for x in samples])
        except DataError as error:
            raise DataError(
                f"{error}. A forward pass is one micro batch: of a Trainer lower "
                "per_device_train_batch_size, and raise gradient_accumulation_steps as much"
            ) from None
        group = dealt.group_of(0, rank)
        # A rank without samples computes some tokens once more, without labels: its pass has the
        # same modules as the others', which may share weights by collectives.
        idle = [range(1)] * self.idle_tokens
        row, index = batch.packed([samples[i] for i in group.samples] or idle)
        is_real = torch.full_like(index, bool(group.samples), dtype=torch.long)
        return (
            self.meshes[len(group.ranks)],
            row,
            Places((batch.size, batch.seq_len), index, is_real),
        )


def _check(model: PreTrainedModel, whole_head: bool) -> None:
    name = type(model).__name__
    if whole_head:
        raise UnsupportedAttentionError(
            f"{name} computes its loss of whole rows, and a dealt batch has those of each group: "
            "leave deal out"
        )
    states = [type(layer).__name__ for layer in recurrent_layers(model)]
    if states:
        raise UnsupportedAttentionError(
            f"{name} has {len(states)} layers that carry a state ({states[0]}), which may pass "
            "from one document of a row to the next, and dealt documents have other neighbours: "
            "leave deal out"
        )


@dataclass(frozen=True)
class Places:
    """Where tokens belong in the whole batch.

    Shapes:
        index, is_real: ``[tokens]``, of the group's row, or of this rank.

    Args:
        shape: of the whole batch, rows and tokens.
        index: counted through all rows.
        is_real: 0 for the tokens of ranks without samples, which belong nowhere.
    """

    shape: tuple[int, int]
    index: Tensor
    is_real: Tensor

    def of_rank(self, layout: TokenLayout, rank: int) -> Places:
        index, is_real = (layout.shard(x, 0, rank) for x in (self.index, self.is_real))
        return Places(self.shape, index, is_real)

    def of_tokens(self, x: Tensor) -> Tensor:
        """This rank's values, ``[1, s_local]``, of the whole batch's ``[b, seq_len]``."""
        return x.flatten()[self.index][None]

    def labels(self, targets: Tensor) -> Tensor:
        """As :meth:`of_tokens`; none where a rank has no samples."""
        return self.of_tokens(targets).masked_fill(self.is_real == 0, IGNORE_INDEX)

    def join(self, x: Tensor, mesh: SequenceMesh, gradients: Reduction) -> Tensor:
        """The whole tensor ``[b, seq_len, ...]``, zero at padding, from the ranks' ``[1, s_local,
        ...]``. Differentiable; collective over the mesh."""
        return join_parts(x, partial(self._sum, mesh), self._own, mesh, gradients)

    def _sum(self, mesh: SequenceMesh, x: Tensor) -> Tensor:
        rows, seq_len = self.shape
        # Not every backend sums flags.
        dtype = torch.uint8 if x.dtype == torch.bool else x.dtype
        whole = x.new_zeros(rows * seq_len, *x.shape[2:], dtype=dtype)
        real = self.is_real == 1
        whole[self.index[real]] = x[0, real].to(dtype)
        if mesh.sp_group is not None:
            mesh.agree(f"an output of dealt samples {list(whole.shape)} {x.dtype}")
            dist.all_reduce(whole, group=mesh.sp_group)
        return whole.view(rows, seq_len, *x.shape[2:]).to(x.dtype)

    def _own(self, whole: Tensor) -> Tensor:
        own = whole.flatten(0, 1)[self.index]
        return own.masked_fill((self.is_real == 0).view(-1, *[1] * (own.ndim - 1)), 0)[None]
