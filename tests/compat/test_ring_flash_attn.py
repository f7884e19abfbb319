"""ring_flash_attn's functions: what its own tests call, against the oracle, in its token orders.

Its tests call the functions of packed tensors, causal, on equal shards or on packed documents whose
lengths the ranks divide, and look at the output, the log-sum-exp and the gradients.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from harness import RankContext

from ds_usp import testing as oracle
from ds_usp.compat import ring_flash_attn

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
    "alibi": {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.5, 6)},
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


@lru_cache(maxsize=64)
def problem(batch: int, heads: tuple[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    counts = {"q": heads[0], "k": heads[1], "v": heads[1], "dout": heads[0]}
    return {
        name: torch.randn(batch, 64, count, HEAD_DIM, generator=generator)
        for name, count in counts.items()
    }


@lru_cache(maxsize=64)
def expected(
    batch: int, heads: tuple[int, int], lengths: tuple[int, ...], option: str
) -> dict[str, torch.Tensor]:
    """The oracle's results for whole tensors ``[batch, tokens, ...]``."""
    given = OPTIONS[option]
    left, right = (None if bound < 0 else bound for bound in given.get("window_size", (-1, -1)))
    tokens = range(64)
    allowed = oracle.window(tokens, tokens, left, 0 if given.get("causal") else right)
    allowed &= oracle.same_document(tokens, tokens, lengths)
    full = problem(batch, heads)
    q, k, v = (full[name].double().requires_grad_() for name in "qkv")
    slopes = given.get("alibi_slopes")
    bias = None if slopes is None else oracle.alibi(slopes[: heads[0]], tokens)
    out, lse = oracle.dense_attention(q, k, v, allowed, given.get("softmax_scale"), bias=bias)
    grads = torch.autograd.grad(out, (q, k, v), full["dout"].double())
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.mT, *grads), strict=True))


def errors(
    ctx: RankContext,
    names: list[str],
    ulysses: int,
    options: list[str],
    order_of: Callable[[str], str] = str,
) -> dict[str, float]:
    """The largest relative error of each call's results on this rank.

    Args:
        order_of: whose token order a function is given; another's is a planted error.
    """
    with ring_flash_attn.install(ulysses_degree=ulysses):
        import ring_flash_attn as package

        return {
            f"{name} {option}": error(ctx, getattr(package, name), name, option, order_of(name))
            for name in names
            for option in options
        }


def error(
    ctx: RankContext, function: Callable[..., Any], name: str, option: str, order: str
) -> float:
    packed, heads = "varlen" in name, heads_of(name)
    batch = 1 if packed else BATCH
    rows = positions_of(order, ctx.world)[ctx.rank]
    local = {key: x[:, rows] for key, x in problem(batch, heads).items()}
    if packed:
        local = {key: x[0] for key, x in local.items()}
    q, k, v = (local[key].clone().requires_grad_() for key in "qkv")
    tensors = {
        "qkvpacked_func": lambda: (torch.stack((q, k, v), -3),),
        "kvpacked_func": lambda: (q, torch.stack((k, v), -3)),
    }.get(name.rpartition("attn_")[2].removeprefix("varlen_"), lambda: (q, k, v))()
    options = dict(OPTIONS[option])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][: heads[0]]
    out, lse, probs = function(
        *tensors, *lengths_for(ctx, name, options), **options, return_attn_probs=True
    )
    assert probs is None and lse.dtype == torch.float32
    grads = torch.autograd.grad(out, (q, k, v), local["dout"])
    assert torch.equal(out, function(*tensors, *lengths_for(ctx, name, options), **options))
    actual = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.mT, *grads), strict=True))
    whole = expected(batch, heads, lengths_of(name), option)
    return max(
        oracle.relative_error(x.reshape(batch, *x.shape[packed ^ 1 :]), whole[key][:, rows])
        for key, x in actual.items()
    )


def lengths_for(ctx: RankContext, name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """What a function takes between its tensors and its options."""
    borders = torch.tensor([0, *accumulate(lengths_of(name))], dtype=torch.int32)
    if "llama3" in name:
        *lengths, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            borders, options.get("causal", False), ctx.rank, ctx.world
        )
        return (*lengths, 1, keys)
    return (borders // ctx.world, 32 // ctx.world) if "varlen" in name else ()


@pytest.mark.parametrize(
    ("world", "ulysses", "options"),
    [(4, 1, list(OPTIONS)), (4, 2, ["causal", "both sides"]), (2, 2, ["causal"])],
)
def test_every_function_equals_the_oracle(pool, world, ulysses, options):
    names = [name for name in NAMES if ulysses == 1 or "stripe" not in name]
    for by_call in pool.run(errors, world, names=names, ulysses=ulysses, options=options):
        wrong = {call: error for call, error in by_call.items() if not error <= LIMIT}
        assert len(by_call) == len(names) * len(options) and not wrong
