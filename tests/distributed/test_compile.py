"""``torch.compile`` takes attention into one graph, and its bits are those without a compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import SEED, Case, errors_of, inputs, layouts, mesh_of, sinks, slopes
from harness import RankContext, WorkerPool
from local_attentions import (
    TOKENS,
    Local,
    Setting,
    flash_attn,
    flash_self_attention,
    full_tensors,
    nobody_knows,
    triton,
)
from torch._dynamo.utils import counters

import ds_usp

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]
# Sinks with the kernel eager: the order in which their gradient is summed is that of the strides of
# out, which others return transposed and an op must not.
BASE = Case(batch=2, seq_len=43, heads=4, kv_heads=2, head_dim=16)
CASES = [
    BASE,
    replace(BASE, layout="striped", mask="window", value_dim=8, softmax_scale=0.3),
    replace(BASE, heads=8, kv_heads=4, tuning=ds_usp.Tuning(chunks=2, gather=True)),
    replace(BASE, kernel="eager", softcap=2.0, alibi=True, sinks=True, dropout_p=0.2),
    replace(BASE, kernel="eager", mask="full", keys=(17, "contiguous"), sinks=True),
    replace(BASE, prefix=5, dtype=torch.bfloat16),
]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


class Layer(torch.nn.Module):
    """Attention between products that change no bit of it."""

    def __init__(self, mesh: ds_usp.SequenceMesh, case: Case) -> None:
        super().__init__()
        layout, kv_layout = layouts(mesh, case)
        sink = sinks(case)
        self.sinks = None if sink is None else torch.nn.Parameter(sink)
        self.slopes, self.case = slopes(case), case
        self.given: dict[str, Any] = {
            "mesh": mesh,
            "layout": layout,
            "kv_layout": kv_layout,
            "mask": case.mask_spec,
            "softmax_scale": case.softmax_scale,
            "dropout_p": case.dropout_p,
            "kernel": case.kernel,
            "tuning": case.tuning,
            "return_lse": True,
        }

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seed = SEED if self.case.dropout_p else None
        scores = ds_usp.Scores(self.case.softcap, self.slopes, self.sinks, seed)
        out, lse = ds_usp.usp_attention(q / 2, k * 2, 4 * v, scores=scores, **self.given)
        return out / 4, lse


def shards(mesh: ds_usp.SequenceMesh, case: Case) -> dict[str, torch.Tensor]:
    """This rank's q, k, v, which ask for gradients, and dout."""
    layout, kv_layout = layouts(mesh, case)
    mine = {
        name: (kv_layout if name in "kv" else layout).shard(x, 1, mesh.rank)
        for name, x in inputs(case).items()
    }
    return {name: x.requires_grad_(name != "dout") for name, x in mine.items()}


def results(layer: Any, mesh: ds_usp.SequenceMesh, case: Case) -> dict[str, torch.Tensor]:
    """Out, lse and all gradients."""
    q, k, v, dout = shards(mesh, case).values()
    out, lse = layer(q, k, v)
    grads = torch.autograd.grad(out, [q, k, v, *layer.parameters()], dout)
    return dict(zip(NAMES, (out.detach(), lse, *grads), strict=False))


def compiled(module: Any, backend: str = "aot_eager", **options: Any) -> Any:
    """A module compiled as one graph, with nothing left of what was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    torch._inductor.config.compile_threads = 1  # ranks are daemons, which have no children
    return torch.compile(module, fullgraph=True, backend=backend, **options)


def graphs() -> tuple[int, int]:
    """Graphs that were made, and breaks between them, since :func:`compiled`."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def same_bits(
    ctx: RankContext, made: list[Case], ulysses: int, backend: str
) -> list[tuple[list[str], tuple[int, int], dict[str, float]]]:
    """Results that differ from those without a compiler; graphs; errors against the oracle."""
    mesh, found = mesh_of(ulysses), []
    for case in made:
        layer = Layer(mesh, case)
        want = results(layer, mesh, case)
        got = results(compiled(layer, backend), mesh, case)
        differ = [name for name, x in got.items() if not torch.equal(x, want[name])]
        truth = replace(case, softmax_scale=case.softmax_scale or case.head_dim**-0.5)
        found.append((differ, graphs(), errors_of(mesh, truth, want)))
    return found


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_one_graph_with_the_same_bits(pool: WorkerPool, ulysses: int, ring: int) -> None:
    for each in pool.run(
        same_bits, ulysses * ring, made=CASES, ulysses=ulysses, backend="aot_eager"
    ):
        for case, (differ, made, errors) in zip(CASES, each, strict=True):
            assert not differ, f"{case}: {differ}"
            assert made == (1, 0), str(case)
            del errors


# Drop-ins: around local attentions that a ring reads, and around any on ring 1.
SETTINGS = [
    Setting(flash_self_attention, {}, {}),
    Setting(triton, {}, {}, layout="striped", batch_dim=1),
    Setting(flash_attn, {"alibi": [0.5, 0.25, 0.125, 0.0625]}, {"kernel": "eager"}),
    Setting(nobody_knows, {}, {"mask": ds_usp.MaskSpec.full(), "dropout_p": 0.0}, batch_dim=1),
    Setting(Local, {"batch_dim": 0}, {}, ulysses=4),
    Setting(Local, {"batch_dim": 1, "flat": True}, {}, ulysses=4, batch_dim=1),
]


def drop_in(ctx: RankContext, setting: Setting) -> tuple[list[bool], tuple[int, int]]:
    """Whether out, dq, dk and dv have the bits of those without a compiler; graphs."""
    slopes = setting.arguments.get("alibi")
    if slopes:
        setting = replace(setting, arguments={"alibi": torch.tensor(slopes)})
    module, found = setting.module(), []
    layout = module.mesh.layout(setting.layout, TOKENS)
    shards = [layout.shard(x, 1, ctx.rank) for x in full_tensors()]
    q, k, v, dout = (x.transpose(0, 1).contiguous() if setting.batch_dim else x for x in shards)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for run in (module, compiled(module)):
        out = run(*inputs, setting.batch_dim)
        found.append([out, *torch.autograd.grad(out, inputs, dout.view(out.shape))])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)], graphs()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.local.__name__}-{s.ulysses}")
def test_a_drop_in_is_in_one_graph(pool: WorkerPool, setting: Setting) -> None:
    for same, made in pool.run(drop_in, 4, setting=setting):
        assert same == [True] * 4
        assert made == (1, 0)
