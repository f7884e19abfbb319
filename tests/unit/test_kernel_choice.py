"""Which kernel serves a request on which machine, why others do not; what stands in for CUDA."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_flash import BACKWARD, FORWARD, library
from kernel_cases import BLOCKS, TOKENS, check_block, run_tile, tensors
from stub_machine import MAKERS, efficient, flash2_in_torch, flash4, module

import ds_usp
from ds_usp import MaskSpec, UnsupportedAttentionError, lowlevel
from ds_usp.comm import copy_engine
from ds_usp.kernels import registry
from ds_usp.kernels.api import KernelRequest, PaddedHeadDimKernel, UnsuitableDeviceError
from ds_usp.kernels.efficient import EfficientKernel
from ds_usp.kernels.flash2 import Flash2Kernel
from ds_usp.kernels.flash3 import Flash3Kernel
from ds_usp.kernels.registry import AUTO, KERNELS, KernelEntry, missing_libraries, select_kernel
from ds_usp.kernels.varlen import SignatureAdapter
from ds_usp.settings import setting
from megatron_patches import PatchSet
from megatron_patches.megatron_core import without_apex
from megatron_patches.megatron_core.cpu_patch_table import training_without_gpu, without_gpu

CAUSAL, WINDOW = MaskSpec.causal(), MaskSpec.window(3)


def request(dtype: torch.dtype, head_dim: int = 16, device: str = "cpu") -> KernelRequest:
    return KernelRequest(device, dtype, head_dim, WINDOW)


def on_gpu(dtype: torch.dtype, mask: MaskSpec = CAUSAL, head_dim: int = 64) -> KernelRequest:
    return KernelRequest("cuda", dtype, head_dim, mask)


def test_the_registrys_names_are_the_kernels():
    for entry in KERNELS:
        kernel, reason = registry._load(entry)
        assert (kernel is None) != (reason is None)
        assert kernel is None or kernel.name == entry.name
    assert setting("kernel").kind.values == (AUTO, *(entry.name for entry in KERNELS))


@pytest.mark.parametrize(
    ("wanted", "name", "chosen"),
    [
        (request(torch.float32), AUTO, "sdpa"),
        (request(torch.float64, 3), AUTO, "sdpa"),
        (request(torch.float16), AUTO, "eager"),
        (request(torch.float32), "eager", "eager"),
        (request(torch.float32, 128, "cuda"), AUTO, "eager"),
        (request(torch.float32, 16, "xpu"), AUTO, "eager"),
    ],
    ids=str,
)
def test_auto_takes_the_best_that_serves(wanted, name, chosen):
    assert select_kernel(wanted, name).name == chosen


def test_no_kernel_lists_every_reason(monkeypatch):
    entry = KernelEntry("missing", "ds_usp.kernels.missing", "MissingKernel")
    monkeypatch.setattr(registry, "KERNELS", (*KERNELS, entry))
    with pytest.raises(UnsupportedAttentionError) as caught:
        select_kernel(KernelRequest("cpu", torch.int8, 24, CAUSAL))
    lines = str(caught.value).splitlines()
    assert all(word in lines[0] for word in ("torch.int8", "cpu", "24", "causal"))
    reasons = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert list(reasons) == [entry.name for entry in registry.KERNELS]
    assert reasons["flash2"] == "runs on cuda, not cpu"
    assert reasons["eager"] == "takes bfloat16, float16, float32, float64, not int8"
    assert reasons["missing"].startswith("cannot be imported: No module named")


@pytest.mark.parametrize(
    ("wanted", "name", "reason"),
    [
        (request(torch.bfloat16, 12, "cuda"), "flash2", "multiples of 8, not 12"),
        (request(torch.bfloat16, 264, "cuda"), "flash2", "up to 256, not 264"),
        (request(torch.float32), "flash9", "'flash9'; there are auto, flash4, .*, eager"),
    ],
    ids=str,
)
def test_a_named_kernel_that_cannot_says_why(wanted, name, reason):
    with pytest.raises(UnsupportedAttentionError, match=reason):
        select_kernel(wanted, name)


def test_only_kernels_that_declare_a_soft_cap_are_taken():
    plain = replace(request(torch.float32), value_dim=8)
    wanted = replace(plain, softcap=2.0, deterministic=True)
    assert (select_kernel(plain).name, select_kernel(wanted).name) == ("sdpa", "eager")
    with pytest.raises(UnsupportedAttentionError, match="sdpa: has no softcap") as caught:
        select_kernel(wanted, "sdpa")
    text = "head dim 16 (values 8) and a window(3, 0) mask, softcap 2.0, deterministic"
    assert text in str(caught.value)


@pytest.fixture
def forget_kernels() -> Iterator[Callable[[], None]]:
    def forget() -> None:
        for cached in (registry._load, select_kernel, missing_libraries):
            cached.cache_clear()

    yield forget
    forget()


@pytest.mark.parametrize(
    ("version", "name"), [("2.6.0+cu124", "eager"), ("2.8.1", "eager"), ("2.9.0", "sdpa")]
)
def test_torch_without_grouped_heads_on_cpus_takes_the_eager_kernel(
    version, name, monkeypatch, forget_kernels
):
    monkeypatch.setattr(torch, "__version__", version)
    forget_kernels()
    assert select_kernel(request(torch.float32)).name == name
    advice = missing_libraries(request(torch.float32)) or ""
    reason = f"sdpa (needs torch 2.9, for grouped heads; not {version})"
    assert (reason in advice) == (name == "eager")


# ------------------------------------------------------------------ libraries


@pytest.mark.parametrize("make", MAKERS)
def test_all_flash_kernels_but_torchs_have_a_softcap(machine, make):
    capped = make not in (efficient, flash2_in_torch)
    assert make(machine).caps.softcap == capped


def test_flash2_caps_where_its_library_does_backward_too(machine):
    for version, capped in (("2.6.1", False), ("2.6.2", True), ("2.8.3.post1", True)):
        machine.flash_attn(version, library("flash_attn 2.6"))
        assert Flash2Kernel().caps.softcap == capped


def test_flash4_declares_what_its_version_has_on_this_gpu(machine):
    kernel = flash4(machine)
    assert (kernel.caps.softcap, kernel.caps.deterministic) == (True, True)
    old = flash4(machine, create_softcap_scoremod=None)
    machine.gpu(12)
    for kernel in (old, flash4(machine)):
        assert (kernel.caps.softcap, kernel.caps.deterministic) == (False, False)


UNKNOWN = {**library("flash_attn 2.8"), BACKWARD: lambda dout, q, k, v: None}


@pytest.mark.parametrize(
    ("version", "functions"),
    [
        ("2.5.9.post1", library("flash_attn 2.6")),
        ("2.6.0.dev1", library("flash_attn 2.6")),
        ("2.10.0", UNKNOWN),
        (None, {}),  # flash-attn-4 alone leaves a folder of the name
    ],
)
def test_flash2_is_torchs_where_the_package_is_not_one_that_is_supported(
    machine, version, functions
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the package was called")

    if version is None:
        machine.install("flash_attn", module("flash_attn", __path__=[]))
        machine.patch.delitem(sys.modules, "flash_attn.flash_attn_interface")
    else:
        machine.flash_attn(version, functions)
    machine.patch.setattr(SignatureAdapter, "__call__", refuse)
    x = tensors((2, 2), 16, torch.float32, TOKENS)
    run_tile(Flash2Kernel(), x, BLOCKS["causal"].tile, 0.3)
    machine.torch_flash(False)
    with pytest.raises(ImportError, match="neither flash-attn is here nor"):
        Flash2Kernel()


def test_a_function_without_a_parameter_is_refused_by_its_name(machine):
    def forward(q, k, v, softmax_scale, causal, window_size):  # type: ignore[no-untyped-def]
        """As before 2025, with the log-sum-exp elsewhere."""

    functions = library("flash_attn_interface 2026")
    machine.flash3({**functions, FORWARD: forward})
    with pytest.raises(ImportError, match=r"forward of this version has no parameter .*num_splits"):
        Flash3Kernel()
    machine.flash3({**functions, BACKWARD: functions[FORWARD]})
    with pytest.raises(ImportError, match=r"no parameter .*dout, out, softmax_lse, dq, dk, dv"):
        Flash3Kernel()


def test_an_operator_of_torch_is_called_by_its_functions_parameters():
    @torch.library.custom_op("fake_flash::forward", mutates_args=())
    def forward(
        q: torch.Tensor, unused: torch.Tensor | None, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int,
    ) -> torch.Tensor:  # fmt: skip
        assert (unused, softmax_scale, causal) == (None, 0.5, True)
        return q * 2

    q = torch.ones(2)
    adapter = SignatureAdapter(forward, "q")
    assert torch.equal(adapter(BLOCKS["causal"].tile, 0.5, None, q=q), q * 2)


@pytest.mark.parametrize(
    ("kernel", "generation", "needs"),
    [
        (Flash3Kernel, (8, 9), "9.x, this one has 8.9"),
        (Flash3Kernel, (10, 0), "9.x, this one has 10.0"),
        (Flash2Kernel, (7, 5), "8.0, this one has 7.5"),
        (EfficientKernel, (3, 7), "5.0, this one has 3.7"),
    ],
)
def test_other_generations_are_refused(machine, kernel, generation, needs):
    machine.gpu(*generation)
    with pytest.raises(UnsuitableDeviceError, match=needs):
        kernel()


# A GPU's generation, whether cuDNN is there, the request's dtype and what it asks for, the kernel.
@pytest.mark.parametrize(
    ("generation", "cudnn", "dtype", "asks", "name"),
    [
        ((7, 5), False, torch.bfloat16, {}, "eager"),  # bf16 begins with Ampere
        ((7, 5), False, torch.float16, {}, "efficient"),
        ((7, 5), False, torch.float32, {}, "efficient"),
        ((7, 5), False, torch.float32, {"mask": WINDOW}, "eager"),
        ((8, 0), False, torch.bfloat16, {}, "flash2"),
        ((9, 0), True, torch.bfloat16, {}, "cudnn"),
        ((9, 0), True, torch.bfloat16, {"documents": True}, "flash2"),  # which has varlen
        ((9, 0), True, torch.float32, {"documents": True}, "efficient"),  # none of fp32 has
        ((9, 0), True, torch.bfloat16, {"deterministic": True}, "flash2"),
        ((9, 0), True, torch.float32, {"deterministic": True}, "efficient"),
    ],
    ids=str,
)
def test_the_kernel_is_the_best_for_the_machine(machine, generation, cudnn, dtype, asks, name):
    machine.gpu(*generation)
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn)
    assert select_kernel(replace(on_gpu(dtype), **asks)).name == name


def test_a_named_kernel_serves_documents_one_by_one_and_no_determinism_that_it_lacks(machine):
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert select_kernel(replace(on_gpu(torch.bfloat16), documents=True), "cudnn").name == "cudnn"
    with pytest.raises(UnsupportedAttentionError, match="cudnn: has no deterministic backward"):
        select_kernel(replace(on_gpu(torch.bfloat16), deterministic=True), "cudnn")


def test_a_chosen_kernel_has_the_requests_soft_cap_and_padding(machine):
    flash4(machine)
    x = tensors((2, 2), 72, torch.float32, TOKENS)
    for cap in ({}, {"softcap": 0.7}):
        kernel = select_kernel(replace(on_gpu(torch.bfloat16, head_dim=72), **cap), "flash4")
        assert isinstance(kernel, PaddedHeadDimKernel)
        check_block(kernel, x, BLOCKS["causal"], 2e-6, cap)


def test_missing_libraries_are_named_and_unsuitable_devices_are_not(machine):
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    text = missing_libraries(on_gpu(torch.bfloat16))
    assert text is not None and "\n" not in text
    start = "attention runs on the kernel cudnn; faster ones cannot be used: flash4 ("
    assert text.startswith(start) and "flash3 (" in text and "flash2" not in text
    assert missing_libraries(on_gpu(torch.float32)) is None  # no library takes fp32
    for dtype in (torch.float32, torch.float16):
        assert missing_libraries(KernelRequest("cpu", dtype, 64, CAUSAL)) is None
    machine.flash3(library("flash_attn_interface 2026"))
    for cache in (select_kernel, missing_libraries, registry._load):
        cache.cache_clear()
    assert select_kernel(on_gpu(torch.bfloat16)).name == "flash3"
    assert select_kernel(on_gpu(torch.bfloat16, WINDOW, 256)).name == "flash3"
    text = missing_libraries(on_gpu(torch.bfloat16))
    assert text is not None and "flash4 (" in text and "flash3 (" not in text
    text = missing_libraries(on_gpu(torch.bfloat16, head_dim=256))
    assert text is not None and "flash4 (" in text
    assert missing_libraries(on_gpu(torch.float16, head_dim=256)) is None
    packed = missing_libraries(replace(on_gpu(torch.bfloat16), documents=True))
    assert packed is not None and "cudnn" not in packed and "flash4 (" in packed
    machine.gpu(8)
    select_kernel.cache_clear()
    missing_libraries.cache_clear()
    registry._load.cache_clear()
    assert missing_libraries(on_gpu(torch.bfloat16)) is None  # an older GPU misses nothing


def test_head_dims_are_counted_as_the_kernel_gets_them(machine):
    wanted = replace(on_gpu(torch.bfloat16, CAUSAL, 192), value_dim=132)
    served = select_kernel(wanted, "flash2")  # as 192 and 192
    assert isinstance(served, PaddedHeadDimKernel) and served.name == "flash2"
    with pytest.raises(UnsupportedAttentionError, match="multiples of 8, not 132"):
        select_kernel(wanted, "efficient")
    with pytest.raises(UnsupportedAttentionError, match="up to 256, not 264"):
        select_kernel(replace(wanted, value_dim=264), "flash2")
    assert isinstance(select_kernel(replace(wanted, value_dim=128), "efficient"), EfficientKernel)


def test_head_dims_above_128_on_hopper(machine):
    def served(name: str, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> str:
        wanted = replace(on_gpu(dtype, CAUSAL, dims[0]), value_dim=dims[1])
        for cache in (select_kernel, registry._load):
            cache.cache_clear()
        try:
            kernel = select_kernel(wanted, name)
        except UnsupportedAttentionError as error:
            return str(error).partition(f"{name}: ")[2]
        x = tensors((2, 2), dims, torch.float32, TOKENS)
        seen = kernel._dims if isinstance(kernel, PaddedHeadDimKernel) else dims
        if name == "flash4":  # cuDNN has no stub
            check_block(kernel, x, BLOCKS["causal"], 2e-6)
        return str(seen)

    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    machine.patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    machine.patch.setattr("ds_usp.kernels.flash4.version", lambda name: "4.0.0b36")
    flash4(machine)
    both = {(192, 192): (192, 192), (192, 128): (192, 128), (128, 192): (192, 192)}
    both |= {(224, 200): (256, 256), (160, 128): (160, 160), (136, 64): (160, 160)}
    for dims, wanted in both.items():
        assert served("flash4", dims) == served("cudnn", dims) == str(wanted)
    assert served("cudnn", (72, 72)) == "(72, 72)"
    assert served("flash4", (72, 72)) == served("flash4", (72, 40)) == "(96, 96)"
    assert served("flash4", (40, 40)).endswith("192, 256, and would pad 40 to 64")
    assert served("flash4", (264, 264)) == "takes head dims up to 256, not 264"
    assert served("cudnn", (192, 132)) == "(192, 192)"
    for name in ("flash4", "cudnn"):  # compared with fp64 in bf16 only
        refusal = served(name, (192, 192), torch.float16)
        assert refusal == "takes head dims above 128 in bfloat16 only"
    machine.patch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    machine.patch.setattr("ds_usp.kernels.flash4.version", lambda name: "4.0.0b35")
    assert "128, not 192 (up to 256 on compute" in served("flash4", (192, 128))
    assert "with cuDNN 9.19 or newer)" in served("cudnn", (192, 128))
    machine.patch.setattr("ds_usp.kernels.flash4.version", lambda name: "4.0.0b36")
    machine.patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    machine.gpu(10)
    for name in ("flash4", "cudnn"):
        assert "128, not 136 (up to 256 on compute capability 9.x" in served(name, (136, 64))
        assert served(name, (128, 64)) == "(128, 128)"


def test_torchs_switch_asks_for_determinism(monkeypatch):
    mesh = ds_usp.SequenceMesh.single()
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    layout = mesh.layout("contiguous", 8)
    requests: list[KernelRequest] = []

    def noted(request: KernelRequest, name: str = AUTO) -> Any:
        requests.append(request)
        return select_kernel(request, name)

    monkeypatch.setattr("ds_usp.attention.plan.select_kernel", noted)
    for on, warn_only in ((False, False), (True, False), (True, True), (False, False)):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
        try:
            ds_usp.usp_attention(q, q, q, mesh=mesh, layout=layout, mask=CAUSAL).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    # The third and fourth are calls of a kind that was planned before.
    assert [request.deterministic for request in requests] == [False, True]


Call = tuple[str, tuple[int, ...], tuple[Any, ...]]


class Kernel:
    """Records what was launched: the kernel by Triton, or what it compiled."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.calls.append(("triton", grid, (*args, *constants.values())))
            return _Compiled(self.calls)

        return launch


