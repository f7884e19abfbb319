"""What ``ds-usp plan --emit megatron-lm`` writes trains in Megatron-LM as one rank does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lm_runs import SGD_BY_ADAM, TrainingServer, losses_of, relative_difference

from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.planner.emit import emit

LIMIT = 1e-5
LLAMA = ModelShape("tiny", 4, 64, 96, 8, 4, 257, rope_theta=500000.0, norm_epsilon=1e-3)
GPT = replace(LLAMA, kv_heads=8, gated=False, tied=True, learned_positions=True, biases=True)
ATTENTION = ParallelConfig(ulysses=2, ring=2, recompute="attention", overlap_gradients=True)
STAGES = ParallelConfig(tp=2, ulysses=2, pp=2, layers_per_virtual_stage=1, recompute="full")
HEADS = ATTENTION.replace(recompute="full", mlp_chunks=2, projection_overlap="recompute")
PLANS = [
    (LLAMA, ATTENTION.replace(mlp_chunks=3)),
    (GPT, STAGES.replace(mlp_chunks=2)),
    (LLAMA, HEADS),
]


def emitted(model: ModelShape, config: ParallelConfig) -> str:
    """The flags in fp32, with a vocabulary that is padded alike for any tensor-parallel size."""
    text = emit("megatron-lm", Workload(model, 64, 4), config).replace("\\\n", " ")
    padding = f"--make-vocab-size-divisible-by {128 // config.tp}"
    return f"{text.replace(' --bf16', '')} {padding} {SGD_BY_ADAM}"


@pytest.mark.parametrize(("model", "config"), PLANS, ids=["llama", "gpt", "heads in chunks"])
def test_an_emitted_plan_trains_as_one_rank_does(
    server: TrainingServer, model: ModelShape, config: ParallelConfig
) -> None:
    ranks = server.run(config.gpus, emitted(model, config))
    one = server.run(1, emitted(model, ParallelConfig(zero=0)), patched=False)
    assert relative_difference(losses_of(ranks), losses_of(one)) < LIMIT
    assert relative_difference(ranks[0]["norms"], one[0]["norms"]) < LIMIT
