"""ds_usp in DeepSpeed: its ``DistributedAttention`` is ours, for models that already use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ds_usp
from megatron_patches.deepspeed.distributed_attention import bound_attention
from megatron_patches.guards import Guard
from megatron_patches.patch import Patch, PatchSet
from megatron_patches.settings import MeshSettings, read_settings

_FRAMEWORK = "deepspeed"
_DISTRIBUTION = Guard("deepspeed", ">=0.19,<0.20", "89c49d14b7a36fb6")


@dataclass(frozen=True, kw_only=True)
class Settings(MeshSettings):
    """What ``megatron_patches.apply("deepspeed", ...)`` takes.

    Args:
        layout: None is how batches are sharded for DeepSpeed (``contiguous``), so nothing else
            changes, and is checked against the batches of a ``SequenceParallelDataLoader``;
            ``zigzag`` balances causal work, but then the model's batches have to be sharded by it.
        mask, softmax_scale, dropout_p: what the local attention computes, where a ring cannot
            read it.
        also_in: modules that have imported the class by name already, as ``package.module:Name``.
    """

    layout: str | ds_usp.TokenLayout | None = None  # type: ignore[assignment]
    mask: ds_usp.MaskSpec | None = None
    softmax_scale: float | None = None
    dropout_p: float | None = None
    also_in: tuple[str, ...] = ()


def patches(keywords: Mapping[str, Any]) -> PatchSet:
    """DeepSpeed's class replaced by ours, bound to the settings.

    Raises:
        ConfigError: a keyword that is no setting.
    """
    settings = read_settings(_FRAMEWORK, Settings, keywords)
    return PatchSet(
        _FRAMEWORK,
        (
            Patch(
                "deepspeed.sequence.layer:DistributedAttention",
                bound_attention(
                    ulysses_degree=settings.ulysses_degree,
                    layout=settings.layout,
                    mask=settings.mask,
                    softmax_scale=settings.softmax_scale,
                    dropout_p=settings.dropout_p,
                    kernel=settings.kernel,
                ),
                also_in=settings.also_in,
                guard=_DISTRIBUTION,
                reason="stops at the number of heads; ours adds a ring under the same signature",
            ),
        ),
    )
