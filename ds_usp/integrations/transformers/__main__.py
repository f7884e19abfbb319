"""``python -m ds_usp.integrations.transformers MODEL``: is a model served, and if not, why. It runs
once without weights, ranks and attention."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental import _config as meta_config
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import UnsupportedAttentionError, USPError
from ds_usp.integrations.transformers import attention, refusals
from ds_usp.integrations.transformers.model import enable


def judge(config: PreTrainedConfig) -> tuple[PreTrainedModel, list[str], str]:
    """Make a model of a configuration on ``meta`` and try one forward pass. Returns the model, why
    it is refused, [] if it is served, and what makes that uncertain: the error of a pass that needs
    values, else ""."""
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    makers = [getattr(transformers, name)._from_config for name in names]
    for head in ("ForCausalLM", "ForMaskedLM", "ForImageTextToText", "ForMultimodalLM", ""):
        auto = getattr(transformers, f"AutoModel{head}")
        makers += [auto.from_config] if type(config) in auto._model_mapping else []
    with torch.device("meta"):  # where tensors have shapes but no values
        model: PreTrainedModel = makers[0](config)
    if hasattr(model, "set_experts_implementation"):  # the others read which tokens an expert has
        model.set_experts_implementation("batched_mm")
    if reasons := list(refusals.reasons_against(model)):
        return model, reasons, ""
    ids = torch.zeros((1, 16), dtype=torch.long, device="meta")
    batch = {"input_ids": ids}
    batch |= {"labels": ids} if refusals.has_head(model) and not _own_loss(model) else {}
    if refusals.positions_are_offset(model):
        batch["position_ids"] = torch.arange(16)[None]
    # What counts true values (routers, indexers) takes all for true.
    counts = cast(Any, meta_config).patch(meta_nonzero_assume_all_nonzero=True)
    try:
        with torch.no_grad(), counts, enable(model, SequenceMesh.single()):
            AttentionInterface.register(attention.IMPLEMENTATION, _check)
            model(**batch)
    except USPError as refusal:
        return model, [str(refusal)], ""
    except Exception as error:  # whatever a model does that needs values
        return model, [], f"{type(error).__name__}: {error}".split("\n")[0]
    finally:
        AttentionInterface.register(attention.IMPLEMENTATION, attention.usp_attention_forward)
    return model, [], ""


def _own_loss(model: PreTrainedModel) -> str:
    """Why labels are refused beside logits that are served; nothing where they are not."""
    try:
        refusals.check_loss(model)
    except UnsupportedAttentionError as refusal:
        return str(refusal)
    return ""


def _check(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **call: Any
) -> tuple[Tensor, None]:
    """Check a call of :func:`usp_attention_forward`, and return an empty output in its place."""
    causal, window, usp = (call.get(x) for x in ("is_causal", "sliding_window", "usp"))
    parameters = inspect.signature(attention.usp_attention_forward).parameters
    others = {x: y for x, y in call.items() if x not in parameters}
    usp = attention.PASS.get() if usp is None else usp
    attention.check_call(module, attention_mask, causal, window, usp, others)
    return query.new_empty((*query.transpose(1, 2).shape[:3], value.shape[-1])), None


def main(argv: list[str] | None = None) -> int:
    """Print whether a model is served: 0, refused: 1, or no configuration of that name: 2."""
    parser = argparse.ArgumentParser(prog="python -m ds_usp.integrations.transformers")
    parser.add_argument("model", help="a folder, a model type, or a name on the hub")
    name = parser.parse_args(argv).model
    try:
        refusals.check_version()
        config = CONFIG_MAPPING[name]() if name in CONFIG_MAPPING else None
        model, reasons, doubt = judge(config or AutoConfig.from_pretrained(name))
    except Exception as error:  # of the hub, of JSON, of a model that cannot be made
        print(f"error: {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    condition = ", where position_ids are given" if refusals.positions_are_offset(model) else ""
    title = f"{type(model).__name__} (transformers {transformers.__version__})"
    lines = [f"{title}: {'refused' if reasons else f'served{condition}'}"]
    lines += [x for x in [_own_loss(model)] if x and not reasons]
    lines += [f"or refused by its first forward pass, which has failed here: {doubt}"] * bool(doubt)
    print("\n  ".join([*lines, *reasons]))
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
