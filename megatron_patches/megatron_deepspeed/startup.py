"""Start of a run: make the checkout importable, and patch the script that runs as ``__main__``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_usp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_patches.patch_set import PatchSet

_MARKER_FILE = Path("megatron/core/parallel_state.py")
FRAMEWORK = "megatron_deepspeed"
SCRIPT = "__main__"


def find_checkout(path: Path) -> Path:
    """The root of the checkout that holds ``path``, a file or a folder.

    Raises:
        ConfigError: a path that does not exist, or that is in no checkout.
    """
    path = path.expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a checkout of Megatron-DeepSpeed")
    for folder in (path, *path.parents):
        if (folder / _MARKER_FILE).is_file():
            return folder
    raise ConfigError(
        f"{path} is in no checkout of Megatron-DeepSpeed: no {_MARKER_FILE} there or above it. "
        "Get one: git clone https://github.com/deepspeedai/Megatron-DeepSpeed"
    )


def prepend_to_path(checkout: Path) -> None:
    """Let ``import megatron`` find this checkout before an installed megatron-core.

    Raises:
        ConfigError: another ``megatron`` is loaded already.
    """
    loaded = getattr(sys.modules.get("megatron"), "__path__", None)
    if loaded is not None and str(checkout / "megatron") not in list(loaded):
        raise ConfigError(
            f"megatron is loaded already, from {', '.join(loaded)}, and not from {checkout}. Start "
            "Megatron-DeepSpeed in a process of its own: python -m megatron_patches.run"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))


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
