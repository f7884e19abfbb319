"""Enabled models under torch.compile: losses and gradients as without."""

from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from tiny_models import HAS_STATES, build
from torch.nn.parallel import DistributedDataParallel
from training_models import Batch, Model, batch_of, difference, gradients, llama

from ds_usp.integrations.transformers import enable

BACKEND = "aot_eager"


def whole(model: Model) -> Model:
    """What ``Trainer(torch_compile=True)`` does to a model and what is around it."""
    return torch.compile(model, backend=BACKEND)


def layers(model: Model) -> Model:
    """Accelerate's regional compilation."""
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


HOW = {f.__name__: f for f in (whole, layers)}


def packed(*lengths: int) -> Batch:
    batch = {name: x[:1] for name, x in batch_of(sum(lengths)).items()}
    return batch | {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


# Of one length with other documents: nothing of one batch may be compiled into the next.
BATCHES = (packed(41), packed(10, 31), packed(25, 16))


def losses_of(model: Model, seed: int) -> list[float]:
    """With their backward passes."""
    losses = []
    for batch in BATCHES:
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def compiled_and_not(
    ctx: RankContext, how: str, ulysses: int, options: dict[str, Any], hybrid: str = ""
) -> tuple[float, float]:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = build(hybrid) if hybrid else llama(num_hidden_layers=1)
        enabled = enable(model, mesh_of(ulysses), **options)
        trained = DistributedDataParallel(model) if how == "whole" else model
        losses = losses_of(HOW[how](trained) if compiled else trained, seed=5)
        results.append((losses, gradients(model)))
        enabled.disable()
    (losses, grads), (losses_compiled, grads_compiled) = results
    error = max(abs(a - b) for a, b in zip(losses, losses_compiled, strict=True))
    return error, difference(grads_compiled, grads)


ALL = {"recompute": "attention", "offload_ratio": 0.5, "loss_chunks": 2, "mlp_chunks": 2}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "ulysses", "options"),
    [
        pytest.param("whole", 2, {}, marks=SLOW, id="whole"),
        pytest.param("layers", 2, {}, id="layers"),
        pytest.param("whole", 1, ALL, id="memory options"),
    ],
)
def test_compiled_models_compute_the_same(pool, how, ulysses, options):
    for loss, grads in pool.run(compiled_and_not, 2, how=how, ulysses=ulysses, options=options):
        assert loss < 1e-5
        assert grads < 1e-5


@SLOW
@pytest.mark.skipif(not HAS_STATES, reason="layers with a state need a newer transformers")
@pytest.mark.parametrize(("how", "hybrid"), [("whole", "mamba"), ("layers", "qwen3_next")])
def test_layers_with_a_state_break_the_graph_and_compute_the_same(pool, how, hybrid):
    case = {"how": how, "ulysses": 1, "options": {}, "hybrid": hybrid}
    for loss, grads in pool.run(compiled_and_not, 2, **case):
        assert loss < 1e-5
        assert grads < 1e-5
