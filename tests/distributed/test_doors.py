"""Token orders: one SGD step through every entry point, layouts by name and by default."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import ALL_ORDERS, mesh_of
from harness import RankContext, logged_lines
from sample_attentions import Local, flash_self_attention

import ds_usp
from ds_usp import MaskSpec, SequenceMesh, USPAttention
from ds_usp import testing as oracle
from ds_usp.errors import _emit_once
from ds_usp.training import SequenceParallelDataLoader

WORLD, ULYSSES, TOKENS, VOCAB, WIDTH, HEADS = 4, 2, 32, 11, 16, 4
CAUSAL: dict[str, Any] = {"mask": MaskSpec.causal(), "dropout_p": 0.0}
LIMIT = 1e-5

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Dense(torch.nn.Module):
    """The user's own attention of ``[b, s, h, d]``: causal, of no class that can be read."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        allowed = oracle.causal(range(q.shape[1]), range(k.shape[1]))
        return oracle.dense_attention(q, k, v, allowed)[0].to(q.dtype)


def one_step(attend: Attend, rank: int | None) -> torch.Tensor:
    """All weights of a small language model after one SGD step.

    Args:
        rank: of the caller's shard; None: the whole sequence, in fp64.
    """
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCAB, (2, TOKENS + 1), generator=generator)
    tables = [torch.randn(n, WIDTH, generator=generator) for n in (VOCAB, TOKENS)]
    mixes = [torch.randn(WIDTH, n, generator=generator) / 4 for n in (3 * WIDTH, VOCAB)]
    weights = [w if rank is not None else w.double() for w in (*tables, *mixes)]
    words, places, into, out = (w.requires_grad_() for w in weights)
    parts = (text[:, :-1], text[:, 1:], torch.arange(TOKENS).expand(2, -1))
    if rank is not None:
        parts = tuple(x.tensor_split(WORLD, dim=1)[rank] for x in parts)
    tokens, labels, positions = parts
    qkv = ((words[tokens] + places[positions]) @ into).unflatten(-1, (3, HEADS, -1))
    logits = attend(*qkv.unbind(2)).flatten(2) @ out
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    if rank is not None:
        for weight in weights:
            dist.all_reduce(weight.grad)
    with torch.no_grad():
        stepped = [w - 0.1 / text[:, 1:].numel() * w.grad for w in weights]
    return torch.cat([w.flatten() for w in stepped])


def drop_in(ctx: RankContext, **options: Any) -> Attend:
    group = None if "mesh" in options else ctx.group
    attention = USPAttention(Dense(), group, gather_idx=1, **{**CAUSAL, **options})
    return lambda q, k, v: attention(q, k, v, 0)


def patched_deepspeed(ctx: RankContext, **options: Any) -> Attend:
    from deepspeed.sequence import layer

    import megatron_patches

    megatron_patches.apply("deepspeed", **CAUSAL, **options)
    try:
        attention = layer.DistributedAttention(Dense(), ctx.group, gather_idx=1)
    finally:
        megatron_patches.restore()
    return lambda q, k, v: attention(q, k, v, 0)


def mesh(ctx: RankContext, order: str) -> dict[str, Any]:
    """What a drop-in is given instead of its group."""
    return {"mesh": SequenceMesh.shared(None, ULYSSES, order)}


DOORS: dict[str, Callable[[RankContext], Attend]] = {
    "USPAttention": lambda ctx: drop_in(ctx, ulysses_degree=ULYSSES),
    "USPAttention, ring 4": lambda ctx: drop_in(ctx, ulysses_degree=1),
    "USPAttention, ring 1": drop_in,
    **{
        f"USPAttention, {order}": (
            lambda ctx, order=order: drop_in(ctx, ulysses_degree=ULYSSES, order=order)
        )
        for order in ALL_ORDERS
    },
    "USPAttention, mesh": lambda ctx: drop_in(ctx, **mesh(ctx, ALL_ORDERS[0])),
    "usp_attention": lambda ctx: partial(
        ds_usp.usp_attention, **mesh(ctx, ALL_ORDERS[1]), layout="contiguous", mask=CAUSAL["mask"]
    ),
    "apply('deepspeed')": lambda ctx: patched_deepspeed(ctx, ulysses_degree=ULYSSES),
}


