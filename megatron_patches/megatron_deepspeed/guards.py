"""Guards of the checkout and of the DeepSpeed that the patches were written for."""

from __future__ import annotations

from megatron_patches.guards import Guard


def checkout(source_sha256: str) -> Guard:
    """A function of Megatron-DeepSpeed, which has no version."""
    return Guard(source_sha256=source_sha256)


def deepspeed(source_sha256: str) -> Guard:
    """A function of DeepSpeed."""
    return Guard("deepspeed", ">=0.19,<0.20", source_sha256)
