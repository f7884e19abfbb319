"""The applied patches of Megatron-LM in this process."""

from __future__ import annotations

from megatron_patches.patch_set import applied_sets

FRAMEWORK = "megatron_lm"


def compare_script() -> None:
    """Compare the functions of the running script that the patches rely on.

    Raises:
        PatchError: a script that does not match.
    """
    for patches in applied_sets():
        if patches.framework == FRAMEWORK:
            patches.apply_later()
