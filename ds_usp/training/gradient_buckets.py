"""The size of the buckets in which DeepSpeed's ZeRO-2 reduces gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_usp.errors import warn_once

_DEFAULT_ELEMENTS = 500_000_000  # DeepSpeed's


def with_large_enough_buckets(
    config: Mapping[str, Any], parameters: Iterable[nn.Parameter]
) -> dict[str, Any]:
    """DeepSpeed's configuration with buckets that hold the largest gradient, where they have to.

    ZeRO-2 with ``overlap_comm`` reduces a gradient that is larger than ``reduce_bucket_size`` where
    it lies, on a stream of its own, and frees it on the ranks that do not keep it before that
    stream has read it (DeepSpeed 0.19.8, ``stage_1_and_2.py``: ``record_stream`` is called on the
    rank that keeps it alone). The backward pass then writes over it: gradients are wrong. With
    matrices of 89 M elements and buckets of 40 M on two H200 the norm was 160.5 instead of 180.7.

    Args:
        parameters: of this rank; those that are trained count.

    Returns:
        The configuration as it is, or with a larger ``reduce_bucket_size``; rank 0 warns of it.
    """
    zero = config.get("zero_optimization")
    elements = zero.get("reduce_bucket_size", _DEFAULT_ELEMENTS) if isinstance(zero, Mapping) else 0
    if not isinstance(zero, Mapping) or not isinstance(elements, (int, float)):
        return dict(config)  # DeepSpeed refuses it
    in_place = zero.get("contiguous_gradients", True)  # else they are freed a bucket later
    overlapped = zero.get("stage") == 2 and zero.get("overlap_comm") and in_place
    largest = max((p.numel() for p in parameters if p.requires_grad), default=0)
    if not overlapped or largest <= elements:
        return dict(config)
    warn_once(
        f"reduce_bucket_size={int(elements)} of DeepSpeed's configuration is raised to {largest}, "
        "the elements of the largest parameter: with overlap_comm ZeRO-2 frees larger gradients "
        "before they are reduced",
        rank=dist.get_rank(),
    )
    return {**config, "zero_optimization": {**zero, "reduce_bucket_size": largest}}
