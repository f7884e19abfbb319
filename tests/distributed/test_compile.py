"""``torch.compile`` takes attention into one graph, and its bits are those without a compiler."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, errors_of, inputs, layouts, mesh_of, sinks
from harness import RankContext
from sample_attentions import (
    TOKENS,
    Local,
    Setting,
    flash_self_attention,
    full_tensors,
    nobody_knows,
    rotary,
    triton,
)
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ds_usp
from ds_usp.attention.passes import ForwardPass
from ds_usp.memory import keep_attention

# Sinks with the kernel eager: the order in which their gradient is summed is that of the strides of
# out, which others return transposed and an op must not.
BASE = Case(batch=2, seq_len=43, heads=4, kv_heads=2, head_dim=16)
CASES = [
    BASE,
    replace(BASE, layout="striped", mask="window", value_dim=8, softmax_scale=0.3),
    replace(BASE, heads=8, kv_heads=4, tuning=ds_usp.Tuning(chunks=2, gather=True)),
    replace(BASE, kernel="eager", softcap=2.0, sinks=True),
    replace(BASE, kernel="eager", mask="full", keys=(17, "contiguous"), sinks=True),
    replace(BASE, prefix=5, dtype=torch.bfloat16),
]
ops = torch.ops.ds_usp
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


class Layer(torch.nn.Module):
    """Attention between products that change no bit of it, or alone."""

    def __init__(self, mesh: ds_usp.SequenceMesh, case: Case, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone
        layout, kv_layout = layouts(mesh, case)
        sink = sinks(case)
        self.sinks = None if sink is None else torch.nn.Parameter(sink)
        self.softcap = case.softcap
        self.given: dict[str, Any] = {
            "mesh": mesh,
            "layout": layout,
            "kv_layout": kv_layout,
            "mask": case.mask_spec,
            "softmax_scale": case.softmax_scale,
            "kernel": case.kernel,
            "tuning": case.tuning,
            "return_lse": True,
        }

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = ds_usp.Scores(self.softcap, self.sinks)
        if self.alone:
            return ds_usp.usp_attention(q, k, v, scores=scores, **self.given)
        return self.attend(q, k, v, scores, self.given)

    @staticmethod
    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: ds_usp.Scores,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = ds_usp.usp_attention(q / 2, k * 2, 4 * v, scores=scores, **options)
        return out / 4, lse


def shards(mesh: ds_usp.SequenceMesh, case: Case) -> dict[str, torch.Tensor]:
    """This rank's q, k, v, which ask for gradients, and dout."""
    layout, kv_layout = layouts(mesh, case)
    local_qkv = {
        name: (kv_layout if name in "kv" else layout).shard(x, 1, mesh.rank)
        for name, x in inputs(case).items()
    }
    return {name: x.requires_grad_(name != "dout") for name, x in local_qkv.items()}


def results(layer: Any, mesh: ds_usp.SequenceMesh, case: Case) -> dict[str, torch.Tensor]:
    """Out, lse and all gradients."""
    q, k, v, dout = shards(mesh, case).values()
    out, lse = layer(q, k, v)
    grads = torch.autograd.grad(out, [q, k, v, *layer.parameters()], dout)
    return dict(zip(NAMES, (out.detach(), lse, *grads), strict=False))


def compiled(module: Any, backend: str = "aot_eager", fullgraph: bool = True) -> Any:
    """A module compiled, as one graph, with nothing left of what was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    torch._inductor.config.compile_threads = 1  # ranks are daemons, which have no children
    return torch.compile(module, fullgraph=fullgraph, backend=backend)


def graphs() -> tuple[int, int]:
    """Graphs that were made, and breaks between them, since :func:`compiled`."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def same_bits(
    ctx: RankContext, made: list[Case], ulysses: int, backend: str
) -> list[tuple[list[str], tuple[int, int], dict[str, float]]]:
    """Results that differ from those without a compiler; graphs; errors against the oracle."""
    mesh, outcomes = mesh_of(ulysses), []
    for case in made:
        layer = Layer(mesh, case, alone=backend == "inductor")
        expected = results(layer, mesh, case)
        actual = results(compiled(layer, backend), mesh, case)
        differ = [name for name, x in actual.items() if not torch.equal(x, expected[name])]
        outcomes.append(
            (differ, graphs(), errors_of(mesh, case, actual) if backend == "inductor" else {})
        )
    return outcomes


