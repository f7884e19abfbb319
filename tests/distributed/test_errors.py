"""What cannot be computed raises on every rank, with the numbers, and the group stays usable.

Which arguments of one call are refused at all is a table on one rank,
tests/unit/test_refused_arguments.py.
"""

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
    Tuning,
    UnsupportedAttentionError,
    USPAttention,
    USPError,
)

WORLD = 4
TIMEOUT_S = 30.0  # what takes longer hangs
DOORS = ("usp_attention", "USPAttention 2x2", "USPAttention 4x1")
FUNCTION, RING = DOORS[:1], DOORS[:2]  # rows of the function alone, and of what has a ring
MODULES = DOORS[1:]


@dataclass(frozen=True)
class Call:
    """What one rank passes; the defaults are right."""

    q: tuple[int, ...] = (1, 8, 8, 16)
    k: tuple[int, ...] = (1, 8, 4, 16)
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    seq_len: int = 32
    layout: str = "zigzag"
    options: tuple[tuple[str, Any], ...] = ()
    batch_dim: int = 0
    rotary: int = 0  # tokens of cos and sin, 0: none
    num_kv_heads: int | None = None
    extra: tuple[Any, ...] = ()

    def make(self, door: str) -> None:
        mesh = mesh_of(4 if door.endswith("4x1") else 2)
        qkv = [torch.ones(self.q).to(self.dtypes[0])]
        qkv += [torch.ones(self.k).to(dtype) for dtype in self.dtypes]
        options = {"mask": MaskSpec.causal(), **dict(self.options)}
        if door == "usp_attention":
            layout = mesh.layout(self.layout, self.seq_len)
            ds_usp.usp_attention(*qkv, mesh=mesh, layout=layout, **options)
            return
        local, heads = torch.nn.Identity(), self.num_kv_heads
        given = {"mesh": mesh, "layout": self.layout, "dropout_p": 0.0, **options}
        attention = USPAttention(local, None, gather_idx=1, num_kv_heads=heads, **given)
        rotary = (torch.ones(self.rotary, 1, 1, 16),) * 2 if self.rotary else None
        attention(*qkv, self.batch_dim, rotary, *self.extra)


def heads(q: int, kv: int) -> dict[str, Any]:
    return {"q": (1, 8, q, 16), "k": (1, 8, kv, 16)}


def option(**options: Any) -> dict[str, Any]:
    return {"options": tuple(options.items())}


Outcome = tuple[str, str, float]


def outcome(ctx: RankContext, call: Callable[[], object]) -> Outcome:
    """What a call raised on this rank, and the error of a right call made afterwards."""
    try:
        call()
        kind, message = "nothing", ""
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    after = run_case(ctx, Case(batch=1, heads=4, kv_heads=2), 2)
    return kind, message, max(after.values())


def attempts(
    ctx: RankContext, door: str, rows: list[tuple[dict[str, Any], tuple[int, ...]]]
) -> list[Outcome]:
    """Each call by one door, of which some ranks' is another."""
    calls = (replace(Call(), **changes) if ctx.rank in odd else Call() for changes, odd in rows)
    return [outcome(ctx, lambda call=call: call.make(door)) for call in calls]


def check(outcomes: list[Outcome], kinds: list[str], numbers: tuple[str, ...]) -> None:
    """Every rank raised its kind of error with all numbers, and could go on."""
    assert [kind for kind, _, _ in outcomes] == kinds, outcomes
    for _, message, error in outcomes:
        assert all(number in message for number in numbers), (numbers, message)
        assert error < 1e-5


