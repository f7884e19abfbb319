"""ds_usp as the context parallelism of megatron-core 0.16, as installed from a package index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_patches.megatron_core import patch_table
from megatron_patches.megatron_core.context_parallel import ContextParallel, Settings
from megatron_patches.patch_set import PatchSet
from megatron_patches.settings import read_settings

_FRAMEWORK = "megatron_core"


def patches(keywords: Mapping[str, Any]) -> PatchSet:
    """megatron-core with USP attention wherever ``context_parallel_size`` is above 1; ConfigError
    for a keyword that is no setting."""
    context_parallel = ContextParallel(read_settings(_FRAMEWORK, Settings, keywords))
    return PatchSet(_FRAMEWORK, (*patch_table.usp(context_parallel), *patch_table.without_gpu()))


def cpu_fallbacks_patch_set() -> PatchSet:
    """Return the patches that megatron-core needs without a GPU, for a program that names
    :class:`~megatron_patches.megatron_core.core_attention.USPCoreAttention` in its layer spec."""
    return PatchSet(_FRAMEWORK, patch_table.without_gpu())
