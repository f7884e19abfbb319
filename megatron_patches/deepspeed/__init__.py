"""``ds_usp.USPAttention`` under the name of DeepSpeed's ``DistributedAttention``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partialmethod
from typing import Any

import ds_usp
from megatron_patches.guards import deepspeed_guard
from megatron_patches.patch import Patch
from megatron_patches.patch_set import PatchSet
from megatron_patches.settings import MeshSettings, read_settings

_FRAMEWORK = "deepspeed"


@dataclass(frozen=True, kw_only=True)
class Settings(MeshSettings):
    """Settings that ``megatron_patches.apply("deepspeed", ...)`` takes; all but ``also_in`` are
    keywords of ``USPAttention``.

    Args:
        layout: None: ``contiguous``, as batches are for DeepSpeed, which is checked against those
            of a ``SequenceParallelDataLoader``; ``zigzag`` balances causal work, but then the
            model's batches have to be sharded by it.
        mask, softmax_scale, dropout_p: what the local attention computes, for a ring, where its
            class is not a known one.
        also_in: modules that have imported the class by name already, as ``package.module:Name``.
    """

    layout: str | ds_usp.TokenLayout | None = None  # type: ignore[assignment]
    mask: ds_usp.MaskSpec | None = None
    softmax_scale: float | None = None
    dropout_p: float | None = None
    also_in: tuple[str, ...] = ()


def patches(keywords: Mapping[str, Any]) -> PatchSet:
    """The patch that replaces DeepSpeed's ``DistributedAttention`` by ``USPAttention``, bound to
    the settings; ConfigError for a keyword that is no setting. ``patch_set`` calls it, to apply and
    to check: it imports no DeepSpeed. The versions that the guard takes are in guards.py."""
    settings = read_settings(_FRAMEWORK, Settings, keywords)
    bound = {field.name: getattr(settings, field.name) for field in fields(settings)}
    also_in = bound.pop("also_in")
    attention = type(
        "DistributedAttention",
        (ds_usp.USPAttention,),
        {"__init__": partialmethod(ds_usp.USPAttention.__init__, **bound)},
    )
    patch = Patch(
        "deepspeed.sequence.layer:DistributedAttention",
        attention,
        also_in=also_in,
        guard=deepspeed_guard("89c49d14b7a36fb6"),
        reason="at most one rank a head; USPAttention adds a ring under the same signature",
    )
    return PatchSet(_FRAMEWORK, (patch,))
