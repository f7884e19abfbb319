"""What gives the layers of a built GPTModel their projections under the exchanges."""

from __future__ import annotations

from typing import Any


def layers_of(model: Any) -> list[Any]:
    """The transformer layers of a model, those that predict further tokens too."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def overlap(model: Any, *, keep: str, may_be_plain: bool = False) -> None:
    """Overlap the projections of every layer.

    Args:
        may_be_plain: a layer may compute its projections by itself.
    """
    from megatron_patches.megatron_core.projections import overlap_projections

    for layer in layers_of(model):
        attention = layer.self_attention
        if attention.core_attention.mesh.sp_degree > 1 and not may_be_plain:
            attention.forward = _never  # what the overlapped forward falls back on
        overlap_projections(layer, keep)


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a layer computed its projections by itself")
