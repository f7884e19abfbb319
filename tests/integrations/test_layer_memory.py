"""Recomputation, offload and MLPs in chunks on transformers' layers: gradients and collectives."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import mesh_of
from harness import RankContext
from peak_memory import LiveBytes
from training_models import Model, batch_of, difference, forward, gpt2, gradients, llama
from transformers import MixtralConfig, MixtralForCausalLM

import ds_usp
from ds_usp.errors import ConfigError, LayoutError
from ds_usp.integrations.transformers import enable


def by_transformers(reentrant: bool) -> Callable[[Model], None]:
    def switch_on(model: Model) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    return switch_on


def by_nobody(model: Model) -> None:
    """Nothing."""


CHECKPOINTS = {
    "nobody": by_nobody,
    "reentrant": by_transformers(True),
    "not reentrant": by_transformers(False),
}


def attributes(model: Model) -> dict[tuple[str, str], Any]:
    names = ("forward", "gradient_checkpointing", "_gradient_checkpointing_func")
    return {
        (path, name): module.__dict__[name]
        for path, module in model.named_modules()
        for name in names
        if name in module.__dict__
    }


def train(model: Model, mesh: Any, switch_on: Callable[[Model], None]) -> tuple[Any, int]:
    """Gradients of two forward passes of other batches before their backward passes and of a third
    that accumulates, after one to begin with; what the backward passes sent."""
    forward(model, batch_of(16))
    switch_on(model)
    losses = [forward(model, batch_of(tokens, tokens)) for tokens in (30, 41)]
    mesh.ledger.reset()
    sum(losses).backward()
    sent = sum(mesh.ledger.calls.values())
    forward(model, batch_of(30, 3)).backward()
    return gradients(model), sent


def compare_with_no_options(
    ctx: RankContext, ulysses: int, checkpoint: str, late: bool, options: dict[str, Any]
) -> tuple[float, int, int]:
    """The difference of gradients, and what backward sent without options and with them."""
    mesh = mesh_of(ulysses)
    model = llama()
    with enable(model, mesh):
        plain, sent_plain = train(model, mesh, by_nobody)
    switch_on = CHECKPOINTS[checkpoint]
    if not late:
        switch_on(model)
    before = attributes(model)
    with enable(model, mesh, **options):
        got, sent = train(model, mesh, switch_on if late else by_nobody)
        if late:
            switch_on(model)
            before = attributes(model)
    assert attributes(model) == before
    return difference(got, plain), sent_plain, sent


@pytest.mark.parametrize(
    ("checkpoint", "late", "ulysses"),
    [
        ("nobody", False, 1),
        ("nobody", False, 2),
        ("reentrant", False, 1),
        ("reentrant", True, 2),
        ("not reentrant", False, 2),
        ("not reentrant", True, 1),
    ],
)
def test_recompute_attention_sends_nothing_twice(pool, ulysses, checkpoint, late):
    options = {"recompute": "attention"}
    case = {"ulysses": ulysses, "checkpoint": checkpoint, "late": late, "options": options}
    for error, plain, sent in pool.run(compare_with_no_options, 2, **case):
        assert error < 1e-5
        assert 0 < sent == plain


OTHER_OPTIONS = {
    "full": {"recompute": "full"},
    "offload": {"offload_ratio": 0.7},
    "offload of attention": {"recompute": "attention", "offload_ratio": 1.0},
}  # MLPs in chunks: test_memory_sharded.py


@pytest.mark.parametrize("checkpoint", ["nobody", "reentrant"])
@pytest.mark.parametrize("options", OTHER_OPTIONS)
def test_gradients_are_those_without_options(pool, options, checkpoint):
    case = {"checkpoint": checkpoint, "late": False, "options": OTHER_OPTIONS[options]}
    for error, _, _ in pool.run(compare_with_no_options, 2, ulysses=2, **case):
        assert error < 1e-5


def rows_of_gpt2(ctx: RankContext, chunks: int) -> float:
    """The difference of gradients to one process's, of a batch of two rows."""
    model = gpt2()
    forward(model, batch_of(23)).backward()
    plain = gradients(model)
    with enable(model, mesh_of(2), gradients="sum", mlp_chunks=chunks):
        forward(model, batch_of(23)).backward()
    summed = gradients(model)
    for gradient in summed.values():
        dist.all_reduce(gradient)
    return difference(summed, plain)


