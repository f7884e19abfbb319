"""LoRA by PEFT: losses and gradients as without a mesh, with memory options too."""

from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from training_models import (
    Model,
    adapted,
    batch_of,
    difference,
    forward,
    gradients,
    llama,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.transformers import enable

MEMORY = {"recompute": "attention", "offload_ratio": 0.5, "loss_chunks": 3, "mlp_chunks": 2}


def mean_gradients(model: Model) -> dict[str, torch.Tensor]:
    """Over two ranks."""
    grads = gradients(model)
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
        grad /= 2
    return grads


def error_of_an_adapter(
    ctx: RankContext, adapter: str, first: str, options: dict[str, Any], ulysses: int
) -> tuple[float, float]:
    """Of the loss and of gradients, their mean over the ranks, relative to one rank's."""
    base = llama()
    one_rank = adapted(llama(), adapter)
    wanted = forward(one_rank, batch_of(41))
    wanted.backward()
    if first == "enable":
        enable(base, mesh_of(ulysses), **options)
        model = adapted(base, adapter)
    else:
        model = adapted(base, adapter)
        enable(model, mesh_of(ulysses), **options)
    batch = batch_of(41)
    got = model(batch["input_ids"], None, None, batch["labels"]).loss  # as PEFT orders them
    got.backward()
    return float((got - wanted).abs()), difference(mean_gradients(model), gradients(one_rank))


@pytest.mark.parametrize(
    ("adapter", "first", "options", "ulysses"),
    [
        ("attention", "PEFT", {}, 1),
        ("all", "enable", {}, 2),
        ("all", "PEFT", MEMORY, 2),
        ("all", "enable", {"recompute": "attention", "mlp_chunks": 2}, 1),
        ("head", "PEFT", MEMORY, 1),
        ("trained head", "PEFT", MEMORY, 2),
    ],
)
def test_adapters_are_trained_as_on_one_rank(pool, adapter, first, options, ulysses):
    for loss, grads in pool.run(
        error_of_an_adapter, 2, adapter=adapter, first=first, options=options, ulysses=ulysses
    ):
        assert loss < 1e-5
        assert grads < 1e-5


def test_an_adapter_around_a_chunked_head_is_refused(pool):
    options = {"loss_chunks": 2}
    for error in pool.errors(
        error_of_an_adapter, 2, adapter="head", first="enable", options=options, ulysses=2
    ):
        assert type(error) is UnsupportedAttentionError
        assert "loss_chunks" in str(error)


def error_of_qlora(
    ctx: RankContext, folder: str, options: dict[str, Any], ulysses: int
) -> tuple[float, float, set[str]]:
    """Of the loss and of gradients, relative to one rank's, and the linear modules."""
    import peft

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )

    def quantized() -> Model:
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
        )
        return adapted(peft.prepare_model_for_kbit_training(model), "all")

    one_rank, model = quantized(), quantized()
    wanted = forward(one_rank, batch_of(41))
    wanted.backward()
    enable(model, mesh_of(ulysses), **options)
    got = forward(model, batch_of(41))
    got.backward()
    kinds = {type(x).__name__ for x in model.modules()}
    error = difference(mean_gradients(model), gradients(one_rank))
    return float((got - wanted).abs()), error, kinds


@pytest.mark.parametrize("ulysses", [1, 2])
def test_qlora_is_trained_as_on_one_rank(pool, tmp_path, ulysses):
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    options = {"recompute": "attention", "loss_chunks": 3} if ulysses == 2 else {}
    for loss, grads, kinds in pool.run(
        error_of_qlora, 2, folder=str(tmp_path), options=options, ulysses=ulysses
    ):
        assert "Linear4bit" in kinds
        assert loss < 1e-5
        assert grads < 1e-5
