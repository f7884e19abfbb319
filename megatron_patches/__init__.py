"""Adapters that put ds_usp into Megatron's training stacks, from outside and without edits.

A host is a subpackage with a function ``patches(settings) -> PatchSet``, and, where the host is
a checkout and not an installed package, ``prepare(checkout)``, which makes it importable. A host
with patches of a script names its module: ``SCRIPT``.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from pathlib import Path
from typing import Any

from ds_usp.errors import ConfigError
from megatron_patches.bypass import Bypass
from megatron_patches.guards import Guard, fingerprint
from megatron_patches.patch import Patch, PatchSet, applied_sets
from megatron_patches.table import markdown

__all__ = [
    "Bypass",
    "Guard",
    "Patch",
    "PatchSet",
    "apply",
    "check",
    "fingerprint",
    "frameworks",
    "hosts",
    "patch_set",
    "prepare",
    "restore",
    "table",
]


def frameworks() -> tuple[str, ...]:
    """The names that :func:`apply` and :func:`table` take."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def hosts() -> tuple[str, ...]:
    """The old name of :func:`frameworks`."""
    warnings.warn("hosts() is called frameworks()", DeprecationWarning, stacklevel=2)
    return frameworks()


def patch_set(framework: str, **settings: Any) -> PatchSet:
    """What would be changed in a host, without a change.

    Raises:
        ConfigError: an unknown host, or settings that it cannot serve.
    """
    if framework not in frameworks():
        raise ConfigError(f"unknown framework {framework!r}; there are {', '.join(frameworks())}")
    patches: PatchSet = importlib.import_module(f"{__name__}.{framework}").patches(settings)
    return patches


def apply(framework: str, *, unchecked: bool = False, **settings: Any) -> PatchSet:
    """Patch a host that is importable in this process.

    Args:
        unchecked: proceed although the host's versions or sources are not the known ones.
        settings: the host's own, for example ``ulysses_degree=2``.

    Returns:
        What was applied; its ``stale()`` names modules that hold an old object.

    Raises:
        ConfigError: an unknown host or setting.
        PatchError: a host that does not match, or is patched already.
    """
    patches = patch_set(framework, **settings)
    patches.apply(unchecked=unchecked)
    return patches


def restore() -> None:
    """Take every patch back, of all hosts."""
    for patches in reversed(applied_sets()):
        patches.restore()


def check(framework: str, checkout: Path | None = None) -> str:
    """Whether the host of this process, or a checkout of it, is the one the patches know.

    Returns:
        One line for the reader, and one for each function whose edit only some flag bypasses.

    Raises:
        ConfigError: an unknown host, or a path that is no checkout of it.
        PatchError: with every mismatch.
    """
    patches = patch_set(framework)
    prepare(framework, checkout)
    script = getattr(importlib.import_module(f"{__name__}.{framework}"), "SCRIPT", "__main__")
    patched = (*patches.patches, *(patch.retarget("__main__", script) for patch in patches.later))
    bypassed = [bypass.retarget("__main__", script) for bypass in patches.bypassed_by("")]
    patches.verify((*patched, *bypassed))
    flagged = (bypass for bypass in patches.bypassed if bypass.flag)
    notes = (
        f"\n  refused with {bypass.flag}: {line}"
        for bypass in flagged
        for line in bypass.mismatches()
    )
    location = f" at {checkout}" if checkout else ""
    bypass_count = f", {len(bypassed)} functions that they bypass" if bypassed else ""
    return f"{framework}{location} matches: {len(patched)} patches{bypass_count}{''.join(notes)}"


def prepare(framework: str, checkout: Path | None) -> None:
    """Make a host importable that is a checkout.

    Raises:
        ConfigError: a path that is no checkout of it, or a host that takes none.
    """
    module = importlib.import_module(f"{__name__}.{framework}")
    if hasattr(module, "prepare"):
        module.prepare(checkout)
    elif checkout is not None:
        raise ConfigError(f"{framework} is used as it is installed; give no path, got {checkout}")


def table(framework: str) -> str:
    """What :func:`apply` changes in a host, why, and against which source: Markdown."""
    return markdown(patch_set(framework))
