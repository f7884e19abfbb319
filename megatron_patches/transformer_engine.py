"""Whether TransformerEngine's layers can be built here, read without importing it: Megatron-LM's
patched arguments ask, on each rank."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.version import Version

OLDEST = Version("2.9.0a0")  # that Megatron-LM core_v0.16 admits in its pyproject.toml


def what_is_missing() -> str:
    """The predicate of an error's sentence, as "is not installed"; "" where it can be used."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "is not installed"
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return "is a folder without an installed version"
    return "" if Version(version) >= OLDEST else f"is {version}"
