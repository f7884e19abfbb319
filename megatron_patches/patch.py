"""Changes to a host's code as data: checked together, applied together, taken back together."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, TypeAlias

from ds_usp.errors import ConfigError, PatchError
from megatron_patches.bypass import Bypass
from megatron_patches.guards import NO_GUARD, Guard
from megatron_patches.patch_target import ABSENT, PatchTarget

UNCHECKED_FLAG = "--usp-unchecked-host"
_SETS_ATTRIBUTE = "__ds_usp_patches__"  # on a changed module: the sets that changed it
_SCRIPT = "__main__"


@dataclass(frozen=True)
class Patch:
    """One thing that is changed in a host.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``.
        replacement: what stands there afterwards. With ``wrap`` a function that gets the original
            as its first argument, then what the caller gave.
        kind: ``replace`` and ``wrap`` need the target to exist, ``add`` needs it not to.
        also_in: other places that hold the same object, because they imported it by name.
        guard: what the target must be.
        needs: a package without which there is nothing to patch, and the patch is left out.
        reason: why it is changed, for the table.
        upstream: issue or link, where upstream is in the wrong.

    Raises:
        ConfigError: a target that is not ``module:name``, or an unknown kind.
    """

    target: str
    replacement: Any
    kind: Literal["replace", "wrap", "add"] = "replace"
    also_in: tuple[str, ...] = ()
    guard: Guard = NO_GUARD
    needs: str = ""
    reason: str = ""
    upstream: str = ""

    def __post_init__(self) -> None:
        for target in (self.target, *self.also_in):
            module, _, path = target.partition(":")
            if not module or not path:
                raise ConfigError(
                    f"{target!r} is no place to patch; write package.module:Name.attr"
                )
        if self.kind not in ("replace", "wrap", "add"):
            raise ConfigError(f"{self.target}: kind {self.kind!r} is not replace, wrap or add")

    @property
    def applies(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def mismatches(self) -> Iterator[str]:
        """Everything that keeps this patch from fitting the host, one line each."""
        try:
            original = PatchTarget.find(self.target).read()
            aliases = [(target, PatchTarget.find(target).read()) for target in self.also_in]
        except (ImportError, AttributeError) as error:
            yield f"{self.target}: {type(error).__name__}: {error}"
            return
        if self.kind == "add":
            if original is not ABSENT:
                yield f"{self.target}: exists already, and would be hidden"
            return
        if original is ABSENT:
            yield f"{self.target}: does not exist"
            return
        if self.kind == "wrap" and isinstance(original, type):
            yield f"{self.target}: is a class; wrap one of its methods or replace it"
        for target, alias in aliases:
            if _unwrap_descriptor(alias) is not _unwrap_descriptor(original):
                yield f"{target}: is not the same object as {self.target}"
        yield from (f"{self.target}: {mismatch}" for mismatch in self.guard.mismatches(original))

    def retarget(self, module: str, to: str) -> Patch:
        """The same patch for a module that is loaded under another name."""
        name, _, path = self.target.partition(":")
        return replace(self, target=f"{to}:{path}") if name == module else self

    def build(self, original: Any) -> Any:
        """What is put in place of ``original``."""
        if self.kind != "wrap":
            return self.replacement
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(_wrap(original.__func__, self.replacement))
        return _wrap(original, self.replacement)


Guarded: TypeAlias = Patch | Bypass  # what a host has to hold as it is known


class PatchSet:
    """Patches that go in together or not at all.

    Args:
        host: the name that messages use.
        patches: in the order in which they are applied.
        later: patches of a script that runs as ``__main__``, for :meth:`apply_later`.
        bypassed: functions of the host that have no effect beside these patches, and that are
            compared with their guards as the patched ones are; those of ``__main__`` in
            :meth:`apply_later`, those that a flag bypasses in :meth:`verify_flag`.

    A set that changed a module is written on that module, so that :func:`applied_sets` finds it
    without a list on the side.
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
            targets: others than those that :meth:`apply` relies on.

        Raises:
            PatchError: with all mismatches.
        """
        default: tuple[Guarded, ...] = (*self.patches, *self._bypassed(script=False))
        compared = default if targets is None else targets
        mismatches = [line for item in compared if item.applies for line in item.mismatches()]
        if mismatches:
            raise PatchError(
                f"{self.framework} is not the code that these patches were written for:\n"
                + "".join(f"  {line}\n" for line in mismatches)
                + "Undo the edits of these functions, or install the versions in `python -m "
                f"megatron_patches --framework {self.framework} --table`, or proceed at your own "
                f"risk with {UNCHECKED_FLAG} (unchecked=True)."
            )

    def apply(self, *, unchecked: bool = False) -> None:
        """Change the host: all targets, or on any error none.

        Args:
            unchecked: do not compare versions and sources.

        Raises:
            PatchError: a host that is patched already, or that does not match.
        """
        self._refuse_second()
        self._unchecked = unchecked
        self._apply(self.patches, script=False)

    def apply_later(self) -> None:
        """Change the script too, once it runs. A second time changes nothing.

        Raises:
            PatchError: a script that does not match.
        """
        done = {target.module.__name__ for target, _ in self._undo}
        patches = (p for p in self.later if p.target.partition(":")[0] not in done)
        self._apply(patches, script=True)

    def verify_flag(self, flag: str) -> None:
        """Compare what a flag of the host bypasses, now that it was given.

        Raises:
            PatchError: with all mismatches.
        """
        if not self._unchecked:
            self.verify(self.bypassed_by(flag))

    def bypassed_by(self, flag: str) -> tuple[Bypass, ...]:
        """What a flag of the host bypasses; "": what is bypassed without one."""
        return tuple(bypass for bypass in self.bypassed if bypass.flag == flag)

    def _apply(self, candidates: Iterable[Patch], *, script: bool) -> None:
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
        """Put back what was there, last change first."""
        self._restore(0)

    def _restore(self, undo_length: int) -> None:
        modules = {target.module for target, _ in self._undo}
        while len(self._undo) > undo_length:
            target, original = self._undo.pop()
            target.write(original)
        for module in modules - {target.module for target, _ in self._undo}:
            _record_sets(
                module,
                tuple(patches for patches in _sets_that_changed(module) if patches is not self),
            )

    def stale(self) -> tuple[str, ...]:
        """Names in loaded modules that still hold what was replaced. A module that was replaced is
        another one in that place alone: all the others hold it rightly."""
        replaced = (x for _, x in self._undo if x is not ABSENT and not isinstance(x, ModuleType))
        old = set(map(id, map(_unwrap_descriptor, replaced)))
        return tuple(
            f"{module.__name__}:{name}"
            for module in _loaded_modules()
            for name, value in list(vars(module).items())
            if id(_unwrap_descriptor(value)) in old
        )

    def _apply_patch(self, patch: Patch) -> None:
        target = PatchTarget.find(patch.target)
        original = target.read()
        if original is ABSENT and patch.kind != "add":
            raise AttributeError(f"{patch.target} does not exist")
        value = patch.build(original)
        for alias in (target, *map(PatchTarget.find, patch.also_in)):
            owned_value = alias.owned()
            alias.write(value)
            self._undo.append((alias, owned_value))
            _record_sets(
                alias.module,
                (*(x for x in _sets_that_changed(alias.module) if x is not self), self),
            )

    def _bypassed(self, *, script: bool) -> Iterator[Bypass]:
        for bypass in self.bypassed_by(""):
            if bypass.target.startswith(f"{_SCRIPT}:") == script:
                yield bypass

    def _refuse_second(self) -> None:
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
    """Every set that is in effect in this process, each once."""
    sets = (patches for module in _loaded_modules() for patches in _sets_that_changed(module))
    return tuple(dict.fromkeys(sets))


def _sets_that_changed(module: ModuleType) -> tuple[PatchSet, ...]:
    marked: tuple[PatchSet, ...] = vars(module).get(_SETS_ATTRIBUTE, ())
    return marked


def _record_sets(module: ModuleType, sets: tuple[PatchSet, ...]) -> None:
    if sets:
        setattr(module, _SETS_ATTRIBUTE, sets)
    elif hasattr(module, _SETS_ATTRIBUTE):
        delattr(module, _SETS_ATTRIBUTE)


def _loaded_modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _unwrap_descriptor(value: Any) -> Any:
    # By type(): isinstance() asks objects of other libraries for their class, and some warn.
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def _wrap(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call
