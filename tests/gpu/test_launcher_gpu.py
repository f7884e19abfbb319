"""Launches of what Triton has compiled, beside what they should compute."""

from __future__ import annotations

import pytest
import torch

from ds_usp.lowlevel import CachedLauncher

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def _scaled(out, x, count, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count) * factor
    if TWICE:
        value += value
    tl.store(out + at, value, mask=at < count)


def test_every_launch_computes_with_its_own_arguments() -> None:
    launch = CachedLauncher(_scaled)
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            for count, factor in ((64, 1), (64, 16), (63, 3), (640, 2**33)):
                for first in (0, 1, 8):
                    for twice in (False, True):
                        x = torch.randint(-8, 8, (count + 8,), device="cuda").to(dtype)[first:]
                        x, out = x[:count], torch.zeros(count, device="cuda", dtype=dtype)
                        grid = (triton.cdiv(count, 32),)
                        launch(grid, (out, x), (count, factor), BLOCK=32, TWICE=twice)
                        assert torch.equal(out, (x.double() * factor * (1 + twice)).to(dtype))
    assert len(launch._cache) == 8
    assert sum(len(prepared._compiled) for prepared in launch._cache.values()) == 32
