"""Start of a run: patch the script that runs as ``__main__``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.patch_set import PatchSet

FRAMEWORK = "megatron_deepspeed"
SCRIPT = "__main__"


def patch_script() -> None:
    """Apply the patches of functions that the running script defines.

    Raises:
        PatchError: a script that does not match.
    """
    for patches in _applied():
        patches.apply_later()


def verify_flag(flag: str) -> None:
    """Compare the source of the functions that have no effect once a flag is given (``Bypass``)
    with the known fingerprints; nothing where the patches were applied unchecked.

    Args:
        flag: as on the command line, ``--usp-loss-chunks``.

    Raises:
        PatchError: with each of them that is not the known one.
    """
    for patches in _applied():
        patches.verify_flag(flag)


def _applied() -> list[PatchSet]:
    """The applied patch sets of Megatron-DeepSpeed."""
    from megatron_patches.patch_set import applied_sets

    return [patches for patches in applied_sets() if patches.framework == FRAMEWORK]


def pretrain(
    original: Callable[..., Any],
    train_valid_test_dataset_provider: Any,
    model_provider: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrapper of ``training.pretrain``: looks up the script's ``model_provider`` by its name when
    a model is built.

    The script passes the function before :func:`patch_script` replaces it. A provider that its
    module does not have under its name is called as it is.
    """
    script = sys.modules.get(getattr(model_provider, "__module__", SCRIPT))
    name = getattr(model_provider, "__name__", "")

    def provide(*args: Any, **kwargs: Any) -> Any:
        return getattr(script, name, model_provider)(*args, **kwargs)

    return original(train_valid_test_dataset_provider, provide, *args, **kwargs)
