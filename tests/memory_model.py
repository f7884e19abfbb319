"""A stack of small transformer layers under an activation memory policy, on a CPU or a GPU."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_usp import MaskSpec, SequenceMesh, usp_attention
from ds_usp.memory import GemmLast, LayerMemory, recompute_before

MESH = SequenceMesh.single()


class FusedNorm(torch.autograd.Function):
    """RMSNorm that saves its input, its weight and one number a token, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, rstd)
        return (x.float() * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, rstd = ctx.saved_tensors
        hat, inner = x.float() * rstd, grad.float() * weight.float()
        dx = rstd * (inner - hat * (inner * hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad.float() * hat).sum((0, 1)).to(weight.dtype)


class Sizes(NamedTuple):
    tokens: int
    heads: int
    dim: int
    ffn: int
    layers: int

    @property
    def hidden(self) -> int:
        return self.heads * self.dim


def swiglu(y: Tensor) -> Tensor:
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


class Layer(nn.Module):
    """Norm, projection, attention, projection; norm, product, SwiGLU, product."""

    def __init__(self, sizes: Sizes, gemm_last: bool) -> None:
        super().__init__()
        self.dim, hidden, ffn = sizes.dim, sizes.hidden, sizes.ffn
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.RMSNorm(hidden)
        self.mix, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * ffn), nn.Linear(ffn, hidden)
        if gemm_last:
            GemmLast.between(self.norm1, self.mix)
            GemmLast.between(self.norm2, self.up)
        self.join: Any = recompute_before if gemm_last else lambda f, linear, y: linear(f(y))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm1(x)).unflatten(-1, (-1, self.dim)).chunk(3, 2)
        layout = MESH.layout("contiguous", x.shape[1])
        mixed = usp_attention(q, k, v, mesh=MESH, layout=layout, mask=MaskSpec.causal())
        x = x + self.out(mixed.flatten(2))
        return x + self.join(swiglu, self.down, self.up(self.norm2(x)))


class Stack(nn.Module):
    """Layers of the same weights for the same sizes; its output is a loss."""

    def __init__(self, memory: LayerMemory, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(4)
        gemm_last = memory.recompute == "gemm-last"
        self.layers = nn.ModuleList(Layer(sizes, gemm_last) for _ in range(sizes.layers))
        self.memory, self.sizes = memory, sizes

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.memory.run(number, layer, x)
        return x.float().square().mean()

    def inputs(self, count: int) -> list[Tensor]:
        """The same ones every time, of the parameters' device and dtype."""
        generator = torch.Generator().manual_seed(9)
        shape, like = (1, self.sizes.tokens, self.sizes.hidden), next(self.parameters())
        made = (torch.randn(shape, generator=generator).to(like) for _ in range(count))
        return [x.detach().requires_grad_() for x in made]

    def gradients(self, inputs: list[Tensor]) -> list[Tensor]:
        """Of the parameters and of the inputs, after backward; the parameters' are reset."""
        grads = [*(p.grad for p in self.parameters()), *(x.grad for x in inputs)]
        self.zero_grad()
        return grads
