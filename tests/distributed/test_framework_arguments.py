"""What a ring does not compute is refused on every rank: modules, masks and other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankContext, WorkerPool
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

from ds_usp import MaskSpec, UnsupportedAttentionError, USPError

WORLD = 4


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
def test_what_the_ring_does_not_compute_is_refused_on_every_rank(
    pool: WorkerPool, name: str
) -> None:
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


def test_arguments_that_agree_are_accepted(pool: WorkerPool) -> None:
    setting = Setting(flash_self_attention, {}, {})
    for texts in pool.run(messages, WORLD, setting=setting, calls=list(SAME.values())):
        assert dict(zip(SAME, texts, strict=True)) == dict.fromkeys(SAME, "")


def test_arguments_that_ask_for_something_else_are_refused(pool: WorkerPool) -> None:
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


def test_masks_are_compared_with_a_window_too(pool: WorkerPool) -> None:
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


def test_a_mask_is_looked_at_again_when_it_may_have_changed(pool: WorkerPool) -> None:
    for computed in pool.run(same_mask_again, WORLD, layout="zigzag"):
        assert computed == [True, True, False, False, True, True, False]
