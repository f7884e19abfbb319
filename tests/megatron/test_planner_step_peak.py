"""The peak of a real step of the trainer, under DeepSpeed's bf16 optimizer, is the formula's."""

from dataclasses import replace

import pytest
import torch
from harness import RankContext, fork_world
from peak_memory import peak_of
from trainer_runs import TRAINER

from ds_usp.planner import ParallelConfig, Workload, framework_caps, load_model
from ds_usp.planner.formulas import stage_elements
from ds_usp.planner.memory import memory, states_bytes
from ds_usp.training import prepare_deepspeed

assert TRAINER.is_dir()  # trainer_runs has put it on the path
GPT = replace(
    load_model("gpt-1.3b"), layers=4, hidden=256, ffn=1024, heads=8, kv_heads=8, head_dim=32
)
FLAGS = f"""
    --num-layers {GPT.layers} --hidden-size {GPT.hidden} --num-attention-heads {GPT.heads}
    --zero-stage 1 --device cpu --bf16 --usp-loss-chunks 64 --lr 1e-5
"""
# Vocabulary, sequence length, Ulysses and ring degree, what is recomputed: so wide that the named
# part stands out.
CASES = [
    (12288, 1024, 1, 2, "none"),  # all activations and the loss
    (12288, 1024, 1, 2, "full"),  # the loss
    (12288, 64, 2, 1, "none"),  # the reduction of gradients
]


def over_formula(ctx: RankContext) -> list[float]:
    """What a step allocates at most beyond what it finds, over the formula's."""
    from usp_trainer.arguments import parse, validated
    from usp_trainer.data import Tokens
    from usp_trainer.step import Trainer

    prepare_deepspeed()
    ratios = []
    for vocab, seq_len, ulysses, ring, recompute in CASES:
        config = ParallelConfig(
            ulysses=ulysses,
            ring=ring,
            recompute=recompute,
            tp_sequence=False,
            fused_loss=True,
            unsharded_grad_reduce=framework_caps("trainer").unsharded_grad_reduce,
        )
        work = Workload(replace(GPT, vocab=vocab), seq_len)
        degrees = f"--ds-sequence-parallel-size {ctx.world} --ulysses-degree {ulysses}"
        flags = f"{FLAGS} {degrees} --seq-length {seq_len} --usp-recompute {recompute}"
        ids = torch.randint(vocab, (8 * seq_len,)).numpy().astype("u2")
        args = validated(parse(flags.split()), ctx.world)
        trainer = Trainer(args, Tokens("noise", ids, vocab), torch.device("cpu"))
        trainer.train(1e-5)  # makes the optimizer's states
        peak = peak_of(lambda trainer=trainer: trainer.train(1e-5), repeats=5)
        states = sum(states_bytes(stage_elements(work, config, 0), config))
        ratios.append(peak / (memory(work, config).total - states))
    return ratios


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no instructions for bf16: the steps take minutes, and memory of their own",
)
def test_the_peak_of_a_real_step_is_the_formula():
    """By torch's own count of what it allocates."""
    for ratios in fork_world(over_formula, 2):
        assert ratios == pytest.approx([1.0] * len(CASES), abs=0.02)
