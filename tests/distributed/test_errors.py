"""What cannot be computed raises on every rank, with the numbers, and the group stays usable."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, mesh_of, run_case
from harness import RankContext
from sample_attentions import (
    HEAD_DIM,
    HEADS,
    TOKENS,
    Setting,
    core_attention,
    flash_attn,
    flash_self_attention,
    full_tensors,
    megatron_core,
    nobody_knows,
    stand_in,
)

import ds_usp
from ds_usp import (
    MaskSpec,
    Scores,
    SequenceMesh,
    TokenLayout,
    Tuning,
    UnsupportedAttentionError,
    USPAttention,
    USPError,
)
from ds_usp.attention.score_mod import NO_SCORE_MOD
from ds_usp.attention.tuning import AUTO_TUNING

WORLD = 4
TIMEOUT_S = 20.0  # what takes longer hangs
WAYS = ("usp_attention", "USPAttention 2x2", "USPAttention 4x1")
MODULES = WAYS[1:]
EVERYONE = tuple(range(WORLD))
CAUSAL = MaskSpec.causal()


@dataclass(frozen=True)
class Call:
    """What one rank passes; the defaults are right."""

    q: tuple[int, ...] = (1, 8, 8, 16)
    k: tuple[int, ...] = (1, 8, 4, 16)
    v: tuple[int, ...] = (1, 8, 4, 16)
    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None
    seq_len: int = 32
    layout: str = "zigzag"
    layout_degrees: tuple[int, int] | None = None
    order: str = "ulysses-ring"
    mask: Any = CAUSAL
    scale: Any = None
    kernel: Any = "auto"
    tuning: Any = AUTO_TUNING
    dropout: Any = 0.0
    scores: Any = NO_SCORE_MOD
    batch_dim: Any = 0
    rotary: int = 0  # tokens of cos and sin, 0: none
    num_kv_heads: int | None = None
    extra: tuple[Any, ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        dtypes = (self.dtype, self.dtype, self.v_dtype or self.dtype)
        shapes = (self.q, self.k, self.v)
        return [torch.ones(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]

    def make(self, mode: str) -> None:
        mesh = mesh_of(4 if mode.endswith("4x1") else 2)
        degrees = self.layout_degrees or (mesh.ulysses_degree, mesh.ring_degree)
        if mode == "usp_attention":
            layout = TokenLayout(self.layout, self.seq_len, *degrees, self.order)
            ds_usp.usp_attention(
                *self.tensors(),
                mesh=mesh,
                layout=layout,
                mask=self.mask,
                softmax_scale=self.scale,
                dropout_p=self.dropout,
                kernel=self.kernel,
                tuning=self.tuning,
                scores=self.scores,
            )
            return
        local = torch.nn.Identity()
        attention = USPAttention(
            local,
            None,
            gather_idx=1,
            num_kv_heads=self.num_kv_heads,
            mesh=mesh,
            layout=self.layout,
            mask=self.mask,
            softmax_scale=self.scale,
            dropout_p=self.dropout,
            kernel=self.kernel,
            tuning=self.tuning,
        )
        rotary = (torch.ones(self.rotary, 1, 1, 16),) * 2 if self.rotary else None
        attention(*self.tensors(), self.batch_dim, rotary, *self.extra)


def heads(q: int, kv: int) -> dict[str, Any]:
    return {"q": (1, 8, q, 16), "k": (1, 8, kv, 16), "v": (1, 8, kv, 16)}


def outcome(ctx: RankContext, call: Any) -> tuple[str, str, float]:
    """What a call raised on this rank, and the error of a right call made afterwards."""
    try:
        call()
        kind, message = "nothing", ""
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    after = run_case(ctx, Case(batch=1, heads=4, kv_heads=2), 2)
    return kind, message, max(after.values())


def attempt(ctx: RankContext, mode: str, changes: dict[str, Any], odd: tuple[int, ...]) -> Any:
    call = replace(Call(), **changes) if ctx.rank in odd else Call()
    return outcome(ctx, lambda: call.make(mode))


def check(results: list[Any], kinds: list[str], fragments: list[str]) -> None:
    """Every rank raised its kind of error with all numbers, and could go on."""
    assert [kind for kind, _, _ in results] == kinds, results
    for _, message, error in results:
        for fragment in fragments:
            assert fragment in message, message
        assert error < 1e-5


# What no mesh can serve, given on every rank: the ways it is given, the numbers of the error, its
# kind where that is no ConfigError.
WRONG: dict[str, tuple[Any, ...]] = {
    "fewer heads than ranks": (
        WAYS,
        heads(1, 1),
        ["needs at least", "query heads", "there are 1", "Use one of 1 (ring 4)"],
    ),
    "kv heads": (WAYS, heads(8, 3), ["8 query heads", "3 key/value heads"]),
    "more kv heads": (WAYS, heads(4, 8), ["4 query heads", "8 key/value heads"]),
    "3-D": (WAYS, {"q": (1, 8, 128)}, ["q [1, 8, 128]", "[batch, tokens, heads"]),
    "num_kv_heads": (MODULES, {"num_kv_heads": 3}, ["num_kv_heads=3", "[1, 8, 4, 16]"]),
    "2-D keys": (WAYS, {"k": (8, 16)}, ["k [8, 16]", "[batch, tokens, heads"]),
    "batch": (WAYS, {"k": (2, 8, 4, 16)}, ["q [1, 8, 8, 16]", "k [2, 8, 4, 16]"]),
    "tokens": (WAYS, {"v": (1, 7, 4, 16)}, ["k [1, 8, 4, 16]", "v [1, 7, 4, 16]"]),
    "key dim": (WAYS, {"k": (1, 8, 4, 8)}, ["q [1, 8, 8, 16]", "k [1, 8, 4, 8]"]),
    "nothing": (
        WAYS,
        {"q": (0, 8, 8, 16), "k": (0, 8, 4, 16), "v": (0, 8, 4, 16)},
        ["must not be empty", "[0, 8, 8, 16]"],
    ),
    "mixed dtypes": (
        WAYS,
        {"v_dtype": torch.bfloat16},
        ["torch.float32 on cpu", "torch.bfloat16 on cpu"],
    ),
    "integers": (WAYS, {"dtype": torch.int32}, ["torch.int32"]),
    "tokens of another layout": (
        WAYS[:1],
        {"seq_len": 36},
        ["holds 8 tokens", "36 tokens", "gives it 9", "layout.shard"],
        "LayoutError",
    ),
    "layout of another mesh": (
        WAYS[:1],
        {"layout_degrees": (4, 1)},
        ["ulysses 4 x ring 1", "the mesh is 2 x 2", "mesh.layout"],
        "LayoutError",
    ),
    "layout of another order": (
        WAYS[:1],
        {"order": "ring-ulysses"},
        ["(ring-ulysses)", "(ulysses-ring)", "mesh.layout"],
        "LayoutError",
    ),
    "unknown layout": (WAYS[:1], {"layout": "zig"}, ["'zig'", "zigzag, striped"], "LayoutError"),
    "module's layout": (MODULES, {"layout": "zig"}, ["'zig'", "zigzag, striped"], "LayoutError"),
    "too short": (WAYS[:1], {"seq_len": 3}, ["3 tokens", "at least 4 tokens"], "LayoutError"),
    "dropout": (
        WAYS[:2],
        {"dropout": 0.1},
        [
            "dropout 0.1",
            "ulysses 2 x ring 2",
            "--attention-dropout 0",
            "--ulysses-degree 4",
            "scores=Scores(dropout_seed=...)",
        ],
        "UnsupportedAttentionError",
    ),
    "unknown kernel": (
        WAYS[:2],
        {"kernel": "cuda"},
        ["'cuda'", "eager"],
        "UnsupportedAttentionError",
    ),
    "kernel of a GPU": (
        WAYS[:2],
        {"kernel": "flash2"},
        ["flash2: runs on cuda, not cpu", "head dim 16"],
        "UnsupportedAttentionError",
    ),
    "more parts than heads": (
        WAYS[:2],
        {"tuning": Tuning(chunks=3)},
        [
            "chunks=3",
            "only 2 key/value heads",
            "4 key/value heads among 2 Ulysses ranks",
            "at most 2",
        ],
    ),
    "no scale": (WAYS[:2], {"scale": 0.0}, ["softmax_scale=0.0", "above 0"]),
    "negative scale": (WAYS[:2], {"scale": -1.0}, ["softmax_scale=-1.0"]),
    "endless scale": (WAYS[:2], {"scale": float("inf")}, ["softmax_scale=inf"]),
    "batch_dim_idx": (MODULES, {"batch_dim": 2}, ["batch_dim_idx=2", "0 for", "1 for"]),
    "cos of this rank only": (
        MODULES,
        {"rotary": 8},
        ["rotary_pos_emb [8, 1, 1, 16]", "32 tokens"],
    ),
    "dropout of all": (
        WAYS[:1],
        {"dropout": 1.0, "scores": Scores(dropout_seed=1)},
        ["dropout_p=1.0", "below 1"],
    ),
    "dropout in words": (WAYS[:1], {"dropout": "some"}, ["dropout_p='some'", "below 1"]),
    "dropout on a kernel without": (
        WAYS[:1],
        {"dropout": 0.1, "scores": Scores(dropout_seed=1), "kernel": "sdpa"},
        ["sdpa: has no dropout"],
        "UnsupportedAttentionError",
    ),
    "no scores": (WAYS[:1], {"scores": 50.0}, ["scores=50.0", "softcap=50.0"]),
    "sinks of too few heads": (
        WAYS[:1],
        {"scores": Scores(sinks=torch.zeros(4))},
        ["sinks [4]", "8 query heads"],
    ),
    "whole sinks": (
        WAYS[:1],
        {"scores": Scores(sinks=torch.zeros(8, dtype=torch.int64))},
        ["sinks of torch.int64", "floating"],
    ),
}


def modes_of(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(mode, name) for name, (modes, *_) in table.items() for mode in modes]


@pytest.mark.parametrize(("mode", "name"), modes_of(WRONG))
def test_what_no_mesh_can_serve_raises_everywhere(pool, mode, name):
    _, changes, fragments, kind = (*WRONG[name], "ConfigError")[:4]
    results = pool.run(attempt, WORLD, timeout=TIMEOUT_S, mode=mode, changes=changes, odd=EVERYONE)
    check(results, [kind] * WORLD, fragments)


# What one rank passes differently, though right in itself: the field, others' value, its own.
DIFFERENT: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, str, str]]] = {
    "batch": (
        WAYS,
        {"q": (2, 8, 8, 16), "k": (2, 8, 4, 16), "v": (2, 8, 4, 16)},
        ("batch: ", "1", "2"),
    ),
    "dtype": (WAYS, {"dtype": torch.bfloat16}, ("dtype: ", "torch.float32", "torch.bfloat16")),
    "query heads": (WAYS, heads(4, 4), ("query heads: ", "8", "4")),
    "kv heads": (WAYS, heads(8, 8), ("kv heads: ", "4", "8")),
    "head dim": (
        WAYS,
        {"q": (1, 8, 8, 8), "k": (1, 8, 4, 8), "v": (1, 8, 4, 8)},
        ("head dims: ", "16 and 16", "8 and 8"),
    ),
    "sequence length": (
        WAYS[:1],  # where the layout is only named see test_doors
        {"q": (1, 9, 8, 16), "k": (1, 9, 4, 16), "v": (1, 9, 4, 16), "seq_len": 36},
        ("", "zigzag(32 tokens, MESH)", "zigzag(36 tokens, MESH)"),
    ),
    "layout": (
        WAYS,
        {"layout": "striped"},
        ("", "zigzag(32 tokens, MESH)", "striped(32 tokens, MESH)"),
    ),
    "mask": (WAYS[:2], {"mask": MaskSpec.window(3)}, ("mask: ", "causal", "window(3, 0)")),
    "scale": (WAYS[:2], {"scale": 0.3}, ("scale: ", "0.25", "0.3")),
    "kernel": (WAYS[:2], {"kernel": "eager"}, ("kernel: ", "sdpa", "eager")),
    "chunks": (WAYS[:2], {"tuning": Tuning(chunks=2)}, ("", "1 chunk", "2 chunks")),
    "gather": (WAYS[:2], {"tuning": Tuning(gather=True)}, ("KV: ", "stepwise", "all-gathered")),
    "soft cap": (WAYS[:1], {"scores": Scores(softcap=2.0)}, ("", "plain scores", "softcap 2.0")),
    "sinks": (WAYS[:1], {"scores": Scores(sinks=torch.ones(8))}, ("sinks: ", "no", "fixed")),
}
# What one rank passes wrongly: it raises, and the others report it.
WRONG_ON_ONE: dict[str, tuple[Any, ...]] = {
    **{name: WRONG[name] for name in ("kv heads", "tokens", "mixed dtypes", "dropout", "no scale")},
    **{name: WRONG[name] for name in ("more parts than heads", "batch_dim_idx", "num_kv_heads")},
    "cos of this rank only": WRONG["cos of this rank only"],
    "no mask": (WAYS[:1], {"mask": None}, ["mask=None", "MaskSpec"]),
    "scale in words": (WAYS[:2], {"scale": "half"}, ["softmax_scale='half'"]),
    "extra argument": (WAYS[1:2], {"extra": (3,)}, ["=3 differs"], "UnsupportedAttentionError"),
}


@pytest.mark.parametrize("odd", [0, WORLD - 1])
@pytest.mark.parametrize(("mode", "name"), modes_of(DIFFERENT))
def test_ranks_that_differ_hear_of_it_everywhere(pool, mode, name, odd):
    _, changes, (field, many, one) = DIFFERENT[name]
    results = pool.run(attempt, WORLD, timeout=TIMEOUT_S, mode=mode, changes=changes, odd=(odd,))
    line = f"\n  {field}{many} on ranks {'0-2' if odd else '1-3'}, {one} on rank {odd}\n"
    line = line.replace("MESH", f"ulysses {'4 x ring 1' if mode.endswith('4x1') else '2 x ring 2'}")
    check(results, ["MeshError"] * WORLD, [line, "\nequal on all ranks: "])


@pytest.mark.parametrize("odd", [0, WORLD - 1])
@pytest.mark.parametrize(("mode", "name"), modes_of(WRONG_ON_ONE))
def test_one_rank_that_is_wrong_stops_all(pool, mode, name, odd):
    _, changes, fragments, kind = (*WRONG_ON_ONE[name], "ConfigError")[:4]
    results = pool.run(attempt, WORLD, timeout=TIMEOUT_S, mode=mode, changes=changes, odd=(odd,))
    check(results, [kind if rank == odd else "MeshError" for rank in EVERYONE], fragments)


def build(ctx: RankContext, arguments: list[tuple[Any, str]]) -> Any:
    return outcome(ctx, lambda: SequenceMesh.from_group(None, *arguments[ctx.rank]))


RIGHT = (2, "ulysses-ring")
GRIDS: dict[str, tuple[list[tuple[Any, str]], list[str], list[str]]] = {
    "degree that does not divide": (
        [(3, RIGHT[1])] * WORLD,
        ["ConfigError"] * WORLD,
        ["ulysses_degree=3 does not divide the 4 ranks", "Use one of 4 (ring 1), 2 (ring 2)"],
    ),
    "degree beyond the group": (
        [(8, RIGHT[1])] * WORLD,
        ["ConfigError"] * WORLD,
        ["=8", "4 ranks"],
    ),
    "degree 0": ([(0, RIGHT[1])] * WORLD, ["ConfigError"] * WORLD, ["ulysses_degree=0"]),
    "half a degree": ([(2.0, RIGHT[1])] * WORLD, ["ConfigError"] * WORLD, ["ulysses_degree=2.0"]),
    "unknown order": (
        [(2, "ring")] * WORLD,
        ["ConfigError"] * WORLD,
        ["'ring'", "ulysses-ring, ring-ulysses"],
    ),
    "wrong degree on one": (
        [RIGHT, RIGHT, (3, RIGHT[1]), RIGHT],
        ["MeshError", "MeshError", "ConfigError", "MeshError"],
        ["ulysses_degree=3 does not divide the 4 ranks"],
    ),
    "other degree on one": (
        [(4, RIGHT[1]), RIGHT, RIGHT, RIGHT],
        ["MeshError"] * WORLD,
        ["ulysses_degree: 2 on ranks 1-3, 4 on rank 0"],
    ),
    "other order on one": (
        [RIGHT, RIGHT, RIGHT, (2, "ring-ulysses")],
        ["MeshError"] * WORLD,
        ["ulysses-ring on ranks 0-2, ring-ulysses on rank 3"],
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_that_does_not_fit_raises_everywhere(pool, name):
    arguments, kinds, fragments = GRIDS[name]
    check(pool.run(build, WORLD, timeout=TIMEOUT_S, arguments=arguments), kinds, fragments)


def in_and_out(ctx: RankContext) -> Any:
    group = dist.new_group([0, 1])
    return outcome(ctx, lambda: SequenceMesh.from_group(group, 2))


def test_a_rank_outside_the_group_is_refused(pool):
    results = pool.run(in_and_out, WORLD, timeout=TIMEOUT_S)
    assert [kind for kind, _, _ in results] == ["nothing", "nothing", "MeshError", "MeshError"]
    for rank in (2, 3):
        assert f"global rank {rank} is not in the sequence-parallel group" in results[rank][1]
    assert max(error for _, _, error in results) < 1e-5


def other_grid(ctx: RankContext) -> Any:
    return outcome(ctx, lambda: SequenceMesh.build(ds_usp.RankGrid({"ulysses": 2, "ring": 4})))


def test_a_grid_of_another_world_is_refused(pool):
    results = pool.run(other_grid, WORLD, timeout=TIMEOUT_S)
    check(results, ["ConfigError"] * WORLD, ["8 ranks", "the world has 4"])


def long_texts(ctx: RankContext) -> Any:
    return outcome(ctx, lambda: mesh_of(2).agree("x" * 5000 + str(ctx.rank % 2)))


def line_of_program(ctx: RankContext, *, texts: list[str]) -> Any:
    """The argument with which a program ends on this rank: what Python prints, or a code."""
    with pytest.raises(SystemExit) as end, ds_usp.one_line_errors():
        raise ds_usp.ConfigError(texts[ctx.rank])
    with pytest.raises(KeyError), ds_usp.one_line_errors():
        raise KeyError("a defect keeps its traceback")
    return end.value.code


def test_a_program_says_an_error_of_all_ranks_once(pool, monkeypatch):
    said = pool.run(line_of_program, 3, texts=["a", "b", "a"])
    assert sorted(map(str, said)) == ["1", "ConfigError: a", "ConfigError: b"]
    for rank, code in (("0", "ConfigError: x"), ("2", 1)):  # before there are process groups
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end, ds_usp.one_line_errors():
            raise ds_usp.ConfigError("x")
        assert end.value.code == code


def test_texts_that_differ_late_differ(pool):
    results = pool.run(long_texts, WORLD, timeout=TIMEOUT_S)
    check(results, ["MeshError"] * WORLD, ["on ranks 0, 2, xxx", "on ranks 1, 3", "sha256"])


def test_without_torch_distributed_a_mesh_is_refused_with_the_fix():
    with pytest.raises(ds_usp.MeshError, match=r"init_process_group .*SequenceMesh.single\(\)"):
        SequenceMesh.from_group(None, 1)


def drop(ctx: RankContext) -> Any:
    scores = Scores(dropout_seed=5 + (ctx.rank == 3))
    return outcome(ctx, lambda: Call(dropout=0.1, scores=scores).make("usp_attention"))


def test_ranks_that_drop_by_other_seeds_hear_of_it(pool):
    fragments = ["dropout seed: 5 on ranks 0-2, 6 on rank 3"]
    check(pool.run(drop, WORLD, timeout=TIMEOUT_S), ["MeshError"] * WORLD, fragments)


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    *(({"softcap": x}, f"softcap={x!r} must be") for x in (0.0, -1.0, float("nan"), "50", True)),
    *(
        ({"dropout_seed": x}, r"dropout_seed=.* must be a whole number")
        for x in (-1, 2**63, 1.5, True)
    ),
    ({"alibi_slopes": [0.5]}, r"alibi_slopes=\[0.5\] must be a tensor"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_VALUES, ids=str)
def test_scores_are_numbers_and_tensors(given, message):
    with pytest.raises(ds_usp.ConfigError, match=message):
        Scores(**given)


def test_learned_slopes_are_refused():
    mesh = ds_usp.SequenceMesh.single()
    q, slopes = torch.ones(1, 4, 2, 8), torch.ones(2, requires_grad=True)
    given = {"mesh": mesh, "layout": "zigzag", "mask": CAUSAL}
    with pytest.raises(ds_usp.UnsupportedAttentionError, match=r"alibi_slopes .* detach\(\) them"):
        ds_usp.usp_attention(q, q, q, **given, scores=Scores(alibi_slopes=slopes))


def messages(ctx: RankContext, setting: Setting, calls: list[dict[str, Any]]) -> list[str]:
    """What the constructor, or else each call, raised on this rank; '' where nothing."""
    try:
        attention = setting.module()
    except USPError as error:
        return [str(error)]
    q, k, v, _ = (
        attention.mesh.layout("zigzag", TOKENS).shard(x, 1, ctx.rank) for x in full_tensors()
    )
    texts = []
    for call in calls:
        try:
            attention(q, k, v, 0, None, *call.get("args", ()), **call.get("kwargs", {}))
            texts.append("")
        except UnsupportedAttentionError as error:
            texts.append(str(error))
    return texts


def own_forward() -> torch.nn.Module:
    """Derived from a known class, but it computes something of its own."""
    known = type(flash_self_attention())
    body = {"__module__": "my_model", "forward": lambda self, q, k, v: q}
    return type("MyAttention", (known,), body)()


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "unknown": (nobody_knows, {}, {}, ["Identity must be known", "mask=MaskSpec", "ring 1"]),
    "same name elsewhere": (
        stand_in,
        {"module": "my_model", "name": "FlashSelfAttention", "causal": True},
        {},
        ["FlashSelfAttention must be known"],
    ),
    "own forward": (own_forward, {}, {}, ["MyAttention must be known"]),
    "another mask": (
        flash_self_attention,
        {},
        {"mask": MaskSpec.full()},
        ["mask=full was given", "computes with causal"],
    ),
    "another scale": (core_attention, {}, {"softmax_scale": 0.3}, ["softmax_scale=0.3", "0.25"]),
    "another scale than none": (
        flash_self_attention,
        {},
        {"softmax_scale": 0.3},
        ["softmax_scale=0.3"],
    ),
    "another dropout": (flash_self_attention, {}, {"dropout_p": 0.1}, ["dropout_p=0.1", "0.0"]),
    "padding": (core_attention, {"kind": "padding"}, {}, ["'padding'", "causal or no_mask"]),
    "padding in megatron-core": (megatron_core, {"kind": "padding"}, {}, ["'padding'"]),
    "ALiBi": (flash_attn, {"alibi": (1.0, 2.0)}, {}, ["ALiBi"]),
    "a window of -1": (
        megatron_core,
        {"window_size": (5, -1)},
        {},
        ["window_size=(5, -1)", "takes -1 as a distance", "sequence length in its place"],
    ),
    "dropout": (
        flash_self_attention,
        {"dropout": 0.1},
        {},
        ["dropout 0.1", "--attention-dropout 0"],
    ),
    "dropout of flash-attn": (flash_attn, {"dropout": 0.2}, {}, ["dropout 0.2"]),
    "dropout of core": (
        core_attention,
        {"dropout": 0.1},
        {},
        ["dropout 0.1", "--ulysses-degree 4"],
    ),
    "dropout of megatron-core": (megatron_core, {"attention_dropout": 0.3}, {}, ["dropout 0.3"]),
    "dropout of an unknown": (
        torch.nn.Dropout,
        {"p": 0.4},
        {"mask": MaskSpec.causal()},
        ["dropout_p=0.0"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ring_does_not_compute_is_refused_on_every_rank(pool, name):
    make, arguments, options, fragments = REFUSED[name]
    for texts in pool.run(messages, WORLD, setting=Setting(make, arguments, options), calls=[{}]):
        assert len(texts) == 1
        for fragment in fragments:
            assert fragment in texts[0]


HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
WINDOW = ~(HIDDEN | torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-4))
ADDITIVE = torch.zeros(TOKENS, TOKENS).masked_fill(HIDDEN, float("-inf"))
PADDED = HIDDEN.clone()
PADDED[:, -3:] = True
BIAS = ADDITIVE + torch.arange(TOKENS) * 0.1

# Extra arguments of a causal attention: those that agree with it, and those that differ.
SAME: dict[str, dict[str, Any]] = {
    "nothing": {"kwargs": {"attention_mask": None, "my_own": None}},
    "hidden pairs": {"args": (HIDDEN,)},
    "hidden pairs by name": {"kwargs": {"attention_mask": HIDDEN[None, None]}},
    "hidden pairs of each sample": {"args": (HIDDEN.expand(2, 1, TOKENS, TOKENS),)},
    "minus infinity": {"args": (ADDITIVE,)},
    "a large negative number": {"args": (ADDITIVE.clamp_min(-1e4),)},
    "the least of bf16": {"args": (ADDITIVE.clamp_min(-3e38).bfloat16(),)},
    "causal": {"kwargs": {"causal": True}},
    "the scale": {"kwargs": {"softmax_scale": HEAD_DIM**-0.5}},
    "is_causal": {"kwargs": {"is_causal": True, "dropout_p": 0.0}},
}
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "visible pairs": ({"kwargs": {"attn_mask": ~HIDDEN}}, "True hides a pair"),
    "a window": ({"args": (~WINDOW,)}, "extra argument 0=a tensor [32, 32]"),
    "visible window": ({"kwargs": {"attention_mask": WINDOW}}, "attention_mask=a tensor"),
    "all visible": ({"args": (torch.ones_like(HIDDEN),)}, "causal mask"),
    "padding": ({"args": (PADDED[None, None],)}, "a tensor [1, 1, 32, 32]"),
    "one padded sample": ({"args": (torch.stack([HIDDEN, PADDED]),)}, "a tensor [2, 32, 32]"),
    "a bias": ({"args": (BIAS,)}, "a tensor [32, 32]"),
    "weak hiding": ({"args": (ADDITIVE.clamp_min(-10.0),)}, "a tensor [32, 32]"),
    "not a number": ({"args": (ADDITIVE * 0,)}, "a tensor [32, 32]"),
    "this rank's rows": ({"args": (HIDDEN[:8],)}, "a tensor [8, 32]"),
    "another length": ({"args": (HIDDEN[:16, :16],)}, "a tensor [16, 16]"),
    "zeros and ones": ({"args": (HIDDEN.long(),)}, "a tensor [32, 32]"),
    "a vector": ({"args": (HIDDEN[0],)}, "a tensor [32]"),
    "not causal": ({"kwargs": {"causal": False}}, "causal=False"),
    "another scale": ({"kwargs": {"softmax_scale": 0.3}}, "softmax_scale=0.3"),
    "dropout": ({"kwargs": {"dropout_p": 0.1}}, "dropout_p=0.1"),
    "unknown keyword": ({"kwargs": {"my_own": 3}}, "my_own=3"),
    "unknown extra": ({"args": ("alibi",)}, "extra argument 0=alibi"),
}


def test_arguments_that_agree_are_accepted(pool):
    setting = Setting(flash_self_attention, {}, {})
    for texts in pool.run(messages, WORLD, setting=setting, calls=list(SAME.values())):
        assert dict(zip(SAME, texts, strict=True)) == dict.fromkeys(SAME, "")


def test_arguments_that_ask_for_something_else_are_refused(pool):
    setting = Setting(flash_self_attention, {}, {})
    calls = [call for call, _ in OTHER.values()]
    for texts in pool.run(messages, WORLD, setting=setting, calls=calls):
        for (name, (_, fragment)), text in zip(OTHER.items(), texts, strict=True):
            assert fragment in text, (name, text)
            assert "Leave it out" in text and "ring degree 1" in text


WINDOWS = [
    (WINDOW, ""),
    (~WINDOW, "lets a pair attend"),
    (HIDDEN, "window(3, 0)"),
    (ADDITIVE, "window(3, 0)"),
]


def test_masks_are_compared_with_a_window_too(pool):
    setting = Setting(nobody_knows, {}, {"mask": MaskSpec.window(3), "dropout_p": 0.0})
    calls = [{"args": (mask,)} for mask, _ in WINDOWS]
    for texts in pool.run(messages, WORLD, setting=setting, calls=calls):
        for text, (_, fragment) in zip(texts, WINDOWS, strict=True):
            assert fragment in text and bool(text) == bool(fragment)


def same_mask_again(ctx: RankContext, layout: str) -> list[bool]:
    """Whether one mask is accepted: at first, again, for twice the tokens, changed, inferring."""
    attention = Setting(flash_self_attention, {}, {}, layout).module()
    mask = HIDDEN.clone()

    def taken(tokens: int) -> bool:
        x = torch.ones(1, tokens // WORLD, HEADS, HEAD_DIM)
        try:
            attention(x, x, x, 0, None, mask)
        except UnsupportedAttentionError:
            return False
        return True

    computed = [taken(TOKENS), taken(TOKENS), taken(2 * TOKENS)]
    mask[5, 2] = True
    computed.append(taken(TOKENS))
    with torch.inference_mode():
        mask = HIDDEN.clone()
        computed += [taken(TOKENS), taken(TOKENS)]
        mask[5, 2] = True
        computed.append(taken(TOKENS))
    return computed


def test_a_mask_is_looked_at_again_when_it_may_have_changed(pool):
    for computed in pool.run(same_mask_again, WORLD, layout="zigzag"):
        assert computed == [True, True, False, False, True, True, False]
