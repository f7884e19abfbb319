"""``python -m ds_usp.integrations.transformers MODEL``: is a model served, and if not, why.

Decided from its configuration, without weights and without ranks: the model is made on the meta
device, where tensors have shapes but no values, enabled on a mesh of one rank, and called once with
an attention that checks its arguments and computes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
    check_version,
    has_head,
    positions_are_offset,
    reasons_against,
)
from ds_usp.integrations.transformers.text_model import has_towers, towers

SERVED, REFUSED, UNKNOWN = 0, 1, 2
_TOKENS = 16


@dataclass(frozen=True)
class Verdict:
    """Whether a model is served.

    Args:
        model: the name of its class.
        reasons: why it is refused; () if it is served.
        needs_positions: only batches with position_ids are served.
        others: what of a model with towers is served beside text; "" for one without.
        undecided: why the trial forward pass has ended, where it could not run without values.
    """

    model: str
    reasons: tuple[str, ...] = ()
    needs_positions: bool = False
    others: str = ""
    undecided: str = ""


def judge(config: PreTrainedConfig) -> Verdict:
    """Whether :func:`enable` serves the models of a configuration; ConfigError: there are none."""
    model = _model_without_weights(config)
    name = type(model).__name__
    reasons = tuple(reasons_against(model))
    if reasons:
        return Verdict(name, reasons)
    served = Verdict(name, (), positions_are_offset(model), _beside_text(model))
    try:
        _forward(model, served.needs_positions)
    except USPError as refusal:
        return Verdict(name, (str(refusal),))
    except Exception as error:  # whatever a model does that needs values
        return replace(served, undecided=f"{type(error).__name__}: {error}")
    return served


def _beside_text(model: PreTrainedModel) -> str:
    names = ", ".join(type(tower).__name__ for tower in towers(model))
    if has_towers(model):
        return (
            f"text; images and sounds: {names or 'what places them'} runs whole on every rank. The "
            "first forward pass with them is exact or refused; the table of model types says what "
            "was tried"
        )
    return f"text; images and sounds of {names} as inputs_embeds that hold them" if names else ""


def _model_without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device: of the class that the configuration names, else a causal or
    masked language model, one of images or sounds and text, else the model without a head."""
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    makers = [getattr(transformers, name)._from_config for name in names]
    if not makers:
        autos = (
            *(AutoModelForCausalLM, AutoModelForMaskedLM),
            *(AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModel),
        )
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
    if hasattr(model, "set_experts_implementation"):  # the others read which tokens an expert has
        model.set_experts_implementation("batched_mm")
    return model


def _forward(model: PreTrainedModel, needs_positions: bool) -> None:
    ids = torch.zeros((1, _TOKENS), dtype=torch.long, device="meta")
    batch = {"input_ids": ids}
    if has_head(model):
        batch["labels"] = ids
    if needs_positions:  # their values are read; they only choose rows of an embedding here
        batch["position_ids"] = torch.arange(_TOKENS)[None]
    with torch.no_grad(), enable(model, SequenceMesh.single()):
        # Attention checks its arguments and returns an output without values.
        AttentionInterface.register(IMPLEMENTATION, _check_only)
        try:
            model(**batch)
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
    known = {"scaling", "dropout", "softcap", "s_aux"}
    unknown = {name: x for name, x in others.items() if name not in known}
    check_call(module, attention_mask, is_causal, sliding_window, usp, unknown)
    return query.new_empty((*query.transpose(1, 2).shape[:3], value.shape[-1])), None


def main(argv: Sequence[str] | None = None) -> int:
    """Print whether a model is served.

    Args:
        argv: the arguments without the program's name; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ds_usp.integrations.transformers",
        description="Print whether enable() serves a model of transformers, and if not, why: from "
        "its configuration, on any machine, without its weights.",
        epilog="Exit codes: 0 served, 1 refused, 2 the configuration cannot be read.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a folder with config.json, that file, a model type (llama: its default "
        "configuration), or the name of a model on the Hugging Face Hub",
    )
    name = parser.parse_args(argv).model
    transformers.logging.set_verbosity_error()
    try:
        check_version()
        verdict = judge(_read_config(name))
    except USPError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNKNOWN
    print("\n".join(_report(verdict)))
    return REFUSED if verdict.reasons else SERVED


def _read_config(name: str) -> PreTrainedConfig:
    """A configuration from a folder, a file, the hub or a model type's defaults, or ConfigError."""
    try:
        if name in CONFIG_MAPPING and not Path(name).exists():
            return CONFIG_MAPPING[name]()
        _refuse_misspelled(name)
        return AutoConfig.from_pretrained(name)
    except ConfigError:
        raise
    except Exception as error:  # of the hub, of JSON, of the configuration's own checks
        first = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(
            f"no configuration {name!r}: {type(error).__name__}: {first}. Give a folder with "
            "config.json, a model type such as llama, or the name of a model on the hub"
        ) from error


def _refuse_misspelled(name: str) -> None:
    """ConfigError for a name that is nearly a model type and cannot be one on the hub, which would
    be asked for long. Old names there have no owner either: a type, a dash, a size."""
    if "/" in name or Path(name).exists() or any(name.startswith(f"{x}-") for x in CONFIG_MAPPING):
        return
    near = get_close_matches(name.lower(), CONFIG_MAPPING, n=3, cutoff=0.8)
    if near:
        raise ConfigError(f"no model type {name!r}: did you mean {' or '.join(near)}?")


def _report(verdict: Verdict) -> list[str]:
    title = f"{verdict.model} (transformers {transformers.__version__})"
    if verdict.reasons:
        return [f"{title}: refused", *(f"  {reason}" for reason in verdict.reasons)]
    lines = [f"{title}: served"]
    if verdict.others:
        lines.append(f"  {verdict.others}")
    if verdict.needs_positions:
        lines.append("  where position_ids are given: it does not count positions from 0")
    if verdict.undecided:
        first = verdict.undecided.strip().split("\n")[0]
        lines.append(f"  by its configuration; it does not run without weights ({first[:80]}), ")
        lines[-1] += "so its first forward pass may still refuse"
    return lines


if __name__ == "__main__":
    sys.exit(main())
