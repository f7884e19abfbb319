"""Patches of a framework: verified together, applied together, restored together.

Each process patches itself, before it runs the framework. The patched parsing of arguments calls
:func:`apply_later` and :func:`verify_flag`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

from ds_usp.errors import PatchError
from megatron_patches.patch import ABSENT, Bypass, Patch, PatchTarget, unwrap_descriptor

UNCHECKED_FLAG = "--usp-unchecked-host"
_SETS_ATTRIBUTE = "__ds_usp_patches__"  # on a changed module: the sets that changed it
_SCRIPT = "__main__"

Guarded: TypeAlias = Patch | Bypass  # what is compared with its guard


class PatchSet:
    """Patches that are applied together or not at all.

    Args:
        framework: the name that messages use.
        patches: in the order in which they are applied.
        later: patches of a script that runs as ``__main__``, for :meth:`apply_later`.
        bypassed: functions that have no effect beside these patches, or that they rely on, compared
            with their guards as the patched ones are; those of ``__main__`` in :meth:`apply_later`,
            those that a flag bypasses in :meth:`verify_flag`.

    A set records itself as an attribute of each module that it changed, where
    :func:`applied_sets` finds it.
    """

    def __init__(
        self,
        framework: str,
        patches: Iterable[Patch],
        later: Iterable[Patch] = (),
        bypassed: Iterable[Bypass] = (),
    ) -> None:
        self.framework = framework
        self.patches, self.later, self.bypassed = tuple(patches), tuple(later), tuple(bypassed)
        self._undo: list[tuple[PatchTarget, Any]] = []
        self._unchecked = False

    def verify(self, targets: Iterable[Guarded] | None = None) -> None:
        """Compare every target with its guard; change nothing.

        Args:
            targets: None: those of :meth:`apply`.

        Raises:
            PatchError: with all mismatches.
        """
        default: tuple[Guarded, ...] = (*self.patches, *self._bypassed(script=False))
        compared = default if targets is None else targets
        needed = [item for item in compared if item.applies]
        missing = [*dict.fromkeys(filter(None, (item.guard.missing() for item in needed)))]
        if missing:  # of which each target would say so
            command = " ".join(["pip install", *(f"'{requirement}'" for requirement in missing)])
            raise PatchError(
                f"{self.framework} needs {', '.join(missing)}, not installed: {command}"
            )
        versions = (line for item in needed for line in item.guard.version_mismatches())
        mismatches = [*dict.fromkeys(versions), *(x for item in needed for x in item.mismatches())]
        if mismatches:
            raise PatchError(
                f"{self.framework} is not the code that these patches were written for:\n"
                + "".join(f"  {line}\n" for line in mismatches)
                + "Undo the edits of these functions, or install the versions in `python -m "
                f"megatron_patches --framework {self.framework} --table`, or proceed at your own "
                f"risk with {UNCHECKED_FLAG} (unchecked=True)."
            )

    def apply(self, *, unchecked: bool = False) -> None:
        """Change the framework: all targets, or on any error none.

        Args:
            unchecked: do not compare versions and sources.

        Raises:
            PatchError: a framework that is patched already, or that does not match.
        """
        self._refuse_second()
        self._unchecked = unchecked
        self._apply(self.patches, script=False)

    def apply_later(self) -> None:
        """Change the script too, once it runs as ``__main__``; PatchError for one that does not
        match. A second call changes nothing."""
        changed = {target.module.__name__ for target, _ in self._undo}
        patches = (p for p in self.later if p.target.partition(":")[0] not in changed)
        self._apply(patches, script=True)

    def verify_flag(self, flag: str) -> None:
        """Compare what a flag of the framework bypasses, once it was parsed; as :meth:`verify`."""
        if not self._unchecked:
            self.verify(self.bypassed_by(flag))

    def bypassed_by(self, flag: str) -> tuple[Bypass, ...]:
        """Return what a flag of the framework bypasses; "": what is always bypassed."""
        return tuple(bypass for bypass in self.bypassed if bypass.flag == flag)

    def _apply(self, candidates: Iterable[Patch], *, script: bool) -> None:
        """Verify and apply patches, of ``__main__`` or of modules; undo them all if one fails."""
        patches = tuple(patch for patch in candidates if patch.applies)
        if not self._unchecked:
            self.verify((*patches, *self._bypassed(script=script)))
        undo_length = len(self._undo)
        try:
            for patch in patches:
                self._apply_patch(patch)
        except Exception as error:
            self._restore(undo_length)
            raise PatchError(f"{self.framework}: {error}. Nothing was changed") from error

    def restore(self) -> None:
        """Write the original values back, last change first."""
        self._restore(0)

    def _restore(self, undo_length: int) -> None:
        """Undo the newest changes, until the undo list has this length."""
        modules = {target.module for target, _ in self._undo}
        while len(self._undo) > undo_length:
            target, original = self._undo.pop()
            target.write(original)
        for module in modules - {target.module for target, _ in self._undo}:
            _record(module, self, applied=False)

    def stale(self) -> tuple[str, ...]:
        """Names in loaded modules that still hold a replaced object, ``module:name``; ``run.py``
        asks after :meth:`apply`, and refuses to go on with any.

        A replaced module does not count: a patch gives one importer another module, and no other
        importer. Nor do torch's functions in other libraries than Megatron, which they are replaced
        for: DeepSpeed, for one, keeps them to wrap them itself.
        """
        owners = {
            id(unwrap_descriptor(x)): _package(target.module)
            for target, x in self._undo
            if x is not ABSENT and not isinstance(x, ModuleType)
        }
        return tuple(
            f"{module.__name__}:{name}"
            for module in _loaded_modules()
            for name, value in list(vars(module).items())
            if (owner := owners.get(id(unwrap_descriptor(value))))
            and (owner != "torch" or _package(module) == "megatron")
        )

    def markdown(self) -> str:
        """One row for neighbours that differ in their target alone, and one for a group of bypassed
        functions; a table for each purpose. ``test_patch.py`` compares the README with it."""
        rows: dict[str, list[tuple[str, ...]]] = {}
        for (purpose, *cells), group in itertools.groupby((*self.patches, *self.later), _cells):
            targets = (target for patch in group for target in (patch.target, *patch.also_in))
            rows.setdefault(purpose, []).append((_code(*targets), *cells))
        if self.bypassed:
            rows[""].extend(_bypass_rows(self.bypassed))
        tables = (_markdown_table(purpose, rows) for purpose, rows in rows.items())
        return "\n\n".join(tables)

    def _apply_patch(self, patch: Patch) -> None:
        """Write the patch's replacement to its target and to each alias in ``also_in``; append what
        each of them owned before to the undo list."""
        target = PatchTarget.find(patch.target)
        original = target.read()
        if original is ABSENT and patch.kind != "add":
            raise AttributeError(f"{patch.target} does not exist")
        value = patch.build(original)
        for alias in (target, *map(PatchTarget.find, patch.also_in)):
            owned_value = alias.owned()
            alias.write(value)
            self._undo.append((alias, owned_value))
            _record(alias.module, self, applied=True)

    def _bypassed(self, *, script: bool) -> Iterator[Bypass]:
        """The functions that are always bypassed, of the script or of all other modules."""
        for bypass in self.bypassed_by(""):
            if bypass.target.startswith(f"{_SCRIPT}:") == script:
                yield bypass

    def _refuse_second(self) -> None:
        """Raise PatchError if this set, or another one with a shared target, is applied."""
        targets = {patch.target for patch in self.patches}
        for other in applied_sets():
            shared = sorted(targets & {patch.target for patch in other.patches})
            if other is self or shared:
                raise PatchError(
                    f"{self.framework} is patched already (by {other.framework}"
                    + (f", {shared[0]} and {len(shared) - 1} more" if shared else "")
                    + "). Call megatron_patches.restore() before you apply again."
                )


def applied_sets() -> tuple[PatchSet, ...]:
    """Every set that is applied in this process."""
    sets = (x for module in _loaded_modules() for x in vars(module).get(_SETS_ATTRIBUTE, ()))
    return tuple(dict.fromkeys(sets))


def apply_later(framework: str) -> None:
    """:meth:`PatchSet.apply_later` of a framework's sets that are applied."""
    for patches in applied_sets():
        if patches.framework == framework:
            patches.apply_later()


