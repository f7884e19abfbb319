"""The script that runs as ``__main__``, whose functions the host's ``pretrain`` gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.patch import PatchSet

FRAMEWORK = "megatron_deepspeed"
SCRIPT = "__main__"


def patch_script() -> None:
    """Replace what the running script defines itself, as far as the patches list it.

    Raises:
        PatchError: a script that is not the known one.
    """
    for patches in _applied():
        patches.apply_later()


def verify_flag(flag: str) -> None:
    """Compare the functions that a flag bypasses.

    Raises:
        PatchError: a checkout in which they are not the known ones.
    """
    for patches in _applied():
        patches.verify_flag(flag)


def _applied() -> list[PatchSet]:
    from megatron_patches.patch import applied_sets

    return [patches for patches in applied_sets() if patches.framework == FRAMEWORK]


def pretrain(
    original: Callable[..., Any],
    train_valid_test_dataset_provider: Any,
    model_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Look the script's model provider up when it is called, and not before it is patched."""
    script = sys.modules.get(getattr(model_provider, "__module__", SCRIPT))
    name = getattr(model_provider, "__name__", "")

    def provide(*args: Any, **kwargs: Any) -> Any:
        return getattr(script, name, model_provider)(*args, **kwargs)

    return original(
        train_valid_test_dataset_provider,
        provide,
        model_type,
        forward_step_func,
        *args,
        **kwargs,
    )