CONFIG, LAYOUT, UNSUPPORTED = "ConfigError", "LayoutError", "UnsupportedAttentionError"
# The doors, what a rank passes, the error, the numbers: all ranks pass it, then one of them.
Row = tuple[tuple[str, ...], dict[str, Any], str, tuple[str, ...]]
WRONG: dict[str, Row] = {
    "fewer heads than ranks": (DOORS, heads(1, 1), CONFIG, ("there are 1", "1 (ring 4)")),
    "kv heads": (DOORS, heads(8, 3), CONFIG, ("8 query heads", "3 key/value heads")),
    "dtypes": (DOORS, {"dtypes": (torch.float32, torch.bfloat16)}, CONFIG, ("bfloat16",)),
    "num_kv_heads": (MODULES, {"num_kv_heads": 3}, CONFIG, ("=3", "[1, 8, 4, 16]")),
    "layout": (MODULES, {"layout": "zig"}, LAYOUT, ("'zig'",)),
    "tokens": (FUNCTION, {"seq_len": 36}, LAYOUT, ("holds 8 tokens", "gives it 9")),
    "dropout": (RING, option(dropout_p=0.1), UNSUPPORTED, ("0.1", "dropout_p=0")),
    "chunks": (RING, option(tuning=Tuning(chunks=3)), CONFIG, ("=3", "4 key/value", "at most 2")),
    "scale": (RING, option(softmax_scale="half"), CONFIG, ("'half'",)),
    "mask": (FUNCTION, option(mask=None), CONFIG, ("mask=None",)),
    "batch_dim_idx": (MODULES, {"batch_dim": 2}, CONFIG, ("batch_dim_idx=2",)),
    "cos of this rank only": (MODULES, {"rotary": 8}, CONFIG, ("[8, 1, 1, 16]", "32 tokens")),
    "extra argument": (MODULES[:1], {"extra": (3,)}, UNSUPPORTED, ("=3",)),
}


def rows_of(table: dict[str, Any], door: str) -> list[tuple[int, Any]]:
    """The rows of a door, each with the one rank that differs: the first or the last, in turn."""
    rows = [row for row in table.values() if door in row[0]]
    return [((0, WORLD - 1)[number % 2], row) for number, row in enumerate(rows)]


@pytest.mark.parametrize("by", ["all", "one"])
@pytest.mark.parametrize("door", DOORS)
def test_what_is_wrong_on_all_ranks_or_on_one_raises_everywhere(pool, door, by):
    rows = rows_of(WRONG, door)
    given = [(row[1], (odd,) if by == "one" else tuple(range(WORLD))) for odd, row in rows]
    results = pool.run(attempts, WORLD, timeout=TIMEOUT_S, door=door, rows=given)
    for (_, (_, _, kind, numbers)), (_, odd), *outcomes in zip(rows, given, *results, strict=True):
        check(outcomes, [kind if rank in odd else "MeshError" for rank in range(WORLD)], numbers)


# What one rank passes differently, though right in itself: the field, others' value, its own.
DIFFERENT: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, str, str]]] = {
    "batch": (DOORS, {"q": (2, 8, 8, 16), "k": (2, 8, 4, 16)}, ("batch: ", "1", "2")),
    "dtype": (DOORS, {"dtypes": (torch.bfloat16,) * 2}, ("", "torch.float32", "torch.bfloat16")),
    "query heads": (DOORS, heads(4, 4), ("query heads: ", "8", "4")),
    "kv heads": (DOORS, heads(8, 8), ("kv heads: ", "4", "8")),
    "head dim": (DOORS, {"q": (1, 8, 8, 8), "k": (1, 8, 4, 8)}, ("", "16 and 16", "8 and 8")),
    "sequence length": (  # where the layout is only named see test_doors
        FUNCTION,
        {"q": (1, 9, 8, 16), "k": (1, 9, 4, 16), "seq_len": 36},
        ("", "zigzag(32 tokens, MESH)", "zigzag(36 tokens, MESH)"),
    ),
    "layout": (
        DOORS,
        {"layout": "striped"},
        ("", "zigzag(32 tokens, MESH)", "striped(32 tokens, MESH)"),
    ),
    "mask": (RING, option(mask=MaskSpec.window(3)), ("mask: ", "causal", "window(3, 0)")),
    "scale": (RING, option(softmax_scale=0.3), ("scale: ", "0.25", "0.3")),
    "kernel": (RING, option(kernel="eager"), ("kernel: ", "sdpa", "eager")),
    "chunks": (RING, option(tuning=Tuning(chunks=2)), ("", "1 chunk", "2 chunks")),
    "lse": (FUNCTION, option(return_lse=True), ("lse: ", "without", "with")),
    "gather": (RING, option(tuning=Tuning(gather=True)), ("KV: ", "stepwise", "all-gathered")),
    "soft cap": (FUNCTION, option(scores=Scores(softcap=2.0)), ("softcap: ", "none", "2.0")),
    "sinks": (FUNCTION, option(scores=Scores(sinks=torch.ones(8))), ("sinks: ", "no", "fixed")),
}


