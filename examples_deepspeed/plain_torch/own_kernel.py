"""A kernel and a mask of your own, beside dense attention; the exit code is 1 if they differ.

torchrun --nproc-per-node 4 own_kernel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ds_usp
from ds_usp.kernels.api import KernelCaps, SingleTileKernel, window_mask
from ds_usp.kernels.head_dims import HeadDims

CHUNK, S, HEADS, KV_HEADS, DIM = 24, 64, 4, 2, 8


class OwnKernel(SingleTileKernel):
    """Plain products in fp32. A tile is a rectangle of the mask: its rows and columns are cut out
    already, and every row sees a key of it. ``ds_usp`` calls one tile after the other and merges
    their results by ``lse``; it pads head dims and refuses dtypes by what ``caps`` declares."""

    name = "own_kernel:OwnKernel"
    caps = KernelCaps(devices=frozenset(), dtypes=frozenset({torch.float32}), head_dims=HeadDims())

    def tile_forward(self, qkv, tile, scale):
        """q [b, s, h, d], k and v [b, t, kv heads, d] -> out [b, s, h, d], lse [b, h, s]."""
        q, k, v = (*qkv[:1], *self._per_query_head(*qkv))
        scores = self._scores(q, k, tile, scale)
        lse = scores.logsumexp(-1)
        return torch.einsum("bhst,bthd->bshd", (scores - lse[..., None]).exp(), v), lse

    def tile_backward(self, saved, tile, scale):
        """Gradients by the out and the lse of the whole row, of which this tile is a part."""
        q, dout = saved.q, saved.dout
        k, v = self._per_query_head(q, saved.k, saved.v)
        weights = (self._scores(q, k, tile, scale) - saved.lse[..., None]).exp()
        delta = (dout * saved.out).sum(-1).transpose(1, 2)[..., None]
        dscores = weights * (torch.einsum("bshd,bthd->bhst", dout, v) - delta) * scale
        dq = torch.einsum("bhst,bthd->bshd", dscores, k)
        dk = torch.einsum("bhst,bshd->bthd", dscores, q)
        dv = torch.einsum("bhst,bshd->bthd", weights, dout)
        groups = saved.k.shape[2]
        return dq, *(x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))

    def _scores(self, q, k, tile, scale):
        scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
        return scores.masked_fill(~window_mask(tile, q.device), float("-inf"))

    def _per_query_head(self, q, k, v):
        return [x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v)]


def main() -> int:
    """Attention on Ulysses 2 x ring, beside torch's on whole tensors with a dense mask."""
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses_degree=2)
    layout = mesh.layout("zigzag", seq_len=S)
    torch.manual_seed(0)
    shapes = [(2, S, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    whole = [torch.randn(shape, requires_grad=True) for shape in shapes]
    # The mask: causal in chunks of 24 tokens (Llama 4), each of which is a document.
    mask = ds_usp.MaskSpec.causal(documents=[*range(0, S, CHUNK), S])
    shards = [layout.shard(x.detach(), dim=1, rank=mesh.rank).requires_grad_() for x in whole]
    out = ds_usp.usp_attention(*shards, mesh=mesh, layout=layout, mask=mask, kernel=OwnKernel.name)
    out.square().sum().backward()

    place = torch.arange(S)
    dense = (place[:, None] >= place) & (place[:, None] // CHUNK == place // CHUNK)
    heads_first = [x.transpose(1, 2) for x in whole]
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=dense, enable_gqa=True)
    expected = expected.transpose(1, 2)
    expected.square().sum().backward()
    pairs = [(mesh.gather(out.detach(), layout, dim=1), expected)]
    for shard, x in zip(shards, whole, strict=True):
        pairs.append((mesh.gather(shard.grad, layout, dim=1), x.grad))
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    print(f"rank {mesh.rank}: largest difference {worst:.1e} of output and gradients")
    return int(worst > 1e-5)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with ds_usp.one_line_errors():
        code = main()
    dist.destroy_process_group()
    raise SystemExit(code)
