"""The most bytes that live while a recomputed layer of the trainer runs backward, against the
planner's formula."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, fork_world
from peak_memory import LiveBytes
from test_trainer_layer_bytes import layer_and_input, validated

from ds_usp.geometry.chunking import CallSize
from ds_usp.kernels import rotary, rotary_positions
from ds_usp.planner.layer_peak import attention_peak
from ds_usp.training import prepare_deepspeed

MODEL = """
    --num-key-value-heads 8 --ffn-hidden-size 256 --swiglu --disable-bias-linear
    --use-rotary-position-embeddings --usp-recompute full --usp-mlp-chunks 16
"""


def peak_bytes(args: Any) -> int:
    """Of one layer, without the layer's input. Its output, which the caller has here, is as large
    as the output's gradient, which in a model is there instead."""
    layer, x = layer_and_input(args)
    x, grad = x.detach().requires_grad_(), torch.randn_like(x)
    for _ in range(2):
        with LiveBytes() as live:
            layer(x).backward(grad)
        x.grad = None
        layer.zero_grad()
    return live.peak


def measured_and_formula(ctx: RankContext, tokens: tuple[int, int]) -> list[tuple[float, float]]:
    """With whole heads in one chunk, in four, and projected in chunks, bytes of as many tokens as
    the two lengths differ in: weights and their gradients do not grow."""
    from usp_trainer.auto_args import planned_run

    prepare_deepspeed()
    rotary._CPU_ELEMENTS = rotary_positions._TABLE_ELEMENTS = 2**13  # not in proportion to tokens
    results = []
    for overlap, chunks in (("off", 1), ("off", 4), ("recompute", 1)):
        both = []
        for count in tokens:
            flags = f"{MODEL} --usp-projection-overlap {overlap} --micro-batch-size 1"
            args = validated(1, 2, 1, f"{flags} --seq-length {2 * count}")
            run = planned_run(args)
            # As on GPUs, by the length of a call; CPUs take one chunk.
            with mock.patch.object(CallSize, "num_chunks", lambda _, number=chunks: number):
                expected = attention_peak(run.workload(), run.parallel_config())
                both.append((peak_bytes(args), expected.held + expected.buffers))
        (few, few_formula), (many, many_formula) = both
        results.append((float(many - few), many_formula - few_formula))
    return results


def test_the_peak_of_a_recomputed_layer_is_the_formula() -> None:
    for whole, chunked, projected in fork_world(measured_and_formula, 2, tokens=(768, 1024)):
        for measured, formula in (whole, chunked, projected):
            assert measured == pytest.approx(formula, rel=0.01)
        assert projected[0] < chunked[0] < 0.75 * whole[0]
