"""Recomputation, offload and MLPs in chunks on transformers' layers: gradients and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import mesh_of
from harness import RankContext, WorkerPool
from training_models import Model, batch_of, difference, forward, gradients, llama


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
    """What the options set on modules."""
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
    from ds_usp.integrations.transformers import enable

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


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize(
    ("checkpoint", "late"),
    [(name, late) for name in CHECKPOINTS for late in (False, True) if late <= (name != "nobody")],
)
def test_recompute_attention_sends_nothing_twice(
    pool: WorkerPool, ulysses: int, checkpoint: str, late: bool
) -> None:
    options = {"recompute": "attention"}
    for error, plain, sent in pool.run(
        compare_with_no_options,
        2,
        ulysses=ulysses,
        checkpoint=checkpoint,
        late=late,
        options=options,
    ):
        assert error < 1e-5
        assert 0 < sent == plain


OTHER_OPTIONS = {
    "full": {"recompute": "full"},
    "offload": {"offload_ratio": 0.7},
    "offload of attention": {"recompute": "attention", "offload_ratio": 1.0},
    "mlp": {"mlp_chunks": 3},
    "all": {"recompute": "attention", "offload_ratio": 0.5, "mlp_chunks": 5},
}


@pytest.mark.parametrize("checkpoint", ["nobody", "reentrant"])
@pytest.mark.parametrize("options", OTHER_OPTIONS)
def test_gradients_are_those_without_options(
    pool: WorkerPool, options: str, checkpoint: str
) -> None:
    for error, _, _ in pool.run(
        compare_with_no_options,
        2,
        ulysses=2,
        checkpoint=checkpoint,
        late=False,
        options=OTHER_OPTIONS[options],
    ):
        assert error < 1e-5
