"""Run-time patches that use ds_usp in Megatron-LM, Megatron-DeepSpeed, megatron-core and DeepSpeed.

They change this process alone: every rank applies them, and nothing here communicates. A framework
is a subpackage with ``patches(settings) -> PatchSet``; where it is used from a checkout, also
``CHECKOUT`` and ``prepare(checkout)``; where its script is patched, ``SCRIPT``, that module's name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_usp.errors import ConfigError, PatchError
from megatron_patches.checkout import Checkout
from megatron_patches.guards import Guard, fingerprint
from megatron_patches.patch import Bypass, Patch
from megatron_patches.patch_set import PatchSet, applied_sets

__all__ = [
    "Bypass",
    "Checkout",
    "Guard",
    "Patch",
    "PatchSet",
    "apply",
    "check",
    "checkout_of",
    "fingerprint",
    "framework_of",
    "frameworks",
    "patch_set",
    "prepare",
    "restore",
    "table",
]


def frameworks() -> tuple[str, ...]:
    """The names that :func:`apply` and :func:`table` take."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def patch_set(framework: str, **settings: Any) -> PatchSet:
    """Return what :func:`apply` would change, without a change; ConfigError as of it."""
    if framework not in frameworks():
        raise ConfigError(f"unknown framework {framework!r}; there are {', '.join(frameworks())}")
    return _module(framework).patches(settings)


def checkout_of(framework: str) -> Checkout | None:
    """How a checkout of a framework is known; None of one that is used as it is installed."""
    return getattr(_module(framework), "CHECKOUT", None)


def framework_of(path: Path) -> str:
    """The framework whose checkout holds a path, the innermost one; ConfigError for a path that
    does not exist, or that is in the checkout of none or of several."""
    if not path.expanduser().exists():
        raise ConfigError(f"{path} does not exist; give a script of a checkout")
    checkouts = {name: checkout for name in frameworks() if (checkout := checkout_of(name))}
    roots = {name: root for name, checkout in checkouts.items() if (root := checkout.root_of(path))}
    if not roots:
        wanted = " or of ".join(checkout.wanted for checkout in checkouts.values())
        raise ConfigError(f"{path} is in no checkout of {wanted}")
    innermost = max(roots.values(), key=lambda root: len(root.parts))
    names = [name for name, root in roots.items() if root == innermost]
    if len(names) > 1:
        titles = " and of ".join(
            f"{checkouts[name].name} ({', '.join(checkouts[name].markers)})" for name in names
        )
        raise ConfigError(
            f"{innermost} is a checkout of {titles} at once; give a clone of one of them alone"
        )
    return names[0]


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
        PatchError: a framework that is not installed or importable, does not match, or is patched
            already.
    """
    patches = patch_set(framework, **settings)
    checkout, spec = checkout_of(framework), importlib.util.find_spec("megatron")
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    if checkout and not any(checkout.root_of(x) == x.resolve().parent for x in folders):
        raise PatchError(
            f"no checkout of {checkout.name} is importable: call megatron_patches.prepare("
            f"'{framework}', Path('path/of/{checkout.name}')) before apply"
        )
    patches.apply(unchecked=unchecked)
    return patches


def restore() -> None:
    """Undo every patch, of all frameworks."""
    for patches in reversed(applied_sets()):
        patches.restore()


def check(framework: str, checkout: Path | None = None) -> str:
    """Compare a framework with the sources that are known; it is imported, and not changed.

    Args:
        checkout: as of :func:`prepare`.

    Returns:
        One line, and one for each edited function that is refused with some flag alone.

    Raises:
        ConfigError: an unknown framework, or a path that is no checkout of it.
        PatchError: with every mismatch.
    """
    patches = patch_set(framework)
    prepare(framework, checkout)
    script = getattr(_module(framework), "SCRIPT", "__main__")
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
    bypass_count = f", {len(bypassed)} functions that they bypass or rely on" if bypassed else ""
    return f"{framework}{location} matches: {len(patched)} patches{bypass_count}{''.join(notes)}"


def prepare(framework: str, checkout: Path | None) -> None:
    """Make a checkout of a framework importable, with stubs of packages that it does not need.

    Args:
        checkout: a path in it; None for a framework that is used as it is installed.

    Raises:
        ConfigError: a path that is in no checkout of it; none, or one, where it takes the other.
    """
    if checkout_of(framework):
        _module(framework).prepare(checkout)
    elif checkout is not None:
        raise ConfigError(f"{framework} is used as it is installed; give no path, got {checkout}")


def table(framework: str) -> str:
    """Return a Markdown table of what :func:`apply` changes, why, and in which source."""
    return patch_set(framework).markdown()


def _module(framework: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{framework}")