@pytest.mark.parametrize("door", DOORS)
def test_ranks_that_differ_hear_of_it_everywhere(pool, door):
    rows = rows_of(DIFFERENT, door)
    given = [(changes, (odd,)) for odd, (_, changes, _) in rows]
    results = pool.run(attempts, WORLD, timeout=TIMEOUT_S, door=door, rows=given)
    degrees = f"ulysses {'4 x ring 1' if door.endswith('4x1') else '2 x ring 2'}"
    for (odd, (_, _, (field, many, one))), *outcomes in zip(rows, *results, strict=True):
        others = "0-2" if odd else "1-3"
        line = f"{field}{many} on ranks {others}, {one} on rank {odd}\n".replace("MESH", degrees)
        check(outcomes, ["MeshError"] * WORLD, (line, "\nequal on all ranks: "))


def scored(sinks: torch.Tensor) -> None:
    Call(**option(scores=Scores(sinks=sinks))).make("usp_attention")


def joined(sinks: torch.Tensor) -> None:
    mesh, (q, text) = mesh_of(2), (torch.ones(1, tokens, 4, 16) for tokens in (8, 4))
    options: dict[str, Any] = {"layout": mesh.layout("zigzag", 32), "mask": MaskSpec.full()}
    scores = Scores(sinks=sinks[:4])
    ds_usp.usp_joint_attention(q, q, q, text, text, text, mesh=mesh, scores=scores, **options)


def in_a_module(sinks: torch.Tensor) -> None:
    local = torch.nn.Identity()
    local.softmax_offset = sinks
    attention = USPAttention(local, mesh=mesh_of(2), mask=MaskSpec.causal(), dropout_p=0.0)
    known = replace(attention._framework.attention, sinks_owner=local)
    attention._framework.attention = known
    attention(torch.ones(1, 8, 8, 16), *(torch.ones(1, 8, 4, 16) for _ in "kv"), 0)


def turned(table: torch.Tensor, ulysses: int) -> None:
    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q

    attention = USPAttention(local, mesh=mesh_of(ulysses), mask=MaskSpec.causal(), dropout_p=0.0)
    whole = table[0].repeat(128, 1, 1, 16)
    whole[17, 0, 0, 5] = table[-1]
    attention(*(torch.ones(1, 8, 4, 16) for _ in "qkv"), 0, (torch.ones_like(whole), whole))


# Calls with a tensor that is no shard, of 8 numbers, and its name.
ALIKE: list[tuple[Callable[[torch.Tensor], None], str]] = [
    (scored, "torch.float32 sinks 8"),
    (joined, "torch.float32 sinks 4"),
    (in_a_module, "torch.float32 sinks 8"),
    (lambda table: turned(table, 2), "torch.float32 sin 128x1x1x16"),
    (lambda table: turned(table, 4), "torch.float32 sin 128x1x1x16"),
]


def given_other_numbers(ctx: RankContext) -> list[list[Outcome]]:
    """Each call with one other element on rank 1, as another dtype there, and as on the others."""
    numbers, other = torch.arange(8.0), torch.arange(8.0)
    other[0 if ctx.rank == 1 else 7] = 7 - 1e-6 * (ctx.rank == 1)
    wide = numbers.double() if ctx.rank == 1 else numbers
    given = other, wide, numbers
    return [[outcome(ctx, lambda x=x, call=call: call(x)) for x in given] for call, _ in ALIKE]


def test_numbers_of_tensors_that_are_no_shards_are_compared(pool):
    for rank, calls in enumerate(pool.run(given_other_numbers, WORLD, timeout=TIMEOUT_S)):
        for (_, name), (numbers, dtype, equal) in zip(ALIKE, calls, strict=True):
            check([numbers], ["MeshError"], (f"{name}, digest: ", "on rank 1", "broadcast"))
            assert dtype[0] == "MeshError" and "torch.float64" in dtype[1], (rank, dtype)
            check([equal], ["nothing"], ())


def build(ctx: RankContext, grids: list[tuple[tuple[Any, str], ...]]) -> list[Outcome]:
    """What each rank hears of meshes with these degrees and orders, one a rank."""
    return [
        outcome(ctx, lambda grid=grid: SequenceMesh.from_group(None, *grid[ctx.rank]))
        for grid in grids
    ]


