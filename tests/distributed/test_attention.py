"""USP attention against the fp64 oracle, forward and backward, on every mesh up to 8 ranks."""

from dataclasses import replace
from itertools import count, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import (
    ALL_LAYOUTS,
    HEADS,
    RESULTS,
    Case,
    attend_by_module,
    check,
    dense_errors,
    errors_of,
    mesh_of,
    run_cases,
)
from harness import RankContext, WorkerPool

import ds_usp
from ds_usp import MaskSpec
from ds_usp import testing as oracle
from ds_usp.attention import tuning
from ds_usp.attention.local_attention import FrameworkArgumentChecks, LocalAttention
from ds_usp.attention.plan import AttentionOptions, plan_call
from ds_usp.comm.readings import Readings
from ds_usp.geometry.chunking import chunk_positions
from ds_usp.geometry.heads import HeadSplit

MESHES = [(u, r) for u in (1, 2, 4) for r in (1, 2, 4) if u * r <= 8]
PRODUCT_HEADS = ("MHA", "GQA", "MQA")


def heads_of(name: str) -> dict[str, int]:
    return dict(zip(("heads", "kv_heads"), HEADS[name], strict=True))


def cases_on(ulysses: int, ring: int, layout: str) -> list[Case]:
    """Masks x heads, then one case for each other size, in fp32 and fp64.

    Each of the first is on two of the four layouts of a mesh, with one length as it is and with the
    other in chunks, and on the other two of the next mesh. On each mesh a layout has every mask and
    every number of heads, both lengths, some in chunks. Each of the others is on one layout of a
    mesh, on the next one of the next mesh. Every second one is under keep_attention.
    """
    base, turn = Case(batch=1), ALL_LAYOUTS.index(layout)
    at = MESHES.index((ulysses, ring))
    masks, lengths = ("causal", "full", "window", "window both sides"), (64, 67)
    product_cases, nth = [], count(turn)
    for m, h in product(range(len(masks)), range(len(PRODUCT_HEADS))):
        if (m + m // 2 + h + at) % 2 != (turn in (1, 2)):
            continue
        name, seq_len = PRODUCT_HEADS[h], lengths[(m + h + turn) % 2]
        case = replace(base, mask=masks[m], seq_len=seq_len, **heads_of(name))
        in_chunks = (m // 2 + h + turn // 2) % 2
        product_cases.append(tuned(case, ulysses, next(nth)) if in_chunks else case)
    names = [name for name, (heads, _) in HEADS.items() if heads >= ulysses]
    single_cases = [
        *(replace(base, **heads_of(name)) for name in names if name not in PRODUCT_HEADS),
        *(replace(base, **heads_of(name), seq_len=61, mask="window ahead") for name in names[::2]),
        replace(base, batch=3, head_dim=80, seq_len=70),
        replace(base, batch=3, head_dim=128, **heads_of("GQA")),
        replace(base, softmax_scale=0.3, mask="window back", **heads_of("MQA")),
        replace(base, kernel="eager", seq_len=67, mask="window", **heads_of("GQA")),
        replace(base, dtype=torch.float64, seq_len=67, **heads_of("GQA")),
        replace(base, dtype=torch.float64, mask="window both sides", **heads_of("6 heads of 2")),
        replace(base, dtype=torch.float64, mask="full", kernel="eager"),
        # A kernel of rectangular causal tiles computes later chunks in one step.
        *(
            tuned(replace(base, kernel="eager", seq_len=n, kv_heads=4), ulysses, 1)
            for n in (64, 67)
        ),
    ]
    single_cases = single_cases[(turn + at) % 4 :: 4]
    cases = product_cases + single_cases
    return [replace(case, layout=layout, kept=bool((i + at) % 2)) for i, case in enumerate(cases)]


def tuned(case: Case, ulysses: int, index: int) -> Case:
    """The case in several chunks and with all-gathered KV, or one of the two."""
    most = HeadSplit(case.heads, case.kv_heads, ulysses).max_chunks
    tunings = (
        ds_usp.Tuning(chunks=1, gather=True),
        ds_usp.Tuning(chunks=most, gather=True),
        ds_usp.Tuning(chunks=most, gather=False),
        ds_usp.Tuning(chunks=max(most - 1, 1), gather=True),
    )
    return replace(case, tuning=tunings[index % len(tunings)])


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_equals_the_oracle(pool, ulysses, ring, layout):
    check(pool, cases_on(ulysses, ring, layout), ulysses, ring)


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_kept_results_of_documents_and_sinks(pool, ulysses, ring):
    base = Case(seq_len=67, heads=8, kv_heads=4, kernel="eager", sinks=True, kept=True)
    layouts = ("zigzag", "contiguous")
    cases = [replace(base, documents=((40, 27),), layout=layout) for layout in layouts]
    check(pool, [*cases, replace(cases[0], mask="window")], ulysses, ring)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (4, 2), (2, 4)])
