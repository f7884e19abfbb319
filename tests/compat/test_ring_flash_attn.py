"""ring_flash_attn's functions: what its own tests call, against the oracle, in its token orders.

Its tests call the functions of packed tensors, causal, on equal shards or on packed documents whose
lengths the ranks divide, and look at the output, the log-sum-exp and the gradients.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext

from ds_usp import testing as oracle
from ds_usp.compat import ring_flash_attn
from ds_usp.errors import ConfigError, MeshError, PatchError, UnsupportedAttentionError

LIMIT = 1e-5
HEAD_DIM, BATCH = 8, 2
LENGTHS = {
    "": (64,),
    "_varlen": (8, 24, 32),  # each divides into 2 * 4 chunks
    "llama3": (7, 1, 22, 34),  # only their sum divides
}
KINDS = {"zigzag_ring": "context_parallel", "ring": "contiguous", "stripe": "striped"}
NAMES = [
    f"{family}_{form}"
    for family in (
        *("ring_flash_attn", "ring_flash_attn_varlen", "stripe_flash_attn"),
        *("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen"),
    )
    for form in ("func", "kvpacked_func", "qkvpacked_func")
]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window_size": (5, 0)},
    "both sides": {"window_size": (9, 4), "softmax_scale": 0.3},
}


def lengths_of(name: str) -> tuple[int, ...]:
    return LENGTHS[next(key for key in ("llama3", "_varlen", "") if key in name)]


def positions_of(name: str, world: int) -> list[torch.Tensor]:
    """The tokens of each rank, in the order of the package's tests: each document is cut by itself,
    but for the llama3 functions."""
    kind = KINDS[name.partition("_flash")[0].removeprefix("llama3") or "ring"]
    lengths = (64,) if "llama3" in name else lengths_of(name)
    starts = [0, *accumulate(lengths)]
    pieces = [
        oracle.expected_positions(kind, length, 1, world, "ulysses-ring") for length in lengths
    ]
    return [
        torch.cat([start + of_ranks[rank] for start, of_ranks in zip(starts, pieces, strict=False)])
        for rank in range(world)
    ]


def heads_of(name: str) -> tuple[int, int]:
    """Of queries and of keys; 5 as in the package's tests where one tensor holds all."""
    return (5, 5) if "qkvpacked" in name else (6, 2)


@dataclass(frozen=True)
class Where:
    """The dtype of the tensors, where attention is computed, and, of one rank that holds all
    tokens, whose are compared: (rank, world); None: its own."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    compared: tuple[int, int] | None = None


CPU = Where()


@lru_cache(maxsize=64)
def problem(
    batch: int, heads: tuple[int, int], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    counts = {"q": heads[0], "k": heads[1], "v": heads[1], "dout": heads[0]}
    return {
        name: torch.randn(batch, 64, count, HEAD_DIM, generator=generator).to(dtype)
        for name, count in counts.items()
    }


@lru_cache(maxsize=64)
def expected(
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, ...],
    option: str,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """The oracle's results for whole tensors ``[batch, tokens, ...]``."""
    given = OPTIONS[option]
    left, right = (None if bound < 0 else bound for bound in given.get("window_size", (-1, -1)))
    tokens = range(64)
    allowed = oracle.window(tokens, tokens, left, 0 if given.get("causal") else right)
    allowed &= oracle.same_document(tokens, tokens, lengths)
    full = problem(batch, heads, dtype)
    q, k, v = (full[name].double().requires_grad_() for name in "qkv")
    out, lse = oracle.dense_attention(q, k, v, allowed, given.get("softmax_scale"))
    grads = torch.autograd.grad(out, (q, k, v), full["dout"].double())
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.mT, *grads), strict=True))


def errors(
    ctx: RankContext,
    names: list[str],
    ulysses: int,
    options: list[str],
    orders: dict[str, str] | None = None,
    where: Where = CPU,
) -> dict[str, float]:
    """The largest relative error of each call's results on this rank.

    Args:
        orders: of whose token order a function is given; another's is a planted error.
    """
    with ring_flash_attn.install(ulysses_degree=ulysses):
        import ring_flash_attn as package

        return {
            f"{name} {option}": error(
                ctx, getattr(package, name), name, option, (orders or {}).get(name, name), where
            )
            for name in names
            for option in options
        }