@pytest.mark.parametrize("chunks", [1, 3])
def test_layers_that_take_views_are_given_contiguous_chunks(pool, chunks):
    assert max(pool.run(rows_of_gpt2, 2, chunks=chunks)) < 1e-5


def peak_and_offload(ctx: RankContext, options: dict[str, Any]) -> tuple[int, float]:
    """Peak bytes of a step, and the fraction of saved bytes that was offloaded."""
    model = llama(intermediate_size=1024)
    with enable(model, mesh_of(2), **options) as enabled:
        batch = batch_of(256)
        forward(model, batch).backward()
        with LiveBytes() as live:
            forward(model, batch).backward()
        offload = enabled._memory.offload(torch.device("cpu"))
    return live.peak, offload.counts.offloaded / offload.counts.saved if offload else 0.0


def test_less_is_saved(pool):
    def measured(**options: Any) -> tuple[int, float]:
        return pool.run(peak_and_offload, 2, options=options)[0]

    none, _ = measured()
    full, _ = measured(recompute="full")
    in_chunks, _ = measured(recompute="full", mlp_chunks=8)
    kept, offloaded = measured(recompute="attention", offload_ratio=0.5)
    assert in_chunks < full < kept < none
    assert offloaded == pytest.approx(0.5, abs=0.02)


def train_in_a_tenth_of_a_gib(ctx: RankContext) -> None:
    model = llama()
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses_degree=2)
    with pytest.MonkeyPatch.context() as patch, enable(model, mesh, offload_ratio=1.0):
        patch.setenv("USP_HOST_MEMORY_GIB", "0.1")
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        forward(model, batch_of(512))


def test_offload_beyond_host_memory_is_refused_on_every_rank(pool):
    """Each rank would take a block of 64 MiB."""
    for error in pool.errors(train_in_a_tenth_of_a_gib, 2):
        assert isinstance(error, ConfigError) and "2 ranks of this host 0.12 GiB" in str(error)


@pytest.mark.parametrize("backward", [True, False], ids=["trained", "dropped"])
@pytest.mark.parametrize("switch", CHECKPOINTS)
def test_a_pass_is_freed_with_its_loss(switch, backward):
    """Checkpoints keep a layer's arguments, and what these refer to must not refer to the graph."""
    model = llama()
    CHECKPOINTS[switch](model)
    embedded: list[weakref.ref[torch.Tensor]] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: embedded.append(weakref.ref(out))
    )
    with enable(model, ds_usp.SequenceMesh.single()):
        loss = forward(model, batch_of(16))
        if backward:
            loss.backward()
        del loss
        gc.collect()
        assert [ref() for ref in embedded] == [None]


def refused(ctx: RankContext, case: str) -> None:
    if case == "experts":
        experts = MixtralConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_local_experts=2,
        )
        enable(MixtralForCausalLM(experts), mesh_of(2), mlp_chunks=2)
    model = llama()
    before = attributes(model)
    if case == "no mlp":
        model.model.layers[2].mlp = None
        with pytest.raises(ConfigError):
            enable(model, mesh_of(2), mlp_chunks=2)
        assert attributes(model) == before
        assert model.config._attn_implementation == "eager"
        enable(model, mesh_of(2), mlp_chunks=2)
    enable(model, mesh_of(2), mlp_chunks=9)
    forward(model, batch_of(17))


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("experts", ConfigError, "MixtralSparseMoeBlock"),
        ("no mlp", ConfigError, "no module `mlp`"),
        ("too many", LayoutError, "mlp_chunks=9, and a rank has 8 of the 17 tokens"),
    ],
)
def test_refusals(pool, case, error, words):
    for raised in pool.errors(refused, 2, case=case):
        assert type(raised) is error
        assert words in str(raised)
