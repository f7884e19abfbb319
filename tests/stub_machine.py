"""A GPU machine with stub libraries, and the kernels that use them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_flash import ATEN, library
from torch import library as operators

from ds_usp.kernels import registry
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.efficient import EfficientKernel
from ds_usp.kernels.flash2 import Flash2Kernel
from ds_usp.kernels.flash3 import Flash3Kernel
from ds_usp.kernels.flash4 import Flash4Kernel


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


@dataclass
class Machine:
    """What a GPU machine has: a generation, libraries, kernels in torch."""

    patch: pytest.MonkeyPatch

    def gpu(self, major: int, minor: int = 0) -> None:
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        # torch 2.14 compares cuDNN with each GPU that there is, of which one without any has none.
        self.patch.setattr(torch.cuda, "device_count", lambda: 1)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    def torch_flash(self, available: bool) -> None:
        self.patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: available)

    def install(self, name: str, package: ModuleType | None) -> None:
        self.patch.setitem(sys.modules, name, package)

    def flash_attn(self, version: str, functions: dict[str, Callable[..., Any]]) -> None:
        interface = module("interface", **functions)
        package = module("flash_attn", __version__=version, flash_attn_interface=interface)
        self.install("flash_attn", package)

    def flash3(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.install("flash_attn_interface", module("flash_attn_interface", **functions))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A Hopper GPU with no library, and a torch whose CUDA kernels run on the CPU."""
    caches = (registry.select_kernel, registry.missing_libraries, registry._load)
    made = Machine(monkeypatch)
    made.gpu(9)
    made.torch_flash(True)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface"):
        made.install(name, None)
    made.install("flash_attn_interface", None)
    for cache in caches:
        cache.cache_clear()
    with operators._scoped_library("aten", "IMPL") as kernels:
        for name, function in ATEN.items():
            kernels.impl(name, function, "CPU")
        yield made
    for cache in caches:
        cache.cache_clear()


def flash2_package_26(machine: Machine) -> AttentionKernel:
    machine.flash_attn("2.6.3+cu123", library("flash_attn 2.6"))
    return Flash2Kernel()


def flash2_package_28(machine: Machine) -> AttentionKernel:
    machine.torch_flash(False)
    machine.flash_attn("2.8.3.post1", library("flash_attn 2.8"))
    return Flash2Kernel()


def flash2_in_torch(machine: Machine) -> AttentionKernel:
    return Flash2Kernel()


def flash3_old(machine: Machine) -> AttentionKernel:
    machine.flash3(library("flash_attn_interface 2025"))
    return Flash3Kernel()


def flash3_new(machine: Machine) -> AttentionKernel:
    machine.flash3(library("flash_attn_interface 2026"))
    return Flash3Kernel()


def flash4(machine: Machine, **helpers: object) -> AttentionKernel:
    helpers = helpers or {"create_softcap_scoremod_bwd": None}
    utils = module("flash_attn.cute.utils", **helpers)
    functions = library("flash_attn.cute 4.0")
    interface = module("flash_attn.cute.interface", utils=utils, **functions)
    package = module("flash_attn.cute", interface=interface)
    machine.install("flash_attn", module("flash_attn", cute=package))
    machine.install("flash_attn.cute", package)
    return Flash4Kernel()


def efficient(machine: Machine) -> AttentionKernel:
    return EfficientKernel()


FLASH2 = (flash2_package_26, flash2_package_28, flash2_in_torch)
MAKERS = (*FLASH2, flash3_old, flash3_new, flash4, efficient)
