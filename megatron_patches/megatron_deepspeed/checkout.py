"""The user's checkout of Megatron-DeepSpeed: found, and put first among the modules."""

from __future__ import annotations

import sys
from pathlib import Path

from ds_usp.errors import ConfigError

_MARKER_FILE = Path("megatron/core/parallel_state.py")


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
    """Let ``import megatron`` mean this checkout, and not megatron-core from a package index.

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
