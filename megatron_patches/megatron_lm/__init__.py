"""Unified sequence parallelism in an unedited checkout of Megatron-LM, core_v0.16.

``megatron_patches`` calls :func:`prepare` and :func:`patches` before the script runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_usp.errors import ConfigError
from megatron_patches.checkout import Checkout
from megatron_patches.megatron_core import patch_table as megatron_core
from megatron_patches.megatron_core.context_parallel import ContextParallel
from megatron_patches.megatron_core.cpu_patch_table import training_without_gpu
from megatron_patches.megatron_core.groups import LAYOUT
from megatron_patches.megatron_lm import missing, patch_table, relied_on
from megatron_patches.megatron_lm.relied_on import FRAMEWORK
from megatron_patches.patch_set import PatchSet
from megatron_patches.settings import MeshSettings, read_settings

SCRIPT = "pretrain_gpt"  # defines the functions that are compared when it runs
CHECKOUT = Checkout(
    "Megatron-LM",
    markers=("megatron/training/arguments.py", "megatron/core/parallel_state.py"),
    repository="https://github.com/NVIDIA/Megatron-LM --branch core_v0.16.1",
    variable="MEGATRON_LM_PATH",
)


@dataclass(frozen=True, kw_only=True)
class Settings(MeshSettings):
    """Defaults of the added flags, given to ``megatron_patches.apply("megatron_lm", ...)``.

    Args:
        layout: that of Megatron-LM's batches and rotary embeddings; there is no other one.

    Raises:
        ConfigError: another layout.
    """

    layout: str = LAYOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout != LAYOUT:
            raise ConfigError(
                f"layout={self.layout!r}: Megatron-LM shards its batches in the layout {LAYOUT!r}. "
                "Leave layout out"
            )


def prepare(checkout: Path | None) -> None:
    """Make the checkout importable, with stubs of missing packages that training does not need;
    ConfigError for no path, one that is in no checkout, or another ``megatron`` that is loaded."""
    CHECKOUT.prepend_to_path(CHECKOUT.find(checkout))
    missing.install()


def patches(keywords: Mapping[str, Any]) -> PatchSet:
    """All patches: those of megatron-core, and of Megatron-LM's arguments, layers and training.
    ``keywords`` are those of :class:`Settings`; ConfigError for others."""
    settings = read_settings(FRAMEWORK, Settings, keywords)
    context_parallel = ContextParallel(None)  # arguments.validate_args sets its settings
    return PatchSet(
        FRAMEWORK,
        (
            *patch_table.start(settings, context_parallel),
            *megatron_core.usp(context_parallel),
            *patch_table.training(),
            *megatron_core.without_gpu(),
            *training_without_gpu(),
        ),
        bypassed=relied_on.rows(),
    )
