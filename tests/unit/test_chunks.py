"""An MLP in parts of the tokens: the same gradients, and no wide tensor of all tokens."""

from __future__ import annotations

import oracle
import pytest
import torch
from torch import Tensor, nn

from ds_usp import ConfigError
from ds_usp.memory import in_chunks

TOKENS, H, FFN = 23, 16, 64


def gradients(mlp: nn.Module, chunks: int) -> tuple[list[Tensor], int]:
    """Of input and weights; and the largest tensor that an activation function gives."""
    mlp.zero_grad()
    x = torch.randn(2, TOKENS, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    widest = []
    hook = mlp[1].register_forward_hook(lambda _, __, out: widest.append(out.numel()))
    in_chunks(mlp, x, chunks, dim=1).square().sum().backward()
    hook.remove()
    return [x.grad, *(p.grad.clone() for p in mlp.parameters())], max(widest)


@pytest.mark.parametrize("chunks", [2, 5, TOKENS])
def test_gradients_are_those_of_all_tokens_at_once(chunks: int) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(H, FFN), nn.GELU(), nn.Linear(FFN, H))
    want, whole = gradients(mlp, 1)
    actual, part = gradients(mlp, chunks)
    assert part == whole // TOKENS * -(-TOKENS // chunks)
    for g, w in zip(actual, want, strict=True):
        assert oracle.relative_error(g, w.double()) < 2e-5


def test_parts_that_are_empty_are_refused() -> None:
    for chunks in (0, TOKENS + 1):
        with pytest.raises(ConfigError, match=f"the size of dim 1, {TOKENS}"):
            in_chunks(nn.Identity(), torch.zeros(2, TOKENS, H), chunks, dim=1)