ORDER = "ulysses-ring"
RIGHT = (2, ORDER)
ALL_CONFIG, ALL_MESH = [CONFIG] * WORLD, ["MeshError"] * WORLD
GRIDS: list[tuple[tuple[tuple[Any, str], ...], list[str], tuple[str, ...]]] = [
    (((3, ORDER),) * WORLD, ALL_CONFIG, ("=3", "4 ranks", "4 (ring 1), 2 (ring 2)")),
    (((8, ORDER),) * WORLD, ALL_CONFIG, ("=8", "4 ranks")),
    (((0, ORDER),) * WORLD, ALL_CONFIG, ("=0",)),
    (((2.0, ORDER),) * WORLD, ALL_CONFIG, ("=2.0",)),
    (((2, "ring"),) * WORLD, ALL_CONFIG, ("'ring'", "ulysses-ring, ring-ulysses")),
    (
        (RIGHT, RIGHT, (3, ORDER), RIGHT),
        ["MeshError", "MeshError", CONFIG, "MeshError"],
        ("=3", "4 ranks"),
    ),
    (((4, ORDER), RIGHT, RIGHT, RIGHT), ALL_MESH, ("2 on ranks 1-3, 4 on rank 0",)),
    ((RIGHT, RIGHT, RIGHT, (2, "ring-ulysses")), ALL_MESH, ("ring-ulysses on rank 3",)),
]


def test_a_grid_that_does_not_fit_raises_everywhere(pool):
    grids = [grid for grid, *_ in GRIDS]
    results = pool.run(build, WORLD, timeout=TIMEOUT_S, grids=grids)
    for (_, kinds, numbers), *outcomes in zip(GRIDS, *results, strict=True):
        check(outcomes, kinds, numbers)


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
    check(results, ALL_CONFIG, ("8 ranks", "4"))


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
    check(results, ALL_MESH, ("on ranks 0, 2, xxx", "on ranks 1, 3", "sha256"))


def test_without_torch_distributed_a_mesh_is_refused_with_the_fix():
    with pytest.raises(ds_usp.MeshError, match=r"init_process_group .*SequenceMesh.single\(\)"):
        SequenceMesh.from_group(None, 1)


def messages(
    ctx: RankContext, settings: list[Setting], calls: list[dict[str, Any]]
) -> list[list[str]]:
    """Of each local attention what the constructor, or else each call, raised on this rank; ''
    where nothing."""
    return [_messages(ctx, setting, calls) for setting in settings]


def _messages(ctx: RankContext, setting: Setting, calls: list[dict[str, Any]]) -> list[str]:
    try:
        attention = setting.module()
    except USPError as error:
        return [str(error)]
    layout = attention.mesh.layout("zigzag", TOKENS)
    q, k, v, _ = (layout.shard(x, 1, ctx.rank) for x in full_tensors())
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


ELSEWHERE = {"module": "my_model", "name": "FlashSelfAttention", "causal": True}
FULL, WINDOW_BACK = MaskSpec.full(), {"window_size": (5, -1)}
PREFIX = {"mask": MaskSpec(right=0, prefix=3), "dropout_p": 0.0}
# Local attentions that a ring does not compute, what they are given, and numbers of the message.
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (nobody_knows, {}, {}, ("Identity", "ring 1")),
    (stand_in, ELSEWHERE, {}, ("FlashSelfAttention",)),
    (stand_in, ELSEWHERE, PREFIX, ("prefix", "causal=True")),
    (own_forward, {}, {}, ("MyAttention",)),
    (flash_self_attention, {}, {"mask": FULL}, ("mask=full", "causal")),
    (core_attention, {}, {"softmax_scale": 0.3}, ("softmax_scale=0.3", "0.25")),
    (flash_self_attention, {}, {"softmax_scale": 0.3}, ("softmax_scale=0.3",)),
    (flash_self_attention, {}, {"dropout_p": 0.1}, ("dropout_p=0.1", "0.0")),
    (core_attention, {"kind": "padding"}, {}, ("'padding'", "causal or no_mask")),
    (megatron_core, {"kind": "padding"}, {}, ("'padding'",)),
    (flash_attn, {"alibi": (1.0, 2.0)}, {}, ("alibi_slopes", "ring 1")),
    (megatron_core, WINDOW_BACK, {}, ("window_size=(5, -1)",)),
    (flash_self_attention, {"dropout": 0.1}, {}, ("dropout 0.1", "dropout_p=0")),
    (flash_attn, {"dropout": 0.2}, {}, ("dropout 0.2",)),
    (core_attention, {"dropout": 0.1}, {}, ("dropout 0.1", "dropout_p=0")),
    (megatron_core, {"attention_dropout": 0.3}, {}, ("dropout 0.3",)),
    (torch.nn.Dropout, {"p": 0.4}, {"mask": MaskSpec.causal()}, ("dropout_p=0.0",)),
]