def test_ranks_may_lie_ring_first(pool, ulysses, ring):
    masks, tunings = ("causal", "window both sides"), (ds_usp.Tuning(), ds_usp.Tuning(gather=True))
    cases = [
        Case(layout=layout, mask=masks[m], seq_len=67, heads=6, kv_heads=2, tuning=tunings[t])
        for turn, layout in enumerate(ALL_LAYOUTS, start=ulysses // 2)
        for m, t in product((0, 1), (0, 1))
        if (turn + m + t) % 2
    ]
    check(pool, cases, ulysses, ring, order="ring-ulysses")


@pytest.mark.parametrize("ulysses", [2, 3, 4])
def test_chunks_may_be_smaller_than_a_kv_group(pool, ulysses):
    """K and V are exchanged with the group's first chunk, and so are their gradients; from shards
    backward exchanges K and V with its last."""
    heads = {2: [(8, 2), (12, 4), (7, 1)], 3: [(12, 3), (9, 1)], 4: [(8, 2), (16, 4), (14, 2)]}
    cases = []
    for (query_heads, kv_heads), layout in product(heads[ulysses], ("zigzag", "contiguous")):
        split = HeadSplit(query_heads, kv_heads, ulysses)
        base = Case(layout=layout, seq_len=67, heads=query_heads, kv_heads=kv_heads)
        for chunks in range(split.max_chunks + 1, split.max_chunks_in_groups + 1):
            cases.append(replace(base, tuning=ds_usp.Tuning(chunks=chunks)))
        cases.append(
            replace(cases[-1], mask="window", sinks=True, kernel="eager", documents=((40, 27),))
        )
        cases.append(replace(cases[-1], softcap=5.0, documents=()))
        cases.append(replace(cases[0], dtype=torch.float64, value_dim=8))
    check(pool, [replace(case, kept=i % 3 < 2) for i, case in enumerate(cases)], ulysses, 1)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), [(3, 2), (1, 7), (7, 1)])
def test_degrees_need_not_be_powers_of_two(pool, ulysses, ring, layout):
    turn = ALL_LAYOUTS.index(layout)  # each mask with both lengths, on two layouts each
    cases = [
        Case(layout=layout, seq_len=(43, 84)[(turn + at) % 2], mask=mask, heads=14, kv_heads=7)
        for at, mask in enumerate(("causal", "window", "full"))
    ]
    check(pool, cases, ulysses, ring)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("ring", [3, 4, 7])
