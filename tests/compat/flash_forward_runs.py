"""A tiny model of transformers on contiguous shards, as a trainer shards them, and by itself: what
ranks run in test_flash_attention_forward.py. Works with every transformers from 4.51 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from harness import RankContext
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.integrations import flash_attention

import ds_usp
from ds_usp.compat.flash_attention_forward import patch_flash_attention

VOCAB, TOKENS = 97, 48
IGNORED = -100

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
WINDOWS = ["sliding_attention", "full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 11, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": WINDOWS, "num_key_value_heads": 1},
    ),
}

# Rows of lengths of documents; a negative one is padding.
PACKED = ((9, 21, 18),)
ROWS = ((48,), (48,))
PACKED_ROWS = ((9, 21, 18), (30, 18))
LEFT, RIGHT = ((48,), (-13, 35)), ((48,), (30, -18))


def has(kind: str) -> bool:
    return hasattr(transformers, f"{KINDS[kind][0]}ForCausalLM")


def build(kind: str) -> Any:
    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for index, weight in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        # Scores of order 1, so that masks, caps and sinks show in them.
        spread = 0.3 if weight.ndim > 1 else 0.5
        weight.data = spread * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1)
    return model.train()


def batch_of(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Token ids, next-token labels, positions in the documents and padding of whole rows."""
    ids = torch.randint(3, VOCAB, (len(rows), TOKENS), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    positions, real = torch.zeros_like(ids), torch.ones_like(ids)
    for row, (start, stop, is_real) in runs_of(rows):
        labels[row, stop - 1] = IGNORED
        if is_real:
            positions[row, start:stop] = torch.arange(stop - start)
        else:
            labels[row, start:stop], real[row, start:stop] = IGNORED, 0
    return {"ids": ids, "labels": labels, "positions": positions, "real": real}


def runs_of(rows: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, tuple[int, int, bool]]]:
    for row, lengths in enumerate(rows):
        borders = [sum(map(abs, lengths[:n])) for n in range(len(lengths) + 1)]
        for length, (start, stop) in zip(lengths, pairwise(borders), strict=True):
            yield row, (start, stop, length > 0)


Numbers = dict[str, Tensor]  # the loss, and each weight's gradient


def numbers_of(model: Any, loss: Tensor) -> Numbers:
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return {"loss": loss.detach(), **{n: g for n, g in gradients.items() if g is not None}}


def alone(kind: str, rows: tuple[tuple[int, ...], ...]) -> Numbers:
    """One process, eager attention, each document without the others and without padding: nothing
    depends on how a version of transformers packs and pads."""
    model, batch = build(kind), batch_of(rows)
    losses = []
    for row, (start, stop, is_real) in runs_of(rows):
        if is_real:
            ids, labels = (batch[name][row : row + 1, start:stop] for name in ("ids", "labels"))
            logits = model(input_ids=ids, use_cache=False).logits
            losses.append(loss_of(logits, labels))
    return numbers_of(model, torch.stack(losses).sum() / (batch["labels"] != IGNORED).sum())


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def error_of(have: Numbers, want: Numbers) -> float:
    """The largest relative error of the loss and of any gradient; a gradient's scale is at least a
    hundredth of that of all."""
    gradients = [value.norm() for name, value in want.items() if name != "loss"]
    scale = 1e-2 * float(torch.stack(gradients).norm())
    errors = [float((have["loss"] - want["loss"]).abs() / want["loss"].abs())]
    for name, value in want.items():
        if name != "loss":
            difference = float((have[name] - value).norm())
            errors.append(difference / max(float(value.norm()), scale))
    assert have.keys() == want.keys() and scale > 0
    return max(e if e == e else float("inf") for e in errors)


def shard(x: Tensor, ctx: RankContext) -> Tensor:
    return x.tensor_split(ctx.world, dim=1)[ctx.rank].contiguous()


def sharded(
    model: Any,
    ctx: RankContext,
    rows: tuple[tuple[int, ...], ...],
    *,
    lengths: bool = False,
) -> Numbers:
    """The loss and gradients of this rank's shard, summed over the ranks: as a trainer calls."""
    whole = batch_of(rows)
    local = {name: shard(x, ctx) for name, x in whole.items()}
    given = {"input_ids": local["ids"], "position_ids": local["positions"]}
    if not whole["real"].all():
        given["attention_mask"] = local["real"]
    if lengths:
        borders = [0, *torch.tensor(rows[0]).cumsum(0).tolist()]
        cumulative = torch.tensor(borders, dtype=torch.int32)
        given |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
        given |= {"max_length_q": max(rows[0]), "max_length_k": max(rows[0])}
    logits = model(**given, use_cache=False).logits
    loss = loss_of(logits, local["labels"]) / (whole["labels"] != IGNORED).sum()
    numbers = numbers_of(model, loss)
    for value in numbers.values():
        dist.all_reduce(value, group=ctx.group)
    return numbers


def use_flash(model: Any) -> Any:
    """The model calls flash attention, as with attn_implementation="flash_attention_2", which
    transformers refuses on a machine without flash-attn."""
    model.config._attn_implementation = "flash_attention_2"
    return model


def compare(
    ctx: RankContext,
    *,
    kind: str,
    rows: tuple[tuple[int, ...], ...],
    ulysses: int,
    recompute: str = "",
    lengths: bool = False,
    passes: int = 1,
    plant: str = "",
) -> tuple[float, int]:
    """The error against one process, and how many gathers a forward and backward pass posts."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ulysses)
    model = use_flash(build(kind))
    if recompute:
        use_reentrant = recompute == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        # A reentrant checkpoint has a gradient only where an input has one.
        model.enable_input_require_grads()
    with patch_flash_attention(mesh), planted(plant), counted_gathers() as gathers:
        for _ in range(passes):
            have = sharded(model, ctx, rows, lengths=lengths)
    return error_of(have, alone(kind, rows)), len(gathers) // passes


@contextmanager
def counted_gathers() -> Iterator[list[object]]:
    from ds_usp.comm import mesh

    gathers: list[object] = []
    original = mesh.gather_shards

    def count(*args: Any) -> Any:
        gathers.append(args)
        return original(*args)

    with mock.patch.object(mesh, "gather_shards", count):
        yield gathers


@contextmanager
def planted(what: str) -> Iterator[None]:
    """Break what the function does with one of its arguments."""
    function: Callable[..., Tensor] = flash_attention._flash_attention_forward

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        if what == "window" and kwargs.get("sliding_window"):
            kwargs["sliding_window"] += 1
        elif what == "documents":
            start = dist.get_rank() * args[0].shape[1]
            kwargs["position_ids"] = torch.arange(start, start + args[0].shape[1])[None]
        elif what == "scale":
            kwargs["softmax_scale"] = 1.01 * kwargs["softmax_scale"]
        else:
            kwargs[what] = None
        return function(*args, **kwargs)

    with mock.patch.object(
        flash_attention, "_flash_attention_forward", broken if what else function
    ):
        yield
