"""Modules in place of packages that the host imports and training does not need.

Each goes in only where the real one is missing. What is called all the same says what to install.
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
from megatron_patches.megatron_deepspeed import apex


@dataclass(frozen=True)
class Stub:
    """One module that may be missing.

    Args:
        name: of the module that is put in.
        needs: the package whose absence makes it necessary.
        purpose: what the host uses it for, with the package to install.
        until: the module whose import needs it; afterwards nobody else shall see it. "": it stays.
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
    """Put a stand-in wherever a package is missing; the checkout must be importable."""
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
    """Instead of ``make`` in the checkout: build its index builder in torch's extension cache."""
    helpers = sys.modules.get(_HELPERS)
    if isinstance(helpers, _LazyModule):
        helpers.load()


class _Missing:
    """A name of a package that is not there; any use of it says so."""

    def __init__(self, row: Stub, name: str) -> None:
        self._row, self._name = row, name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{self._row.needs} is not installed, and {self._row.name}.{self._name} was used. It "
            f"serves {self._row.purpose}"
        )

    __call__ = __bool__ = __getattr__ = _refuse


class _MissingModule(ModuleType):
    def __init__(self, row: Stub) -> None:
        super().__init__(row.name, row.purpose)
        self._row = row

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(self._row, name)


class _LazyModule(ModuleType):
    """A module that is made when something of it is asked for."""

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
    from megatron.data import __path__ as folders
    from torch.utils import cpp_extension

    # torch brings pybind11's headers and a lock: ranks that come together build once. Where the
    # compiler puts libstdc++ into the module, its symbols must stay there: beside the libstdc++
    # that torch has loaded, half of one and half of the other print no number without a crash.
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
