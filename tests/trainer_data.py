"""Megatron's encoded data, written by megatron-core's own builder."""

from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_pair(
    prefix: Path, documents: Sequence[Sequence[int]], dtype: type = numpy.uint16
) -> Path:
    """Write ``prefix.bin`` and ``prefix.idx``; the prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
