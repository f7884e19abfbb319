"""megatron-core's dense masks, compared with a layer's mask rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.errors import UnsupportedAttentionError

_CHECKED = "_usp_checked"
_ROWS = 1024  # compared at a time, to bound the memory of the comparison


def check_dense_mask(
    mask: Any,
    rule: ds_usp.MaskSpec,
    layout: ds_usp.TokenLayout | str,
    mesh: ds_usp.SequenceMesh,
    tokens: int,
) -> None:
    """Refuse a dense mask that differs from the layer's ``rule``. Collective over the mesh.

    Compared once for each mask and rule, on all ranks alike: the layers share the tensor, which
    keeps what it was compared with.

    Args:
        layout: of the tokens, or the kind of one.
        tokens: of this rank.

    Shapes:
        mask: ``[b or 1, 1, s_local, seq_len]``, True where a query must not look.

    Raises:
        UnsupportedAttentionError: on the ranks whose rows of the mask differ.
        MeshError: on the others.
    """
    version = mask._version if isinstance(mask, Tensor) and not mask.is_inference() else None
    key = rule, layout, mesh.name, tokens
    checked: dict[Any, int] = getattr(mask, _CHECKED, {})
    if version is not None and checked.get(key) == version:
        return
    error = None
    if isinstance(layout, str):
        layout = mesh.layout(layout, tokens * mesh.sp_degree)
    if not _equals_rule(mask, rule, layout, mesh.rank):
        error = UnsupportedAttentionError(
            f"attention_mask was given and is not the rule of this layer, {rule}, for the tokens "
            f"of this rank in {layout}. USP attention computes one rule over global positions for "
            "every sequence. Pass attention_mask=None, and documents as packed_seq_params"
        )
    mesh.agree("a dense mask that equals the layer's rule", error)
    if version is not None:
        setattr(mask, _CHECKED, {**checked, key: version})


def _equals_rule(mask: Any, rule: ds_usp.MaskSpec, layout: ds_usp.TokenLayout, rank: int) -> bool:
    """Whether the rows of this rank's queries hide the same keys as the rule."""
    rows = layout.positions(rank)
    if rule.documents:  # packed_seq_params carry them, so a dense mask beside them is refused
        return False
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim < 2:
        return False
    if mask.shape[-2:] != (len(rows), layout.seq_len):
        return False
    keys = torch.arange(layout.seq_len, device=mask.device)
    for begin in range(0, len(rows), _ROWS):
        queries = torch.tensor(rows[begin : begin + _ROWS], device=mask.device)
        distance = keys - queries[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if rule.left is not None:
            hidden |= distance < -rule.left
        if rule.right is not None:
            hidden |= distance > rule.right
        if bool((mask[..., begin : begin + _ROWS, :] != hidden).any()):
            return False
    return True
