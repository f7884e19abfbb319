"""The applied patches of Megatron-LM in this process."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_patches.patch_set import PatchSet, applied_sets

FRAMEWORK = "megatron_lm"


def compare_script() -> None:
    """Compare the functions of the running script that the patches rely on.

    Raises:
        PatchError: a script that does not match.
    """
    for patches in _applied():
        patches.apply_later()


def verify_flag(flag: str) -> None:
    """Compare the functions that matter once a flag is given (``Bypass``); nothing where the
    patches were applied unchecked.

    Raises:
        PatchError: with each of them that is not the known one.
    """
    for patches in _applied():
        patches.verify_flag(flag)


def _applied() -> Iterator[PatchSet]:
    return (patches for patches in applied_sets() if patches.framework == FRAMEWORK)
