"""Kernels whose libraries need a GPU, on libraries that compute on CPUs (fake_flash.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import fake_flash
import oracle
import pytest
import torch
from test_kernels import (
    BLOCKS,
    HEADS,
    SPLITS,
    TOKENS,
    VIEWS,
    Block,
    blockwise,
    check,
    run_tile,
    serves,
    tensors,
    truth,
)
from test_packed_kernels import PACKED, check_packed, packed_calls
from torch import library as operators

from ds_usp import MaskSpec
from ds_usp.geometry.tiles import Tile
from ds_usp.kernels import registry
from ds_usp.kernels.api import AttentionKernel, KernelRequest, UnsuitableDeviceError
from ds_usp.kernels.efficient import EfficientKernel
from ds_usp.kernels.flash2 import Flash2Kernel
from ds_usp.kernels.flash3 import Flash3Kernel
from ds_usp.kernels.flash4 import Flash4Kernel
from ds_usp.kernels.varlen import SignatureAdapter

# The libraries here compute fp32 too, so a wrong argument does not hide behind a rounding.
TOLERANCE = 2e-6
CAUSAL = MaskSpec.causal()
ATEN = {
    "_flash_attention_forward": fake_flash.torch_flash_forward,
    "_flash_attention_backward": fake_flash.torch_flash_backward,
    "_efficient_attention_forward": fake_flash.torch_efficient_forward,
    "_efficient_attention_backward": fake_flash.torch_efficient_backward,
}
LIBRARIES = ("flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface")


@dataclass
class Machine:
    """What a GPU machine has: a generation, libraries, kernels in torch."""

    patch: pytest.MonkeyPatch

    def gpu(self, major: int, minor: int = 0) -> None:
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    def torch_flash(self, there: bool) -> None:
        known = torch.backends.cuda
        self.patch.setattr(known, "is_flash_attention_available", lambda: there)

    def install(self, name: str, found: ModuleType | None) -> None:
        self.patch.setitem(sys.modules, name, found)

    def flash_attn(
        self, version: str, forward: Callable, backward: Callable, *varlen: Callable
    ) -> None:
        names = ("forward", "backward", "varlen_forward", "varlen_backward")
        functions = zip(names, (forward, backward, *varlen), strict=False)
        members = {f"_flash_attn_{name}": function for name, function in functions}
        library = fake_flash.module("interface", **members)
        package = fake_flash.module("flash_attn", __version__=version, flash_attn_interface=library)
        self.install("flash_attn", package)

    def flash3(self, forward: Callable, backward: Callable) -> None:
        members = {"_flash_attn_forward": forward, "_flash_attn_backward": backward}
        self.install("flash_attn_interface", fake_flash.module("flash_attn_interface", **members))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A Hopper GPU with no library, and a torch whose CUDA kernels run on the CPU."""
    caches = (registry.select_kernel, registry.missing_libraries, registry._load)
    made = Machine(monkeypatch)
    made.gpu(9)
    made.torch_flash(True)
    for name in (*LIBRARIES, "flash_attn_interface"):
        made.install(name, None)
    for cache in caches:
        cache.cache_clear()
    with operators._scoped_library("aten", "IMPL") as kernels:
        for name, function in ATEN.items():
            kernels.impl(name, function, "CPU")
        yield made
    for cache in caches:
        cache.cache_clear()


def flash2_package_26(machine: Machine) -> AttentionKernel:
    varlen = fake_flash.varlen_forward_26, fake_flash.varlen_backward_26
    machine.flash_attn("2.6.3+cu123", fake_flash.forward_26, fake_flash.backward_26, *varlen)
    return Flash2Kernel()


def flash2_package_28(machine: Machine) -> AttentionKernel:
    machine.torch_flash(False)
    varlen = fake_flash.varlen_forward_28, fake_flash.varlen_backward_28
    machine.flash_attn("2.8.3.post1", fake_flash.forward_28, fake_flash.backward_28, *varlen)
    return Flash2Kernel()


def flash2_in_torch(machine: Machine) -> AttentionKernel:
    return Flash2Kernel()


def flash3_old(machine: Machine) -> AttentionKernel:
    machine.flash3(fake_flash.forward_3_old, fake_flash.backward_3_old)
    return Flash3Kernel()


def flash3_new(machine: Machine) -> AttentionKernel:
    machine.flash3(fake_flash.forward_3, fake_flash.backward_3)
    return Flash3Kernel()


def flash4(machine: Machine, **helpers: object) -> AttentionKernel:
    helpers = helpers or {"create_softcap_scoremod_bwd": None}
    functions = {"_flash_attn_fwd": fake_flash.forward_4, "_flash_attn_bwd": fake_flash.backward_4}
    utils = fake_flash.module("flash_attn.cute.utils", **helpers)
    interface = fake_flash.module("flash_attn.cute.interface", utils=utils, **functions)
    package = fake_flash.module("flash_attn.cute", interface=interface)
    machine.install("flash_attn", fake_flash.module("flash_attn", cute=package))
    machine.install("flash_attn.cute", package)
    return Flash4Kernel()


