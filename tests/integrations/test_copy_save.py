"""An enabled model that is saved, loaded or copied."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from cases import mesh_of
from harness import RankContext
from training_models import batch_of, difference, forward, gradients, llama
from transformers import AutoModelForCausalLM

from ds_usp.integrations.transformers import enable

OPTIONS: dict[str, Any] = {
    "recompute": "attention",
    "offload_ratio": 0.5,
    "loss_chunks": 2,
    "mlp_chunks": 2,
}


def saved_and_loaded(ctx: RankContext, folder: str) -> None:
    """Names of weights and the saved configuration are those of a model that is not enabled."""
    model = llama()
    names = list(model.state_dict())
    wanted = forward(model, batch_of(30))
    saved = [Path(folder, when) for when in ("before", "enabled")]
    model.save_pretrained(saved[0])  # the first rank writes
    enable(model, mesh_of(2), **OPTIONS)
    forward(model, batch_of(30))
    assert list(model.state_dict()) == names
    model.save_pretrained(saved[1])
    torch.distributed.barrier()
    configs = [json.loads((path / "config.json").read_text()) for path in saved]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(saved[1], attn_implementation="eager").train()
    assert torch.allclose(forward(loaded, batch_of(30)), wanted, rtol=1e-6)
    enable(loaded, mesh_of(1))  # on another ulysses x ring
    assert torch.allclose(forward(loaded, batch_of(30)), wanted, rtol=1e-6)


def test_save_and_load_are_transformers_own(pool, tmp_path):
    pool.run(saved_and_loaded, 2, folder=str(tmp_path))


def copied(ctx: RankContext) -> float:
    """A copy of a model after a step is enabled, and on its own."""
    model = llama()
    enabled = enable(model, mesh_of(2), **OPTIONS)
    forward(model, batch_of(30)).backward()
    model.zero_grad()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        forward(one, batch_of(41)).backward()
        if one is model:
            assert all(p.grad is None for p in twin.parameters())
    error = difference(gradients(twin), gradients(model))
    enabled.disable()
    assert model.config._attn_implementation == "eager"
    assert twin.config._attn_implementation == "usp"
    forward(twin, batch_of(30)).backward()
    assert all(p.grad is None for p in model.parameters())
    return error


def test_a_copy_is_enabled_by_itself(pool):
    assert max(pool.run(copied, 2)) == 0
