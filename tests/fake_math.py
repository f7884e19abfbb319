"""What attention libraries compute, written out in fp64, with their checks and their reading of
windows: dense ``[B, S, H, D]`` and packed ``[N, H, D]``."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def allowed(rows: int, columns: int, left: int | None, right: int | None) -> Tensor:
    """A window aligned to the bottom right corner: ``[rows, columns]`` bool."""
    distance = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (columns - rows)
    low = -math.inf if left is None else -left
    return (distance >= low) & (distance <= (math.inf if right is None else right))


def version2(rows: int, columns: int, causal: bool, left: int, right: int) -> Tensor:
    """FlashAttention-2 calls a bound of all keys or more none, and none beside a bound all keys."""
    left, right = (-1 if bound >= columns else bound for bound in (left, right))
    right = 0 if causal else right
    if left < 0 and right < 0:
        return allowed(rows, columns, None, None)
    return allowed(rows, columns, *(columns if bound < 0 else bound for bound in (left, right)))


def version3(rows: int, columns: int, causal: bool, left: int, right: int) -> Tensor:
    """FlashAttention-3 says -1 for none."""
    right = 0 if causal else right
    return allowed(rows, columns, *(None if bound < 0 else bound for bound in (left, right)))


def scores(q: Tensor, k: Tensor, scale: float, seen: Tensor, softcap: float) -> Tensor:
    """``[B, H, rows, columns]`` in fp64."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    found = torch.einsum("bshd,bthd->bhst", q.double(), k.double()).mul(scale)
    return (softcap * (found / softcap).tanh() if softcap else found).where(seen, -math.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Out in the queries' dtype and the natural log-sum-exp in fp32 ``[B, H, rows]``."""
    check(q, k, v)
    weights = scores(q, k, scale, seen, softcap)
    lse = weights.logsumexp(-1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhst,bthd->bshd", (weights - lse[..., None]).exp(), v.double())
    return out.to(q.dtype), lse.float()


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, seen: Tensor, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """From the output and log-sum-exp that are given, whichever keys these have seen."""
    check(dout, q, k, v, out)
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    heads = [x.repeat_interleave(q.shape[2] // x.shape[2], 2).double() for x in (k, v)]
    capped = scores(q, k, scale, seen, softcap)
    weights = (capped - lse.double()[..., None]).exp()
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)[..., None]
    dweights = torch.einsum("bshd,bthd->bhst", dout.double(), heads[1])
    dscores = weights * (dweights - delta) * scale
    if softcap:
        dscores = dscores * (1 - (capped / softcap) ** 2).where(seen, 0.0)
    dq = torch.einsum("bhst,bthd->bshd", dscores, heads[0])
    dk = torch.einsum("bhst,bshd->bthd", dscores, q.double())
    dv = torch.einsum("bhst,bshd->bthd", weights, dout.double())
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


Seen = Callable[[int, int], Tensor]


def spans(cu_seqlens: Tensor, most: int) -> list[tuple[int, int]]:
    """Where each sequence is among packed tokens."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0
    found = list(pairwise(cu_seqlens.tolist()))
    assert max(stop - start for start, stop in found) == most
    assert all(stop > start for start, stop in found), "libraries differ in what is empty"
    return found


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen,
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[N, H, D]`` and ``[H, N]``."""
    assert cu_q[-1] == q.shape[0] and cu_k[-1] == k.shape[0] == v.shape[0]
    parts = [
        attend(q[None, a:b], k[None, c:d], v[None, c:d], scale, seen(b - a, d - c), softcap)
        for (a, b), (c, d) in zip(spans(cu_q, max_q), spans(cu_k, max_k), strict=True)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def gradients_packed(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    seen: Seen, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, softcap: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    parts = [
        gradients(
            dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out[None, a:b],
            lse[None, :, a:b].contiguous(), scale, seen(b - a, d - c), softcap,
        )
        for (a, b), (c, d) in zip(spans(cu_q, max_q), spans(cu_k, max_k), strict=True)
    ]  # fmt: skip
    return tuple(torch.cat([each[0] for each in grads]) for grads in zip(*parts, strict=True))


def packed2(max_k: int, causal: bool, left: int, right: int) -> Seen:
    """FlashAttention-2 compares its bounds with the longest sequence."""
    left, right = (-1 if bound >= max_k else bound for bound in (left, right))
    right = 0 if causal else right
    if left < 0 and right < 0:
        return lambda rows, columns: allowed(rows, columns, None, None)
    bounds = [max_k if bound < 0 else bound for bound in (left, right)]
    return lambda rows, columns: allowed(rows, columns, *bounds)


def packed3(causal: bool, left: int, right: int) -> Seen:
    return lambda rows, columns: version3(rows, columns, causal, left, right)


def check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0


def fill(targets: Sequence[Tensor | None], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target is not None and target.dtype == value.dtype
        target.copy_(value)
