"""The module of self-attention with its linear layers, against the same weights without it."""

from typing import Any, NamedTuple

import pytest
import torch
from cases import mesh_of
from harness import RankContext

import ds_usp
from ds_usp import MaskSpec, USPSelfAttention
from ds_usp import testing as oracle
from ds_usp.training import RotaryPositions

FEATURES, HEADS, KV_HEADS, DIM, VALUE_DIM, TOKENS, ROTARY = 20, 4, 2, 8, 12, 32, 6
DOCUMENTS = [10, 22]  # tokens of each


class Case(NamedTuple):
    """One module; ``layers`` is the order of one layer's features, or ``three`` layers."""

    layers: str
    rotary: str = ""  # table | positions
    norms: bool = False
    documents: bool = False


CASES = [
    Case("qkv"),
    Case("qkv", "positions", documents=True),
    Case("grouped", "table", norms=True),
    Case("grouped", "positions"),
    Case("three", "table", documents=True),
]


def linear(rows: int, columns: int) -> torch.nn.Linear:
    return torch.nn.Linear(columns, rows, dtype=torch.float64)


def made(case: Case, mesh: ds_usp.SequenceMesh) -> USPSelfAttention:
    """The same weights on every rank."""
    torch.manual_seed(7)
    h, g = HEADS, KV_HEADS
    three = case.layers == "three"
    value_dim = VALUE_DIM if three else DIM
    rows = (h * DIM, g * DIM, g * value_dim) if three else ((h + 2 * g) * DIM,)
    layers = [linear(n, FEATURES) for n in rows]
    qkv = torch.nn.ModuleList(layers) if three else layers[0]
    order = "grouped" if case.layers == "grouped" else "qkv"
    norms: dict[str, Any] = {}
    if case.norms:
        norms = {
            name: torch.nn.LayerNorm(DIM, dtype=torch.float64) for name in ("q_norm", "k_norm")
        }
    return USPSelfAttention(
        qkv,
        linear(FEATURES + 4, h * value_dim),
        h,
        g,
        mesh=mesh,
        layout="zigzag",
        mask=MaskSpec.causal(),
        order=order,
        **norms,
    )


def rows_of(case: Case, kind: int, head: int, value_dim: int) -> tuple[int, int]:
    """The layer, and its first row of a head of queries (0), keys (1) or values (2)."""
    dim, ratio = (DIM, DIM, value_dim)[kind], HEADS // KV_HEADS
    if case.layers == "three":
        return kind, head * dim
    if case.layers == "qkv":
        return 0, ((0, HEADS, HEADS + KV_HEADS)[kind] + head) * dim
    group, place = divmod(head, ratio) if kind == 0 else (head, ratio + kind - 1)
    return 0, (group * (ratio + 2) + place) * dim


def expected(case: Case, module: USPSelfAttention, x: torch.Tensor) -> torch.Tensor:
    """Of the whole sequence, head by head."""
    value_dim = VALUE_DIM if case.layers == "three" else DIM
    layers: Any = module.qkv if isinstance(module.qkv, torch.nn.ModuleList) else [module.qkv]

    def heads(kind: int, count: int) -> torch.Tensor:
        parts = []
        for head in range(count):
            layer, start = rows_of(case, kind, head, value_dim)
            rows = slice(start, start + (DIM, DIM, value_dim)[kind])
            parts.append(x @ layers[layer].weight[rows].t() + layers[layer].bias[rows])
        return torch.stack(parts, 2)

    q, k, v = heads(0, HEADS), heads(1, KV_HEADS), heads(2, KV_HEADS)
    if module.q_norm is not None and module.k_norm is not None:
        q, k = module.q_norm(q), module.k_norm(k)
    positions = range(TOKENS)
    if case.rotary:
        q, k = (oracle.rotated(y, positions, ROTARY, 10000.0, token_dim=1) for y in (q, k))
    allowed = oracle.causal(positions, positions)
    if case.documents:
        allowed = allowed & oracle.same_document(positions, positions, DOCUMENTS)
    out, _ = oracle.dense_attention(q, k, v, allowed, DIM**-0.5)
    return module.out(out.flatten(2))


def errors(ctx: RankContext, ulysses: int) -> list[float]:
    """Of each case the largest error of output and gradients."""
    mesh, found = mesh_of(ulysses), []
    layout = mesh.layout("zigzag", TOKENS)
    positions = layout.positions(mesh.rank)
    inverse = 10000.0 ** -(torch.arange(0, ROTARY, 2, dtype=torch.float64) / ROTARY)
    for case in CASES:
        module = made(case, mesh)
        x = torch.randn(2, TOKENS, FEATURES, dtype=torch.float64).requires_grad_()
        dy = torch.randn(2, TOKENS, FEATURES + 4, dtype=torch.float64)
        y = expected(case, module, x)
        wanted = [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]
        rotary: Any = RotaryPositions(torch.tensor(positions), inverse)
        if case.rotary == "table":
            rotary = rotary.table(0, len(positions), torch.float64)
        mask = MaskSpec.causal([0, 10, TOKENS]) if case.documents else None
        y = module(x[:, positions], rotary if case.rotary else None, mask=mask)
        dx, *weights = torch.autograd.grad(y, [x, *module.parameters()], dy[:, positions])
        for gradient in weights:  # each rank has its tokens' part
            torch.distributed.all_reduce(gradient, group=ctx.group)
        pairs = [
            (y, wanted[0][:, positions]),
            (dx[:, positions], wanted[1][:, positions]),
            *zip(weights, wanted[2:], strict=True),
        ]
        found.append(max(oracle.relative_error(a, b) for a, b in pairs))
    return found


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_module_equals_dense_attention_of_its_weights(pool, ulysses, ring):
    for found in pool.run(errors, ulysses * ring, ulysses=ulysses):
        assert max(found) < 1e-12, found


def test_weights_keep_their_names_in_checkpoints():
    layers = {
        "three": ("qkv.0", "qkv.1", "qkv.2", "out"),
        "qkv": ("qkv", "out"),
    }
    for kind, names in layers.items():
        state = made(Case(kind), ds_usp.SequenceMesh.single()).state_dict()
        assert set(state) == {f"{name}.{x}" for name in names for x in ("weight", "bias")}