def test_ranks_may_hold_a_token_or_two(pool, ring, layout):
    # Not causal: the first token's dq would be 0, which leaves nothing to be relative to.
    shortest = 2 * ring if layout == "context_parallel" else ring
    choices = list(product(("full", "window ahead"), ("auto", "eager")))
    tunings = (ds_usp.Tuning(), ds_usp.Tuning(chunks=3, gather=True))
    turn, cases = ALL_LAYOUTS.index(layout), []
    for n in range(4):  # each choice with each length on one layout, on two layouts in chunks
        mask, kernel = choices[(n + turn) % 4]
        tuning = tunings[(n + turn // 2) % 2]
        cases.append(
            Case(layout=layout, seq_len=shortest + n, mask=mask, kernel=kernel, tuning=tuning)
        )
    check(pool, cases, 1, ring)


def run_launch_bound(
    ctx: RankContext, cases: list[Case], ulysses_degree: int
) -> list[dict[str, float]]:
    """:func:`cases.run_cases` as on GPUs where launches would take longer than kernels."""
    mesh = mesh_of(ulysses_degree)
    mesh.plans.clear()
    with mock.patch.object(
        tuning,
        "chunk_positions",
        lambda sizes, launch_bound: chunk_positions(sizes, launch_bound=True),
    ):
        results = run_cases(ctx, cases, ulysses_degree)
    mesh.plans.clear()
    return results


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (1, 4), (2, 2)])
def test_a_launch_bound_call_computes_local_and_remote_kv_together(pool, ulysses, ring, layout):
    settings = product(
        (64, 67),
        ("causal", "window both sides"),
        ("sdpa", "eager"),
        (ds_usp.Tuning(1, True), ds_usp.Tuning(1, False)),
    )
    turn = ALL_LAYOUTS.index(layout)
    cases = [
        Case(layout=layout, seq_len=seq_len, mask=mask, kernel=kernel, tuning=tuned)
        for at, (seq_len, mask, kernel, tuned) in enumerate(settings)
        if at.bit_count() % 2 == turn % 2  # any three of the settings together; the rest on others
    ]
    check(pool, cases, ulysses, ring, run_launch_bound)


def mean_errors(
    pool: WorkerPool, case: Case, ulysses: int, ring: int, seeds: int
) -> dict[str, float]:
    """Error of each result over all ranks and several inputs, root mean square."""
    cases = [replace(case, seed=seed) for seed in range(seeds)]
    results = pool.run(run_cases, ulysses * ring, cases=cases, ulysses_degree=ulysses)
    flat = [errors for by_case in results for errors in by_case]
    return {name: (sum(e[name] ** 2 for e in flat) / len(flat)) ** 0.5 for name in RESULTS}


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_bf16_loses_no_more_than_the_dense_kernel(pool, layout):
    seeds = 3
    case = Case(
        layout=layout, dtype=torch.bfloat16, seq_len=256, heads=8, kv_heads=2, head_dim=64, batch=1
    )
    dense = [dense_errors(replace(case, seed=seed)) for seed in range(seeds)]
    limit = {name: max(errors[name] for errors in dense) for name in RESULTS}
    # Without a ring a rank computes whole heads, whatever the layout is.
    meshes = [(1, 2), (1, 8), (2, 2), *[(8, 1)] * (layout == "zigzag")]
    by_ring = {
        (ulysses, ring): mean_errors(pool, case, ulysses, ring, seeds) for ulysses, ring in meshes
    }
    for degrees, errors in by_ring.items():
        for name in ("out", "dq", "dk", "dv"):
            assert errors[name] <= 1.5 * limit[name], (degrees, name, errors, limit)
        assert errors["lse"] <= 1e-5  # fp32, whatever the inputs are
    for name in ("out", "dq", "dk", "dv"):  # sums are fp32: no growth with the number of blocks
        assert by_ring[1, 8][name] <= 1.1 * by_ring[1, 2][name], (name, by_ring)


def first_steps(ctx: RankContext) -> tuple[list[bool], list[bool]]:
    """Whether each chunk's first step is of the local block alone, forward and backward."""
    mesh = mesh_of(2)
    layout = mesh.layout("zigzag", 64)
    x = torch.randn(1, 16, 8, 8)
    options = AttentionOptions(
        mesh, layout, ds_usp.MaskSpec.causal(), kernel="eager", tuning=ds_usp.Tuning(3, True)
    )
    _, call = plan_call(x, x, x, options)
    plans = [ring.schedule for ring in call.ring_calls]
    return (
        [plan.steps[0].is_local for plan in plans],
        [plan.backward_steps[0].is_local for plan in plans],
    )


def test_the_first_chunk_computed_has_its_local_block_alone(pool):
    # Chunks of 1, 2 and 1 heads: too little is computed before the second chunk.
    modes = pool.run(first_steps, 4)
    assert any(forward == [True, True, False] for forward, _ in modes)
    for forward, backward in modes:  # backward begins with the last chunk
        assert forward[:2] == [True, True] and backward == [False, True, True]


SEQ_LEN = 48


