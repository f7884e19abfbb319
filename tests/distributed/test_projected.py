"""Attention that projects its own heads, against linear layers around usp_attention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cases import mesh_of
from harness import RankContext, logged_lines

import ds_usp
from ds_usp import MaskSpec, Projection, Scores, Tuning, projected_attention
from ds_usp.attention.plan import AttentionOptions
from ds_usp.experimental.projected_attention import plain_attention, weights_reason
from ds_usp.kernels.rotary import Rotary
from ds_usp.training import RotaryPositions, local_positions

FEATURES, DIM = 20, 8
CAUSAL = MaskSpec.causal()


class Call(NamedTuple):
    """One call; ``weights`` is the order of the rows, or ``three`` weights."""

    heads: int = 8
    kv_heads: int = 8
    weights: str = "qkv"
    chunks: int = 1
    positions: bool = False  # rotary by positions, as the trainer does
    bias: bool = False
    rotary: bool = False
    batch: int = 1
    seq_len: int = 64
    layout: str = "zigzag"
    mask: MaskSpec = CAUSAL
    sinks: bool = False
    value_dim: int = DIM
    gather: bool = True
    inner: int | None = None
    frozen: tuple[int, ...] = ()


def calls(ulysses: int, ring: int) -> list[Call]:
    """Numbers of chunks with each kind of weights, then one call of each other kind."""
    most = ds_usp.geometry.heads.HeadSplit(8, 4, ulysses).chunk_limit(ring)
    made = [
        Call(8, kv, weights, min(chunks, most), positions, bias=bias, rotary=rotary)
        for kv, weights, chunks, positions, bias, rotary in (
            (4, "qkv", 1, False, True, True),
            (8, "qkv", 2, False, False, True),
            (4, "grouped", 3, False, True, False),
            (4, "three", 4, False, True, True),
            (4, "grouped", 1, True, True, True),
            (8, "three", 2, True, False, True),
            (4, "qkv", 4, True, True, True),
        )
    ]
    few = min(2, most)
    made += [
        Call(7, 7, chunks=1, seq_len=61, layout="striped", rotary=True),
        Call(8, 2, chunks=1, batch=3, mask=MaskSpec.window(9, 0), bias=True),
        Call(8, 2, chunks=1, batch=2, sinks=True, mask=MaskSpec.causal([0, 20, 64])),
        Call(weights="three", value_dim=12, sinks=True, chunks=few, gather=False),
        Call(value_dim=12, weights="three", chunks=few, gather=False, seq_len=67),
        Call(frozen=(0,), chunks=few, rotary=True, bias=True),
        Call(frozen=(1, 2, 3, 4), chunks=few, bias=True),
    ]
    if ring == 4:
        made += [Call(inner=2, positions=x, rotary=True) for x in (False, True)]
    return made


class Problem(NamedTuple):
    """Tensors of a call on one rank."""

    x: torch.Tensor
    projection: Projection
    rotary: Rotary | None
    dy: torch.Tensor
    options: dict[str, Any]


def problem(call: Call, mesh: ds_usp.SequenceMesh, dtype: torch.dtype = torch.float64) -> Problem:
    """Weights and the whole sequence are the same on every rank, which keeps its shard."""
    generator = torch.Generator().manual_seed(call.chunks)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)

    h, g, e = call.heads, call.kv_heads, call.value_dim
    rows = (h * DIM, g * DIM, g * e) if call.weights == "three" else ((h + 2 * g) * DIM,)
    weights, biases = tuple(values(n, FEATURES) for n in rows), tuple(values(n) for n in rows)
    single = len(rows) == 1
    projection = Projection(
        weights[0] if single else weights,  # type: ignore[arg-type]
        values(FEATURES + 4, h * e),
        h,
        g,
        (biases[0] if single else biases) if call.bias else None,  # type: ignore[arg-type]
        values(FEATURES + 4) if call.bias else None,
        "grouped" if call.weights == "grouped" else "qkv",
    )
    layout = mesh.layout(call.layout, call.seq_len)

    def shard(*shape: int, dim: int = 1) -> torch.Tensor:
        return layout.shard(values(*shape), dim, mesh.rank)

    x = shard(call.batch, call.seq_len, FEATURES)
    dy = shard(call.batch, call.seq_len, FEATURES + 4)
    rotary: Rotary = (shard(call.seq_len, 6, dim=0), shard(call.seq_len, 6, dim=0))
    if call.positions:
        positions = local_positions(layout, mesh.rank, x.device)
        rotary = RotaryPositions.of(positions, 6, seq_len=call.seq_len)
    sinks = values(h).requires_grad_() if call.sinks else None
    for i, tensor in enumerate((x, *projection.tensors)):
        tensor.requires_grad_(i not in call.frozen)
    inner = "auto" if call.inner is None else call.inner
    options = {
        "mesh": mesh,
        "layout": layout,
        "mask": call.mask,
        "tuning": Tuning(chunks=call.chunks, gather=call.gather, inner_ring=inner),
        "scores": Scores(sinks=sinks),
    }
    return Problem(x, projection, rotary if call.rotary else None, dy, options)


def results(y: torch.Tensor, made: Problem) -> list[torch.Tensor]:
    """The output, and the gradients of everything that requires one."""
    tensors = [made.x, *made.projection.tensors, made.options["scores"].sinks]
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, made.dy)]


def compare(ctx: RankContext, ulysses: int, made: Sequence[Call]) -> list[tuple[float, Any, Any]]:
    """Of each call: the largest error beside the plain graph, and the bytes of both."""
    rows, mesh = [], mesh_of(ulysses)
    for call in made:
        of_call = problem(call, mesh)
        mesh.ledger.reset()
        options = of_call.options
        y = projected_attention(of_call.x, of_call.projection, rotary=of_call.rotary, **options)
        ours = results(y, of_call)
        sent = dict(mesh.ledger.bytes)
        mesh.ledger.reset()
        whole = AttentionOptions(**options)
        y = plain_attention(of_call.x, of_call.projection, of_call.rotary, whole)
        plain = results(y, of_call)
        error = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True)
        )
        rows.append((error, sent, dict(mesh.ledger.bytes)))
    return rows


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (2, 2), (1, 4)])
def test_equals_linear_layers_around_attention(pool, ulysses, ring):
    made = calls(ulysses, ring)
    by_rank = pool.run(compare, ulysses * ring, ulysses=ulysses, made=made)
    for call, *rows in zip(made, *by_rank, strict=True):
        assert max(error for error, _, _ in rows) <= 1e-12, call
        for _, sent, plain in rows:
            again = ulysses > 1  # queries, keys and values once more, and the output
            assert all((sent[kind] > plain[kind]) == (again and "all" in kind) for kind in sent)


def lines_of(ctx: RankContext, run: Callable[[], None]) -> list[str]:
    with logged_lines() as lines:
        run()
    return lines


def in_training() -> None:
    """Accumulation, recomputation and what takes the plain path."""
    mesh = mesh_of(2)
    made = problem(Call(4, 2, chunks=2, bias=True, rotary=True), mesh, torch.float32)
    options: dict[str, Any] = made.options | {"rotary": made.rotary}
    weight = made.projection.weights[0]

    def run(x: torch.Tensor) -> torch.Tensor:
        return projected_attention(x, made.projection, **options)

    adds = []
    weight.register_hook(adds.append)
    (once,) = torch.autograd.grad(run(made.x), [weight], made.dy)
    for _ in range(2):
        run(made.x).backward(made.dy)
    assert len(adds) == 3  # once a pass
    torch.testing.assert_close(weight.grad, 2 * once)
    for wrap in (lambda f: f, ds_usp.memory.keep_attention):
        weight.grad = None
        y = torch.utils.checkpoint.checkpoint(wrap(run), made.x, use_reentrant=False)
        y.backward(made.dy)
        torch.testing.assert_close(weight.grad, once)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(made.x).dtype == torch.bfloat16
    y = run(made.x)
    with torch.autocast("cpu", torch.bfloat16):  # which changes no dtype in backward
        torch.testing.assert_close(torch.autograd.grad(y, [weight], made.dy), (once,))
    with torch.no_grad():
        run(made.x)


def test_gradients_come_once_a_pass_and_the_plain_path_has_a_reason(pool):
    lines, *others = pool.run(lines_of, 2, run=in_training)
    text = "projections are computed before attention, not under its exchanges: "
    said = [line.removeprefix(text) for line in lines if line.startswith(text)]
    assert said == [
        "keep_attention keeps attention without its projections",
        "autocast is on; convert the weights instead",
    ]
    assert others == [[]]


class Adapter(torch.nn.Linear):
    """A linear layer that computes something else, as those of LoRA."""


def as_modules() -> None:
    """Modules that overlap beside the same that do not."""
    mesh = mesh_of(2)
    made = problem(Call(4, 2), mesh, torch.float64)
    layout = mesh.layout("contiguous", 64)
    documents = MaskSpec.causal([0, 10, 64])

    def linear(kind: type[torch.nn.Linear], rows: int, columns: int) -> torch.nn.Linear:
        return kind(columns, rows, dtype=torch.float64)

    def module(qkv: Any, out: Any, order: str = "qkv", **options: Any) -> ds_usp.USPSelfAttention:
        return ds_usp.USPSelfAttention(
            qkv, out, 4, 2, mesh=mesh, layout=layout, mask=CAUSAL, order=order, **options
        )

    plain, hooked = torch.nn.Linear, linear(torch.nn.Linear, 64, FEATURES)
    hooked.register_forward_hook(lambda *_: None)
    replaced = linear(torch.nn.Linear, 64, FEATURES)
    replaced.forward = lambda x: 2 * torch.nn.functional.linear(x, replaced.weight)  # type: ignore[method-assign]
    replaced.bias = None  # type: ignore[assignment]
    norm = torch.nn.LayerNorm(DIM, dtype=torch.float64)
    three = [linear(plain, n, FEATURES) for n in (32, 16, 16)]
    one, out = linear(plain, 64, FEATURES), linear(plain, FEATURES + 4, 32)
    for qkv, options in (
        (one, {}),
        (one, {"order": "grouped"}),
        (three, {}),
        (linear(Adapter, 64, FEATURES), {}),
        (hooked, {}),
        (replaced, {}),
        (one, {"q_norm": norm, "k_norm": norm}),
    ):
        both = []
        for overlap in (True, False):
            layer = module(qkv, out, overlap=overlap, **options)
            y = layer(made.x, made.rotary, mask=documents)
            wanted = [made.x, *layer.parameters()]
            both.append([y, *torch.autograd.grad(y, wanted, made.dy)])
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not mesh.crosses_nodes
    assert ds_usp.SequenceMesh(4, 1, 0, ulysses_in_node=False).crosses_nodes
    assert ds_usp.SequenceMesh(1, 4, 0, ring_ranks_per_node=2).crosses_nodes
    assert not ds_usp.SequenceMesh.single().crosses_nodes
    assert set(module(three, out).state_dict()) == {
        f"{name}.{kind}"
        for name in ("qkv.0", "qkv.1", "qkv.2", "out")
        for kind in ("weight", "bias")
    }


def test_a_module_is_its_linear_layers_and_says_when_it_calls_them(pool):
    lines, others = pool.run(lines_of, 2, run=as_modules)
    text = "projections are computed before attention, not under its exchanges: "
    assert [line.removeprefix(text) for line in lines if line.startswith(text)] == [
        "a projection is a Adapter, no torch.nn.Linear",
        "a projection has hooks, which only its own call runs",
        "a projection's forward is replaced",
        "queries or keys are normalized between their projection and attention",
    ]
    assert not [line for line in others if line.startswith(text)]


def plain_of(x: torch.Tensor, projection: Projection, **options: Any) -> torch.Tensor:
    return plain_attention(x, projection, None, AttentionOptions(**options))


def kept(ctx: RankContext) -> list[int]:
    """Elements saved for backward besides weights, plain and projected."""
    made = problem(Call(4, 2, chunks=2), mesh_of(2))
    weights = {x.untyped_storage().data_ptr() for x in made.projection.tensors}
    sizes = []
    for attend in (plain_of, projected_attention):
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes() // 8
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = attend(made.x, made.projection, **made.options)
        sizes.append(sum(saved.values()))
        results(y, made)
    return sizes


def test_only_the_input_the_output_and_the_log_sum_exp_are_kept(pool):
    for plain, only_input in pool.run(kept, 2):
        x, out, lse = 32 * FEATURES, 32 * 4 * DIM, 64 * 2
        assert only_input == x + out + lse
        # After the exchange: q and out of 2 heads, k and v of one, of 64 tokens.
        assert plain == only_input + 64 * (2 + 1 + 1 + 2) * DIM


def refused(ctx: RankContext, changes: dict[str, Any], odd: int) -> str:
    made = problem(Call(4, 2), mesh_of(2), torch.float32)
    arguments = made.options | {"rotary": None} | (changes if ctx.rank >= odd else {})
    x = arguments.pop("x", made.x)
    try:
        projected_attention(x, made.projection, **arguments)
    except ds_usp.USPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"keep": "all"}, "ConfigError: keep='all' must be 'input'"),
        ({"keep": "arrivals"}, "ConfigError: keep='arrivals' was removed: products under"),
        ({"x": torch.randn(1, 32, 8)}, "ConfigError: x must be [batch, tokens, 20]"),
        ({"rotary": (torch.ones(3, 4),) * 2}, "ConfigError: rotary must be cos and sin [s, r]"),
        ({"rotary": (torch.ones(32, 4),) * 2}, "MeshError"),
    ],
)
def test_a_wrong_or_different_call_is_refused_on_every_rank(pool, changes, text):
    differs = text == "MeshError"
    first, second = pool.run(refused, 2, changes=changes, odd=1)
    assert (text in second) and (text if differs else "MeshError") in first


def test_weights_that_do_not_fit_are_refused():
    x = torch.randn
    for arguments, text in (
        ((x(30, 8), x(8, 16), 4, 3), "no multiple of 3 key/value heads"),
        ((x(33, 8), x(8, 16), 4, 2), "must be .h d"),
        ((x(32, 8), x(8, 12), 4, 2), "must be .h d"),
        (((x(16, 8), x(8, 8), x(8, 8)), x(8, 16), 4, 2, None, None, "grouped"), "order='grouped'"),
        ((x(32, 8), x(8, 16), 4, 2, x(31)), "biases ..31.. do not fit"),
        ((x(32, 8), x(8, 16), 4, 2, None, x(1)), "out_bias .1. does not fit"),
    ):
        with pytest.raises(ds_usp.ConfigError, match=text):
            Projection(*arguments)  # type: ignore[arg-type]


def test_weights_of_their_own_layers_are_known():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    assert weights_reason([weight], torch.float32) is None
    assert "bfloat16" in str(weights_reason([weight], torch.bfloat16))

    class Quantized(torch.nn.Parameter):
        pass

    assert "Quantized" in str(weights_reason([Quantized(torch.randn(2))], torch.float32))
    partitioned = torch.nn.Parameter(torch.empty(0))
    partitioned.ds_id = 0  # type: ignore[attr-defined]
    tensors = Projection(partitioned, partitioned, 4, 4).tensors
    assert "ZeRO-3" in str(weights_reason(tensors, torch.float32))