def step_through(ctx: RankContext, door: str) -> torch.Tensor:
    return one_step(DOORS[door](ctx), ctx.rank)


@pytest.mark.parametrize("door", DOORS)
def test_one_step_from_the_callers_shards_is_one_processs(pool, door):
    local = Dense()
    expected = one_step(lambda q, k, v: local(q, k, v), None)
    for weights in pool.run(step_through, WORLD, door=door):
        assert oracle.relative_error(weights, expected) <= LIMIT


def lines(ctx: RankContext, layout: str, causal: bool) -> list[str]:
    """What is logged while two layers of a ring are made and called twice."""
    _emit_once.cache_clear()
    with logged_lines() as messages:
        for _ in range(2):
            local = flash_self_attention(causal)
            attention = USPAttention(
                local, ctx.group, gather_idx=1, ulysses_degree=ULYSSES, layout=layout
            )
            for _ in range(2):
                x = torch.randn(1, 8, 4, 16)
                attention(x, x, x, 0)
    return messages


@pytest.mark.parametrize(
    ("layout", "causal", "hint"),
    [("contiguous", True, True), ("contiguous", False, False), ("zigzag", True, False)],
)
def test_a_ring_warns_once_what_it_replaces_and_how_to_balance_it(pool, layout, causal, hint):
    first, *others = pool.run(lines, WORLD, layout=layout, causal=causal)
    assert others == [[]] * (WORLD - 1)
    assert len(first) == 1 + hint, first
    assert "does not call the local attention FlashSelfAttention with a ring" in first[0]
    if hint:
        assert "1.50 times the mean" in first[1] and "layout='zigzag'" in first[1]