@pytest.mark.parametrize(
    ("ulysses", "ring", "made", "backend"),
    [
        (1, 1, CASES[:1], "aot_eager"),
        (2, 1, CASES[2:4], "eager"),
        (1, 2, CASES[3:], "aot_eager"),
        (2, 2, CASES[1:3], "aot_eager"),
    ],
)
def test_one_graph_with_the_same_bits(pool, ulysses, ring, made, backend):
    world = ulysses * ring
    for each in pool.run(same_bits, world, made=made, ulysses=ulysses, backend=backend):
        for case, (differ, graphs_and_breaks, _) in zip(made, each, strict=True):
            assert not differ, f"{case}: {differ}"
            assert graphs_and_breaks == (1, 0), str(case)


def test_inductor_makes_one_graph_that_the_oracle_confirms(pool):
    # Alone: inductor would have a C++ compiler make what is around attention, for half a minute.
    case = replace(BASE, heads=8, kv_heads=2, tuning=ds_usp.Tuning(chunks=2))  # of a KV group
    for [(differ, graphs_and_breaks, errors)] in pool.run(
        same_bits, 2, made=[case], ulysses=2, backend="inductor"
    ):
        assert not differ
        assert graphs_and_breaks == (1, 0)
        assert max(errors.values()) <= 1e-5, errors


def on_one_rank(ctx: RankContext) -> list[bool]:
    """Whether ranks with and without a compiler go on together, with the same bits."""
    same = []
    for ulysses in (1, 2, 4):
        gathered = ds_usp.Tuning(gather=True)
        case = replace(BASE, kv_heads=4, kernel="eager", sinks=True, tuning=gathered)
        layer = Layer(mesh_of(ulysses), case)
        run = compiled(layer) if ctx.rank == 1 else layer
        expected = results(layer, mesh_of(ulysses), case)
        actual = results(run, mesh_of(ulysses), case)
        same += [torch.equal(x, expected[name]) for name, x in actual.items()]
    local = replace(LOCAL, arguments={"batch_dim": 0})
    for setting, fullgraph in ((SETTINGS[0], True), (local, False)):
        module = setting.module()
        layout = module.mesh.layout(setting.layout, TOKENS)
        q, k, v, _ = (layout.shard(x, 1, ctx.rank).requires_grad_() for x in full_tensors())
        run = compiled(module, fullgraph=fullgraph) if ctx.rank == 1 else module
        same.append(torch.equal(module(q, k, v, 0), run(q, k, v, 0)))
    return same


def test_ranks_with_and_without_a_compiler_agree(pool):
    for same in pool.run(on_one_rank, 4):
        assert all(same)


def of_mixed_dtypes(ctx: RankContext, ulysses: int) -> None:
    x, call = torch.randn(1, 8, 4, 8), {"layout": "contiguous", "mask": ds_usp.MaskSpec.causal()}
    run = compiled(partial(ds_usp.usp_attention, mesh=mesh_of(ulysses), **call))
    run(x, x.bfloat16(), x.bfloat16())


@pytest.mark.parametrize("ulysses", [1, 2])
def test_mixed_dtypes_are_refused_in_a_graph_too(pool, ulysses):
    """An exchange would cast keys and values to the dtype of the queries."""
    for error in pool.errors(of_mixed_dtypes, 2, ulysses=ulysses):
        assert isinstance(error, ds_usp.ConfigError)
        assert "torch.float32 on cpu, torch.bfloat16 on cpu, torch.bfloat16 on cpu" in str(error)


def same_as_uncompiled(run: Any, given: dict[str, torch.Tensor], *more: Any) -> list[bool]:
    """Whether out, lse and gradients have the bits of a call without a compiler."""
    (q, k, v, dout), outputs = given.values(), []
    for each in (Layer.attend, run):
        out, lse = each(q, k, v, *more)
        outputs.append([out, lse, *torch.autograd.grad(out, [q, k, v], dout)])
    return [torch.equal(a, b) for a, b in zip(*outputs, strict=True)]