def efficient(machine: Machine) -> AttentionKernel:
    return EfficientKernel()


Make = Callable[[Machine], AttentionKernel]
MAKERS = (
    flash2_package_26, flash2_package_28, flash2_in_torch, flash3_old, flash3_new, flash4,
    efficient,
)  # fmt: skip
every_library = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


@every_library
@pytest.mark.parametrize("name", BLOCKS)
def test_a_tile_is_the_oracles(machine: Machine, make: Make, name: str) -> None:
    kernel, block = make(machine), BLOCKS[name]
    windowed = block.left is not None
    if (windowed and not kernel.caps.tiles.window) or not serves(kernel, block):
        assert name not in {"everything", "full", "causal", "causal inside", "causal rectangle"}
        return
    rows, columns = (
        slice(block.tile.q_start, block.tile.q_stop),
        slice(block.tile.k_start, block.tile.k_stop),
    )
    for heads in HEADS.values():
        x = tensors(heads, 16, torch.float32, TOKENS)
        got = run_tile(kernel, x, block.tile, scale=0.3)
        check(got, truth(x, block.allowed, 0.3, rows, columns), TOLERANCE)


@every_library
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "mask", [CAUSAL, MaskSpec.full(), MaskSpec(None, 3), MaskSpec(3, 2)], ids=str
)
def test_blocks_use_the_log_sum_exp_of_all(
    machine: Machine, make: Make, split: str, mask: MaskSpec
) -> None:
    kernel = make(machine)
    if mask.left is not None and not kernel.caps.tiles.window:
        return
    x = tensors(HEADS["GQA"], 16, torch.float32, 24)
    want = truth(x, oracle.window(range(24), range(24), mask.left, mask.right), 0.25)
    check(blockwise(kernel, x, SPLITS[split], mask), want, TOLERANCE)


@every_library
@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_same_as_copies(machine: Machine, make: Make, view: str) -> None:
    kernel, block = make(machine), BLOCKS["causal inside"]
    x = tensors(HEADS["GQA"], 16, torch.float32, TOKENS)
    viewed = {name: VIEWS[view](each) for name, each in x.items()}
    got, want = (run_tile(kernel, each, block.tile, 0.25) for each in (viewed, x))
    check(got, want, TOLERANCE)


@every_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_have_the_inputs_dtype(machine: Machine, make: Make, dtype: torch.dtype) -> None:
    x = tensors(HEADS["MQA"], 16, dtype, TOKENS)
    got = run_tile(make(machine), x, BLOCKS["causal"].tile, 0.3)
    assert got["lse"].dtype == torch.float32
    assert {got[name].dtype for name in ("out", "dq", "dk", "dv")} == {dtype}
    check(got, truth(x, BLOCKS["causal"].allowed, 0.3), 1e-2)


@pytest.mark.parametrize("make", [flash2_package_26, flash2_package_28, flash2_in_torch])
def test_flash2_reads_tall_bands_wrongly_and_is_not_asked(machine: Machine, make: Make) -> None:
    # 10 queries, of which the first sees 1 of 4 keys and the fourth all.
    kernel, tile = make(machine), Tile(0, 10, 0, 4, -9, 0)
    block = Block(10, 4, None, 6)
    assert block.tile == tile and not serves(kernel, block)
    x = tensors(HEADS["MHA"], 16, torch.float32, TOKENS)
    got = run_tile(kernel, x, tile, 0.3)
    want = truth(x, block.allowed, 0.3, slice(10), slice(4))
    assert oracle.relative_error(got["out"], want["out"]) > 0.1


@every_library
@pytest.mark.parametrize("case", PACKED)
def test_documents_are_the_references(machine: Machine, make: Make, case: str) -> None:
    check_packed(make(machine), PACKED[case], torch.float32, TOLERANCE)


@pytest.mark.parametrize("make", [each for each in MAKERS if each is not efficient])
def test_documents_are_one_library_call(machine: Machine, make: Make) -> None:
    kernel, calls = make(machine), []
    assert kernel.caps.varlen
    inner = kernel.tile_forward  # type: ignore[attr-defined]

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return inner(*args, **kwargs)

    machine.patch.setattr(kernel, "tile_forward", counted)
    check_packed(kernel, PACKED["documents of each sample"], torch.float32, TOLERANCE)
    assert len(calls) == len(packed_calls(kernel, PACKED["documents of each sample"]))


# ------------------------------------------------------------------ which library is taken


