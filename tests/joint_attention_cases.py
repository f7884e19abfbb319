"""Calls with joint tokens as data; a function compares one on a rank with the reference."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cases import mesh_of
from harness import RankContext

import ds_usp
from ds_usp import MaskSpec
from ds_usp import testing as oracle
from ds_usp.attention.tuning import AUTO_TUNING

FULL = MaskSpec.full()


@dataclass(frozen=True)
class Joint:
    """A call: the sequence's tokens, the joint ones, the mask."""

    layout: str = "zigzag"
    tokens: int = 40
    joint: int = 17
    front: bool = True
    mask: MaskSpec = FULL
    dtype: torch.dtype = torch.float32
    kv_heads: int = 4
    value_dim: int = 16
    sinks: bool = False
    tuning: ds_usp.Tuning = AUTO_TUNING


def run(ctx: RankContext, cases: list[Joint], ulysses_degree: int) -> list[dict[str, float]]:
    return [errors(ctx.world, case, mesh_of(ulysses_degree)) for case in cases]


def errors(
    world: int, case: Joint, mesh: ds_usp.SequenceMesh, device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of this rank's outputs and gradients; gradients of joint tensors, to which
    every rank's joint_out has contributed, summed over the ranks."""
    generator = torch.Generator().manual_seed(3)

    def draw(tokens: int, heads: int, dim: int) -> torch.Tensor:
        drawn = torch.randn(2, tokens, heads, dim, generator=generator, dtype=torch.float64)
        return drawn.to(device, case.dtype)

    shapes = [(8, 16), (case.kv_heads, 16), (case.kv_heads, case.value_dim)]
    full = [draw(case.tokens, *shape) for shape in shapes]
    joint = [draw(case.joint, *shape).requires_grad_() for shape in shapes]
    dout = draw(case.tokens, 8, case.value_dim)
    djoint = [draw(case.joint, 8, case.value_dim) for _ in range(world)]
    sinks = torch.linspace(-1.0, 3.0, 8, device=device) if case.sinks else None

    layout = mesh.layout(case.layout, case.tokens)
    local_qkv = [layout.shard(x, 1, mesh.rank).requires_grad_() for x in full]
    out, joint_out = ds_usp.usp_joint_attention(
        *local_qkv,
        *joint,
        mesh=mesh,
        layout=layout,
        mask=case.mask,
        joint_front=case.front,
        tuning=case.tuning,
        scores=ds_usp.Scores(sinks=sinks),
    )
    douts = layout.shard(dout, 1, mesh.rank), djoint[mesh.rank]
    grads = torch.autograd.grad((out, joint_out), [*local_qkv, *joint], douts)
    for grad in grads[3:]:
        dist.all_reduce(grad)

    expected = reference(case, full, joint, dout, sum(djoint), sinks)
    names = ("out", "joint_out", "dq", "dk", "dv", "joint_dq", "joint_dk", "joint_dv")
    actual = dict(zip(names, (out, joint_out, *grads), strict=True))
    return {
        name: oracle.relative_error(
            x, expected[name] if "joint" in name else layout.shard(expected[name], 1, mesh.rank)
        )
        for name, x in actual.items()
    }


def reference(
    case: Joint,
    full: list[torch.Tensor],
    joint: list[torch.Tensor],
    dout: torch.Tensor,
    djoint: Any,
    sinks: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The oracle on both sequences as one."""
    own, others = ([x.detach().double().requires_grad_() for x in each] for each in (full, joint))
    order = slice(None) if case.front else slice(None, None, -1)
    q, k, v = (torch.cat([x, y][order], dim=1) for x, y in zip(others, own, strict=True))
    positions = range(case.tokens + case.joint)
    allowed = oracle.window(positions, positions, case.mask.left, case.mask.right).to(q.device)
    out, _ = oracle.dense_attention(q, k, v, allowed, sinks=sinks)
    position = case.joint if case.front else case.tokens
    joint_out, own_out = (out[:, :position], out[:, position:])[order]
    grads = torch.autograd.grad(
        (own_out, joint_out), [*own, *others], (dout.double(), djoint.double())
    )
    names = ("out", "joint_out", "dq", "dk", "dv", "joint_dq", "joint_dk", "joint_dv")
    return dict(zip(names, (own_out.detach(), joint_out.detach(), *grads), strict=True))
