"""Flags and configuration that the planner emits start Megatron-DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mds_runs import TrainingServer, losses_of, relative_difference

from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.planner.emit import emit

LIMIT = 1e-5
# What belongs to a run, not to a plan; no GPU; fp32, because bf16 rounds every split differently.
RUN = """
    --train-iters 2 --lr 0.1 --min-lr 0.1 --lr-decay-style constant --optimizer sgd
    --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --seed 1234 --log-interval 1
    --eval-interval 1000 --eval-iters 1 --data-impl mmap --split 90,5,5 --num-workers 0
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --distributed-backend gloo
"""
LLAMA = ModelShape("tiny", 2, 64, 96, 8, 2, 257, head_dim=16, rope_theta=500000.0)
GPT = ModelShape(
    "gpt", 2, 64, 256, 8, 8, 257, gated=False, tied=True, learned_positions=True, biases=True
)
PLAIN = ParallelConfig(tp_sequence=False)
CASES = {
    "memory": (LLAMA, PLAIN.replace(ulysses=2, ring=2, recompute="gemm-last", fused_loss=True)),
    "full": (
        LLAMA,
        PLAIN.replace(
            ring=2,
            dp=2,
            zero=3,
            recompute="full",
            offload_ratio=0.5,
            projection_overlap="recompute",
        ),
    ),
    "pipeline": (GPT, PLAIN.replace(ulysses=2, pp=2, recompute="attention", offload_ratio=1.0)),
}


def planned(
    server: TrainingServer, split: ParallelConfig, shape: ModelShape
) -> Callable[..., tuple[str, ...]]:
    """Replaces the server's own flags by emitted ones."""

    def arguments(_: str, folder: Path) -> tuple[str, ...]:
        work = Workload(shape, 64, 4)
        config = folder / "ds_config.json"
        text = emit("ds-config", work, split).replace('"enabled": true', '"enabled": false')
        text = text.replace('"gradient_clipping": 1.0', '"zero_allow_untested_optimizer": true')
        config.write_text(text)
        flags = emit("megatron-deepspeed", work, split).replace("\\", "").split()
        flags[flags.index("ds_config.json")] = str(config)
        flags.remove("--bf16")
        return (*flags, *RUN.split(), "--data-path", str(server.folder / "text"))

    return arguments


@pytest.mark.parametrize("case", CASES)
def test_what_is_emitted_trains_as_one_rank_does(
    server: TrainingServer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    shape, split = CASES[case]
    losses = []
    for config in (replace(PLAIN, micro_batch=split.micro_batch), split):
        monkeypatch.setattr(server, "arguments", planned(server, config, shape))
        losses.append(losses_of(server.run(config.gpus, "")))
    expected, sharded = losses
    assert len(expected) >= 2 and relative_difference(sharded, expected) < LIMIT
