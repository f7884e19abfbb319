"""Enabled models under torch.compile: losses and gradients as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext, WorkerPool
from training_models import Batch, Model, batch_of, difference, gradients, llama

BACKEND = "aot_eager"


def whole(model: Model) -> Model:
    """What ``Trainer(torch_compile=True)`` does."""
    return torch.compile(model, backend=BACKEND)


def in_place(model: Model) -> Model:
    model.compile(backend=BACKEND)
    return model


def layers(model: Model) -> Model:
    """Accelerate's regional compilation."""
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


HOW = {f.__name__: f for f in (whole, in_place, layers)}


def packed(*lengths: int) -> Batch:
    batch = {name: x[:1] for name, x in batch_of(sum(lengths)).items()}
    return batch | {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


# Same lengths with other documents: nothing of one batch may be compiled into the next.
BATCHES = (batch_of(30), batch_of(30, 1), packed(10, 31), packed(25, 16))


def steps(model: Model, seed: int) -> tuple[list[float], Any]:
    losses = []
    for batch in BATCHES:
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def compiled_and_not(
    ctx: RankContext, how: str, ulysses: int, options: dict[str, Any]
) -> tuple[float, float]:
    from ds_usp.integrations.transformers import enable

    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = llama(num_hidden_layers=1)
        enabled = enable(model, mesh_of(ulysses), **options)
        results.append(steps(HOW[how](model) if compiled else model, 5))
        enabled.disable()
    (losses, grads), (losses_compiled, grads_compiled) = results
    grads_compiled = {n.removeprefix("_orig_mod."): g for n, g in grads_compiled.items()}
    error = max(abs(a - b) for a, b in zip(losses, losses_compiled, strict=True))
    return error, difference(grads_compiled, grads)


ALL = {"recompute": "attention", "offload_ratio": 0.5, "loss_chunks": 2, "mlp_chunks": 2}


@pytest.mark.parametrize(
    ("how", "ulysses", "options"),
    [("whole", 2, {}), ("in_place", 1, {}), ("layers", 2, {}), ("whole", 1, ALL)],
    ids=["whole", "in place", "layers", "memory options"],
)
def test_compiled_models_compute_the_same(
    pool: WorkerPool, how: str, ulysses: int, options: dict[str, Any]
) -> None:
    for loss, grads in pool.run(compiled_and_not, 2, how=how, ulysses=ulysses, options=options):
        assert loss < 1e-5
        assert grads < 1e-5
