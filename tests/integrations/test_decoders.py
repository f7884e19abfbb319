"""Decoders of an older make: exact on any layout and batch, checkpoints too, and what is planted is
seen."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import (
    BOUND,
    on_the_mesh,
    packed_batch,
    padded_batch,
    plain_batch,
    reference,
    whole_model,
)
from tiny_models import HAS_STATES, build
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

import ds_usp
from ds_usp.integrations.transformers import decoders, enable, sparse_layers
from ds_usp.integrations.transformers.attention import PASS

pytestmark = pytest.mark.skipif(not HAS_STATES, reason="served from 5.23 on")

BATCHES: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "odd": lambda: plain_batch(3, 53),
    "others in each row": lambda: packed_batch((1, 9, 20, 11), (30, 11)),
    "right": lambda: padded_batch("right"),
    "left": lambda: padded_batch("left"),
}
# By how positions and keys reach a layer: positions given, embedded, a bias; keys gathered, under
# windows; an attention interface without keyword arguments.
FEW = ("gptj", "bart", "bloom", "gpt_neo", "nemotron")
ALL = "bigbird_pegasus blenderbot blenderbot-small biogpt clvp_decoder codegen falcon marian mbart "
ALL += "megatron-bert mpt mvp pegasus plbart rembert stablelm trocr whisper xglm gpt_neox_japanese"
FOLLOW_PADDING = ("biogpt", "clvp_decoder")  # padded on the left they are refused, as all such are


def expected(model: Any, batch: Mapping[str, Tensor], name: str) -> Any:
    """The reference; on the left of the stock model, which may count padding as positions."""
    if name != "left":
        return reference(model, batch)
    want = whole_model(model, batch)
    want.logits *= (batch["attention_mask"] != 0)[..., None]
    return want


def of_types(ctx: RankContext, types: tuple[str, ...]) -> dict[str, float]:
    """Errors by type, layout and batch; each rank has the reference of some batches."""
    errors = {}
    for model_type in types:
        model = build(model_type)
        names = [x for x in BATCHES if x != "left" or model_type not in FOLLOW_PADDING]
        share = [name for i, name in enumerate(names) if i % ctx.world == ctx.rank]
        want = {name: expected(model, BATCHES[name](), name) for name in share}
        runs = [("zigzag", names), ("contiguous", ["others in each row"])]
        if decoders.gathered_layers(model):
            runs += [("zigzag, in chunks", ["left" if "left" in names else "odd"])]
        if model.supports_gradient_checkpointing:
            runs += [("zigzag, reentrant", ["odd"]), ("zigzag, not reentrant", ["odd"])]
        for run, of_run in runs:
            layout, *checkpoints = run.split(", ")
            chunks = 3 if checkpoints == ["in chunks"] else "auto"
            if checkpoints and chunks == "auto":
                model.gradient_checkpointing_enable({"use_reentrant": checkpoints == ["reentrant"]})
                model.enable_input_require_grads()
            with enable(model, mesh_of(1), layout=layout, logits="whole", query_chunks=chunks):
                for name in of_run:
                    have = on_the_mesh(model, mesh_of(1), BATCHES[name]())
                    if name in want:
                        errors[f"{model_type}, {run}, {name}"] = have.error(want[name])
        assert not [m for m in model.modules() if "forward" in vars(m)]
    return errors


@pytest.mark.parametrize(
    ("types", "ranks"),
    [
        (FEW, 3),
        pytest.param(tuple(ALL.split()), 3, marks=pytest.mark.slow),
        pytest.param((*FEW, *ALL.split()), 4, marks=pytest.mark.slow),
    ],
    ids=["few", "others", "all on 4 ranks"],
)
def test_every_batch_is_exact(pool, types, ranks):
    found = {
        name: x for errors in pool.run(of_types, ranks, types=types) for name, x in errors.items()
    }
    wrong = {name: x for name, x in found.items() if not x <= BOUND}
    assert len(found) > 5 * len(types) and not wrong, wrong


# ------------------------------------------------------------------ what is planted is seen


@contextmanager
def planted(fault: str) -> Iterator[None]:
    gather, local = sparse_layers.gather_tokens, sparse_layers.local_positions

    def without_backward(x: Tensor, dim: int, **place: Any) -> Tensor:
        return gather(x.detach(), dim, **place)

    def by_offsets(layout: Any, rank: int, device: Any) -> Tensor:
        before = sum(layout.length(r) for r in range(rank))
        return torch.arange(before, before + layout.length(rank))

    def of_a_shard(original: Any, mask: Tensor, heads: int, dtype: Any) -> Tensor:
        shard = PASS.get()
        return original(mask.new_ones(len(mask), shard.layout.seq_len), heads, dtype).roll(1, -1)

    patches = {
        "a gather without its backward": (decoders, "gather_tokens", without_backward),
        "offsets for places in masks": (sparse_layers, "local_positions", by_offsets),
        "offsets for places in windows": (decoders, "local_positions", by_offsets),
        "ALiBi of other keys": (decoders, "_bias_of_keys", of_a_shard),
        "positions from 0": (decoders, "_embed_positions", lambda f, _, *x, **y: f(*x, **y)),
        "": (sparse_layers, "local_positions", local),
    }
    with mock.patch.object(*patches[fault]):
        yield


FAULTS = {
    "a gather without its backward": "gptj",
    "offsets for places in masks": "gptj",
    "offsets for places in windows": "gpt_neo",
    "ALiBi of other keys": "bloom",
    "positions from 0": "bart",
}


def errors_of_planted(ctx: RankContext) -> dict[str, float]:
    batch, errors = plain_batch(), {}
    for fault, model_type in FAULTS.items():
        model = build(model_type)
        want = reference(model, batch)
        with planted(fault), enable(model, mesh_of(1), logits="whole"):
            errors[fault] = on_the_mesh(model, mesh_of(1), batch).error(want)
    return errors


def test_what_is_planted_is_seen(pool):
    wrong = pool.run(errors_of_planted, 2)[0]
    assert min(wrong.values()) > 100 * BOUND, wrong


def error_beyond_a_table(ctx: RankContext) -> float:
    """Of more tokens than XGLM's table has positions, which it grows by the tokens it is given."""
    want = reference(build("xglm", max_position_embeddings=16), plain_batch())
    model = build("xglm", max_position_embeddings=16)
    with enable(model, mesh_of(1), layout="contiguous", logits="whole"):
        return on_the_mesh(model, mesh_of(1), plain_batch()).error(want)


