"""Modules that a framework imports, that are not installed, and that training does not need.

A stub is installed only where the package is missing; using one raises, with what to install.
``prepare`` of a framework installs them in each process, and ``restore`` leaves them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ds_usp.errors import ConfigError


@dataclass(frozen=True)
class Stub:
    """A module that may be missing.

    Args:
        name: of the stub module.
        needs: the package whose absence makes it necessary.
        purpose: what the framework uses it for, with the package to install.
        obsolete_after: the module that imports it, imported at once; then the stub is removed; "":
            it stays.
    """

    name: str
    needs: str
    purpose: str
    obsolete_after: str = ""


def install_stubs(stubs: Sequence[Stub]) -> None:
    """Install a stub for every missing package; the framework must be importable."""
    missing = [row for row in stubs if row.name not in sys.modules and not exists(row.needs)]
    for row in missing:
        sys.modules[row.name] = _MissingModule(row)
    for row in missing:
        if row.obsolete_after:
            importlib.import_module(row.obsolete_after)
            del sys.modules[row.name]


def install_extension(name: str, source: str) -> None:
    """Let a C++ extension of a framework be built when it is first used, outside the checkout.

    Args:
        name: of its module, in a package that is importable; nothing is done where it was built.
        source: its file, in the folder of that package.
    """
    if name not in sys.modules and not exists(name):
        sys.modules[name] = _LazyModule(name, lambda: _build(name, source))


def load_extension(name: str) -> None:
    """Build and load an extension of :func:`install_extension` now; nothing where it is there."""
    module = sys.modules.get(name)
    if isinstance(module, _LazyModule):
        module.load()


class _Missing:
    """An attribute of a missing package; any use raises."""

    def __init__(self, row: Stub, name: str) -> None:
        self._row, self._name = row, name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{self._row.needs} is not installed, and {self._row.name}.{self._name} was used. It "
            f"serves {self._row.purpose}"
        )

    __call__ = __bool__ = __getattr__ = _refuse


class _MissingModule(ModuleType):
    """Module in place of one that is not installed: it imports, and calling or testing an attribute
    raises ConfigError. Dunder ones raise AttributeError, so that import and inspection work."""

    def __init__(self, row: Stub) -> None:
        super().__init__(row.name, row.purpose)
        self._row = row

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(self._row, name)


class _LazyModule(ModuleType):
    """A module that is built at the first access to an attribute, or by ``import *``."""

    def __init__(self, name: str, make: Callable[[], ModuleType]) -> None:
        super().__init__(name)
        self._make = make

    def load(self) -> ModuleType:
        module = self._make()
        sys.modules[self.__name__] = module
        return module

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [public for public in vars(self.load()) if not public.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)


def _build(name: str, source: str) -> ModuleType:
    """Compile and import a C++ extension in torch's extension cache, one rank at a time."""
    from torch.utils import cpp_extension

    package, _, module = name.rpartition(".")
    folder = importlib.import_module(package).__path__[0]
    # Where the compiler links libstdc++ statically its symbols must stay local: mixed with those of
    # the libstdc++ that torch has loaded, printing a number crashes.
    return cpp_extension.load(
        name=module,
        sources=[str(Path(folder) / source)],
        extra_cflags=["-O3"],
        extra_ldflags=["-Wl,--exclude-libs,ALL"],
    )


def exists(name: str) -> bool:
    """Whether a module is loaded or can be found."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False
