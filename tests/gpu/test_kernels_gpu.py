"""Every kernel of this GPU on tiles and documents, against the reference kernel in fp64."""

import inspect

import pytest
import torch
from fake_flash import SIGNATURES, signature_of
from kernel_cases import attend, tensors

from ds_usp import MaskSpec
from ds_usp.geometry.segments import Segment
from ds_usp.geometry.tiles import KernelCall, kernel_calls_from_tiles, plan_tiles
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.eager import EagerKernel
from ds_usp.kernels.registry import _adapted, _load, available_kernels
from ds_usp.testing import relative_error

SCALE = 0.2
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
KERNELS = [_load(row)[0] for row in available_kernels("cuda")]
DOCUMENTS = [0, 1, 8, 136, 265, 266, 400]
TREE = [(0, 1, None), (1, 8, 0), (8, 136, 1), (136, 265, 1), (265, 266, 3), (266, 400, 3)]
# Queries, keys, the position of the first query (keys begin at 0), the mask.
SHAPES = {
    "causal": (200, 200, 0, MaskSpec.causal()),
    "causal, wide": (70, 200, 130, MaskSpec.causal()),
    "causal, tall": (300, 40, 0, MaskSpec.causal()),
    "full": (130, 67, 500, MaskSpec.causal()),
    "one pair": (1, 1, 0, MaskSpec.causal()),
    "window": (200, 200, 0, MaskSpec.window(33)),
    "window, both sides": (200, 200, 0, MaskSpec.window(33, 9)),
    "window, tall": (230, 40, 0, MaskSpec.window(200)),
    "window, wide": (40, 300, 130, MaskSpec.window(70, 50)),
    "window that leaves": (90, 40, 40, MaskSpec.window(90)),
    "ahead": (128, 128, 0, MaskSpec(None, 17)),
    "ahead, tall": (300, 40, 0, MaskSpec(None, 17)),
    "documents": (400, 400, 0, MaskSpec.causal(DOCUMENTS)),
    "full documents": (400, 400, 0, MaskSpec.full(DOCUMENTS)),
    "documents, the later half": (200, 400, 200, MaskSpec.causal(DOCUMENTS)),
    "a tree": (400, 400, 0, MaskSpec.tree(TREE)),
    "a tree, the later half": (200, 400, 200, MaskSpec.tree(TREE)),
    "windows in documents": (400, 400, 0, MaskSpec.window(33, documents=DOCUMENTS)),
}


def results(kernel, x, shape):  # type: ignore[no-untyped-def]
    """Out, lse and gradients of the queries with these keys alone."""
    rows, columns, start, mask = shape
    segments = [Segment(start, rows)], [Segment(0, columns)]
    tiles = plan_tiles(*segments, mask, kernel.caps.tiles)
    calls = (
        kernel_calls_from_tiles([tiles], rows, columns)
        if mask.documents
        else map(KernelCall.of, tiles)
    )
    return attend(kernel, x, {(0, columns): tuple(calls)}, SCALE)


def check_on_gpu(kernel, dtype, heads, head_dim, shape, limit):  # type: ignore[no-untyped-def]
    rows, columns, _, _ = shape
    x = tensors(heads, head_dim, dtype, rows, columns)
    x = {name: tensor.cuda() for name, tensor in x.items()}
    want = results(EagerKernel(), {name: tensor.double() for name, tensor in x.items()}, shape)
    for name, actual in results(kernel, x, shape).items():
        if want[name].abs().max() > 1e-9:  # nothing flows back to q and k through a single pair
            error = relative_error(actual.cpu(), want[name].cpu())
            assert error <= (1e-5 if name == "lse" else limit), f"{name}: {error}"


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_tile_is_the_references(kernel, dtype, shape, heads):  # type: ignore[no-untyped-def]
    mask = SHAPES[shape][3]
    if dtype not in kernel.caps.dtypes or (mask.left is not None and not kernel.caps.tiles.window):
        pytest.skip("the kernel does not claim it")
    for head_dim in (64, kernel.caps.head_dims.limit or 256):
        check_on_gpu(kernel, dtype, heads, head_dim, SHAPES[shape], TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [8, 32, 40, 56, 72, 80, 96, 112, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_head_dim_that_is_claimed(kernel, head_dim):  # type: ignore[no-untyped-def]
    asked = KernelRequest("cuda", torch.bfloat16, head_dim, MaskSpec.causal())
    if kernel.caps.refusal(asked):
        pytest.skip("the kernel does not claim it")
    padded = _adapted(kernel, asked)
    for heads in ((2, 2), (6, 2)):
        shape = (300, 300, 0, MaskSpec.causal())
        check_on_gpu(padded, torch.bfloat16, heads, head_dim, shape, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dims", [(192, 128), (128, 192), (160, 96), (72, 40)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_values_have_another_head_dim(kernel, dims):  # type: ignore[no-untyped-def]
    asked = KernelRequest("cuda", torch.bfloat16, dims[0], MaskSpec.causal(), value_dim=dims[1])
    padded = _adapted(kernel, asked)
    for heads in ((2, 2), (6, 2)):
        shape = (300, 300, 0, MaskSpec.causal())
        check_on_gpu(padded, torch.bfloat16, heads, dims, shape, TOLERANCE[torch.bfloat16])


# eager is cuBLAS's, which torch lets be deterministic by an environment variable at start only.
EXACT = [kernel for kernel in KERNELS if kernel.caps.deterministic and kernel.name != "eager"]


@pytest.mark.parametrize("kernel", EXACT, ids=lambda kernel: kernel.name)
def test_a_deterministic_backward_repeats_its_bits(kernel):  # type: ignore[no-untyped-def]
    shape = (2048, 2048, 0, MaskSpec.causal())
    x = tensors((8, 2), 128, torch.bfloat16, 2048)
    x = {name: tensor.cuda() for name, tensor in x.items()}
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (results(kernel, x, shape) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("version", SIGNATURES)
def test_the_stub_signatures_are_the_librarys(version):
    """Every parameter of the newest stub of an installed library is one of the library's own."""
    name, number = version.split()
    if version != max(other for other in SIGNATURES if other.split()[0] == name):
        pytest.skip("a newer version is known")
    interface = {"flash_attn": ".flash_attn_interface", "flash_attn.cute": ".interface"}
    library = pytest.importorskip(name + interface.get(name, ""), exc_type=ImportError)
    for function, parameters in SIGNATURES[version].items():
        real = getattr(library, function)
        real = inspect.signature(getattr(real, "_init_fn", real)).parameters
        assert set(signature_of(parameters).parameters) <= set(real), (function, number)