def test_what_the_ring_does_not_compute_is_refused_on_every_rank(pool):
    settings = [Setting(*row[:3]) for row in REFUSED]
    for by_setting in pool.run(messages, WORLD, settings=settings, calls=[{}]):
        for (*_, numbers), (text,) in zip(REFUSED, by_setting, strict=True):
            assert all(number in text for number in numbers), (numbers, text)


HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
WINDOW = ~(HIDDEN | torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-4))
ADDITIVE = torch.zeros(TOKENS, TOKENS).masked_fill(HIDDEN, float("-inf"))
PADDED = HIDDEN.clone()
PADDED[:, -3:] = True
BIAS = ADDITIVE + torch.arange(TOKENS) * 0.1


def args(*given: Any) -> dict[str, Any]:
    return {"args": given}


def keywords(**given: Any) -> dict[str, Any]:
    return {"kwargs": given}


# Extra arguments of a causal attention: those that agree with it, and those that differ.
SAME: dict[str, dict[str, Any]] = {
    "nothing": keywords(attention_mask=None, my_own=None),
    "hidden pairs": args(HIDDEN),
    "hidden pairs by name": keywords(attention_mask=HIDDEN[None, None]),
    "hidden pairs of each sample": args(HIDDEN.expand(2, 1, TOKENS, TOKENS)),
    "minus infinity": args(ADDITIVE),
    "a large negative number": args(ADDITIVE.clamp_min(-1e4)),
    "the least of bf16": args(ADDITIVE.clamp_min(-3e38).bfloat16()),
    "causal": keywords(causal=True),
    "the scale": keywords(softmax_scale=HEAD_DIM**-0.5),
    "is_causal": keywords(is_causal=True, dropout_p=0.0),
}
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "visible pairs": (keywords(attn_mask=~HIDDEN), "True hides a pair"),
    "a window": (args(~WINDOW), "0=a tensor [32, 32]"),
    "visible window": (keywords(attention_mask=WINDOW), "attention_mask=a tensor"),
    "all visible": (args(torch.ones_like(HIDDEN)), "causal mask"),
    "padding": (args(PADDED[None, None]), "[1, 1, 32, 32]"),
    "one padded sample": (args(torch.stack([HIDDEN, PADDED])), "[2, 32, 32]"),
    "a bias": (args(BIAS), "[32, 32]"),
    "weak hiding": (args(ADDITIVE.clamp_min(-10.0)), "[32, 32]"),
    "not a number": (args(ADDITIVE * 0), "[32, 32]"),
    "this rank's rows": (args(HIDDEN[:8]), "[8, 32]"),
    "another length": (args(HIDDEN[:16, :16]), "[16, 16]"),
    "zeros and ones": (args(HIDDEN.long()), "[32, 32]"),
    "a vector": (args(HIDDEN[0]), "[32]"),
    "not causal": (keywords(causal=False), "causal=False"),
    "another scale": (keywords(softmax_scale=0.3), "softmax_scale=0.3"),
    "dropout": (keywords(dropout_p=0.1), "dropout_p=0.1"),
    "unknown keyword": (keywords(my_own=3), "my_own=3"),
    "unknown extra": (args("alibi"), "0=alibi"),
}
# Of a window of 3 instead: whether each mask is that.
WINDOWS = [(WINDOW, ""), (~WINDOW, "attend"), (HIDDEN, "window(3, 0)"), (ADDITIVE, "window(3, 0)")]


def test_extra_arguments_are_accepted_where_they_agree_and_refused_where_not(pool):
    causal = [Setting(flash_self_attention, {}, {})]
    calls = [*SAME.values(), *(call for call, _ in OTHER.values())]
    for (texts,) in pool.run(messages, WORLD, settings=causal, calls=calls):
        assert dict(zip(SAME, texts, strict=False)) == dict.fromkeys(SAME, "")
        for (name, (_, number)), text in zip(OTHER.items(), texts[len(SAME) :], strict=True):
            assert number in text and "ring degree 1" in text, (name, text)
    window = [Setting(nobody_knows, {}, {"mask": MaskSpec.window(3), "dropout_p": 0.0})]
    calls = [args(mask) for mask, _ in WINDOWS]
    for (texts,) in pool.run(messages, WORLD, settings=window, calls=calls):
        for text, (_, number) in zip(texts, WINDOWS, strict=True):
            assert number in text and bool(text) == bool(number)


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
