"""Changed scores, head dims of values, determinism: what each kernel does or refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from test_kernels import BLOCKS, TOKENS, TOLERANCE, Tensors, check, run_tile, serves, tensors, truth
from test_library_kernels import (
    Machine,
    asked,
    efficient,
    every_library,
    fake_flash,
    flash2_in_torch,
    flash4,
    machine,  # noqa: F401  a fixture
)
from test_packed_kernels import PACKED, check_packed

import ds_usp
from ds_usp import MaskSpec, UnsupportedAttentionError
from ds_usp.kernels import registry
from ds_usp.kernels.api import KernelRequest, PaddedHeadDimKernel
from ds_usp.kernels.eager import EagerKernel
from ds_usp.kernels.flash2 import Flash2Kernel
from ds_usp.kernels.registry import select_kernel
from ds_usp.kernels.score_mod import PLAIN, SOFTCAP, BoundScoreMod, GlobalPositions, ScoreMod
from ds_usp.kernels.sdpa import SdpaKernel
from ds_usp.kernels.sinks import apply_sinks, sink_gradient

CAP = BoundScoreMod(ScoreMod(softcap=0.7))  # bends scores of about 1
CAUSAL, WINDOW = MaskSpec.causal(), MaskSpec.window(3)


def place(slopes: torch.Tensor | None = None, heads: int = 6, seed: int = 7) -> GlobalPositions:
    rows, columns = torch.arange(TOKENS), torch.arange(0, 3 * TOKENS, 3)
    return GlobalPositions(torch.arange(2), rows, columns, torch.arange(heads), slopes, seed)


@every_library
@pytest.mark.parametrize("name", ["causal", "full", "both sides", "causal rectangle"])
def test_a_capped_tile_is_the_oracles(machine: Machine, make: Any, name: str) -> None:  # noqa: F811
    kernel, block = make(machine), BLOCKS[name]
    if SOFTCAP not in kernel.caps.score_features:
        assert make in (efficient, flash2_in_torch)
        return
    rows, columns = (
        slice(block.tile.q_start, block.tile.q_stop),
        slice(block.tile.k_start, block.tile.k_stop),
    )
    x = tensors((6, 2), 16, torch.float32, TOKENS)
    if serves(kernel, block):
        got = run_tile(kernel.with_score_mod(CAP), x, block.tile, 0.3)
        check(got, truth(x, block.allowed, 0.3, rows, columns, softcap=0.7), 2e-6)
        plain = run_tile(kernel, x, block.tile, 0.3)  # which the changed one has left as it was
        check(plain, truth(x, block.allowed, 0.3, rows, columns), 2e-6)


@every_library
@pytest.mark.parametrize("name", ["documents of each sample", "windows", "stripes, with gaps"])
def test_documents_are_capped_and_have_values_of_their_own_head_dim(
    machine: Machine,  # noqa: F811
    make: Any,
    name: str,
) -> None:
    kernel = make(machine)
    narrow = kernel if kernel.caps.value_dims else PaddedHeadDimKernel(kernel)
    check_packed(narrow, PACKED[name], torch.float32, 2e-6, value_dim=24)
    if SOFTCAP in kernel.caps.score_features:
        capped = kernel.with_score_mod(CAP)
        check_packed(capped, PACKED[name], torch.float32, 2e-6, softcap=0.7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_change_at_once_is_the_oracles(dtype: torch.dtype) -> None:
    slopes = torch.linspace(0.05, 0.5, 6)
    at = place(slopes)
    spec = ScoreMod(softcap=0.7, alibi=True, dropout_p=0.4)
    kernel = EagerKernel().with_score_mod(BoundScoreMod(spec, at))
    weights = oracle.dropout(7, (2, 6, 3 * TOKENS, 3 * TOKENS), 0.4)[..., :TOKENS, ::3]
    bias = oracle.alibi(slopes, range(3 * TOKENS))[:, :TOKENS, ::3]
    for block in (BLOCKS["causal"], BLOCKS["both sides"], BLOCKS["full"]):
        tile = block.tile
        rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        x = tensors((6, 2), 16, dtype, TOKENS)
        want = truth(
            x,
            block.allowed,
            0.3,
            rows,
            columns,
            softcap=0.7,
            bias=bias[:, rows, columns],
            weights=weights[:, :, rows, columns],
        )
        check(run_tile(kernel, x, tile, 0.3), want, TOLERANCE[dtype])


def test_dropout_drops_its_share_evenly_and_by_seed() -> None:
    tokens = torch.arange(256)
    made = [
        BoundScoreMod(
            ScoreMod(dropout_p=0.25),
            GlobalPositions(tokens[:2], tokens, tokens, tokens[:2], None, seed),
        )
        for seed in (0, 1)
    ]
    first, second = (change.dropout_multiplier(torch.float64) for change in made)
    assert first is not None and second is not None
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    same = (first > 0) == (second > 0)  # one seed tells nothing of another
    for kept, expected in ((first > 0, 0.75), (second > 0, 0.75), (same, 0.625)):
        share = kept.double()
        assert abs(float(share.mean()) - expected) < 0.005
        for dims in [(0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)]:  # by key, query, sample, head
            assert float((share.mean(dims) - expected).abs().max()) < 0.07
    lag = [(first[:, :, 1:] > 0) == (first[:, :, :-1] > 0)]
    lag += [(first[..., 1:] > 0) == (first[..., :-1] > 0), (first[:, 1] > 0) == (first[:, 0] > 0)]
    assert all(abs(float(each.double().mean()) - 0.625) < 0.005 for each in lag)


def wide_and_narrow(dims: tuple[int, int], dtype: torch.dtype) -> Tensors:
    """Queries and keys of the first head dim, values of the second."""
    x = tensors((6, 2), max(dims), dtype, TOKENS)
    return {n: each[..., : dims[n in ("v", "dout")]].contiguous() for n, each in x.items()}


DIMS = [(24, 16), (16, 24), (192, 128)]


@every_library
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values_have_a_head_dim_of_their_own(
    machine: Machine,  # noqa: F811
    make: Any,
    dims: tuple[int, int],
) -> None:
    kernel = make(machine)
    assert kernel.caps.value_dims == (make is efficient)
    served = kernel if kernel.caps.value_dims else PaddedHeadDimKernel(kernel)
    x = wide_and_narrow(dims, torch.float32)
    for block in (BLOCKS["causal"], BLOCKS["full"]):
        rows, columns = (
            slice(block.tile.q_start, block.tile.q_stop),
            slice(block.tile.k_start, block.tile.k_stop),
        )
        got = run_tile(served, x, block.tile, 0.3)
        assert {name: got[name].shape[3] for name in ("out", "dq", "dk", "dv")} == {
            "out": dims[1],
            "dq": dims[0],
            "dk": dims[0],
            "dv": dims[1],
        }
        check(got, truth(x, block.allowed, 0.3, rows, columns), 2e-6)


@pytest.mark.parametrize("dims", [*DIMS, (3, 5)], ids=str)
@pytest.mark.parametrize(
    "kernel", [EagerKernel(), PaddedHeadDimKernel(SdpaKernel())], ids=["own", "one"]
)
def test_cpu_kernels_take_any_two_head_dims(kernel: Any, dims: tuple[int, int]) -> None:
    x = wide_and_narrow(dims, torch.float64)
    block = BLOCKS["left window"]
    tile = block.tile
    rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
    check(run_tile(kernel, x, tile, 0.3), truth(x, block.allowed, 0.3, rows, columns), 1e-13)


def test_sinks_are_a_key_without_value() -> None:
    x = tensors((6, 2), 16, torch.float64, TOKENS)
    q, k, v = (x[n].requires_grad_() for n in "qkv")
    sinks = torch.linspace(-40.0, 40.0, 6, dtype=torch.float64, requires_grad=True)
    allowed = oracle.causal(range(TOKENS), range(TOKENS))
    out, lse = oracle.dense_attention(q, k, v, allowed, 0.3)
    got, total = apply_sinks(out.detach().clone(), lse.detach(), sinks.detach())
    want, want_lse = oracle.dense_attention(q, k, v, allowed, 0.3, sinks=sinks)
    assert oracle.relative_error(got, want) < 1e-14
    assert oracle.relative_error(total, want_lse) < 1e-14
    (want_grad,) = torch.autograd.grad(want, sinks, x["dout"])
    assert oracle.relative_error(sink_gradient(x["dout"], got, total, sinks), want_grad) < 1e-13


def test_rows_that_see_no_key_give_all_to_the_sink() -> None:
    out, lse = apply_sinks(
        torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -torch.inf), torch.ones(1)
    )
    assert not out.any() and bool((lse == 1.0).all())


# ------------------------------------------------------------------ who is asked


FEATURES = {
    "softcap": ScoreMod(2.0),
    "ALiBi": ScoreMod(alibi=True),
    "dropout": ScoreMod(None, False, 0.5),
}


@pytest.mark.parametrize("name", FEATURES)
def test_only_kernels_that_declare_a_change_are_taken(name: str) -> None:
    request = KernelRequest("cpu", torch.float32, 16, WINDOW, score_mod=FEATURES[name])
    assert select_kernel(request).name == "eager"
    assert select_kernel(replace(request, score_mod=PLAIN)).name == "sdpa"
    with pytest.raises(UnsupportedAttentionError, match=f"sdpa: has no {name}"):
        select_kernel(request, "sdpa")


def test_all_that_is_lacking_is_named() -> None:
    spec = ScoreMod(2.0, True, 0.5)
    request = KernelRequest(
        "cpu", torch.float32, 16, WINDOW, value_dim=8, score_mod=spec, deterministic=True
    )
    with pytest.raises(UnsupportedAttentionError) as caught:
        select_kernel(request, "sdpa")
    said = "head dim 16 (values 8) and a window(3, 0) mask, ALiBi, dropout 0.5, softcap 2.0"
    assert f"{said}, deterministic" in str(caught.value)
    assert "sdpa: has no ALiBi and no dropout and no softcap" in str(caught.value)


def test_flash2_caps_where_its_library_does_backward_too(machine: Machine) -> None:  # noqa: F811
    for version, capped in (("2.6.1", False), ("2.6.2", True), ("2.8.3.post1", True)):
        varlen = fake_flash.varlen_forward_26, fake_flash.varlen_backward_26
        machine.flash_attn(version, fake_flash.forward_26, fake_flash.backward_26, *varlen)
        assert Flash2Kernel().caps.score_features == (
            frozenset({SOFTCAP}) if capped else frozenset()
        )


def test_flash4_declares_what_its_version_has_on_this_gpu(machine: Machine) -> None:  # noqa: F811
    kernel = flash4(machine)
    assert (kernel.caps.score_features, kernel.caps.deterministic) == ({SOFTCAP}, True)
    old = flash4(machine, create_softcap_scoremod=None)
    assert (old.caps.score_features, old.caps.deterministic) == (frozenset(), False)
    machine.gpu(12)
    assert (flash4(machine).caps.score_features, flash4(machine).caps.deterministic) == (
        frozenset(),
        False,
    )


@every_library
def test_backward_is_told_to_be_deterministic(machine: Machine, make: Any) -> None:  # noqa: F811
    kernel, block = make(machine), BLOCKS["causal"]
    assert kernel.caps.deterministic
    x = tensors((6, 2), 16, torch.float32, TOKENS)
    torch.use_deterministic_algorithms(True)  # which libraries here compare with what they are told
    try:
        got = run_tile(kernel, x, block.tile, 0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    check(got, truth(x, block.allowed, 0.3), 2e-6)


def test_head_dims_are_counted_as_the_kernel_gets_them(machine: Machine) -> None:  # noqa: F811
    request = replace(asked(torch.bfloat16, CAUSAL, 192), value_dim=132)
    served = select_kernel(request, "flash2")  # as 192 and 192
    assert isinstance(served, PaddedHeadDimKernel) and served.name == "flash2"
    with pytest.raises(UnsupportedAttentionError, match="multiples of 8, not 132"):
        select_kernel(request, "efficient")
    with pytest.raises(UnsupportedAttentionError, match="up to 256, not 264"):
        select_kernel(replace(request, value_dim=264), "flash2")


def test_determinism_moves_auto_to_kernels_that_have_it(machine: Machine) -> None:  # noqa: F811
    machine.patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    request = asked(torch.bfloat16)
    assert select_kernel(request).name == "cudnn"
    assert select_kernel(replace(request, deterministic=True)).name == "flash2"
    with pytest.raises(UnsupportedAttentionError, match="cudnn: has no deterministic backward"):
        select_kernel(replace(request, deterministic=True), "cudnn")
    assert registry.select_kernel(replace(asked(torch.float32), deterministic=True)).name == (
        "efficient"
    )


def test_torchs_switch_asks_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = ds_usp.SequenceMesh.single()
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    requests: list[KernelRequest] = []

    def noted(request: KernelRequest, name: str = "auto") -> Any:
        requests.append(request)
        return select_kernel(request, name)

    monkeypatch.setattr("ds_usp.attention.call_plan.select_kernel", noted)
    switches = [(False, False), (True, False), (True, True), (False, False)]
    for on, warn_only in switches:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
        try:
            layout = mesh.layout("contiguous", 8)
            ds_usp.usp_attention(q, q, q, mesh=mesh, layout=layout, mask=CAUSAL).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    # The third and fourth are calls of a kind that was planned before.
    assert [request.deterministic for request in requests] == [False, True]