def error(
    ctx: RankContext,
    function: Callable[..., Any],
    name: str,
    option: str,
    order: str,
    where: Where,
) -> float:
    packed, heads = "varlen" in name, heads_of(name)
    batch = 1 if packed else BATCH
    rows = positions_of(order, ctx.world)[ctx.rank]
    full = problem(batch, heads, where.dtype)
    local = {key: x[:, rows].to(where.device) for key, x in full.items()}
    if packed:
        local = {key: x[0] for key, x in local.items()}
    q, k, v = (local[key].clone().requires_grad_() for key in "qkv")
    tensors = {
        "qkvpacked_func": lambda: (torch.stack((q, k, v), -3),),
        "kvpacked_func": lambda: (q, torch.stack((k, v), -3)),
    }.get(name.rpartition("attn_")[2].removeprefix("varlen_"), lambda: (q, k, v))()
    options = dict(OPTIONS[option], group=ctx.group)
    lengths = lengths_for(ctx, name, options, where.device)
    out, lse, probs = function(*tensors, *lengths, **options, return_attn_probs=True)
    assert probs is None and lse.dtype == torch.float32
    grads = torch.autograd.grad(out, (q, k, v), local["dout"])
    assert torch.equal(out, function(*tensors, *lengths, **options))
    actual = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.mT, *grads), strict=True))
    whole = expected(batch, heads, lengths_of(name), option, where.dtype)
    worst = 0.0
    for key, x in actual.items():
        have, want = x.cpu().reshape(whole[key][:, rows].shape), whole[key][:, rows]
        if where.compared is not None:
            rank, world = where.compared
            have, want = (each[:, positions_of(name, world)[rank]] for each in (have, want))
        worst = max(worst, oracle.relative_error(have, want))
    return worst


def lengths_for(
    ctx: RankContext, name: str, options: dict[str, Any], device: str
) -> tuple[Any, ...]:
    """What a function takes between its tensors and its options."""
    borders = torch.tensor([0, *accumulate(lengths_of(name))], dtype=torch.int32, device=device)
    if "llama3" in name:
        *lengths, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            borders, options.get("causal", False), ctx.rank, ctx.world
        )
        return (*lengths, 1, keys)
    return (borders // ctx.world, 32 // ctx.world) if "varlen" in name else ()


FUNCS = [name for name in NAMES if "packed" not in name]
UNDER_ULYSSES = [name for name in NAMES if "stripe" not in name]


@pytest.mark.parametrize(
    ("world", "ulysses", "names", "options"),
    [
        (4, 1, NAMES, ["causal"]),
        (4, 1, FUNCS, [option for option in OPTIONS if option != "causal"]),
        (4, 2, UNDER_ULYSSES, ["causal"]),
        (2, 2, [name for name in FUNCS if "stripe" not in name], ["both sides"]),
    ],
)
def test_every_function_equals_the_oracle(pool, world, ulysses, names, options):
    for by_call in pool.run(errors, world, names=names, ulysses=ulysses, options=options):
        wrong = {call: error for call, error in by_call.items() if not error <= LIMIT}
        assert len(by_call) == len(names) * len(options) and not wrong


OTHERS_ORDER = {
    "ring_flash_attn_func": "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_varlen_func": "ring_flash_attn_varlen_func",
    "stripe_flash_attn_func": "ring_flash_attn_func",
}


def test_another_token_order_is_seen(pool):
    names = list(OTHERS_ORDER)
    planted = pool.run(errors, 4, names=names, ulysses=1, options=["causal"], orders=OTHERS_ORDER)
    assert all(max(of_calls) > 0.1 for of_calls in zip(*(x.values() for x in planted), strict=True))


def test_the_signatures_are_the_packages():
    options = (
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None"
    )
    expected = {
        "ring_flash_attn_func": "q, k, v, ",
        "stripe_flash_attn_kvpacked_func": "q, kv, ",
        "zigzag_ring_flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, ",
        "llama3_flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
        "max_seqlen_k, heads_k_stride, local_k_slice, ",
    }
    for name, first in expected.items():
        assert str(inspect.signature(getattr(ring_flash_attn, name))) == f"({first}{options})"
    assert {*NAMES, "substitute_hf_flash_attn"} <= set(dir(ring_flash_attn))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("borders", "world"), [([0, 7, 14, 16], 8), ([0, 3, 3, 11, 12], 4)])