def changed_positions(ctx: RankContext, kind: str, ulysses: int, changed: int) -> tuple[int, int]:
    """First and last position whose output changes with the token at ``changed``."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ulysses)
    layout = mesh.layout(kind, SEQ_LEN)
    before = [torch.randn(1, SEQ_LEN, 4, 16) for _ in range(3)]
    after = [x.clone() for x in before]
    for x in after:
        x[:, changed] += 1.0
    outs = []
    for qkv in (before, after):
        q, k, v = (layout.shard(x, 1, mesh.rank) for x in qkv)
        mask = ds_usp.MaskSpec.causal()
        out = ds_usp.usp_attention(q, k, v, mesh=mesh, layout=layout, mask=mask)
        shards = [torch.empty_like(out) for _ in range(mesh.sp_degree)]
        dist.all_gather(shards, out)
        outs.append(layout.gather(shards, 1))
    differs = (outs[0] != outs[1]).flatten(2).any(-1)[0].nonzero()
    return int(differs.min()), int(differs.max())


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize("kind", ALL_LAYOUTS)
def test_earlier_positions_stay_bit_identical(pool, kind, ulysses):
    for changed in (0, 13, 30, SEQ_LEN - 1):
        for first, last in pool.run(
            changed_positions, 4, kind=kind, ulysses=ulysses, changed=changed
        ):
            assert (first, last) == (changed, SEQ_LEN - 1)


BASE = Case(batch=2, seq_len=43, heads=8, kv_heads=4, head_dim=16)
CHANGES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "values of 8": {"value_dim": 8},
    "values of 24": {"value_dim": 24, "kernel": "sdpa"},
    "values of 24, eager": {"value_dim": 24, "kernel": "eager"},
    "sinks and values of 8": {"sinks": True, "value_dim": 8, "dtype": torch.float64},
    "all": {"softcap": 2.0, "sinks": True, "value_dim": 24},
}
TUNINGS = (
    ds_usp.Tuning(),
    ds_usp.Tuning(chunks=1, gather=True),
    ds_usp.Tuning(chunks=2, gather=True),
    ds_usp.Tuning(chunks=2, gather=False),
)
SCORE_MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (4, 2)]


def score_cases(ulysses: int, ring: int) -> list[Case]:
    """Each change under one layout, on the next mesh under the next one, with other masks, heads
    and tunings in turn."""
    masks = ("causal", "full", "window", "window both sides")
    kv_heads, at = (4, 8, 1), SCORE_MESHES.index((ulysses, ring))
    all_cases = []
    for turn, change in enumerate(CHANGES, start=at):
        case = replace(
            BASE,
            layout=ALL_LAYOUTS[turn % len(ALL_LAYOUTS)],
            mask=masks[(turn + turn // 4) % 4],
            kv_heads=kv_heads[turn % 3],
        )
        parts = HeadSplit(8, case.kv_heads, ulysses).max_chunks
        tuning = TUNINGS[(turn + at) % (4 if parts > 1 else 2)]
        all_cases.append(replace(case, tuning=tuning, **CHANGES[change]))
    documents = ((1, 17, 25), (30, 13))  # each sample its own
    changes = ("sinks and values of 8", "all")
    return all_cases + [replace(BASE, documents=documents, **CHANGES[each]) for each in changes]


@pytest.mark.parametrize(("ulysses", "ring"), SCORE_MESHES)
def test_changed_scores_are_the_oracles(pool, ulysses, ring):
    check(pool, score_cases(ulysses, ring), ulysses, ring)


CROSS_MESHES = [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)]
CROSS_BASE = Case(batch=2, seq_len=43, heads=6, kv_heads=3, head_dim=16)
GATHER = ds_usp.Tuning(gather=True)


def cross_cases(at: int) -> list[Case]:
    """Each kind of layout for either sequence, the keys fewer or more; half of the pairs on each
    mesh, the others on the next."""
    pairs = product(ALL_LAYOUTS, ALL_LAYOUTS)
    lengths = (17, 96, 43)
    cases = [
        replace(CROSS_BASE, layout=q_kind, mask="full", keys=(lengths[position % 3], kv_kind))
        for position, (q_kind, kv_kind) in enumerate(pairs)
        if (position + position // 4 + at) % 2
    ]
    one = replace(CROSS_BASE, mask="full", keys=(29, "contiguous"))
    return [
        *cases,
        replace(one, tuning=GATHER),
        replace(one, keys=(96, "striped"), tuning=GATHER, dtype=torch.float64),
        replace(one, value_dim=8, sinks=True),
        replace(one, softcap=2.0, sinks=True),
    ]


def prefix_cases(at: int) -> list[Case]:
    """A prefix of one token, inside of a shard, over several and of all, under some windows; with
    half of the layouts on each mesh, with the others on the next."""
    prefixes = (1, 5, 22, 42, 43)
    cases = [
        replace(
            CROSS_BASE,
            layout=layout,
            prefix=prefix,
            tuning=GATHER if position // 2 % 2 else CROSS_BASE.tuning,
        )
        for position, (layout, prefix) in enumerate(product(ALL_LAYOUTS, prefixes))
        if (position + at) % 2
    ]
    return [
        *cases,
        replace(CROSS_BASE, prefix=3, mask="window"),
        replace(CROSS_BASE, prefix=17, mask="window both sides", kernel="eager", layout="striped"),
        replace(CROSS_BASE, prefix=17, sinks=True, value_dim=8),
    ]


def block_cases() -> list[Case]:
    """Blocks of one token, over several shards and next to each other, in documents of each sample
    and in a window that is shorter than a block."""
    documents = ((43,), (9, 34))
    blocks = (((0, 1), (5, 27), (27, 31)), ((2, 9), (9, 20), (41, 43)))
    one = replace(CROSS_BASE, documents=documents, blocks=blocks)
    return [
        *(replace(one, layout=layout) for layout in ALL_LAYOUTS),
        replace(one, mask="window", tuning=GATHER),
        replace(one, documents=documents[:1], blocks=blocks[:1], sinks=True, value_dim=8),
    ]


@pytest.mark.parametrize(("ulysses", "ring"), CROSS_MESHES)
def test_cross_attention_equals_the_oracle(pool, ulysses, ring):
    at = CROSS_MESHES.index((ulysses, ring))
    made = [*cross_cases(at), *prefix_cases(at), *block_cases()]
    if ulysses == 4:  # a head chunk needs a key/value head on each rank
        made = [replace(case, heads=8, kv_heads=2) for case in made]
    check(pool, made, ulysses, ring)


def through_the_drop_in(ctx: RankContext, ulysses: int) -> float:
    """USPAttention around a local attention that attends to all of another sequence."""
    mesh, full = mesh_of(ulysses), {"mask": MaskSpec.full(), "dropout_p": 0.0}
    case = replace(CROSS_BASE, seq_len=48, heads=8, kv_heads=4, mask="full", keys=(24, "zigzag"))
    actual = attend_by_module(mesh, case, Dense(), layout="zigzag", **full)
    with pytest.raises(ds_usp.ConfigError, match="by one table"):
        turn = (torch.ones(48, 1, 1, 16),) * 2
        attend_by_module(mesh, case, Dense(), turn, layout="zigzag", **full)
    return max(errors_of(mesh, case, actual).values())


class Dense(torch.nn.Module):
    """A local attention of no known class, without a mask."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        return oracle.dense_attention(q, k, v, allowed)[0].to(q.dtype)


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_the_drop_in_crosses_sequences(pool, ulysses):
    assert max(pool.run(through_the_drop_in, 4, ulysses=ulysses)) <= 1e-5


def test_a_frameworks_mask_is_compared_with_the_prefix():
    framework = FrameworkArgumentChecks(
        LocalAttention(MaskSpec.prefix_lm(5), None, 0.0), Readings()
    )
    shown = oracle.causal(range(8), range(8))
    shown[:, :5] = True
    accepted = framework.check(8, 16, (shown,), {"is_causal": False})
    assert str(accepted) == "1 extra arguments, is_causal"
    for wrong in ({"is_causal": True}, {"attn_mask": oracle.causal(range(8), range(8))}):
        with pytest.raises(ds_usp.UnsupportedAttentionError, match="causal with a prefix of 5"):
            framework.check(8, 16, (), wrong)
    shown.numpy()[:, 3] = False  # the next batch's mask in one buffer, unknown to torch
    with pytest.raises(ds_usp.UnsupportedAttentionError, match="causal with a prefix of 5"):
        framework.check(8, 16, (shown,), {})
