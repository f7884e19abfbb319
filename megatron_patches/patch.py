"""One change of a framework's code as data: target, replacement, reason, guard.

``PatchSet`` verifies and writes them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Final, Literal

from ds_usp.errors import ConfigError
from megatron_patches.guards import NO_GUARD, Guard

ABSENT: Final = object()


@dataclass(frozen=True, eq=False)
class PatchTarget:
    """An attribute of a module, or of a class in it."""

    module: ModuleType
    owner: Any
    name: str

    @classmethod
    def find(cls, target: str) -> PatchTarget:
        """Import the module and look up the attribute's owner, of ``package.module:name`` or
        ``package.module:Class.name``; ImportError, AttributeError without an owner."""
        module_name, _, path = target.partition(":")
        module = importlib.import_module(module_name)
        *outer, name = path.split(".")
        return cls(module, functools.reduce(getattr, outer, module), name)

    def read(self) -> Any:
        """The attribute, descriptors of classes as they are; :data:`ABSENT` without one."""
        owned = self.owned()
        return getattr(self.owner, self.name, ABSENT) if owned is ABSENT else owned

    def owned(self) -> Any:
        """The attribute of the owner itself, not an inherited one; else :data:`ABSENT`."""
        return vars(self.owner).get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        """Set the attribute; :data:`ABSENT` deletes it."""
        if value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True)
class Patch:
    """One attribute of a framework that is changed.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``.
        replacement: the new value. With ``wrap`` a function that gets the original as its first
            argument, then the caller's arguments.
        kind: ``replace`` and ``wrap`` need the target to exist, ``add`` needs it not to.
        also_in: other targets that hold the same object, because they imported it by name.
        guard: what the target must be.
        needs: a package without which there is nothing to patch, and the patch is left out.
        without_gpu: left out where there is a GPU.
        reason: why it is changed, for the table.
        purpose: heading of a table of its own; "": the framework's main table.
        upstream: issue or link of a defect of the framework.

    Raises:
        ConfigError: a target that is not ``module:name``, or an unknown kind.
    """

    target: str
    replacement: Any
    kind: Literal["replace", "wrap", "add"] = "replace"
    also_in: tuple[str, ...] = ()
    guard: Guard = NO_GUARD
    needs: str = ""
    without_gpu: bool = False
    reason: str = ""
    upstream: str = ""
    purpose: str = ""

    def __post_init__(self) -> None:
        for target in (self.target, *self.also_in):
            module, _, path = target.partition(":")
            if not module or not path:
                raise ConfigError(f"{target!r} is no patch target; write package.module:Name.attr")
        if self.kind not in ("replace", "wrap", "add"):
            raise ConfigError(f"{self.target}: kind {self.kind!r} is not replace, wrap or add")

    @property
    def applies(self) -> bool:
        """Whether the package that it needs is installed, and the GPU missing that it replaces."""
        if self.without_gpu:
            import torch  # a parser of flags starts without it

            if torch.cuda.is_available():
                return False
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def mismatches(self) -> Iterator[str]:
        """How the source differs from what this patch was written for, one line each."""
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
            if unwrap_descriptor(alias) is not unwrap_descriptor(original):
                yield f"{target}: is not the same object as {self.target}"
        yield from (
            f"{self.target}: {mismatch}" for mismatch in self.guard.source_mismatches(original)
        )

    def retarget(self, module: str, to: str) -> Patch:
        """This patch for a module that is loaded under another name."""
        name, _, path = self.target.partition(":")
        return replace(self, target=f"{to}:{path}") if name == module else self

    def build(self, original: Any) -> Any:
        """The value that replaces ``original``, which is :data:`ABSENT` where one is added."""
        if self.kind != "wrap":
            return self.replacement
        if isinstance(original, (staticmethod, classmethod)):
            return type(original)(_wrap(original.__func__, self.replacement))
        return _wrap(original, self.replacement)


wrap = partial(Patch, kind="wrap")
add = partial(Patch, kind="add")


@dataclass(frozen=True)
class Bypass:
    """One function that is not replaced, and whose edits are refused.

    Of kind ``bypass`` a patched framework does not call it, or not for all that it computes: an
    edit would have no effect. Of kind ``rely`` the patches compute what is right for its known
    source alone, such as the order of tokens: an edit would make results wrong.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``.
        reason: what computes the same instead; what the patches take from it.
        guard: the source that was known.
        flag: the flag of the framework with which alone it is bypassed; "": always.
        needs: a package without which it is not called, nor looked for.
    """

    target: str
    reason: str
    guard: Guard
    flag: str = ""
    kind: Literal["bypass", "rely"] = "bypass"
    needs: str = ""

    @property
    def applies(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def mismatches(self) -> Iterator[str]:
        """The differences from the known function, one sentence each."""
        edit = "An edit has no effect" if self.kind == "bypass" else "The patches rely on it"
        for line in self.guard.source_mismatches(self.target):
            yield f"{self.target}: {line}. {edit}: {self.reason}"

    def retarget(self, module: str, to: str) -> Bypass:
        """This bypass for a module that is loaded under another name."""
        name, _, path = self.target.partition(":")
        return replace(self, target=f"{to}:{path}") if name == module else self


def unwrap_descriptor(value: Any) -> Any:
    """The function of a static or class method; anything else as it is."""
    # By type(): isinstance() reads __class__ of other libraries' objects, and some of them warn.
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def _wrap(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``replacement`` with the original as its first argument."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call
