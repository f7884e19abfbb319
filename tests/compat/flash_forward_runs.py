"""A tiny model of transformers on contiguous shards, as a trainer shards them, and by itself: what
ranks run in test_flash_attention_forward.py. Works with every transformers from 4.51 on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations import flash_attention

import ds_usp
from ds_usp.comm import mesh as of_mesh
from ds_usp.comm import readings
from ds_usp.compat.flash_attention_forward import flash_attention_forward, patch_flash_attention

if TYPE_CHECKING:
    from harness import RankContext

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
CHUNKED = ["chunked_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 48}
UNCOUNTED: dict[str, Any] = EXPERTS | {"attn_temperature_tuning": False, "no_rope_layers": [1, 1]}
LINEAR: dict[str, Any] = {f"linear_{x}_head_dim": 8 for x in ("key", "value")}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 2} | {
    "num_experts_per_tok": 2
}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 8.0}
LONGROPE |= {"long_factor": [2.0, 3.0, 5.0, 9.0], "factor": 8.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 11, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": WINDOWS, "num_key_value_heads": 1},
    ),
    **{
        f"longrope {original}": (
            "Phi3",
            {"original_max_position_embeddings": original, "rope_scaling": LONGROPE},
        )
        for original in (16, 36, 64)
    },
    **{
        f"dynamic {most}": ("Llama", {"max_position_embeddings": most, "rope_scaling": DYNAMIC})
        for most in (36, 48)
    },
    "state": ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"], **LINEAR}),
    "chunks": ("Llama4", {"layer_types": CHUNKED, "attention_chunk_size": 30, **UNCOUNTED}),
    "wide chunks": ("Llama4", {"layer_types": CHUNKED, "attention_chunk_size": 48, **UNCOUNTED}),
    "bart": ("Bart", {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}),
    "bigcode": ("GPTBigCode", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "counted": (
        "Llama4",
        {"layer_types": CHUNKED, "no_rope_layers": [0, 1], "floor_scale": 30, **EXPERTS},
    ),
}

# Rows of lengths of documents; a negative one is padding.
PACKED = ((9, 21, 18),)
ROWS = ((48,), (48,))
PACKED_ROWS = ((9, 21, 18), (30, 18))
LEFT, RIGHT = ((48,), (-13, 35)), ((48,), (30, -18))
PADDED_PACK = ((9, 14, -3, 12, -10), (48,))


def device() -> torch.device:
    """A GPU where tests/gpu runs these."""
    is_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda" if is_gpu else "cpu")


def has(kind: str) -> bool:
    return hasattr(transformers, f"{KINDS[kind][0]}ForCausalLM")


def set_weights(model: Any) -> None:
    """Weights of order one, so that positions, masks, caps and sinks show in all numbers."""
    for index, weight in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        spread = 0.3 if weight.ndim > 1 else 0.5
        weight.data = spread * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1)


def build(kind: str) -> Any:
    name, options = KINDS[kind]
    kind_of_config = "TextConfig" if name == "Llama4" else "Config"
    config = getattr(transformers, name + kind_of_config)(**{**SIZES, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    set_weights(model)
    return model.to(device()).train()


def batch_of(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Token ids, next-token labels, positions in the documents and padding of whole rows."""
    tokens = sum(map(abs, rows[0]))
    ids = torch.randint(3, VOCAB, (len(rows), tokens), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    positions, real = torch.ones_like(ids), torch.ones_like(ids)  # of padding 1, as generate() has
    for row, (start, stop, is_real) in runs_of(rows):
        labels[row, stop - 1] = IGNORED
        if is_real:
            positions[row, start:stop] = torch.arange(stop - start)
        else:
            labels[row, start:stop], real[row, start:stop] = IGNORED, 0
    batch = {"ids": ids, "labels": labels, "positions": positions, "real": real}
    return {name: x.to(device()) for name, x in batch.items()}


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


@cache
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
            difference = float((have.get(name, torch.zeros(())) - value).norm())
            errors.append(difference / max(float(value.norm()), scale))
    return max(e if e == e else float("inf") for e in errors)


def sharded(
    model: Any,
    ctx: RankContext,
    rows: tuple[tuple[int, ...], ...],
    layout: ds_usp.TokenLayout,
    *,
    lengths: bool = False,
    buffer: Tensor | None = None,
) -> Numbers:
    """The loss and gradients of this rank's shard, summed over the ranks: as a trainer calls.

    Args:
        buffer: which the positions are written into, as numpy writes: torch does not know.
    """
    whole = batch_of(rows)
    local = {name: layout.shard(x, dim=1, rank=ctx.rank) for name, x in whole.items()}
    if buffer is not None:
        buffer.numpy()[:] = local["positions"]
        local["positions"] = buffer
    given = {"input_ids": local["ids"], "position_ids": local["positions"]}
    if not whole["real"].all():
        given["attention_mask"] = local["real"]
    if lengths:
        borders = [0, *torch.tensor(rows[0]).cumsum(0).tolist()]
        cumulative = torch.tensor(borders, dtype=torch.int32, device=device())
        given |= {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
        given |= {"max_length_q": max(rows[0]), "max_length_k": max(rows[0])}
    logits = model(**given, use_cache=False).logits
    loss = loss_of(logits, local["labels"]) / (whole["labels"] != IGNORED).sum()
    if not loss.requires_grad:
        return {}
    numbers = numbers_of(model, loss)
    for value in numbers.values():
        dist.all_reduce(value, group=ctx.group)
    return numbers


def use_flash(model: Any) -> Any:
    """The model calls flash attention, as with attn_implementation="flash_attention_2", which
    transformers refuses on a machine without flash-attn."""
    model.config._attn_implementation = "flash_attention_2"
    return model


@dataclass(frozen=True)
class Case:
    """A model, the rows of its batch, the degrees, and how it is called.

    Args:
        recompute: ``reentrant`` or ``plain`` checkpoints of the layers.
        lengths: documents are given as cumulative lengths too.
        plant: which argument is broken.
    """

    kind: str
    rows: tuple[tuple[int, ...], ...]
    ulysses: int
    recompute: str = ""
    lengths: bool = False
    layout: str = "contiguous"
    plant: str = ""


@dataclass(frozen=True)
class Outcome:
    """The error against one process; the gathers and attention calls of a forward pass and of one
    with its backward, and the layers."""

    error: float
    gathers: int
    calls: int
    layers: int


def compare(ctx: RankContext, *, cases: list[Case]) -> list[Outcome | None]:
    """Rank 0's; None for a model that this transformers does not have."""
    return [compare_one(ctx, case) if has(case.kind) else None for case in cases]


def compare_one(ctx: RankContext, case: Case) -> Outcome | None:
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, case.ulysses)
    model = use_flash(build(case.kind))
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": case.recompute == "reentrant"})
        model.enable_input_require_grads()  # without which a reentrant checkpoint has no gradient
    gathers, calls = list[object](), list[object]()
    layout = mesh.layout(case.layout, TOKENS)
    with (
        patch_flash_attention(mesh, layout=case.layout),
        counted(of_mesh, "gather_shards", gathers),
        planted(case.plant),
        counted(flash_attention, "_flash_attention_forward", calls),
    ):
        with torch.no_grad():
            sharded(model, ctx, ROWS, layout)  # whose documents must be forgotten
        have = sharded(model, ctx, case.rows, layout, lengths=case.lengths)
    if ctx.rank:
        return None
    layers = model.config.num_hidden_layers
    return Outcome(error_of(have, alone(case.kind, case.rows)), len(gathers), len(calls), layers)


def in_one_buffer(ctx: RankContext) -> tuple[list[float], int]:
    """The error of each of several passes whose positions lie in one buffer, and their gathers.

    Of the second pass rank 0's shard is as in the first; the third one is another model's."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ctx.world)
    layout, buffer = mesh.layout("contiguous", TOKENS), torch.zeros(1, TOKENS // ctx.world).long()
    models = [use_flash(build("llama")) for _ in range(2)]
    models[0].gradient_checkpointing_enable({"use_reentrant": False})
    gathers, errors = list[object](), []
    passes = (0, ((9, 39),)), (0, PACKED), (1, ((30, 18),)), (0, PACKED), (0, ROWS[:1])
    with patch_flash_attention(mesh), counted(of_mesh, "gather_shards", gathers):
        for which, rows in passes:
            have = sharded(models[which], ctx, rows, layout, buffer=buffer)
            errors.append(error_of(have, alone("llama", rows)))
    return errors, len(gathers)


class Halves(nn.Module):
    """Two halves of layers, each given one buffer that is filled again before it: two models, or
    one that is driven in halves.

    Args:
        how: torch knows what it writes (``copy_``), or does not; None: each half has a tensor.
    """

    def __init__(self, forward: Callable[..., Tensor], indices: list[list[int | None]], how: str):
        super().__init__()
        self.halves = [[_Layer(forward, index) for index in half] for half in indices]
        self.layers, self.how = nn.ModuleList(x for half in self.halves for x in half), how

    def forward(self, x: Tensor, contents: list[Tensor]) -> Tensor:
        buffer = torch.zeros_like(contents[0])
        for half, content in zip(self.halves, contents, strict=True):
            target = {"data": buffer.data, "copy_": buffer}.get(self.how)
            if target is not None:
                target.copy_(content)
            elif self.how:
                buffer.numpy()[:] = content
            for layer in half:
                given = buffer if self.how else content
                if self.how == "copy_":  # which torch refuses between forward and recomputation
                    x = layer(x, given)
                else:
                    x = checkpoint(layer, x, given, use_reentrant=False)
        return x


class _Layer(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], index: int | None):
        super().__init__()
        self.layer_idx, self.attend = index, forward

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.attend(x, x, x, None, x.shape[1], True, position_ids=positions)


def between_layers(ctx: RankContext, plant: bool = False) -> tuple[dict[str, float], str]:
    """The error of outputs and gradients where positions change between layers of one pass, by how;
    and what is raised where they change on one rank alone.

    Args:
        plant: contents are not compared, as on GPUs.
    """
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ctx.world)
    layout, forward = mesh.layout("contiguous", TOKENS), flash_attention_forward(mesh)
    draw = torch.Generator().manual_seed(ctx.rank)
    inputs = torch.randn(1, TOKENS // ctx.world, 2, 8, generator=draw).requires_grad_()

    def run(indices: list[list[int | None]], how: str, *rows: tuple[int, ...]) -> Tensor:
        whole = [batch_of((lengths,))["positions"] for lengths in rows]
        local = [layout.shard(x, dim=1, rank=ctx.rank) for x in whole]
        out = Halves(forward, indices, how)(inputs, local)
        return torch.stack([out, *torch.autograd.grad(out.square().sum(), inputs)]).detach()

    kinds = {"models": [[0], [0]], "no index": [[None], [None]], "halves": [[0, 1], [2, 3]]}
    errors = {}
    blind = mock.patch.object(readings.torch, "equal", lambda *_: True)
    with blind if plant else nullcontext():
        for name, indices in kinds.items():
            want = run(indices, "", (10, 38), (34, 14))
            for how in ("data", "numpy", "copy_"):
                have = run(indices, how, (10, 38), (34, 14))
                errors[f"{name} {how}"] = float((have - want).norm() / want.norm())
    try:
        run(kinds["halves"], "numpy", (10, 38), (10, 30, 8))
    except ds_usp.USPError as error:
        return errors, type(error).__name__
    return errors, ""


def on_shards(ctx: RankContext) -> dict[str, float | str]:
    """Of models that depend on the length in more than attention the error, or the refusal; with
    configurations of transformers 5."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ctx.world)
    layout, found = mesh.layout("contiguous", TOKENS), dict[str, float | str]()
    with patch_flash_attention(mesh):
        for kind in filter(has, list(KINDS)[4:] if transformers.__version__ >= "5" else []):
            for lengths in (False, True)[: 1 + (kind != "state")]:  # which transformers refuses
                model = use_flash(build(kind))
                try:
                    rows = PACKED if lengths and kind == "bigcode" else ROWS[:1]
                    have = sharded(model, ctx, rows, layout, lengths=lengths and rows != PACKED)
                except ds_usp.USPError as error:
                    found[f"{kind}{' lengths' * lengths}"] = str(error)
                else:
                    error = error_of(have, alone(kind, ROWS[:1]))
                    found[f"{kind}{' lengths' * lengths}"] = error
        if found:  # after a pass, another RoPE
            model = use_flash(build("llama"))
            sharded(model, ctx, ROWS[:1], layout)
            model.model.rotary_emb = build("dynamic 36").model.rotary_emb
            try:
                sharded(model, ctx, ROWS[:1], layout)
            except ds_usp.USPError as error:
                found["dynamic 36 later"] = str(error)
    return found


@contextmanager
def counted(module: Any, name: str, calls: list[object]) -> Iterator[None]:
    original = getattr(module, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    with mock.patch.object(module, name, count):
        yield


@contextmanager
def planted(what: str) -> Iterator[None]:
    """Break what the function does with one of its arguments."""
    function: Callable[..., Tensor] = flash_attention._flash_attention_forward

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        if what == "sliding_window" and kwargs.get(what):
            kwargs[what] += 1
        elif what == "position_ids":
            start = dist.get_rank() * args[0].shape[1]
            kwargs[what] = torch.arange(start, start + args[0].shape[1], device=device())[None]
        elif what == "softmax_scale":
            kwargs[what] *= 1.01
        else:
            kwargs[what] = None
        return function(*args, **kwargs)

    wanted = broken if what else function
    with mock.patch.object(flash_attention, "_flash_attention_forward", wanted):
        yield


# ------------------------------------------------------------------ calls of the function itself

Call = dict[str, Any]


def call_of(ctx: RankContext, mesh: ds_usp.SequenceMesh, **changes: Any) -> Call:
    """Arguments of one call on this rank's shard of 16 tokens."""
    local = 16 // ctx.world
    generator = torch.Generator().manual_seed(ctx.rank)
    q, k, v = torch.randn(3, 1, local, 2, 4, generator=generator).unbind()
    call = {
        "query_states": q,
        "key_states": k,
        "value_states": v,
        "attention_mask": None,
        "query_length": local,
        "is_causal": True,
        "position_ids": torch.arange(ctx.rank * local, (ctx.rank + 1) * local)[None],
    }
    return {**call, **changes}


def refused(ctx: RankContext) -> dict[str, tuple[str, str]]:
    """The error of every bad call, by name; each on the mesh that refused the one before."""
    mesh = ds_usp.SequenceMesh.from_group(ctx.group, ctx.world)
    with mock.patch.object(utils, "_flash_attention_forward", lambda *, new_mask, **_: None):
        forward = flash_attention_forward(mesh)
    local = 16 // ctx.world
    positions = torch.arange(ctx.rank * local, (ctx.rank + 1) * local)[None]
    zeros = torch.zeros(1, local, dtype=torch.int64)
    whole = torch.tensor([0, 5, 16], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": whole, "cu_seq_lens_k": whole}
    other = torch.tensor([0, 6, 16], dtype=torch.int32)
    three = dict.fromkeys(lengths, torch.tensor([0, 3, 8, 16], dtype=torch.int32))

    def split(*documents: int) -> Tensor:
        whole = torch.cat([torch.arange(n) for n in documents])
        return whole.chunk(ctx.world)[ctx.rank][None]

    of_shard = torch.tensor([0, local], dtype=torch.int32)
    bad: dict[str, Call] = {
        "dropout": {"dropout": 0.1},
        "window of none": {"sliding_window": 0},
        "full window": {"sliding_window": 3, "is_causal": False},
        "deterministic": {"deterministic": True},
        "cache": {"query_states": torch.randn(1, 1, 2, 4)},
        "something new": {"new_mask": zeros},
        "weights": {"output_attentions": True},
        "one of two lengths": {"cu_seq_lens_q": whole},
        "other lengths of keys": {**lengths, "cu_seq_lens_k": other},
        "lengths of the shard": {"cu_seq_lens_q": of_shard, "cu_seq_lens_k": of_shard},
        "lengths and padding": {**lengths, "attention_mask": zeros},
        "whole positions": {"position_ids": torch.arange(16)[None]},
        "positions of images": {"position_ids": positions.expand(3, 1, local)},
        "mask of pairs": {"attention_mask": torch.ones(1, 1, local, local)},
        "documents as a mask": {"attention_mask": zeros + 2},
        "a jump": {"position_ids": positions * 2},
        "negative positions": {"position_ids": positions - 50},
        "positions in fp32": {"position_ids": positions + 0.25},
        "forgotten positions": {"position_ids": torch.arange(local)[None]},
        "full without positions": {"position_ids": None, "is_causal": False},
        "padding without positions": {"position_ids": None, "attention_mask": zeros},
        "softcap": {"softcap": -1.0},
        "on rank 1": {"dropout": 0.1 * ctx.rank},
        "a mask of rank 1, no positions": {
            "position_ids": None,
            "attention_mask": zeros if ctx.rank else None,
        },
        "lengths on rank 1": {**lengths, "position_ids": None} if ctx.rank else {},
        "lengths beside one document": lengths,
        "lengths of another batch": {**lengths, "position_ids": split(3, 13)},
        "as the next shard shows": {**three, "position_ids": split(3, 13)},
        "other lengths on rank 1": {
            **dict.fromkeys(lengths, other if ctx.rank else whole),
            "position_ids": None,
        },
    }
    errors = {}
    for name, changes in bad.items():
        errors[name] = error_of_call(forward, call_of(ctx, mesh, **changes))
        # What a trainer gives its model beside these goes through to here.
        good = call_of(ctx, mesh, loss_weights=zeros, new_mask=None)
        assert forward(**good).shape == (1, local, 2, 4), name
    rows = {
        name: x.expand(2, -1, -1, -1) for name, x in call_of(ctx, mesh).items() if "states" in name
    }
    forward(**call_of(ctx, mesh, position_ids=None, **lengths))
    errors["known lengths, two rows"] = error_of_call(
        forward, call_of(ctx, mesh, **{**lengths, **rows, "position_ids": None})
    )
    call = call_of(ctx, mesh, attention_mask=zeros + (ctx.rank == 0))
    model = Layers(forward, 2)
    model(call, {**call, "attention_mask": zeros + (ctx.rank == 0)})  # another tensor, the same
    errors["other padding"] = error_of_call(
        lambda **other: model(call, other), {**call, "attention_mask": None}
    )
    mask = call["attention_mask"].numpy()
    model.layers[1].register_forward_pre_hook(lambda *_: mask.__setitem__(0, 0))
    errors["padding in one buffer"] = error_of_call(lambda **same: model(same, same), call)
    return errors


class Layers(torch.nn.Module):
    """A model whose layers call a function, each with arguments of its own."""

    def __init__(self, function: Callable[..., Tensor], layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layers(function, 0) for _ in range(layers))
        self._function = function

    def forward(self, *calls: Call) -> None:
        for layer, call in zip(self.layers, calls, strict=True) if self.layers else ():
            layer(call)
        if not self.layers:
            self._function(**calls[0])


def error_of_call(forward: Callable[..., Tensor], call: Call) -> tuple[str, str]:
    try:
        forward(**call)
    except ds_usp.USPError as error:
        return type(error).__name__, str(error)
    return "", ""


def results(ctx: RankContext) -> dict[str, bool]:
    """What holds of calls on one rank, each against a new function."""
    mesh = ds_usp.SequenceMesh.single()
    one = replace(ctx, rank=0, world=1)
    forward, held = flash_attention_forward(mesh), {}

    def fresh(call: Call) -> Tensor:
        return flash_attention_forward(mesh)(**call)

    positions = torch.arange(16)[None]
    call = call_of(one, mesh, position_ids=positions)
    first = forward(**call)
    positions[:, 8:] -= 8  # in place: documents of 8 tokens
    held["a change in place"] = bool((forward(**call) == fresh(call)).all())
    held["which shows"] = not bool((fresh(call) == first).all())
    call = call_of(one, mesh, position_ids=torch.tensor([[*range(13), -1, -1, -1]]))
    borders = torch.tensor([0, 13, 16])
    as_lengths = {**call, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    held["filled with -1"] = bool((forward(**call) == forward(**as_lengths)).all())
    mask = torch.tensor([[0] * 3 + [1] * 13])
    held["padding is zero"] = not forward(**call_of(one, mesh, attention_mask=mask))[0, :3].any()
    doubled = {n: x.double() if n.endswith("_states") else x for n, x in call.items()}
    held["target_dtype is of fp32"] = forward(**doubled, target_dtype=torch.bfloat16).dtype is (
        torch.float64
    )
    held["target_dtype"] = forward(**call, target_dtype=torch.bfloat16).dtype is torch.bfloat16
    towers = flash_attention_forward(mesh, towers=lambda *args, **kwargs: (len(args), kwargs))
    args, kwargs = towers(**{**call, "position_ids": None, "is_causal": False, "softcap": 2.0})
    held["a tower"] = args == 6 and kwargs["softcap"] == 2.0 and "position_ids" not in kwargs
    held["a decoder beside a tower"] = bool((towers(**call) == forward(**call)).all())
    return held


def patched(ctx: RankContext) -> dict[str, bool]:
    """What holds of the patch and its end."""
    mesh, held = ds_usp.SequenceMesh.single(), {}
    own = utils._flash_attention_forward
    before, after = ModuleType("transformers.of_before"), ModuleType("transformers_modules.late")
    trainer = ModuleType("a_trainer")
    before._flash_attention_forward = trainer._flash_attention_forward = own  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in (before, after, trainer)}

    def of(module: Any) -> Any:
        return module._flash_attention_forward

    with mock.patch.dict(sys.modules, modules):
        with patch_flash_attention(mesh) as patch:
            after._flash_attention_forward = of(utils)  # type: ignore[attr-defined]
            places = utils, flash_attention, before, after
            held["installed"] = all(of(place) is patch.replacement for place in places)
            held["not where a trainer holds it"] = of(trainer) is own
            held["twice"] = "flash_attention_forward" in refusal(mesh)
        held["restored"] = all(of(place) is own for place in places)
        patch.restore()
        with mock.patch.object(flash_attention, "_flash_attention_forward", partial(own)):
            held["a trainer's"] = "functools.partial" in refusal(mesh)
    with mock.patch.object(utils, "_flash_attention_forward"):
        del utils._flash_attention_forward
        held["no such function"] = "4.51" in refusal(mesh)
        utils._flash_attention_forward = own
    held["no mesh"] = "SequenceMesh" in refusal("mesh")
    return held


def refusal(mesh: Any) -> str:
    try:
        patch_flash_attention(mesh)
    except ds_usp.ConfigError as error:
        return str(error)
    return ""