class Learned(Dense):
    """A local attention with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(1))


def like_dense(**attributes: Any) -> torch.nn.Module:
    """A local attention with an attribute that says what it computes."""
    local = Dense()
    for name, value in attributes.items():
        setattr(local, name, value)
    return local


def ring_around(ctx: RankContext, local: torch.nn.Module | None = None, **options: Any) -> Any:
    """Constructs and calls the drop-in with a ring."""
    x = torch.randn(2, 8, 4, 16)
    dims = options.pop("dims", (0,))
    mesh_or_group = {} if "mesh" in options else {"sequence_process_group": ctx.group}
    degrees = {} if "mesh" in options else {"ulysses_degree": ULYSSES}
    attention = USPAttention(local or Dense(), **{**CAUSAL, **mesh_or_group, **degrees, **options})
    return attention(x, x, x, *dims)


def documents_for(ctx: RankContext, mask: MaskSpec) -> torch.Tensor:
    mesh = SequenceMesh.shared(None, ULYSSES, ALL_ORDERS[0])
    layout = mesh.layout("balanced", TOKENS, documents=[0, 5, TOKENS])
    x = torch.randn(1, layout.length(mesh.rank), 4, 16)
    return ds_usp.usp_attention(x, x, x, mesh=mesh, layout=layout, mask=mask)


def function_on(ctx: RankContext, **options: Any) -> torch.Tensor:
    x = torch.randn(1, 8, 4, 16)
    return ds_usp.usp_attention(x, x, x, **{"layout": "zigzag", "mask": CAUSAL["mask"], **options})


def named(ctx: RankContext, call: Any = ds_usp.usp_attention, last: int = 8, **more: Any) -> Any:
    """A call by the name of a layout, with other tokens or joint ones on the last rank."""
    tokens, joint = last if ctx.rank == WORLD - 1 else 8, more.pop("joint", 0)
    return call(*tensors(tokens, joint), **{**NAMED, "mesh": mesh_of(2), **more})


def drop_in_called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    module = USPAttention(torch.nn.Identity(), gather_idx=1, dropout_p=0.0, **options)
    return module(q, k, v, 0)


def heads_first(ctx: RankContext) -> Any:
    layout = mesh_of(2).layout("zigzag", 32)
    q, k, v = (torch.randn(1, 4, 8, 16) for _ in range(3))
    return ds_usp.usp_attention(q, k, v, **{**NAMED, "mesh": mesh_of(2), "layout": layout})


def crossing(ctx: RankContext, more_on_rank_3: int = 0, **options: Any) -> torch.Tensor:
    """Attention to the keys of another sequence, of half the length."""
    layout, kv_layout = (mesh_of(2).layout("zigzag", tokens) for tokens in (32, 16))
    q, k = torch.randn(1, 8, 2, 8), torch.randn(1, 4 + more_on_rank_3 * (ctx.rank == 3), 2, 8)
    given = {"layout": layout, "kv_layout": kv_layout, "mask": MaskSpec.full(), **options}
    return ds_usp.usp_attention(q, k, k, mesh=mesh_of(2), **given)


NAMED: dict[str, Any] = {"layout": "zigzag", "mask": CAUSAL["mask"]}
LAYOUT, CONFIG, UNSUPPORTED = "LayoutError", "ConfigError", "UnsupportedAttentionError"
DROPPING, SCALED = {"dropout": torch.nn.Dropout(0.1)}, {"softmax_scale": 0.1}
HEADS_FIRST = "[1, 4, 8, 16], which looks like [b, h, s, d]"
JOINT = ds_usp.usp_joint_attention


# Calls that were computed, and not as their caller means, or that ended in a traceback of Python's:
# the call, the error, what its message names.
REFUSED: list[tuple[Callable[[RankContext], Any], str, tuple[str, ...]]] = [
    (lambda c: ring_around(c, dims=()), CONFIG, ("which dim",)),
    (lambda c: ring_around(c, Learned()), UNSUPPORTED, ("Learned", "(temperature)")),
    (lambda c: ring_around(c, like_dense(**DROPPING)), CONFIG, ("dropout_p=0.0", "0.1")),
    (lambda c: ring_around(c, like_dense(causal=False)), CONFIG, ("causal=False",)),
    (lambda c: ring_around(c, like_dense(**SCALED), softmax_scale=0.2), CONFIG, ("0.1", "0.2")),
    (lambda c: ring_around(c, dropout_p=None), UNSUPPORTED, ("dropout_p=0.0",)),
    (lambda c: ring_around(c, dims=(0, torch.ones(8, 8))), CONFIG, ("rotary", "[8, 8]")),
    (
        lambda c: ds_usp.USPAttention(lambda q, k, v: q, c.group, 1, 2),
        CONFIG,
        ("scatter_idx=1, gather_idx=2",),
    ),
    (lambda c: ring_around(c, mask="causal"), CONFIG, ("mask='causal'", "MaskSpec.causal()")),
    (
        lambda c: ring_around(c, like_dense(causal=False), mask=None, dropout_p=None),
        UNSUPPORTED,
        ("MaskSpec.full()", "dropout_p=0.0"),
    ),
    (lambda c: function_on(c, mesh=mesh_of(2), mask=torch.ones(8, 8)), CONFIG, ("[8, 8]",)),
    (lambda c: ring_around(c, dropout_p=2.0), CONFIG, ("dropout_p=2.0",)),
    (lambda c: ring_around(c, mesh=mesh_of(2), order=ALL_ORDERS[1]), CONFIG, ("order",)),
    (lambda c: ring_around(c, mesh=c.group), CONFIG, ("SequenceMesh",)),
    (lambda c: function_on(c, mesh=None), CONFIG, ("mesh=None",)),
    *(
        (lambda c, mask=mask: documents_for(c, mask), CONFIG, (advice,))
        for mask, advice in (
            (MaskSpec.causal(), "MaskSpec.causal(documents=borders)"),
            (MaskSpec.full(), "MaskSpec.full(documents=borders)"),
            (MaskSpec.window(3), "MaskSpec.window(3, 0, documents=borders)"),
            (MaskSpec(None, 2), "MaskSpec.window(None, 2, documents=borders)"),
            (MaskSpec.prefix_lm(3), f"mesh.layout('zigzag', {TOKENS})"),
        )
    ),
    (lambda c: named(c, last=9), LAYOUT, ("8, 9",)),
    (lambda c: named(c, JOINT, last=9, joint=4), LAYOUT, ("8, 9",)),
    (lambda c: named(c, drop_in_called, last=9), LAYOUT, ("8, 9",)),
    (
        lambda c: ds_usp.usp_attention(*tensors(), mesh=mesh_of(2), layout="zigzag"),
        CONFIG,
        ("mask=",),
    ),
    (lambda c: JOINT(*tensors(8, 4)), CONFIG, ("mesh=", "layout=", "mask=")),
    (lambda c: named(c, layuot="zigzag"), CONFIG, ("'layuot'; did you mean layout",)),
    (lambda c: named(c, JOINT, joint=4, joint_frnt=True), CONFIG, ("mean joint_front",)),
    (lambda c: USPAttention(Dense(), ulyses_degree=2), CONFIG, ("mean ulysses_degree",)),
    (lambda c: named(c, **({"layuot": 1} if c.rank == 1 else {})), "", ("'layuot'",)),
    (heads_first, LAYOUT, (HEADS_FIRST,)),
    (lambda c: named(c, layout=None), LAYOUT, ("layout=None",)),
    (lambda c: named(c, layout="zig"), LAYOUT, ("'zig'",)),
    (lambda c: named(c, layout="balanced"), LAYOUT, ("documents=borders",)),
    (lambda c: named(c, kv_layout=3, mask=MaskSpec.full()), LAYOUT, ("layout=3",)),
    (lambda c: crossing(c, mask=CAUSAL["mask"]), UNSUPPORTED, ("16 tokens", "32 tokens", "causal")),
    (lambda c: crossing(c, kv_layout=None), CONFIG, ("8 tokens", "have 4")),
    (lambda c: crossing(c, more_on_rank_3=1), "", ("rank 3 holds 5", "gives it 4")),
    (lambda c: crossing(c, mask=MaskSpec.prefix_lm(33)), CONFIG, ("33 tokens", "of 32")),
]


def messages(ctx: RankContext) -> list[str]:
    """What each of these calls raises on this rank."""
    said = []
    for call, *_ in REFUSED:
        try:
            call(ctx)
            said.append("it was computed")
        except ds_usp.USPError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_was_silently_something_else_is_refused(pool):
    for said in pool.run(messages, WORLD):
        for text, (_, kind, numbers) in zip(said, REFUSED, strict=True):
            assert kind in text and all(number in text for number in numbers), (numbers, text)


def test_a_grid_before_init_process_group():
    with pytest.raises(ds_usp.MeshError, match="distributed is not initialized"):
        SequenceMesh.build(ds_usp.RankGrid({"ulysses": 2, "ring": 2}))


def own_scale(ctx: RankContext) -> bool:
    """Whether a ring takes the scale that the local attention has."""
    torch.manual_seed(3)
    by_itself = ring_around(ctx, like_dense(**SCALED))
    torch.manual_seed(3)
    return torch.equal(by_itself, ring_around(ctx, softmax_scale=0.1))


def test_a_scale_is_read_from_the_local_attention(pool):
    assert pool.run(own_scale, WORLD) == [True] * WORLD


def tensors(tokens: int = 8, joint: int = 0) -> list[torch.Tensor]:
    drawn = [torch.randn(1, tokens, 4, 16) for _ in range(3)]
    return drawn + [torch.randn(1, joint, 4, 16) for _ in range(3 if joint else 0)]


def same_bits(ctx: RankContext) -> list[bool]:
    """Whether each function gives the same for a kind as for the layout of that kind."""
    mesh = mesh_of(2)
    layout, half = mesh.layout("zigzag", 32), mesh.layout("striped", 16)
    q, k, v = tensors()
    short = tensors(4)[1:]
    both = tensors(joint=6)

    def attend(**options: Any) -> torch.Tensor:
        return ds_usp.usp_attention(q, k, v, mesh=mesh, mask=CAUSAL["mask"], **options)

    def cross(**options: Any) -> torch.Tensor:
        return ds_usp.usp_attention(q, *short, mesh=mesh, mask=MaskSpec.full(), **options)

    def joint(**options: Any) -> torch.Tensor:
        return torch.cat(
            ds_usp.usp_joint_attention(*both, mesh=mesh, mask=MaskSpec.full(), **options), 1
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    crossing = torch.compile(cross, fullgraph=True, backend="eager")
    names, values = {"layout": "zigzag"}, {"layout": layout}
    two_names = {"layout": "zigzag", "kv_layout": "striped"}
    two_values = {"layout": layout, "kv_layout": half}
    return [
        torch.equal(attend(**names), attend(**values)),
        torch.equal(cross(**two_names), cross(**two_values)),
        torch.equal(joint(**names), joint(**values)),
        torch.equal(compiled(**names), attend(**values)),
        torch.equal(crossing(**two_names), cross(**two_values)),
    ]


def test_a_name_is_the_layout_of_that_kind(pool):
    assert pool.run(same_bits, WORLD) == [[True] * 5] * WORLD


def flat_mesh_differs(ctx: RankContext) -> bool:
    """Whether a named layout on the flat mesh is that mesh's own, after a call on the other."""
    mesh = SequenceMesh.from_group(None, 2)
    q, k, v = tensors()
    outputs = [
        ds_usp.usp_attention(q, k, v, mesh=each, layout="zigzag", mask=CAUSAL["mask"])
        for each in (mesh, mesh.flat())
    ]
    flat = SequenceMesh.from_group(None, 4)
    expected = ds_usp.usp_attention(q, k, v, mesh=flat, layout="zigzag", mask=CAUSAL["mask"])
    return bool(torch.allclose(outputs[1], expected, atol=1e-6))