def test_a_table_grows_by_all_tokens(pool):
    assert max(pool.run(error_beyond_a_table, 2)) <= BOUND


def test_ctrl_c_leaves_no_pass_behind():
    model, mesh = build("gptj"), ds_usp.SequenceMesh.single()
    layer = model.transformer.h[0].mlp
    for ends in ("by another pass", "by disable"):
        with enable(model, mesh):
            interrupted = mock.patch.object(layer, "forward", side_effect=KeyboardInterrupt)
            with interrupted, pytest.raises(KeyboardInterrupt):
                model(**plain_batch())
            if ends == "by another pass":
                model(**plain_batch())
                assert PASS.get() is None
        assert PASS.get() is None, ends
    model = build("mixtral")
    of_module = modeling_mixtral.load_balancing_loss_func  # in a pass another one has its name
    with enable(model, mesh):
        interrupted = mock.patch.object(model.lm_head, "forward", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            model(**plain_batch(), output_router_logits=True)
        assert modeling_mixtral.load_balancing_loss_func is not of_module
    assert modeling_mixtral.load_balancing_loss_func is of_module


# ------------------------------------------------------------------ refusals


def test_what_is_not_served_is_refused():
    mesh = ds_usp.SequenceMesh.single()

    def refused(word: str, model: Any, batch: Any = None, **options: Any) -> None:
        with pytest.raises(ds_usp.USPError, match=word), enable(model, mesh, **options):
            model(**(plain_batch() if batch is None else batch))

    refused("puts no keys into a KV cache", build("openai-gpt"))
    refused("attention_type='original_full'", build("big_bird"))
    refused("makes its masks of the tokens", build("xlm"))
    refused(r"\(config.alibi\)", build("falcon", alibi=True))
    refused("takes no position_ids", build("trocr", use_learned_position_embeddings=False))
    refused("attn_pdrop=0.25 of its", build("gptj", attn_pdrop=0.25))
    refused("attention_dropout=0.25 of its", build("gpt_neox_japanese", attention_dropout=0.25))
    refused("decoder_layerdrop=0.5", build("bart", decoder_layerdrop=0.5))
    refused("know documents and not trees", build("gptj"), share_prefixes=True)
    refused("angles of one row", build("roformer"), packed_batch((1, 9, 20, 11), (30, 11)))
    refused("no layers that transformers can checkpoint", build("clvp_decoder"), recompute="full")
    replaced = build("gptj")
    attention = replaced.transformer.h[0].attn
    attention.forward = partial(type(attention).forward, attention)
    refused("is not transformers' own", replaced)
    other = build("gptj")
    with enable(other, mesh), pytest.raises(ds_usp.ConfigError, match="not a part of it"):
        other.transformer.h[0].attn(torch.ones(1, 8, 64))