def verify_flag(framework: str, flag: str) -> None:
    """:meth:`PatchSet.verify_flag` of a framework's sets that are applied."""
    for patches in applied_sets():
        if patches.framework == framework:
            patches.verify_flag(flag)


def _record(module: ModuleType, patches: PatchSet, *, applied: bool) -> None:
    """List or unlist a set in the attribute of a module that it changes."""
    others = (x for x in vars(module).get(_SETS_ATTRIBUTE, ()) if x is not patches)
    sets = (*others, patches) if applied else tuple(others)
    if sets:
        setattr(module, _SETS_ATTRIBUTE, sets)
    elif hasattr(module, _SETS_ATTRIBUTE):
        delattr(module, _SETS_ATTRIBUTE)


def _package(module: ModuleType) -> str:
    """The first part of its name."""
    return module.__name__.partition(".")[0]


def _loaded_modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _markdown_table(purpose: str, rows: Iterable[tuple[str, ...]]) -> str:
    header = ("target", "kind", "reason", "guard", "upstream")
    lines = [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)]
    return "\n".join([f"**{purpose}**\n", *lines] if purpose else lines)


def _cells(patch: Patch) -> tuple[str, ...]:
    """The purpose of a patch, and its row of the table without the target."""
    guard = ", ".join(filter(None, (str(patch.guard), patch.needs and f"with {patch.needs}")))
    return patch.purpose, patch.kind, patch.reason, guard or "-", patch.upstream or "-"


def _bypass_rows(bypassed: Iterable[Bypass]) -> Iterator[tuple[str, ...]]:
    """One row a reason: its functions, each with its fingerprint."""
    for (kind, *reason), group in itertools.groupby(
        bypassed, lambda bypass: (bypass.kind, bypass.flag, bypass.reason)
    ):
        members = tuple(group)
        guards = ", ".join(str(bypass.guard) for bypass in members)
        targets = _code(*(bypass.target for bypass in members))
        yield targets, kind, ": ".join(filter(None, reason)), guards, "-"


def _code(*targets: str) -> str:
    return ", ".join(f"`{target}`" for target in targets)
