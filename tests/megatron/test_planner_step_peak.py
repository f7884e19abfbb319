"""The peak of a real step of the trainer, under DeepSpeed's bf16 optimizer, is the formula's."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from peak_memory import peak_of
from torch.utils.checkpoint import checkpoint
from trainer_runs import TRAINER

import megatron_patches
from ds_usp.planner import ParallelConfig, Workload, framework_caps, load_model
from ds_usp.planner.formulas import stage_elements
from ds_usp.planner.memory import memory, states_bytes
from ds_usp.training import SequenceBatch, prepare_deepspeed

assert TRAINER.is_dir()  # trainer_runs has put it on the path
# So wide that the loss's logits, kept activations and gradients' copies stand out.
GPT = replace(
    load_model("gpt-1.3b"),
    layers=4, vocab=12288, hidden=256, ffn=1024, heads=8, kv_heads=8, head_dim=32,
)  # fmt: skip
FLAGS = f"""
    --num-layers {GPT.layers} --hidden-size {GPT.hidden} --num-attention-heads {GPT.heads}
    --zero-stage 1 --device cpu --bf16
"""


@dataclass(frozen=True)
class Case:
    """One sequence a step, ZeRO-1, bf16."""

    seq_len: int
    ulysses: int
    ring: int
    recompute: str

    def plan(self) -> tuple[Workload, ParallelConfig]:
        config = ParallelConfig(
            ulysses=self.ulysses,
            ring=self.ring,
            recompute=self.recompute,
            tp_sequence=False,
            unsharded_grad_reduce=framework_caps("megatron-deepspeed").unsharded_grad_reduce,
        )
        return Workload(GPT, self.seq_len), config


CASES = [
    Case(1024, 2, 1, "none"),  # the loss, and all activations
    Case(1024, 1, 2, "full"),  # the loss
    Case(64, 2, 1, "none"),  # the reduction of gradients
]


def peak_bytes(ctx: RankContext, case: Case) -> int:
    """What a step of the trainer allocates at most beyond what it finds."""
    from megatron.core import parallel_state
    from usp_trainer.arguments import parse
    from usp_trainer.data import TrainingBatch
    from usp_trainer.engine import Trainer
    from usp_trainer.model import Layer, build_model
    from usp_trainer.validate_args import validate_and_derive

    from megatron_patches.megatron_core.groups import initialize_groups

    parallel_state.destroy_model_parallel()
    megatron_patches.restore()
    patched: dict[str, Any] = {"layout": "zigzag", "everywhere": True}
    megatron_patches.apply("megatron_core", ulysses_degree=case.ulysses, **patched)
    mesh, groups = initialize_groups(tensor=1, sequence=ctx.world, pipeline=1, ulysses=case.ulysses)
    degrees = f"--ds-sequence-parallel-size {ctx.world} --ulysses-degree {case.ulysses}"
    flags = f"{FLAGS} {degrees} --seq-length {case.seq_len}"
    args = validate_and_derive(parse(flags.split()), ctx.world)
    args.padded_vocab_size = GPT.vocab
    layout, device = mesh.layout("zigzag", case.seq_len), torch.device("cpu")
    gpt = build_model(args, mesh, layout, groups, device)
    if case.recompute == "full":
        gpt.calls = [
            partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
            if isinstance(call, Layer)
            else call
            for call in gpt.calls
        ]
    tokens = torch.randint(GPT.vocab, (1, layout.length(mesh.rank)))
    shard = SequenceBatch(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape))
    batch = TrainingBatch(shard)
    trainer = Trainer(args, gpt, groups, device, GPT.vocab)
    trainer.train([batch], 1e-5)  # makes the optimizer's states
    return peak_of(lambda: trainer.train([batch], 1e-5), repeats=5)


def peaks_over_formula(ctx: RankContext) -> list[float]:
    prepare_deepspeed()
    ratios = []
    for case in CASES:
        work, config = case.plan()
        states = sum(states_bytes(stage_elements(work, config, 0), config))
        ratios.append(peak_bytes(ctx, case) / (memory(work, config).total - states))
    return ratios


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no instructions for bf16: the steps take minutes, and memory of their own",
)
def test_the_peak_of_a_real_step_is_the_formula():
    """By torch's own count of what it allocates."""
    for ratios in fork_world(peaks_over_formula, 2):
        assert ratios == pytest.approx([1.0] * len(CASES), abs=0.02)
