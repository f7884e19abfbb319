"""The text model inside of a model: the part whose tokens are sharded, and what runs whole.

Towers for images and sounds, projectors, draft models and heads other than output embeddings are
given whole inputs, or none: what ``enable`` changes of modules and configurations is changed in
the text model only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The outermost model of the text configuration without the head; itself if there is none."""
    below = (module for module in model.modules() if module is not model)
    return next((x for x in below if isinstance(x, PreTrainedModel) and _is_text(x, model)), model)


def has_towers(model: PreTrainedModel) -> bool:
    """Whether the text model is one of several, to which another model hands embeddings."""
    return model.config.get_text_config() is not model.config and text_model(model) is not model


def text_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules of the text model, without those of towers inside of it."""
    yield from _without_towers(text_model(model), model)


def without_towers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules of a model, its head too, without those of towers."""
    yield from _without_towers(model, model)


def towers(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The outermost models of other configurations than the text's, inside and beside of it."""
    kept = dict.fromkeys(_without_towers(model, model))
    children = dict.fromkeys(child for module in kept for child in module.children())
    return [x for x in _models(children) if x not in kept]


def _without_towers(module: nn.Module, model: PreTrainedModel) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        is_model = isinstance(child, PreTrainedModel) and not _is_text(child, model)
        if not is_model or _holds_text(child, model):
            yield from _without_towers(child, model)


# By the class of the configuration and not by the object, which some models copy, and users may.
def _is_text(module: PreTrainedModel, model: PreTrainedModel) -> bool:
    return type(module.config) is type(model.config.get_text_config())


def _holds_text(module: nn.Module, model: PreTrainedModel) -> bool:
    return any(isinstance(x, PreTrainedModel) and _is_text(x, model) for x in module.modules())


class TextAttention:
    """The attention implementation of the text model, set to another one until :meth:`restore`.

    The configurations around the text model's are set too, as masks are made from either; those of
    towers keep their own.
    """

    def __init__(self, model: PreTrainedModel, implementation: str) -> None:
        everything = {id(c): c for c in _configs(model.config)}
        everything |= {id(m.config): m.config for m in _models(model.modules())}
        self._before = [(c, c._attn_implementation) for c in everything.values()]
        kept = {id(model.config.get_text_config())}
        kept |= {id(m.config) for m in _models(_without_towers(model, model))}
        # By transformers' own rules, which know what a model can set. Then back again in towers,
        # and set where a rule about source code left the text model (ModernBERT of 5.6): a model
        # whose layers do not read it is refused after its first pass.
        model.set_attn_implementation(implementation)
        for config, before in self._before:
            value = implementation if id(config) in kept else before
            config._attn_implementation_internal = value

    def restore(self) -> None:
        for config, before in self._before:
            config._attn_implementation_internal = before


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        inner: Any = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner)


def _models(modules: Iterable[nn.Module]) -> Iterator[PreTrainedModel]:
    return (module for module in modules if isinstance(module, PreTrainedModel))
