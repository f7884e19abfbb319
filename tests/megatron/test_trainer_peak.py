"""The most bytes that live while a recomputed layer of the trainer runs backward, against the
planner's formula."""

import statistics
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankContext, fork_world
from peak_memory import LiveBytes
from test_trainer_layer_bytes import layer_and_input, validated

from ds_usp.geometry.chunking import CallSize
from ds_usp.kernels import rotary
from ds_usp.planner.memory import attention_peak
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
    peaks = []
    for _ in range(4):
        with LiveBytes() as live:
            layer(x).backward(grad)
        peaks.append(live.peak)
        x.grad = None
        layer.zero_grad()
    # The first makes what stays. Of the others gloo's threads may free late what one has sent.
    return statistics.median_low(peaks[1:])


def growth(degree: int, flags: str, chunks: int, tokens: tuple[int, int]) -> tuple[float, float]:
    """Measured and by the formula, bytes of as many tokens as two lengths differ in: weights and
    their gradients do not grow.

    Args:
        degree: of Ulysses.
        chunks: of heads in a call of attention.
        tokens: of a rank, the two lengths.
    """
    from usp_trainer.auto_args import planned_run

    both = []
    for count in tokens:
        length = f"--micro-batch-size 1 --seq-length {degree * count}"
        args = validated(1, degree, 1, f"{MODEL} {flags} {length}")
        run = planned_run(args)
        # As on GPUs, by the length of a call; CPUs take one chunk.
        with mock.patch.object(CallSize, "num_chunks", lambda _: chunks):
            expected = attention_peak(run.workload(), run.parallel_config())
            both.append((peak_bytes(args), expected.held + expected.buffers))
    (few, few_formula), (many, many_formula) = both
    return float(many - few), many_formula - few_formula


def growth_of_cases(
    ctx: RankContext, degree: int, cases: list[tuple[str, int]], tokens: tuple[int, int]
) -> list[tuple[float, float]]:
    """:func:`growth` of each of the cases, flags and chunks."""
    prepare_deepspeed()
    rotary._CPU_ELEMENTS = rotary._TABLE_ELEMENTS = 2**13  # not in proportion to tokens
    return [growth(degree, flags, chunks, tokens) for flags, chunks in cases]


def test_the_peak_of_a_recomputed_layer_is_the_formula():
    """With whole heads in one chunk, and in four."""
    cases = [("", 1), ("", 4)]
    for ranks in fork_world(growth_of_cases, 2, degree=2, cases=cases, tokens=(768, 1024)):
        whole, chunked = ranks
        for measured, formula in ranks:
            assert measured == pytest.approx(formula, rel=0.01)
        assert chunked[0] < 0.75 * whole[0]


def test_the_peak_without_sequence_parallelism_is_the_formula():
    """With as many key/value heads as heads, with half and with a quarter: grouped queries are
    copied. Shorter sequences have their peak where a weight's gradient is computed."""
    cases = [(f"--num-key-value-heads {kv_heads}", 1) for kv_heads in (8, 4, 2)]
    (peaks,) = fork_world(growth_of_cases, 1, degree=1, cases=cases, tokens=(1024, 1536))
    for measured, formula in peaks:
        assert measured == pytest.approx(formula, rel=0.01)
