"""What lets the layers of a built GPTModel project by themselves, chunk by chunk of heads."""

from typing import Any


def layers_of(model: Any) -> list[Any]:
    """The transformer layers of a model, those that predict further tokens too."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def overlap(model: Any, *, may_be_plain: bool = False) -> None:
    """Let every layer project again.

    Args:
        may_be_plain: a layer may compute its projections by itself.
    """
    from megatron_patches.megatron_core.projections import project_again

    for layer in layers_of(model):
        attention = layer.self_attention
        if attention.core_attention.mesh.sp_degree > 1 and not may_be_plain:
            attention.forward = _never  # what the overlapped forward falls back on
        project_again(layer)


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a layer computed its projections by itself")
