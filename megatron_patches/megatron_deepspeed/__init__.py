"""ds_usp in an unedited checkout of Megatron-DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ds_usp
from ds_usp.errors import ConfigError
from ds_usp.training import prepare_deepspeed
from megatron_patches.megatron_deepspeed import bypassed, patch_table
from megatron_patches.megatron_deepspeed.checkout import find_checkout, prepend_to_path
from megatron_patches.megatron_deepspeed.script import FRAMEWORK
from megatron_patches.megatron_deepspeed.stubs import install_stubs
from megatron_patches.patch import PatchSet
from megatron_patches.settings import MeshSettings, read_settings

SCRIPT = "pretrain_gpt"  # defines what the later patches change
CHECKOUT_VARIABLE = "MEGATRON_DEEPSPEED_PATH"  # where the command line finds one without a path


@dataclass(frozen=True, kw_only=True)
class Settings(MeshSettings):
    """Defaults of the added flags, given to ``megatron_patches.apply("megatron_deepspeed", ...)``.

    Args:
        layout: batches are sharded by the patches, in the order that balances causal work.
    """

    layout: str | ds_usp.TokenLayout = ds_usp.TokenLayout.LOADERS_KIND


def prepare(checkout: Path | None) -> None:
    """Make the checkout importable, and fill in what it imports and training does not need.

    Raises:
        ConfigError: no path, or one that is in no checkout.
    """
    if checkout is None:
        raise ConfigError(
            "give the path of a checkout of Megatron-DeepSpeed, or set "
            f"{CHECKOUT_VARIABLE}: git clone https://github.com/deepspeedai/Megatron-DeepSpeed"
        )
    prepend_to_path(find_checkout(checkout))
    prepare_deepspeed()
    install_stubs()


def patches(settings: Mapping[str, Any]) -> PatchSet:
    """Everything that is changed.

    Args:
        settings: defaults of the added flags: ``ulysses_degree``, ``layout`` and ``kernel``.

    Raises:
        ConfigError: another setting.
    """
    return PatchSet(
        FRAMEWORK,
        (
            *patch_table.start(read_settings(FRAMEWORK, Settings, settings)),
            *patch_table.fused_kernels(),
            *patch_table.rank_groups(),
            *patch_table.model(),
            *patch_table.layers(),
            *patch_table.engine(),
        ),
        later=patch_table.script_functions(),
        bypassed=bypassed.rows(),
    )
