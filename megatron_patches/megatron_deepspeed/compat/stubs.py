"""Stubs of packages that Megatron-DeepSpeed imports and training does not need.

Each is installed only where the package is missing; using one raises, with what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ds_usp.errors import ConfigError
from megatron_patches.megatron_deepspeed.compat import apex


@dataclass(frozen=True)
class Stub:
    """A module that may be missing.

    Args:
        name: of the stub module.
        needs: the package whose absence makes it necessary.
        purpose: what Megatron-DeepSpeed uses it for, with the package to install.
        obsolete_after: the module that imports it, after which the stub is removed; "": it stays.
    """

    name: str
    needs: str
    purpose: str
    obsolete_after: str = ""


_HELPERS = "megatron.data.helpers"
_STUBS = (
    Stub(
        "transformers",
        "transformers",
        "tokenizers of Hugging Face: pip install transformers",
        obsolete_after="megatron.tokenizer",
    ),
    Stub(
        "regex",
        "regex",
        "the tokenizer GPT2BPETokenizer: pip install regex",
        obsolete_after="megatron.tokenizer",
    ),
    Stub(
        "six", "six", "the tokenizers of BERT: pip install six", obsolete_after="megatron.tokenizer"
    ),
    Stub(
        "megatron.model.vision.knn_monitor",
        "torchvision",
        "pretraining vision models: pip install torchvision",
    ),
    Stub(
        "deepspeed.compression.compress",
        "deepspeed.compression.compress",
        "compression training, which newer versions of DeepSpeed lack: use deepspeed 0.19.6",
    ),
)


def install_stubs() -> None:
    """Install a stub for every missing package; the checkout must be importable."""
    if _on_cuda() and not _exists("apex"):
        sys.modules.update(apex.modules())
    missing = [row for row in _STUBS if row.name not in sys.modules and not _exists(row.needs)]
    for row in missing:
        sys.modules[row.name] = _MissingModule(row)
    for row in missing:
        if row.obsolete_after:
            importlib.import_module(row.obsolete_after)
            del sys.modules[row.name]
    if _HELPERS not in sys.modules and not _exists(_HELPERS):
        sys.modules[_HELPERS] = _LazyModule(_HELPERS, _build_helpers)


def compile_helpers(original: Callable[[], None]) -> None:
    """``compile_helper``: build the index builder in torch's extension cache instead."""
    helpers = sys.modules.get(_HELPERS)
    if isinstance(helpers, _LazyModule):
        helpers.load()


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
    """Module in place of one that is not installed: it imports, and using an attribute fails.

    Calling or testing an attribute raises ConfigError. Dunder attributes raise AttributeError,
    so that Python's import and inspection work."""

    def __init__(self, row: Stub) -> None:
        super().__init__(row.name, row.purpose)
        self._row = row

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(self._row, name)


class _LazyModule(ModuleType):
    """A module that is built at the first access to an attribute."""

    def __init__(self, name: str, make: Callable[[], ModuleType]) -> None:
        super().__init__(name)
        self._make = make

    def load(self) -> ModuleType:
        module = self._make()
        sys.modules[self.__name__] = module
        return module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)


def _build_helpers() -> ModuleType:
    """Compile and import ``helpers.cpp``, the C++ extension of Megatron's data sets."""
    from megatron.data import __path__ as folders
    from torch.utils import cpp_extension

    # cpp_extension brings pybind11's headers and a lock, so that concurrent ranks build once. Where
    # the compiler links libstdc++ statically its symbols must stay local: mixed with those of the
    # libstdc++ that torch has loaded, printing a number crashes.
    built: ModuleType = cpp_extension.load(
        name="helpers",
        sources=[str(Path(folders[0]) / "helpers.cpp")],
        extra_cflags=["-O3"],
        extra_ldflags=["-Wl,--exclude-libs,ALL"],
    )
    return built


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _on_cuda() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cuda")
