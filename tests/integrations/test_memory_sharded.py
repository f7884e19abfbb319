"""Memory options where ZeRO-3 or FSDP2 shard the parameters: a step is that of one rank."""

from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from cases import mesh_of
from harness import RankContext
from torch.distributed.tensor import DTensor
from training_models import Model, adapted, batch_of, granite, llama

from ds_usp.integrations.transformers import enable, query_chunks
from ds_usp.memory import chunks
from ds_usp.training import prepare_deepspeed

RATE = 256.0
WRAPPERS = ("ZeRO-3", "FSDP2", "FSDP2, head by itself")
OPTIONS: dict[str, dict[str, Any]] = {
    "loss": {"loss_chunks": 4},
    "mlp": {"mlp_chunks": 3},
    "all": {"recompute": "attention", "offload_ratio": 0.6, "loss_chunks": 4, "mlp_chunks": 3},
    "lora": {"recompute": "attention"},
    "sparse": {"query_chunks": 3, "loss_chunks": 4},
}


def step_of_one_rank(model: Model) -> dict[str, torch.Tensor]:
    """What two batches, accumulated, change of each trained weight."""
    for tokens in (30, 41):
        model(**batch_of(tokens, tokens)).loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: -RATE * grad for name, grad in trained.items() if grad is not None}


def deepspeed_step(model: Model) -> None:
    prepare_deepspeed()
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=2 * RATE)  # of the mean of two losses
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    for tokens in (30, 41):
        engine.backward(engine(**batch_of(tokens, tokens)).loss)
        engine.step()
    for p in model.parameters():
        with deepspeed.zero.GatheredParameters([p]):
            p.whole = p.detach().clone()


def fsdp_step(model: Model, head: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Casts every tensor among the arguments of layers, as bf16 does, and changes none.
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (*model.model.layers, *([model.lm_head] if head else [])):
        fully_shard(layer, mesh=ranks, mp_policy=policy)
    fully_shard(model, mesh=ranks, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for tokens in (30, 41):
        model(**batch_of(tokens, tokens)).loss.backward()
    optimizer.step()
    for p in model.parameters():
        assert isinstance(p, DTensor)
        p.whole = p.full_tensor()


def error_of_a_step(ctx: RankContext, wrapper: str, options: str, reentrant: bool) -> float:
    """Of the change of all weights, relative to one rank's."""
    make = granite if options == "loss" else llama  # whose logits are scaled

    def build() -> Model:
        if options == "sparse":
            return tiny_models.build("glm_moe_dsa")
        return adapted(make(), "all") if options == "lora" else make()

    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = step_of_one_rank(build())
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    enable(model, mesh_of(2), **OPTIONS[options])
    # Gradients of chunks are summed as those of bf16 parameters are, but in fp32 to the digit.
    as_of_bf16 = (torch.float32,) if options in ("mlp", "sparse") else chunks.LOW_PRECISION
    with (
        mock.patch.object(chunks, "LOW_PRECISION", as_of_bf16),
        mock.patch.object(query_chunks, "LOW_PRECISION", as_of_bf16),
    ):
        if wrapper == "ZeRO-3":
            deepspeed_step(model)
        else:
            fsdp_step(model, "head" in wrapper)
    got = {name: p.whole - before[name] for name, p in model.named_parameters()}
    return max(float((got[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted)


CASES = [("loss", False), ("mlp", False), ("all", False), ("all", True)]


@pytest.mark.parametrize(
    ("wrapper", "options", "reentrant"),
    [
        *((wrapper, *case) for wrapper in WRAPPERS[1:] for case in CASES),
        # Which hands on what each module of a PEFT model returns, and its loss, as another tensor.
        *(("ZeRO-3", *case) for case in [("lora", False), *CASES] if case[0] != "mlp"),
        *((wrapper, "sparse", False) for wrapper in WRAPPERS[:2] if tiny_models.HAS_STATES),
    ],
)
def test_a_step_is_that_of_one_rank(pool, wrapper, options, reentrant):
    for error in pool.run(
        error_of_a_step, 2, wrapper=wrapper, options=options, reentrant=reentrant
    ):
        assert error < 1e-5