class _Compiled:
    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.calls.append(("compiled", grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    # No GPU: its tensors' device has no number, and is the current one.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(lowlevel, "_launcher_passes_constexprs", lambda: True)
    return Kernel()


def test_an_equal_launch_uses_the_compiled_kernel(kernel):
    launcher = lowlevel.CachedLauncher(kernel)
    x, y = torch.zeros(64), torch.ones(64)
    for tensor in (x, y):
        launcher((9, 2), (tensor,), (3, 16), BLOCK=8)
    kind, grid, (pointer, *rest) = kernel.calls[0]
    assert kind == "triton" and grid == (9, 2) and rest == [3, 16, 8, 4]
    assert pointer.data_ptr() == x.data_ptr() and pointer.dtype == x.dtype
    assert kernel.calls[1] == ("compiled", (9, 2, 1), (y.data_ptr(), 3, 16, 8))


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": (3, 17)},
        {"numbers": (3, 1)},
        {"BLOCK": 16},
        {"num_warps": 8},
        {"tensors": (torch.zeros(64)[1:],)},
        {"tensors": (torch.zeros(64, dtype=torch.bfloat16),)},
    ],
    ids=str,
)
def test_what_triton_compiles_anew_is_launched_by_triton(kernel, change):
    launcher = lowlevel.CachedLauncher(kernel)
    args: dict[str, Any] = {"tensors": (torch.zeros(64),), "numbers": (3, 16), "BLOCK": 8}
    for options in (args, args | change, args, args | change):
        rest = dict(options)
        launcher((7,), rest.pop("tensors"), rest.pop("numbers"), **rest)
    assert [call[0] for call in kernel.calls] == ["triton", "triton", "compiled", "compiled"]


