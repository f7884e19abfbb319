"""Run-time patches that use ds_usp in Megatron-DeepSpeed, megatron-core and DeepSpeed.

A framework is a subpackage with a function ``patches(settings) -> PatchSet``; where it is a
checkout and no installed package, also ``prepare(checkout)``, which makes it importable; and where
it has patches of a script, the name of that module: ``SCRIPT``.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from pathlib import Path
from typing import Any

from ds_usp.errors import ConfigError
from megatron_patches.guards import Guard, fingerprint
from megatron_patches.patch import Bypass, Patch
from megatron_patches.patch_set import PatchSet, applied_sets

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
    """What :func:`apply` would change, without a change.

    Raises:
        ConfigError: an unknown framework or setting.
    """
    if framework not in frameworks():
        raise ConfigError(f"unknown framework {framework!r}; there are {', '.join(frameworks())}")
    patches: PatchSet = importlib.import_module(f"{__name__}.{framework}").patches(settings)
    return patches


def apply(framework: str, *, unchecked: bool = False, **settings: Any) -> PatchSet:
    """Patch a framework in this process: all of its patches, or on any error none.

    It must be importable: of a checkout :func:`prepare` first. Functions that Megatron-DeepSpeed's
    running script defines are patched later, once its arguments are parsed.

    Args:
        framework: one of :func:`frameworks`.
        unchecked: proceed although versions or sources are not the known ones.
        settings: of the framework's ``Settings``, for example ``ulysses_degree=2``.

    Returns:
        What was applied; its ``stale()`` lists ``module:name`` of every name in a loaded module
        that still holds a replaced object.

    Raises:
        ConfigError: an unknown framework or setting.
        PatchError: a framework that does not match, or is patched already.
    """
    patches = patch_set(framework, **settings)
    patches.apply(unchecked=unchecked)
    return patches


def restore() -> None:
    """Undo every patch, of all frameworks."""
    for patches in reversed(applied_sets()):
        patches.restore()


def check(framework: str, checkout: Path | None = None) -> str:
    """Compare the installed framework, or a checkout of it, with the sources that are known.

    Returns:
        One line, and one for each edited function that is refused with some flag alone.

    Raises:
        ConfigError: an unknown framework, or a path that is no checkout of it.
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
    """Make a checkout of a framework importable.

    Raises:
        ConfigError: a path that is no checkout of it, or a framework that takes none.
    """
    module = importlib.import_module(f"{__name__}.{framework}")
    if hasattr(module, "prepare"):
        module.prepare(checkout)
    elif checkout is not None:
        raise ConfigError(f"{framework} is used as it is installed; give no path, got {checkout}")


def table(framework: str) -> str:
    """What :func:`apply` changes, why, and against which source, as a Markdown table."""
    return patch_set(framework).markdown()