def lengths(ctx: RankContext, ulysses: int) -> tuple[list[bool], tuple[int, int]]:
    """Whether each of some lengths has the bits of a call without a compiler; graphs."""
    mesh, same = mesh_of(ulysses), []
    made = [replace(BASE, seq_len=n, batch=b) for n, b in ((43, 2), (32, 1), (57, 3), (20, 2))]
    layers = [Layer(mesh, case) for case in made]
    run = compiled(Layer.attend)
    for layer, case in zip(layers, made, strict=True):
        same += same_as_uncompiled(run, shards(mesh, case), ds_usp.Scores(), layer.given)
    return same, graphs()


def windows(ctx: RankContext) -> list[bool]:
    """The same of other windows and caps, which a compiler takes for symbols."""
    mesh, same = mesh_of(1), []
    layer = Layer(mesh, replace(BASE, kernel="eager"))
    run = compiled(Layer.attend)
    for position in (0, 2, 3):  # 0 is no symbol
        options = layer.given | {"mask": ds_usp.MaskSpec.window(3 + position, position)}
        scores = ds_usp.Scores(1.5 + position)
        same += same_as_uncompiled(run, shards(mesh, BASE), scores, options)
    return same


def test_other_windows(pool):
    for same in pool.run(windows, 2):
        assert all(same)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_other_lengths(pool, ulysses):
    for same, (made, breaks) in pool.run(lengths, 2, ulysses=ulysses):
        assert all(same)
        assert breaks == 0
        # A ring alone makes one more, for any length. What Ulysses exchanges has planned sizes.
        assert made <= 3 if ulysses == 1 else made == 4


# Drop-ins with a ring, and around local attentions that are called.
SETTINGS = [
    Setting(flash_self_attention, {}, {}),
    Setting(triton, {}, {}, layout="striped", batch_dim=1),
    Setting(nobody_knows, {}, {"mask": ds_usp.MaskSpec.full(), "dropout_p": 0.0}, batch_dim=1),
]
LOCAL = Setting(Local, {"batch_dim": 1, "flat": True}, {}, ulysses=4, batch_dim=1)


def drop_in(
    ctx: RankContext, setting: Setting, fullgraph: bool = True
) -> tuple[list[bool], tuple[int, int]]:
    """Whether out, dq, dk and dv have the bits of those without a compiler; graphs."""
    module, outputs = setting.module(), []
    layout = module.mesh.layout(setting.layout, TOKENS)
    shards = [layout.shard(x, 1, ctx.rank) for x in full_tensors()]
    q, k, v, dout = (x.transpose(0, 1).contiguous() if setting.batch_dim else x for x in shards)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    turn = (rotary(setting.rotary, TOKENS),) if setting.rotary else ()
    for run in (module, compiled(module, fullgraph=fullgraph)):
        out = run(*inputs, setting.batch_dim, *turn)
        outputs.append([out, *torch.autograd.grad(out, inputs, dout.view(out.shape))])
    return [torch.equal(a, b) for a, b in zip(*outputs, strict=True)], graphs()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.local.__name__}-{s.ulysses}")
def test_a_drop_in_is_in_one_graph(pool, setting):
    for same, made in pool.run(drop_in, 4, setting=setting):
        assert same == [True] * 4
        assert made == (1, 0)


OUTSIDE = {"rotary": replace(SETTINGS[0], rotary=8), "local attention": LOCAL}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_is_outside_of_graphs_breaks_them_or_is_refused(pool, what):
    for same, (_, breaks) in pool.run(drop_in, 4, setting=OUTSIDE[what], fullgraph=False):
        assert same == [True] * 4
        assert breaks > 0
    for error in pool.errors(drop_in, 4, setting=OUTSIDE[what]):
        assert what in str(error).replace("\n", " ") and "graph" in str(error)


DOCUMENTS = replace(BASE, documents=((20, 23),))


def with_documents(ctx: RankContext, fullgraph: bool) -> tuple[list[bool], int]:
    """Whether documents, which are outside of graphs, have the same bits; breaks of the graph."""
    mesh = mesh_of(2)
    layer = Layer(mesh, DOCUMENTS)
    expected = results(layer, mesh, DOCUMENTS)
    actual = results(compiled(layer, fullgraph=fullgraph), mesh, DOCUMENTS)
    return [torch.equal(x, expected[name]) for name, x in actual.items()], graphs()[1]


def test_documents_break_the_graph_or_are_refused(pool):
    for same, breaks in pool.run(with_documents, 2, fullgraph=False):
        assert all(same)
        assert breaks > 0
    for error in pool.errors(with_documents, 2, fullgraph=True):
        assert "documents" in str(error) and "graph" in str(error)


