"""Unified sequence parallelism in an unedited checkout of Megatron-DeepSpeed.

``megatron_patches`` calls :func:`prepare` and :func:`patches` before the script runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ds_usp
from ds_usp.training import prepare_deepspeed
from megatron_patches.checkout import Checkout
from megatron_patches.megatron_deepspeed import bypassed, compat, patch_table, speedups
from megatron_patches.megatron_deepspeed.compat import install_stubs
from megatron_patches.megatron_deepspeed.startup import FRAMEWORK
from megatron_patches.patch_set import PatchSet
from megatron_patches.settings import MeshSettings, read_settings

SCRIPT = "pretrain_gpt"  # defines the functions of the later patches
CHECKOUT = Checkout(
    "Megatron-DeepSpeed",
    markers=("megatron/arguments.py", "megatron/core/parallel_state.py"),
    repository="https://github.com/deepspeedai/Megatron-DeepSpeed",
    variable="MEGATRON_DEEPSPEED_PATH",
)


@dataclass(frozen=True, kw_only=True)
class Settings(MeshSettings):
    """Defaults of the added flags, given to ``megatron_patches.apply("megatron_deepspeed", ...)``.

    Args:
        layout: the patches shard the batches, in the order that balances causal work.
    """

    layout: str | ds_usp.TokenLayout = ds_usp.TokenLayout.LOADERS_KIND


def prepare(checkout: Path | None) -> None:
    """Make the checkout importable, with stubs of missing packages that training does not need;
    ConfigError for no path, one that is in no checkout, or another ``megatron`` that is loaded."""
    CHECKOUT.prepend_to_path(CHECKOUT.find(checkout))
    prepare_deepspeed()
    install_stubs()


def patches(settings: Mapping[str, Any]) -> PatchSet:
    """All patches: for sequence parallelism, for current packages, and for speed. ``settings`` are
    those of :class:`Settings`; ConfigError for others."""
    return PatchSet(
        FRAMEWORK,
        (
            *patch_table.start(read_settings(FRAMEWORK, Settings, settings)),
            *patch_table.rank_groups(),
            *patch_table.model(),
            *patch_table.layers(),
            *patch_table.engine(),
            *compat.patches(),
            *speedups.patches(),
        ),
        later=patch_table.script_functions(),
        bypassed=bypassed.rows(),
    )
