"""Changes to a host's code as data: checked together, applied together, taken back together."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

from ds_usp.errors import ConfigError, PatchError
from megatron_patches.guards import NO_GUARD, Guard

UNCHECKED_FLAG = "--usp-unchecked-host"
_MARK = "__ds_usp_patches__"  # on a changed module: the sets that changed it
_ABSENT = object()


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
        for place in (self.target, *self.also_in):
            module, _, path = place.partition(":")
            if not module or not path:
                raise ConfigError(f"{place!r} is no place to patch; write package.module:Name.attr")
        if self.kind not in ("replace", "wrap", "add"):
            raise ConfigError(f"{self.target}: kind {self.kind!r} is not replace, wrap or add")

    @property
    def applies(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def mismatches(self) -> Iterator[str]:
        """Everything that keeps this patch from fitting the host, one line each."""
        try:
            original = Place.find(self.target).read()
            others = [(place, Place.find(place).read()) for place in self.also_in]
        except (ImportError, AttributeError) as error:
            yield f"{self.target}: {type(error).__name__}: {error}"
            return
        if self.kind == "add":
            if original is not _ABSENT:
                yield f"{self.target}: exists already, and would be hidden"
            return
        if original is _ABSENT:
            yield f"{self.target}: does not exist"
            return
        if self.kind == "wrap" and isinstance(original, type):
            yield f"{self.target}: is a class; wrap one of its methods or replace it"
        for place, other in others:
            if _plain(other) is not _plain(original):
                yield f"{place}: is not the same object as {self.target}"
        yield from (f"{self.target}: {each}" for each in self.guard.mismatches(original))

    def moved(self, module: str, to: str) -> Patch:
        """The same patch for a module that is loaded under another name."""
        name, _, path = self.target.partition(":")
        return replace(self, target=f"{to}:{path}") if name == module else self

    def made(self, original: Any) -> Any:
        """What is put in place of ``original``."""
        if self.kind != "wrap":
            return self.replacement
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(_wrapped(original.__func__, self.replacement))
        return _wrapped(original, self.replacement)


@dataclass(frozen=True, eq=False)
class Place:
    """An attribute of a module or of a class in it."""

    module: ModuleType
    owner: Any
    name: str

    @classmethod
    def find(cls, place: str) -> Place:
        """Import the module and walk to the attribute's owner."""
        module_name, _, path = place.partition(":")
        module = importlib.import_module(module_name)
        *outer, name = path.split(".")
        return cls(module, functools.reduce(getattr, outer, module), name)

    def read(self) -> Any:
        """What is there, descriptors of classes as they are; a mark for nothing."""
        own = vars(self.owner).get(self.name, _ABSENT)
        return getattr(self.owner, self.name, _ABSENT) if own is _ABSENT else own

    def own(self) -> Any:
        """What the owner holds itself, not by inheritance."""
        return vars(self.owner).get(self.name, _ABSENT)

    def write(self, value: Any) -> None:
        """Put ``value`` there, or nothing."""
        if value is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class PatchSet:
    """Patches that go in together or not at all.

    Args:
        host: the name that messages use.
        patches: in the order in which they are applied.
        later: patches of a script that runs as ``__main__``, for :meth:`apply_later`.

    A set that changed a module is written on that module, so that :func:`applied_sets` finds it
    without a list on the side.
    """

    def __init__(self, host: str, patches: Iterable[Patch], later: Iterable[Patch] = ()) -> None:
        self.host = host
        self.patches, self.later = tuple(patches), tuple(later)
        self._undo: list[tuple[Place, Any]] = []
        self._unchecked = False

    def verify(self, patches: Iterable[Patch] | None = None) -> None:
        """Compare every target with its guard; change nothing.

        Args:
            patches: others than those that :meth:`apply` applies.

        Raises:
            PatchError: with all mismatches.
        """
        compared = self.patches if patches is None else patches
        found = [line for patch in compared if patch.applies for line in patch.mismatches()]
        if found:
            raise PatchError(
                f"{self.host} is not the code that these patches were written for:\n"
                + "".join(f"  {line}\n" for line in found)
                + "Use the versions in `python -m megatron_patches --host "
                f"{self.host} --table`, or proceed at your own risk with {UNCHECKED_FLAG} "
                "(unchecked=True)."
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
        self._apply(self.patches)

    def apply_later(self) -> None:
        """Change the script too, once it runs. A second time changes nothing.

        Raises:
            PatchError: a script that does not match.
        """
        done = {place.module.__name__ for place, _ in self._undo}
        self._apply(p for p in self.later if p.target.partition(":")[0] not in done)

    def _apply(self, given: Iterable[Patch]) -> None:
        patches = tuple(patch for patch in given if patch.applies)
        if not self._unchecked:
            self.verify(patches)
        kept = len(self._undo)
        try:
            for patch in patches:
                self._apply_one(patch)
        except Exception as error:
            self._restore(kept)
            raise PatchError(f"{self.host}: {error}. Nothing was changed") from error

    def restore(self) -> None:
        """Put back what was there, last change first."""
        self._restore(0)

    def _restore(self, keep: int) -> None:
        modules = {place.module for place, _ in self._undo}
        while len(self._undo) > keep:
            place, before = self._undo.pop()
            place.write(before)
        for module in modules - {place.module for place, _ in self._undo}:
            _mark(module, tuple(each for each in _sets_on(module) if each is not self))

    def stale(self) -> tuple[str, ...]:
        """Names in loaded modules that still hold what was replaced. A module that was replaced is
        another one in that place alone: all the others hold it rightly."""
        replaced = (x for _, x in self._undo if x is not _ABSENT and not isinstance(x, ModuleType))
        old = set(map(id, map(_plain, replaced)))
        return tuple(
            f"{module.__name__}:{name}"
            for module in _loaded()
            for name, value in list(vars(module).items())
            if id(_plain(value)) in old
        )

    def _apply_one(self, patch: Patch) -> None:
        place = Place.find(patch.target)
        original = place.read()
        if original is _ABSENT and patch.kind != "add":
            raise AttributeError(f"{patch.target} does not exist")
        made = patch.made(original)
        for each in (place, *map(Place.find, patch.also_in)):
            before = each.own()
            each.write(made)
            self._undo.append((each, before))
            _mark(each.module, (*(x for x in _sets_on(each.module) if x is not self), self))

    def _refuse_second(self) -> None:
        mine = {patch.target for patch in self.patches}
        for other in applied_sets():
            both = sorted(mine & {patch.target for patch in other.patches})
            if other is self or both:
                raise PatchError(
                    f"{self.host} is patched already (by host {other.host}"
                    + (f", {both[0]} and {len(both) - 1} more" if both else "")
                    + "). Call megatron_patches.restore() before you apply again."
                )


def applied_sets() -> tuple[PatchSet, ...]:
    """Every set that is in effect in this process, each once."""
    found = (each for module in _loaded() for each in _sets_on(module))
    return tuple(dict.fromkeys(found))


def _sets_on(module: ModuleType) -> tuple[PatchSet, ...]:
    marked: tuple[PatchSet, ...] = vars(module).get(_MARK, ())
    return marked


def _mark(module: ModuleType, sets: tuple[PatchSet, ...]) -> None:
    if sets:
        setattr(module, _MARK, sets)
    elif hasattr(module, _MARK):
        delattr(module, _MARK)


def _loaded() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _plain(value: Any) -> Any:
    # By type(): isinstance() asks objects of other libraries for their class, and some warn.
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def _wrapped(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call