def wrong_on_rank_1(ctx: RankContext, ulysses: int) -> None:
    mesh = mesh_of(ulysses)
    case = replace(BASE, seq_len=44, heads=1, kv_heads=1) if ctx.rank else replace(BASE, seq_len=44)
    q, k, v, _ = shards(mesh, case).values()
    options = Layer(mesh, case).given | {"dropout_p": float(ctx.rank)}
    compiled(Layer.attend)(q, k, v, ds_usp.Scores(), options)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_what_one_rank_refuses_is_raised_on_all(pool, ulysses):
    others, one = pool.errors(wrong_on_rank_1, 2, ulysses=ulysses)
    assert isinstance(one, ds_usp.USPError) and not isinstance(one, ds_usp.MeshError)
    assert isinstance(others, ds_usp.MeshError)
    assert "refused by ranks" in str(others)


class Counted:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def checkpointed(
    ctx: RankContext, how: str, reentrant: bool, ulysses: int, fullgraph: bool = False
) -> tuple[list[bool], int]:
    """Whether the gradients have the same bits; how often attention was computed forward."""
    mesh, layer = mesh_of(ulysses), Layer(mesh_of(ulysses), BASE)
    q, k, v, dout = shards(mesh, BASE).values()

    def gradients(run: Any) -> list[torch.Tensor]:
        run(q, k, v)[0].backward(dout)
        grads = [x.grad for x in (q, k, v)]
        q.grad = k.grad = v.grad = None
        return grads

    expected = gradients(layer)
    once = Counted(ForwardPass)
    with (
        mock.patch("ds_usp.attention.custom_ops.ForwardPass", once),
        mock.patch("ds_usp.attention.functional.ForwardPass", once),
    ):
        if how == "selective":  # torch's own way, inside of one graph
            keeps = partial(create_selective_checkpoint_contexts, [ops.attention.default])
            run = partial(checkpoint, layer, use_reentrant=False, context_fn=keeps)
            actual = gradients(compiled(lambda *x: run(*x)))
        elif how == "compiled around it":
            kept = partial(checkpoint, use_reentrant=reentrant)
            around = compiled(lambda *x: kept(keep_attention(layer), *x), fullgraph=fullgraph)
            actual = gradients(around)
        else:
            kept = keep_attention(compiled(layer))
            actual = gradients(partial(checkpoint, kept, use_reentrant=reentrant))
    return [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)], once.calls


@pytest.mark.parametrize(
    ("how", "reentrant", "ulysses"),
    [
        ("compiled inside", False, 1),
        ("compiled inside", True, 2),
        ("compiled around it", False, 2),
        ("selective", False, 1),
    ],
)
def test_attention_in_a_graph_is_kept(pool, how, reentrant, ulysses):
    case = {"how": how, "reentrant": reentrant, "ulysses": ulysses}
    for same, calls in pool.run(checkpointed, 2, **case):
        assert all(same)
        assert calls == 1


def test_keeping_in_a_graph_is_refused(pool):
    case = {"how": "compiled around it", "reentrant": False, "ulysses": 2, "fullgraph": True}
    for error in pool.errors(checkpointed, 2, **case):
        assert "create_selective_checkpoint_contexts" in str(error)


def local_kept(ctx: RankContext) -> tuple[list[bool], int]:
    """Whether the gradients have the same bits; how often the local attention was called."""
    module = LOCAL.module()
    layout = module.mesh.layout(LOCAL.layout, TOKENS)
    shards = [layout.shard(x, 1, ctx.rank).transpose(0, 1) for x in full_tensors()]
    inputs, dout = [x.requires_grad_() for x in shards[:3]], shards[3]
    results, calls = [], Counted(module.local_attn.forward)
    around = partial(checkpoint, keep_attention(compiled(module, fullgraph=False)))
    for run in (module, partial(around, use_reentrant=False)):
        calls.calls = 0
        with mock.patch.object(module.local_attn, "forward", calls):
            out = run(*inputs, 1)
            results.append(torch.autograd.grad(out, inputs, dout.reshape(out.shape)))
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)], calls.calls


def test_a_local_attention_that_breaks_the_graph_is_kept(pool):
    for same, calls in pool.run(local_kept, 4):
        assert all(same)
        assert calls == 1