def test_a_name_is_of_the_mesh_that_it_is_given_with(pool):
    assert pool.run(flat_mesh_differs, WORLD) == [True] * WORLD


LOADER_TOKENS = 16


def attempts(ctx: RankContext, ulysses: int, kind: str) -> dict[str, str]:
    """The message of each entry point after a batch of ``LOADER_TOKENS`` tokens in a layout of this
    kind; nothing where it is computed."""
    group = torch.distributed.new_group(list(range(ctx.world)))  # no other test's batches
    batch = {"input_ids": torch.arange(2 * LOADER_TOKENS).view(2, -1)}
    mesh = SequenceMesh.from_group(group, ulysses)
    computed: dict[str, Any] = {"mask": MaskSpec.causal(), "dropout_p": 0.0}

    def attention(**options: Any) -> USPAttention:
        """On a mesh of its own, over the loader's ranks."""
        return USPAttention(
            Local(0), group, gather_idx=1, ulysses_degree=ulysses, **computed, **options
        )

    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch._dynamo.reset()
        one = ulysses < ctx.world  # else the graph breaks at the local attention
        attend = torch.compile(attention(), backend="aot_eager", fullgraph=one)
        out: torch.Tensor = attend(q, k, v)
        return out

    modes: dict[str, tuple[str, int, Callable[..., torch.Tensor]]] = {
        "default": (kind, LOADER_TOKENS, attention()),
        "compiled": (kind, LOADER_TOKENS, compiled),
        "named": (kind, LOADER_TOKENS, attention(layout=kind)),
        "other tokens, named": (kind, LOADER_TOKENS, attention(layout="contiguous")),
        "another length": (kind, 2 * LOADER_TOKENS, attention()),
        "a later batch": ("contiguous", LOADER_TOKENS, attention()),
    }
    message_of = {}
    for mode, (layout, tokens, attend) in modes.items():
        list(SequenceParallelDataLoader([batch], mesh, layout))
        q, k, v = (torch.randn(2, tokens // ctx.world, 4, 16) for _ in range(3))
        try:
            attend(q, k, v)
            message_of[mode] = ""
        except ds_usp.LayoutError as error:
            message_of[mode] = str(error)
    return message_of


def test_a_default_layout_is_checked_against_the_loaders(pool):
    for message_of in pool.run(attempts, WORLD, ulysses=2, kind="zigzag"):
        wrong = [message_of.pop(mode) for mode in ("default", "compiled")]
        assert all("in the layout 'zigzag'" in text and "'contiguous'" in text for text in wrong)
        assert not any(message_of.values()), message_of


def test_layouts_of_equal_positions_are_no_difference(pool):
    for message_of in pool.run(attempts, WORLD, ulysses=4, kind="zigzag"):
        assert not any(message_of.values()), message_of


def test_without_a_ring_the_order_matters_where_it_differs(pool):
    for message_of in pool.run(attempts, WORLD, ulysses=4, kind="context_parallel"):
        assert message_of["default"] and message_of["compiled"] and not message_of["named"]


def autocast_doors() -> dict[str, Callable[..., torch.Tensor]]:
    """Attention of q, k and v ``[b, s, h, d]`` by every door."""
    ring, alone = mesh_of(ULYSSES), mesh_of(WORLD)
    named = {"mesh": ring, **NAMED}
    local, known = Local(0), flash_self_attention()

    def joint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        text = [torch.full_like(x[:, :4], 0.5) for x in (q, k, v)]
        return torch.cat(ds_usp.usp_joint_attention(q, k, v, *text, **named), dim=1)

    def without_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out, lse = ds_usp.usp_attention(q, k, v, return_lse=True, **named)
        nothing = sum(0 * x.sum() for x in (q, k, v))
        return torch.cat((out, lse.transpose(1, 2)[..., None].to(out.dtype)), -1) + nothing

    def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        run = ds_usp.memory.keep_attention(partial(ds_usp.usp_attention, **named))
        return torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False)

    return {
        "usp_attention": partial(ds_usp.usp_attention, **named),
        "usp_attention, no backward": without_backward,
        "usp_attention, kept": kept,
        "usp_joint_attention": joint,
        "USPAttention, ring": lambda q, k, v: USPAttention(known, mesh=ring)(q, k, v, 0),
        "USPAttention, ring 1": lambda q, k, v: USPAttention(local, mesh=alone)(q, k, v, 0),
        "USPAttention, documents": lambda q, k, v: USPAttention(known, mesh=alone)(
            q, k, v, 0, documents=[0, 5, TOKENS]
        ),
    }


def autocast(ctx: RankContext, dtype: torch.dtype) -> dict[str, str]:
    """Of each door what differs under autocast from tensors that were cast before."""
    differ = {}
    for name, attend in autocast_doors().items():
        torch.manual_seed(ctx.rank)
        # Ranks need not hold the same dtypes before the cast.
        dtypes = (torch.float32, torch.float32, dtype if ctx.rank else torch.float32)
        if name.endswith("ring 1"):
            dtypes = (torch.float32, dtype, dtype)
        given = [torch.randn(1, 8, 4, 16).to(d).requires_grad_() for d in dtypes]
        results = []
        for enabled in (True, False):
            with torch.autocast("cpu", dtype, enabled=enabled):
                out = attend(*given) if enabled else attend(*(x.to(dtype) for x in given))
            grads = torch.autograd.grad(out.float().square().sum(), given)
            results.append((out, *grads))
        alike = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True)]
        if not all(alike) or results[0][0].dtype != dtype:
            differ[name] = f"{alike} {results[0][0].dtype}"
    return differ


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_every_door_casts_as_torchs_attention(pool, dtype):
    assert pool.run(autocast, WORLD, dtype=dtype) == [{}] * WORLD
