"""Whether a model is served: decided from its configuration, without weights and without ranks.

The model is made on the meta device, where tensors have shapes but no values, enabled on a mesh of
one rank, and called once with an attention that checks its arguments and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, USPError
from ds_usp.integrations.transformers.attention import (
    IMPLEMENTATION,
    LayerMask,
    Shard,
    check_call,
    usp_attention_forward,
)
from ds_usp.integrations.transformers.model import enable
from ds_usp.integrations.transformers.refusals import (
    has_head,
    positions_are_offset,
    reasons_against,
)

_TOKENS = 16


@dataclass(frozen=True)
class Verdict:
    """Whether a model is served.

    Args:
        model: the name of its class.
        reasons: why it is refused; () if it is served.
        needs_positions: only batches with position_ids are served.
        undecided: why the trial forward pass has ended, where it could not run without values.
    """

    model: str
    reasons: tuple[str, ...] = ()
    needs_positions: bool = False
    undecided: str = ""


def judge(config: PreTrainedConfig) -> Verdict:
    """Whether :func:`enable` serves the models of a configuration.

    Raises:
        ConfigError: no model can be made of it.
    """
    model = _model_without_weights(config)
    name = type(model).__name__
    reasons = tuple(reasons_against(model))
    if reasons:
        return Verdict(name, reasons)
    needs_positions = positions_are_offset(model)
    try:
        _forward(model, needs_positions)
    except USPError as refusal:
        return Verdict(name, (str(refusal),))
    except Exception as error:  # whatever a model does that needs values
        return Verdict(name, (), needs_positions, f"{type(error).__name__}: {error}")
    return Verdict(name, (), needs_positions)


def _model_without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device: of the class that the configuration names, else a causal or
    masked language model, else the model without a head."""
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    makers = [getattr(transformers, name)._from_config for name in names]
    if not makers:
        autos = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel)
        makers = [auto.from_config for auto in autos if type(config) in auto._model_mapping]
    if not makers:
        raise ConfigError(f"transformers has no text model of type {config.model_type!r}")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = makers[0](config)
    except Exception as error:
        raise ConfigError(
            f"transformers makes no model of this configuration of type {config.model_type!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if hasattr(
        model, "set_experts_implementation"
    ):  # the others look at which tokens an expert has
        model.set_experts_implementation("batched_mm")
    return model


def _forward(model: PreTrainedModel, needs_positions: bool) -> None:
    """A forward pass, with labels where the model takes them."""
    ids = torch.zeros((1, _TOKENS), dtype=torch.long, device="meta")
    batch = {"input_ids": ids}
    if has_head(model):
        batch["labels"] = ids
    if needs_positions:  # their values are read; they only choose rows of an embedding here
        batch["position_ids"] = torch.arange(_TOKENS)[None]
    enabled = enable(model, SequenceMesh.single())
    with torch.no_grad(), enabled, _attention_without_values():
        model(**batch)


@contextmanager
def _attention_without_values() -> Iterator[None]:
    """``usp`` attention checks its arguments and returns an output without values."""
    AttentionInterface.register(IMPLEMENTATION, _check_only)
    try:
        yield
    finally:
        AttentionInterface.register(IMPLEMENTATION, usp_attention_forward)


def _check_only(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    usp: Shard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Shapes: as :func:`usp_attention_forward`, without its values."""
    known = {"scaling", "dropout", "softcap", "s_aux"}
    unknown = {name: x for name, x in others.items() if name not in known}
    check_call(module, attention_mask, is_causal, sliding_window, usp, unknown)
    return query.new_empty((*query.transpose(1, 2).shape[:3], value.shape[-1])), None
