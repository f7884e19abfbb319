"""Recomputation, offload and MLPs in chunks, on the layers of transformers.

transformers' layers (``GradientCheckpointingLayer``) hand their forward pass to a function, if
checkpointing is on. ``EnabledModel`` lets :meth:`ModelMemory.prepare` replace that function before
each pass, as ``gradient_checkpointing_enable`` may have set it anew; nothing here communicates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ds_usp.attention.tuning import AUTO_TUNING, Tuning, check_tuning
from ds_usp.errors import ConfigError, LayoutError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.integrations.replicas import Reduction, check_reduction
from ds_usp.integrations.transformers.text_model import text_modules
from ds_usp.integrations.transformers.whole_arguments import AUTO_LAYOUT, check_layout_kind
from ds_usp.kernels.registry import AUTO, check_kernel_name
from ds_usp.memory import LayerMemory, Offload, in_chunks
from ds_usp.settings import settings_of

Logits = Literal["auto", "shard", "whole"]
Recompute = Literal["none", "attention", "full"]


@dataclass(frozen=True)
class Options:
    """The keywords of :func:`ds_usp.integrations.transformers.enable`; some are ``settings`` too.

    Raises:
        ConfigError, LayoutError, UnsupportedAttentionError: a value that does not exist.
    """

    layout: str = AUTO_LAYOUT
    kernel: str = AUTO
    gradients: Reduction = "mean"
    logits: Logits = "auto"
    tuning: Tuning = AUTO_TUNING
    recompute: Recompute = "none"
    offload_ratio: float = 0.0
    loss_chunks: int = 0
    mlp_chunks: int = 0
    query_chunks: int | str = AUTO
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        check_reduction(self.gradients)
        check_layout_kind(self.layout)
        check_kernel_name(self.kernel)
        check_tuning(self.tuning)
        if not isinstance(self.share_prefixes, bool):
            raise ConfigError(f"share_prefixes={self.share_prefixes!r} must be True or False")
        if self.logits not in get_args(Logits):
            raise ConfigError(
                f"logits={self.logits!r} must be one of {', '.join(get_args(Logits))}"
            )
        for row in settings_of("transformers", "memory"):  # its rows whose purpose is memory
            row.check(getattr(self, row.name), "transformers")
        if self.loss_chunks and self.logits == "whole":
            raise ConfigError(
                f"loss_chunks={self.loss_chunks} never makes the logits of all tokens, which "
                "logits='whole' asks for: leave one of them out"
            )


# transformers' attributes of layers.
_IS_ON, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
# Modules with parameters or states that compute every token by itself.
_TOKENWISE = (nn.Linear, Conv1D, nn.LayerNorm)


class ModelMemory:
    """Decides what the layers of a model save for backward, recompute, or offload.

    Args:
        carry: makes of a layer's forward what a checkpoint is given, so that recomputation finds
            the pass (``attention.carry``); None: layers hand it on themselves.

    Raises:
        ConfigError: the model has no such layers, or MLPs that cannot be computed in chunks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: Options,
        carry: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self._recompute, self._ratio = options.recompute, options.offload_ratio
        self.carry = carry
        self._offload: Offload | None = None
        self._layers = list(_layers(model))
        if self._has_policy and not self._layers:
            raise ConfigError(
                f"{type(model).__name__} has no layers that transformers can checkpoint "
                "(GradientCheckpointingLayer): leave recompute and offload_ratio out"
            )
        self._chunks = {"mlp_chunks": options.mlp_chunks, "loss_chunks": options.loss_chunks}
        if isinstance(options.query_chunks, int):
            self._chunks["query_chunks"] = options.query_chunks
        self._mlps = _tokenwise_mlps(model) if options.mlp_chunks else []
        for mlp in self._mlps:
            mlp.forward = partial(_run_mlp, mlp, options.mlp_chunks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offload": None}

    @property
    def _has_policy(self) -> bool:
        return self._recompute != "none" or self._ratio > 0

    def prepare(self, layout: TokenLayout) -> None:
        """Give every layer its policy, before a forward pass.

        Raises:
            LayoutError: on every rank, if one has fewer tokens than chunks.
        """
        # On every rank: those that call another number of modules would be waited for under ZeRO-3.
        fewest = min(layout.length(rank) for rank in range(layout.degree))
        for name, chunks in self._chunks.items():
            if chunks > fewest:
                raise LayoutError(
                    f"{name}={chunks}, and a rank has {fewest} of the {layout.seq_len} tokens: use "
                    "fewer chunks or longer sequences"
                )
        checkpointed_by_transformers = any(
            layer.gradient_checkpointing
            and not isinstance(vars(layer).get(_FUNCTION), _LayerPolicy)
            for layer in self._layers
        )
        if not self._has_policy and not (self.carry and checkpointed_by_transformers):
            return
        for number, layer in enumerate(self._layers):
            function = vars(layer).get(_FUNCTION)
            if layer.gradient_checkpointing and isinstance(function, _LayerPolicy):
                continue
            policy = _LayerPolicy(self, number, layer)
            if not checkpointed_by_transformers:
                policy.recompute = self._recompute
            elif layer.gradient_checkpointing:  # one of every n
                policy.recompute = "full" if self._recompute == "none" else self._recompute
                policy.checkpoint = function
            layer._gradient_checkpointing_func = policy
            layer.gradient_checkpointing = True

    def remove(self) -> None:
        """Undo what the constructor and :meth:`prepare` have set; this object is used no more."""
        for layer in self._layers:
            policy = vars(layer).get(_FUNCTION)
            if isinstance(policy, _LayerPolicy):
                for name in (_IS_ON, _FUNCTION):
                    layer.__dict__.pop(name, None)
                layer.__dict__.update(policy.before)
        for mlp in self._mlps:
            mlp.__dict__.pop("forward", None)

    def offload(self, device: torch.device) -> Offload | None:
        if self._ratio and self._offload is None:
            self._offload = Offload(self._ratio, device, layers=len(self._layers))
        return self._offload


class _LayerPolicy:
    """Runs a layer's forward pass, which the layer hands to it as ``run`` in each pass.

    Attributes:
        before: the layer's own attributes that were replaced.
        recompute: see :class:`ds_usp.memory.LayerMemory`.
        checkpoint: transformers' own where that is on, else torch's that is not reentrant.
    """

    def __init__(self, owner: ModelMemory, number: int, layer: nn.Module) -> None:
        self._owner, self._number = owner, number  # of the layer, in the model's order
        self.before = {
            name: layer.__dict__[name] for name in (_IS_ON, _FUNCTION) if name in layer.__dict__
        }
        self.recompute = "none"
        self.checkpoint: Callable[..., Any] = partial(checkpoint, use_reentrant=False)

    def __call__(self, run: Callable[..., Any], *inputs: Any) -> Any:
        device = next(x.device for x in inputs if isinstance(x, Tensor))
        memory = LayerMemory(self.recompute, self._owner.offload(device), self.checkpoint)
        carry = self._owner.carry
        return memory.run(self._number, carry(run) if carry else run, *inputs)


def _layers(model: PreTrainedModel) -> Iterator[Any]:
    """The outermost layers of the text model that transformers can checkpoint, in order."""
    inside: set[nn.Module] = set()
    for module in text_modules(model):
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            inside.update(module.modules())
            yield module


def _tokenwise_mlps(model: PreTrainedModel) -> list[nn.Module]:
    """Return each layer's ``mlp``; ConfigError for one that may mix tokens, or is missing."""
    mlps = []
    for layer in _layers(model):
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise ConfigError(
                f"mlp_chunks: {type(layer).__name__} has no module `mlp`; leave mlp_chunks out"
            )
        reason = _other_than_tokenwise(mlp)
        if reason:
            raise ConfigError(
                f"mlp_chunks: {type(mlp).__name__} of {type(layer).__name__} {reason}: it is not "
                "known to compute every token by itself (experts are not); leave mlp_chunks out"
            )
        mlps.append(mlp)
    if not mlps:
        raise ConfigError(f"mlp_chunks: {type(model).__name__} has no layers; leave it out")
    return mlps


def _other_than_tokenwise(mlp: nn.Module) -> str:
    """Name what of a module is not known to compute every token by itself; "" if all is."""
    arguments = list(inspect.signature(type(mlp).forward).parameters)[1:]
    if len(arguments) != 1:
        return f"takes {', '.join(arguments)}"
    if "forward" in mlp.__dict__:
        return "has a forward of its own already"
    for name, module in mlp.named_modules():
        kinds = {"parameter": module.named_parameters, "buffer": module.named_buffers}
        named = [f"{kind} {key}" for kind, of in kinds.items() for key, _ in of(recurse=False)]
        if named and not isinstance(module, _TOKENWISE):
            owner = f"{name or 'itself'} ({type(module).__name__})"
            return f"has the {named[0]} in {owner}"
    return ""


def _run_mlp(mlp: nn.Module, chunks: int, x: Tensor) -> Tensor:
    """``mlp.forward(x)`` in chunks of the tokens of all rows. Shapes: x ``[b, s_local, h]``."""
    # In one row, so that a chunk is contiguous: GPT-2's layers take views of what they are given.
    tokens = x.reshape(1, -1, x.shape[-1])
    out = in_chunks(partial(type(mlp).forward, mlp), tokens, chunks, dim=1)
    return out.view(*x.shape[:-1], out.shape[-1])
