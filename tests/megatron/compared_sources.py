"""Imported by the server of ranks alone: reads megatron-core's sources, which every run compares,
once for all ranks."""

from contextlib import suppress
from functools import cache

import megatron_patches
from ds_usp import PatchError
from megatron_patches import guards

guards.fingerprint = cache(guards.fingerprint)
guards.fingerprint_at = cache(guards.fingerprint_at)
for framework in ("megatron_core", "deepspeed"):
    with suppress(PatchError):  # of another version, where tests report it
        megatron_patches.check(framework)
