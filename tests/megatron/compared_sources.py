"""Imported by the server of ranks alone: reads megatron-core's sources, which every run compares,
once for all ranks."""

from contextlib import suppress

from trainer_runs import read_sources_once

import megatron_patches
from ds_usp import PatchError

read_sources_once()
with suppress(PatchError):  # of another megatron-core, where tests report it
    megatron_patches.check("megatron_core")