@pytest.mark.parametrize(
    ("version", "functions"),
    [
        ("2.5.9.post1", (fake_flash.forward_26, fake_flash.backward_26)),
        ("2.6.0.dev1", (fake_flash.forward_26, fake_flash.backward_26)),
        ("2.10.0", (fake_flash.forward_28, lambda dout, q, k, v: None)),
    ],
)
def test_flash2_is_torchs_where_the_package_is_not_one_that_is_known(
    machine: Machine, version: str, functions: tuple[Callable, Callable]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the package was called")

    forward, backward = functions
    machine.flash_attn(version, forward, backward)
    kernel = Flash2Kernel()
    machine.patch.setattr(SignatureAdapter, "__call__", refuse)
    run_tile(kernel, tensors((2, 2), 16, torch.float32, TOKENS), BLOCKS["causal"].tile, 0.3)


def test_flash_attn_4_alone_is_not_flash_attn_2(machine: Machine) -> None:
    machine.install("flash_attn", fake_flash.module("flash_attn", __path__=[]))
    machine.patch.delitem(sys.modules, "flash_attn.flash_attn_interface")
    assert type(Flash2Kernel()._library).__name__ == "_TorchFlash"
    machine.torch_flash(False)
    with pytest.raises(ImportError, match="neither flash-attn is here nor"):
        Flash2Kernel()


def test_a_function_without_a_parameter_is_refused_by_its_name(machine: Machine) -> None:
    def forward(q, k, v, softmax_scale, causal, window_size):  # type: ignore[no-untyped-def]
        """As before 2025, with the log-sum-exp elsewhere."""

    machine.flash3(forward, fake_flash.backward_3)
    with pytest.raises(ImportError, match=r"forward of this version has no parameter .*num_splits"):
        Flash3Kernel()
    machine.flash3(fake_flash.forward_3, fake_flash.forward_3)
    with pytest.raises(ImportError, match=r"no parameter .*dout, out, softmax_lse, dq, dk, dv"):
        Flash3Kernel()


@pytest.mark.parametrize(
    ("kernel", "generation", "needs"),
    [
        (Flash3Kernel, (8, 9), "9.x, this one has 8.9"),
        (Flash3Kernel, (10, 0), "9.x, this one has 10.0"),
        (Flash2Kernel, (7, 5), "8.0, this one has 7.5"),
        (EfficientKernel, (3, 7), "5.0, this one has 3.7"),
    ],
)
def test_other_generations_are_refused(
    machine: Machine, kernel: type[AttentionKernel], generation: tuple[int, int], needs: str
) -> None:
    machine.gpu(*generation)
    with pytest.raises(UnsuitableDeviceError, match=needs):
        kernel()


def asked(dtype: torch.dtype, mask: MaskSpec = CAUSAL, head_dim: int = 64) -> KernelRequest:
    return KernelRequest("cuda", dtype, head_dim, mask)


def test_bf16_begins_with_ampere(machine: Machine) -> None:
    machine.gpu(7, 5)
    assert registry.select_kernel(asked(torch.bfloat16)).name == "eager"
    assert registry.select_kernel(asked(torch.float16)).name == "efficient"
    assert registry.select_kernel(asked(torch.float32)).name == "efficient"
    assert registry.select_kernel(asked(torch.float32, MaskSpec.window(3))).name == "eager"
    assert torch.bfloat16 in EfficientKernel.caps.dtypes


def test_missing_libraries_are_named_and_unsuitable_devices_are_not(machine: Machine) -> None:
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    text = registry.missing_libraries(asked(torch.bfloat16))
    assert text is not None and "\n" not in text
    assert text.startswith(
        "attention runs on the kernel cudnn; faster ones cannot be used: flash4 ("
    )
    assert "flash3 (" in text and "flash2" not in text
    # No library takes fp32 or head dim 256 and windows better than what runs.
    assert registry.missing_libraries(asked(torch.float32)) is None


def test_an_older_gpu_misses_nothing(machine: Machine) -> None:
    machine.gpu(8)
    assert registry.select_kernel(asked(torch.bfloat16)).name == "flash2"
    assert registry.missing_libraries(asked(torch.bfloat16)) is None


def test_a_cpu_misses_nothing(machine: Machine) -> None:
    for dtype in (torch.float32, torch.float16):
        assert registry.missing_libraries(KernelRequest("cpu", dtype, 64, CAUSAL)) is None


def test_documents_go_to_a_kernel_that_takes_them_in_one_call(machine: Machine) -> None:
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    plain = asked(torch.bfloat16)
    packed = replace(plain, documents=True)
    assert registry.select_kernel(plain).name == "cudnn"
    assert registry.select_kernel(packed).name == "flash2"
    assert registry.select_kernel(packed, "cudnn").name == "cudnn", "one by one, if asked for"
    assert registry.select_kernel(replace(packed, dtype=torch.float32)).name == "efficient"
    text = registry.missing_libraries(packed)
    assert text is not None and "cudnn" not in text and "flash3 (" in text


def test_flash3_comes_before_cudnn(machine: Machine) -> None:
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    machine.flash3(fake_flash.forward_3, fake_flash.backward_3)
    assert registry.select_kernel(asked(torch.bfloat16)).name == "flash3"
    assert registry.select_kernel(asked(torch.bfloat16, MaskSpec.window(3), 256)).name == "flash3"
    text = registry.missing_libraries(asked(torch.bfloat16))
    assert text is not None and "flash4 (" in text and "flash3 (" not in text
    assert registry.missing_libraries(asked(torch.bfloat16, head_dim=256)) is None
