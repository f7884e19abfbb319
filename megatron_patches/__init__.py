"""Adapters that put ds_usp into Megatron's training stacks, from outside and without edits.

A host is a subpackage with a function ``patches(settings) -> PatchSet``, and, where the host is
a checkout and not an installed package, ``prepare(checkout)``, which makes it importable. A host
with patches of a script names its module: ``SCRIPT``.
"""

from __future__ import annotations

import importlib
import pkgutil
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
    "hosts",
    "patch_set",
    "prepare",
    "restore",
    "table",
]


def hosts() -> tuple[str, ...]:
    """The names that :func:`apply` and :func:`table` take."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def patch_set(host: str, **settings: Any) -> PatchSet:
    """What would be changed in a host, without a change.

    Raises:
        ConfigError: an unknown host, or settings that it cannot serve.
    """
    if host not in hosts():
        raise ConfigError(f"unknown host {host!r}; there are {', '.join(hosts())}")
    patches: PatchSet = importlib.import_module(f"{__name__}.{host}").patches(settings)
    return patches


def apply(host: str, *, unchecked: bool = False, **settings: Any) -> PatchSet:
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
    patches = patch_set(host, **settings)
    patches.apply(unchecked=unchecked)
    return patches


def restore() -> None:
    """Take every patch back, of all hosts."""
    for patches in reversed(applied_sets()):
        patches.restore()


def check(host: str, checkout: Path | None = None) -> str:
    """Whether the host of this process, or a checkout of it, is the one the patches know.

    Returns:
        One line for the reader, and one for each function whose edit only some flag bypasses.

    Raises:
        ConfigError: an unknown host, or a path that is no checkout of it.
        PatchError: with every mismatch.
    """
    patches = patch_set(host)
    prepare(host, checkout)
    script = getattr(importlib.import_module(f"{__name__}.{host}"), "SCRIPT", "__main__")
    changed = (*patches.patches, *(patch.moved("__main__", script) for patch in patches.later))
    bypassed = [each.moved("__main__", script) for each in patches.bypassed_by("")]
    patches.verify((*changed, *bypassed))
    flagged = (bypass for bypass in patches.bypassed if bypass.flag)
    notes = (
        f"\n  refused with {each.flag}: {line}" for each in flagged for line in each.mismatches()
    )
    where = f" at {checkout}" if checkout else ""
    beside = f", {len(bypassed)} functions that they bypass" if bypassed else ""
    return f"{host}{where} matches: {len(changed)} patches{beside}{''.join(notes)}"


def prepare(host: str, checkout: Path | None) -> None:
    """Make a host importable that is a checkout.

    Raises:
        ConfigError: a path that is no checkout of it, or a host that takes none.
    """
    module = importlib.import_module(f"{__name__}.{host}")
    if hasattr(module, "prepare"):
        module.prepare(checkout)
    elif checkout is not None:
        raise ConfigError(f"{host} is used as it is installed; give no path, got {checkout}")


def table(host: str) -> str:
    """What :func:`apply` changes in a host, why, and against which source: Markdown."""
    return markdown(patch_set(host))