def test_prepared_lengths_are_those_of_each_ranks_documents(borders, world, causal):
    local = borders[-1] // world
    for rank in range(world):
        queries, keys, longest_q, longest_k, visible = (
            ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                torch.tensor(borders, dtype=torch.int32), causal, rank, world
            )
        )
        assert (
            queries.dtype == keys.dtype == torch.int32 and keys[-1] == visible.stop - visible.start
        )
        assert (longest_q, longest_k) == (queries.diff().max(), keys.diff().max())
        for token in range(local):
            position = rank * local + token
            index = sum(border <= token for border in queries.tolist()) - 1
            start, stop = next((a, b) for a, b in pairwise(borders) if a <= position < b)
            assert visible.start + keys[index] == start
            assert visible.start + keys[index + 1] == (
                min(stop, (rank + 1) * local) if causal else stop
            )


LOCAL = torch.tensor([0, 8, 16])
FULL_KEYS = ((LOCAL, LOCAL, 8, 8, 1, slice(0, 16)), (LOCAL, LOCAL, 8, 8, 1, slice(16, 32)))
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "dropout": ("ring_flash_attn_func", (), {"dropout_p": 0.1}, "dropout 0.1 is not exact"),
    "deterministic": (
        "zigzag_ring_flash_attn_func",
        (),
        {"deterministic": True},
        "torch.use_deterministic_algorithms",
    ),
    "ALiBi": (
        "ring_flash_attn_func",
        (),
        {"alibi_slopes": torch.ones(2)},
        "alibi_slopes, and no kernel here adds",
    ),
    "a window of three": ("ring_flash_attn_func", (), {"window_size": (1, 2, 3)}, "(1, 2, 3) must"),
    "lengths as a list": ("ring_flash_attn_varlen_func", ([0, 16], 16), {}, "be a tensor of int"),
    "stripes": ("stripe_flash_attn_func", (), {}, "zigzag_ring_flash_attn"),
    "packed": ("ring_flash_attn_qkvpacked_func", (), {}, "with 2 or 3 before the heads"),
    "odd document": (
        "zigzag_ring_flash_attn_varlen_func",
        (torch.tensor([0, 7, 16]), 9),
        {},
        "14 tokens does not divide into 4 chunks",
    ),
    "of one rank": ("llama3_flash_attn_varlen_func", FULL_KEYS[1], {}, "of rank 0 with"),
    "no documents": (
        "ring_flash_attn_varlen_func",
        (torch.tensor([], dtype=torch.int32), 16),
        {},
        "begin with 0 and do not fall, not [], torch.int32",
    ),
    "lengths in fp32": (
        "ring_flash_attn_varlen_func",
        (torch.tensor([0.0, 16.0]), 16),
        {},
        "not [0.0, 16.0], torch.float32",
    ),
    "not causal": (
        "llama3_flash_attn_varlen_func",
        (LOCAL, LOCAL + torch.tensor([0, 0, 16]), 8, 8, 1, slice(0, 32)),
        {"causal": True},
        "with the same causal",
    ),
    "no token": (
        "llama3_flash_attn_varlen_func",
        (torch.tensor([0, 0]), torch.tensor([0, 0]), 0, 0, 1, slice(0, 0)),
        {"causal": True},
        "are packed; got [[0, 2, 8]",
    ),
}