def test_a_launch_of_alike_tensors_takes_the_arguments_of_the_last(kernel):
    launcher = lowlevel.CachedLauncher(kernel)
    x, made = torch.zeros(6, 8), list[tuple[int, ...]]()

    def arguments(tensors, count):
        made.append((count, *tensors[0].shape, *tensors[1].stride()))
        return (1,), made[-1], {}

    others = [(x[:3], x, 1), (x, x.t(), 1), (x.double(), x, 1), (x, x, 2)]
    for first, second, count in [(x, x, 1), *others] * 2:
        launcher.launch_by_tensors((first, second), count, arguments)
    assert [call[0] for call in kernel.calls] == ["triton"] * 5 + ["compiled"] * 5
    assert len(made) == 5 and [call[2][2:] for call in kernel.calls[5:]] == made


def test_an_unknown_triton_version_launches_itself(kernel, monkeypatch):
    monkeypatch.setattr(lowlevel, "_launcher_passes_constexprs", lambda: False)
    launcher = lowlevel.CachedLauncher(kernel)
    for _ in range(3):
        launcher((1,), (torch.zeros(4),), (4,))
    assert [call[0] for call in kernel.calls] == ["triton"] * 3


def test_the_cache_is_bounded(kernel):
    launcher = lowlevel.CachedLauncher(kernel)
    for number in range(3000):
        launcher((1,), (torch.zeros(4),), (number,))
    assert len(launcher._cache) <= 1024


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The patches of torch alone: they need no megatron-core."""
    patches = PatchSet("torch", (x for x in without_gpu() if x.target.startswith("torch")))
    patches.apply()
    try:
        assert patches.stale() == ()
        yield
    finally:
        patches.restore()


def test_a_gpu_leaves_them_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    targets = {x.target for x in (*without_gpu(), *training_without_gpu()) if x.applies}
    assert targets == {x.target for x in without_apex.patches()}


@NO_GPU
def test_tensors_are_made_on_the_cpu(on_cpu):
    x = torch.ones(3, device="cuda", pin_memory=True)
    same = (x.cuda(), x.to("cuda:1"), x.to(torch.device("cuda")), x.pin_memory())
    assert all(y.device.type == "cpu" and y.data_ptr() == x.data_ptr() for y in same)
    assert torch.zeros_like(x, device=torch.cuda.current_device()).device.type == "cpu"
    assert x.to("cuda", torch.float64).dtype == torch.float64
    assert torch.empty(2, device="meta").device.type == "meta"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"


@NO_GPU
def test_streams_have_nothing_to_wait_for(on_cpu):
    stream = torch.cuda.Stream(device=torch.cuda.current_device())
    with torch.cuda.stream(stream):
        event = stream.record_event()
    stream.wait_stream(torch.cuda.current_stream())
    event.wait(stream)
    torch.cuda.synchronize()
    assert event.query()


@NO_GPU
def test_random_states_are_those_of_the_cpu(on_cpu):
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="cuda"))


@NO_GPU
def test_restored_torch_refuses_cuda_again():
    patches = PatchSet("torch", (x for x in without_gpu() if x.target.startswith("torch")))
    before = torch.empty, torch.cuda.Stream
    patches.apply()
    patches.restore()
    assert (torch.empty, torch.cuda.Stream) == before
    assert not {"cuda", "to", "type", "pin_memory"} & vars(torch.Tensor).keys()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(1, device="cuda")


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (ImportError("No module named 'cuda'"), "cuda-bindings is missing"),
        (SimpleNamespace(cuDriverGetVersion=lambda: (34, 0)), "error 34"),  # a stub of it
        (SimpleNamespace(cuDriverGetVersion=lambda: (0, 11040)), "CUDA 11.4"),
        (SimpleNamespace(cuDriverGetVersion=lambda: (0, 11070)), "None"),
    ],
)
def test_copy_engines_are_off_where_the_driver_cannot_be_used(installed, reason):
    copy_engine.driver.cache_clear()
    with (
        mock.patch.object(copy_engine, "import_module", side_effect=[None, installed]),
        mock.patch.object(torch.version, "cuda", "12.4"),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda *_: True),
    ):
        assert reason in str(copy_engine.peer_copy_unavailable_reason(2))
    copy_engine.driver.cache_clear()
