"""Buckets in which gradients are reduced under backward: their size, and when each is full."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ds_usp.planner.models import ModelShape

# Large for a link; two such buckets are small beside what a GPU holds.
LEAST_BUCKET_ELEMENTS = 40_000_000


def bucket_elements(model: ModelShape, tp: int, zero: int) -> int:
    """Elements of a bucket of gradients that is reduced under backward: at least those of two of a
    layer's largest matrices, under ZeRO-2 also of the embedding.

    Before DeepSpeed reduces a bucket it waits for the one before, which the products that fill a
    smaller one do not hide. A gradient that is larger than a bucket is reduced where it lies, which
    ZeRO-2 with ``overlap_comm`` frees too early (``ds_usp/training/deepspeed.py``).

    ZeRO-3 allocates a bucket for good, in fp32 where sequences are sharded (2 GB with DeepSpeed's
    default), and waits for its reduction whatever its size: it is as small as a link allows.
    """
    if zero == 3:
        return LEAST_BUCKET_ELEMENTS
    largest = model.hidden * model.ffn * (2 if model.gated else 1) // tp
    table = model.padded_vocab(tp) // tp * model.hidden if zero == 2 else 0
    return max(LEAST_BUCKET_ELEMENTS, 2 * largest, table)


@lru_cache(maxsize=256)
def full_buckets(model: ModelShape, tp: int, layers: int, elements: int) -> tuple[Bucket, ...]:
    """The buckets of one backward pass in their order.

    Args:
        layers: of this rank; the tables of the vocabulary are of it too.
        elements: of a bucket. A larger gradient is one of its own.

    Returns:
        Of each the layers' backward that is done when it is full, from 0 to 1, and its elements.
    """
    buckets: list[Bucket] = []
    held, done = 0.0, 0.0
    for when, size in _gradients(model, tp, layers):
        if held and held + size > elements:
            buckets.append((when, held))
            held = 0.0
        held, done = held + size, when
    return (*buckets, (done, held))


Bucket = tuple[float, float]


def _gradients(model: ModelShape, tp: int, layers: int) -> Iterator[Bucket]:
    """Gradients from the last to the first: the part of the layers' backward after which each is
    there, and its elements. In a layer the time is divided as elements are."""
    table = model.padded_vocab(tp) / tp * model.hidden
    if not model.tied:
        yield 0.0, table
    mlp_in = model.hidden * model.ffn * (2 if model.gated else 1)
    queries, keys = model.hidden * model.q_width, model.hidden * model.kv_width
    matrices = (model.ffn * model.hidden, mlp_in, queries, queries + 2 * keys)
    for layer in range(layers):
        before = 0.0
        for size in matrices:
            before += size
            yield (layer + before / sum(matrices)) / layers, size / tp
    yield 1.0, table