def refused(ctx: RankContext) -> dict[str, Exception | None]:
    """What each call raises; and where rank 1 alone is wrong."""
    raised: dict[str, Exception | None] = {}
    with ring_flash_attn.install(ulysses_degree=2) as installed:
        package = installed.module
        for name, (function, lengths, options, _) in REFUSED.items():
            shape = (16, 2, 8) if "varlen" in function else (1, 16, 2, 8)
            shape = (0, 2, 8) if name == "no token" else shape
            tensors = [torch.randn(shape)] * (1 if "qkv" in function else 3)
            raised[name] = error_of(getattr(package, function), *tensors, *lengths, **options)
        q = torch.randn(16, 2, 8)
        prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor([0, 5, 32]), True, ctx.rank if ctx.rank == 0 else 0, ctx.world
        )
        llama3 = package.llama3_flash_attn_varlen_func
        raised["rank 1 has rank 0's"] = error_of(
            llama3, q, q, q, *prepared[:4], 1, prepared[4], causal=True
        )
        queries, *others, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor([0, 5, 32]), True, ctx.rank, ctx.world
        )
        # An empty document at the end of a shard, which the package's own lengths leave out.
        ends = (torch.cat([x, x[-1:]]) for x in (queries, others[0]))
        want = llama3(q, q, q, queries, *others, 1, keys, causal=True)
        assert llama3(q, q, q, *ends, *others[1:], 1, keys, causal=True).equal(want)
        longer, *rest = others
        other = longer.clone()
        other[-1] += 1
        raised["other keys later"] = error_of(
            llama3, q, q, q, queries, other, *rest, 1, keys, causal=True
        )
        # Rank 1 has lengths of another batch, of which its own part is the same.
        *lengths, slice_of_other = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor([0, 9 if ctx.rank else 5, 32]), True, ctx.rank, ctx.world
        )
        raised["lengths of another batch"] = error_of(
            llama3, q, q, q, *lengths, 1, slice_of_other, causal=True
        )
        # One rank gives the tensor of the call before: both read again, and all is right.
        queries = queries.clone() if ctx.rank else queries
        assert llama3(q, q, q, queries, *others, 1, keys, causal=True).shape == q.shape
        q = q[None]
        raised["rank 1 alone"] = error_of(
            package.ring_flash_attn_func, q, q, q, deterministic=ctx.rank == 1
        )
        wrong = {"softcap": 5.0} if ctx.rank == 1 else {}
        raised["rank 1's keyword"] = error_of(package.ring_flash_attn_func, q, q, q, **wrong)
        assert package.ring_flash_attn_func(q, q, q).shape == q.shape  # it goes on
        raised["part"] = error_of(package.utils.unflatten_varlen_lse, q)
        raised["again"] = error_of(ring_flash_attn.install)
    with (
        ring_flash_attn.install() as installed,
        mock.patch.object(ring_flash_attn, "warn_once") as log,
    ):
        for _ in range(2):
            installed.module.ring_flash_attn_func(q, q, q)
    assert [call.kwargs["rank"] for call in log.mock_calls] == [ctx.rank]
    assert "a ring of all 2 ranks" in log.mock_calls[0].args[0]
    return raised


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None


def test_what_is_not_exact_is_refused_on_every_rank(pool):
    first, second = pool.run(refused, 2)
    for name, (*_, text) in REFUSED.items():
        for raised in (first, second):
            assert text in str(raised[name]), (name, raised[name])
    for name in ("rank 1 has rank 0's", "rank 1 alone", "lengths of another batch"):
        assert isinstance(first[name], MeshError) and isinstance(second[name], ConfigError)
        assert str(second[name]) in str(first[name])
    assert "slice(9, 32, None) of rank 1 contradicts" in str(second["lengths of another batch"])
    assert "ring_flash_attn_func has no argument 'softcap'" in str(second["rank 1's keyword"])
    assert str(second["rank 1's keyword"]) in str(first["rank 1's keyword"])
    for raised in (first, second):
        assert "are not those of the tokens" in str(raised["other keys later"])
    assert isinstance(first["part"], UnsupportedAttentionError)
    assert isinstance(first["again"], PatchError)
    with pytest.raises(ConfigError, match="which 4 ranks do not divide"):
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7, 14]), True, 0, 4)
    wrong = ([3, 16], 0, "begin with 0"), ([0, 16], 5, "one of 0 to 1"), ([0, 0], 0, "ends at 0")
    for borders, rank, text in wrong:
        with pytest.raises(ConfigError, match=text):
            ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                torch.tensor(borders), True, rank, 2
            )
