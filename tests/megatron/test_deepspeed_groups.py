"""DeepSpeed's own sequence-parallel settings leave gradients unsummed at ZeRO-0 to 2: refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankContext, fork_world

import ds_usp

TOKENS, HEADS, DIM = 16, 2, 4


class Layer(torch.nn.Module):
    def __init__(self, mesh: ds_usp.SequenceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, DIM)).unbind(2)
        layout = self.mesh.layout("contiguous", TOKENS)
        mask = ds_usp.MaskSpec.causal()
        out = ds_usp.usp_attention(q, k, v, mesh=self.mesh, layout=layout, mask=mask)
        return out.square().sum()


def train(ctx: RankContext, stage: int, setting: str, ulysses: int) -> tuple[str, float]:
    """The error of the first backward pass, and the relative error of one SGD step, which DeepSpeed
    divides by the number of ranks, against one process."""
    import deepspeed

    from ds_usp.training.deepspeed import prepare_deepspeed

    prepare_deepspeed()
    torch.manual_seed(1)
    x = torch.randn(1, TOKENS, HEADS * DIM)
    reference = Layer(ds_usp.SequenceMesh.single())
    layer = Layer(ds_usp.SequenceMesh.from_group(None, ulysses))
    layer.load_state_dict(reference.state_dict())
    reference(x).backward()
    expected = [p.grad / ctx.world for p in reference.parameters() if p.grad is not None]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    if setting == "config":
        config |= {"data_parallel_size": 1, "sequence_parallel_size": ctx.world}
    engine, *_ = deepspeed.initialize(
        model=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=1.0),
        config=config,
        mesh_param=(1, ctx.world) if setting == "mesh_param" else None,
        dist_init_required=False,
    )
    shard = layer.mesh.layout("contiguous", TOKENS).shard(x, 1, layer.mesh.rank)
    try:
        engine.backward(engine(shard))
        engine.step()
    except ds_usp.USPError as error:
        return str(error), 0.0
    with deepspeed.zero.GatheredParameters(list(layer.parameters()), enabled=stage == 3):
        pairs = zip(reference.parameters(), layer.parameters(), strict=True)
        steps = [(before - after).detach() for before, after in pairs]
    return "", max(float((a - b).norm() / b.norm()) for a, b in zip(steps, expected, strict=True))


def train_late(ctx: RankContext) -> str:
    """The error of the backward pass of an engine without a device mesh, which is created after
    another engine had one, and after a backward pass without DeepSpeed."""
    import deepspeed

    from ds_usp.training.deepspeed import prepare_deepspeed

    prepare_deepspeed()
    layer = Layer(ds_usp.SequenceMesh.from_group(None, 1))
    shard = layer.mesh.layout("contiguous", TOKENS).shard(
        torch.randn(1, TOKENS, HEADS * DIM), 1, layer.mesh.rank
    )
    layer(shard).backward()
    other = torch.nn.Linear(2, 2)
    engines = []
    for model, stage, mesh_param in ((other, 3, (1, ctx.world)), (layer, 1, None)):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
            mesh_param=mesh_param,
            dist_init_required=False,
        )
        engines.append(engine)
    try:
        engines[1].backward(engines[1](shard))
    except ds_usp.USPError as error:
        return str(error)
    return ""


def test_the_engine_that_runs_is_the_one_that_is_checked() -> None:
    for text in fork_world(train_late, 2):
        assert "ZeRO-1 sums gradients over" in text


CASES = [(stage, "mesh_param", 1) for stage in range(4)]
CASES += [(1, "config", 2), (1, "neither", 2), (2, "neither", 1)]


@pytest.mark.parametrize(("stage", "setting", "ulysses"), CASES)
def test_gradients_that_would_not_be_summed_are_refused(
    stage: int, setting: str, ulysses: int
) -> None:
    for text, error in fork_world(train, 2, stage=stage, setting=setting, ulysses=ulysses):
        if setting != "neither" and stage < 3:
            assert f"ZeRO-{stage} sums gradients over" in text
            assert "initialize_deepspeed" in text and "mpu" in text
        else:
            assert not text and error <= 1e-5
