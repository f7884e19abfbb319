"""Refuses what is not served: models, before their first forward pass, and their arguments.
``enable`` checks models, ``EnabledModel._before`` batches, on every rank, and both tell the others
of an error; nothing here communicates."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)

from ds_usp.attention.model_sources import counts_tokens, source_of_forward
from ds_usp.errors import ConfigError, DataError, LayoutError, UnsupportedAttentionError
from ds_usp.integrations.transformers.decoders import (
    counts_positions,
    gathered_layers,
    reason_against_attention,
)
from ds_usp.integrations.transformers.memory import Options
from ds_usp.integrations.transformers.recurrent_functions import (
    BESIDE,
    NOT_SERVED,
    RECURRENT_KINDS,
    SERVED,
    WITHOUT_ATTENTION,
)
from ds_usp.integrations.transformers.recurrent_layers import (
    is_of_transformers,
    reason_against_layer,
    recurrent_layers,
)
from ds_usp.integrations.transformers.sparse_layers import SPARSE_KINDS, sparse_layers
from ds_usp.integrations.transformers.sparse_layers import (
    reason_against_layer as reason_against_sparse_layer,
)
from ds_usp.integrations.transformers.text_model import text_model, text_modules, without_towers
from ds_usp.integrations.transformers.whole_arguments import (
    AUTO_LAYOUT,
    PACKING,
    TOKEN_DIM,
    WholeArguments,
    holds_tensor,
)
from ds_usp.integrations.transformers.whole_batch_loss import SUMS_OVER_TOKENS
from ds_usp.kernels.registry import AUTO
from ds_usp.training.whole_batch import IGNORE_INDEX, LOSS_WEIGHTS

OLDEST, BEFORE = "5.5", "6"
OLDEST_WITH_STATES = "5.23"  # earlier layers call other functions
TRL_FUSED_HEAD = "fused_lm_head"  # TRL's argument: log-probabilities instead of logits

# Tensors that a model may be given; others may hold tokens of the whole sequence.
_ARGUMENTS = frozenset({*TOKEN_DIM, *PACKING, "attention_mask", "num_items_in_batch"})
# Flags that ask for something that a shard does not have, and what to do instead.
_FLAGS = MappingProxyType(
    {
        "use_cache": "there is no KV cache over a mesh: leave use_cache and past_key_values out; "
        "to generate, call generate before enable or after disable()",
        "output_attentions": "weights of tokens x tokens are never made; use one rank for them",
        "logits_to_keep": "a shard has other last tokens than the sequence; leave it out",
    }
)


def check_version() -> None:
    """ConfigError for a transformers whose mask functions were never tested."""
    version = Version(transformers.__version__)
    if not Version(OLDEST) <= version < Version(BEFORE):
        raise ConfigError(
            f"transformers {version} is not served: install transformers>={OLDEST},<{BEFORE}"
        )


def find_model(model: Any) -> PreTrainedModel:
    """The transformers model itself: what was given, or what PEFT has wrapped.

    Raises:
        ConfigError: another module, or one that something else has wrapped already.
        UnsupportedAttentionError: PEFT's prompt learning, which adds tokens.
    """
    inner: nn.Module = model
    if hasattr(model, "peft_config"):
        if any(getattr(c, "is_prompt_learning", False) for c in _configs(model)):
            raise UnsupportedAttentionError(
                "PEFT's prompt learning adds virtual tokens to every sequence, which is not "
                "served; LoRA and other adapters of weights are"
            )
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        if any(kind.__module__.startswith("diffusers.") for kind in type(inner).__mro__):
            raise ConfigError(
                f"{type(inner).__name__} is a model of diffusers: give it to "
                "ds_usp.integrations.diffusers.enable"
            )
        raise ConfigError(
            f"{type(model).__name__} is no transformers model (PreTrainedModel) and no PEFT model "
            "around one. Enable the model before DistributedDataParallel, deepspeed.initialize or "
            "torch.compile wraps it"
        )
    return inner


def _configs(model: Any) -> list[Any]:
    config = model.peft_config
    return list(config.values()) if isinstance(config, Mapping) else [config]


def find_head(model: PreTrainedModel) -> nn.Module:
    """The output embeddings, which make logits.

    Raises:
        ConfigError: the model has none, computes no loss, or the head has hooks.
    """
    head = model.get_output_embeddings()
    if head is None or not has_head(model):
        raise ConfigError(
            f"loss_chunks: {type(model).__name__} has no output embeddings and loss of its own; "
            "leave loss_chunks out"
        )
    if head._forward_hooks or head._forward_pre_hooks:
        raise ConfigError(
            f"loss_chunks: the output embeddings of {type(model).__name__} have forward hooks, "
            "which would see the loss instead of logits; remove them, or leave loss_chunks out"
        )
    return head


def check_model(model: PreTrainedModel) -> None:
    """UnsupportedAttentionError for a model that a shard of the tokens would compute wrongly."""
    for reason in reasons_against(model):
        raise UnsupportedAttentionError(f"{type(model).__name__}: {reason}")


def reasons_against(model: PreTrainedModel) -> Iterator[str]:
    """Why a model is not served, one by one; nothing where it is. It may be on the meta device."""
    text = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        yield "encoder-decoder models have two sequences, and only one is sharded"
    yield from _reasons_against_states(model)
    yield from filter(None, map(reason_against_sparse_layer, sparse_layers(model)))
    if counts_positions(model) and text.model_type not in WITHOUT_ATTENTION:
        yield "it takes no position_ids: each rank would count its tokens from 0"
    # Sparse layers are given positions, and their indexers the keys of all tokens.
    sparse = {module for layer in sparse_layers(model) for module in layer.modules()}
    for module in text_modules(model):
        if module not in sparse and counts_tokens(module):
            yield (
                f"{type(module).__name__} counts the tokens that it is given instead of reading "
                "their positions, and a rank has some of them (Llama 4: config."
                "attn_temperature_tuning=False is the same for fewer than floor_scale tokens)"
            )
            break
    if any(getattr(module, "trigram_input", False) for module in text_modules(model)):
        yield (
            "it embeds each token with its neighbors (config.trigram_input), which another rank "
            "may have: make it with trigram_input=False"
        )
    if not (text_model(model)._supports_attention_backend or text.model_type in SERVED):
        yield from filter(None, [reason_against_attention(model)])
    if getattr(model.config, "output_attentions", False):
        yield "config.output_attentions: " + _FLAGS["output_attentions"]
    if getattr(model.config, "return_dict", True) is False:
        yield "config.return_dict is False, and ds_usp takes outputs by their names: set it to True"
    if needs_whole_head(model) and text_model(model) is model:
        yield (
            f"its loss ({_name_of_loss(model)}) is not known to be a sum over tokens, and it is no "
            "head around a model whose outputs could be joined before it"
        )


def _reasons_against_states(model: PreTrainedModel) -> Iterator[str]:
    """Why layers that carry a state from token to token are not served; nothing without any."""
    text = model.config.get_text_config()
    layer_types = list(getattr(text, "layer_types", None) or ())
    kinds = {kind for kind in layer_types if "attention" not in kind or "linear" in kind}
    if any(sparse_layers(model)):
        kinds -= SPARSE_KINDS
    layers = list(recurrent_layers(model))
    listed = text.model_type in NOT_SERVED
    # What compresses keys has a state in a KV cache alone.
    stateful = getattr(model, "_is_stateful", False) and not any(sparse_layers(model))
    if not (kinds or layers or listed or stateful):
        return
    names = ", ".join(sorted(kinds)) or "stateful"
    states = f"its layers ({names}) carry a state from token to token"
    if text.model_type not in SERVED:
        why = NOT_SERVED.get(text.model_type, "they are not known here")
        yield f"{states}, and those of model type {text.model_type} are not served: {why}"
        return
    if Version(transformers.__version__) < Version(OLDEST_WITH_STATES):
        yield (
            f"{states}: such layers are served with transformers>={OLDEST_WITH_STATES}, and this "
            f"is {transformers.__version__}"
        )
        return
    # A checkpoint's own code (trust_remote_code) may have other layers under the same name.
    classes, config_classes = type(text_model(model)).__mro__, type(text).__mro__
    folders = {x.__module__.rpartition(".")[0] for x in classes if is_of_transformers(x)}
    if folders.isdisjoint(x.__module__.rpartition(".")[0] for x in config_classes):
        yield (
            f"{states}: {type(text_model(model)).__name__} is not transformers' own model of the "
            f"type {text.model_type}: load it without trust_remote_code"
        )
        return
    count = sum(kind in RECURRENT_KINDS for kind in layer_types)
    num_layers = sum(type(layer).__name__ not in BESIDE for layer in layers)
    if count != num_layers:
        yield (
            f"{states}: the configuration names {count} of them, and {num_layers} call functions "
            "that are known here"
        )
    for why in filter(None, map(reason_against_layer, layers)):
        yield f"{states}: {why}"
        return


# What holds a layer's attention, and no norm, gate or dropout beside it.
_ATTENTION = re.compile(r"(?!.*(norm|drop|ln))\w*(attn|attention)")


def replaced_attention(model: PreTrainedModel) -> dict[str, frozenset[str]]:
    """Find modules in the place of a layer's attention that are not transformers' or torch's: by
    class name, the classes of what is in each, one of which must call the attention interface."""
    names: dict[str, frozenset[str]] = {}
    for layer in text_modules(model):
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for name, part in layer.named_children():
            kind, bases = type(part), type(part).__mro__
            known = kind.__module__.startswith("torch.") or any(map(is_of_transformers, bases))
            if _ATTENTION.match(name) and not known:
                names[kind.__name__] = frozenset(type(module).__name__ for module in part.modules())
    return names


def layout_of_states(model: PreTrainedModel, options: Options) -> str:
    """The layout of a model whose layers may hand states from token to token, or pick keys.

    Raises:
        LayoutError: one in which no rank has consecutive tokens.
    """
    reason = "carries a state from token to token" if any(recurrent_layers(model)) else ""
    reason = "picks keys by an indexer" if any(sparse_layers(model)) else reason
    if options.layout == "striped" and reason:
        raise LayoutError(
            f"{type(model).__name__} {reason}, and layout='striped' gives each rank tokens that "
            "are not consecutive: use contiguous, zigzag, balanced or auto"
        )
    # Without attention there is no work to balance, and one piece a rank sends fewest states.
    without = model.config.get_text_config().model_type in WITHOUT_ATTENTION
    return "contiguous" if without and options.layout == AUTO_LAYOUT else options.layout


def check_documents(model: PreTrainedModel, batch: WholeArguments) -> None:
    """DataError for documents of which RG-LRU layers would not see the beginning: they forget where
    a position is 0, and nowhere else."""
    positions, mask = (batch.arguments.get(x) for x in ("position_ids", "attention_mask"))
    counted = None if positions is None else positions.tolist()
    documents = batch.documents or ((0, batch.seq_len),) * batch.size
    parents = batch.packing.parents or [(-1,) * len(borders) for borders in documents]
    for row, (borders, row_parents) in enumerate(zip(documents, parents, strict=True)):
        for start, parent in zip(borders[:-1], row_parents, strict=False):
            if parent >= 0 or (mask is not None and not mask[row, start]):  # a branch, padding
                continue
            first = start if counted is None else counted[row % len(counted)][start]
            if first:
                raise DataError(
                    f"{type(model).__name__} forgets what came before where position_ids are 0, "
                    f"and a document of row {row} begins at token {start} with position {first}: "
                    "give position_ids that begin at 0 with each document, or pad on the right"
                )


def check_layerdrop(trunk: PreTrainedModel, batch: WholeArguments) -> None:
    """UnsupportedAttentionError where ranks would leave out different layers of a text model."""
    # Of the modules, not of the configuration, where some call it decoder_layerdrop. The CPU's
    # generator chooses layers: of tokens on CPUs it is each rank's own, else it has to be equal.
    layerdrop = max(getattr(module, "layerdrop", None) or 0.0 for module in trunk.modules())
    if layerdrop and trunk.training and next(iter(batch.tensors.values())).device.type == "cpu":
        raise UnsupportedAttentionError(
            f"{type(trunk).__name__} leaves out layers at random in training (layerdrop or "
            f"decoder_layerdrop={layerdrop}), and ranks on CPUs would leave out different ones: "
            "make the model with 0, or train on GPUs"
        )


# Settings of PEFT by which an adapter drops parts of a weight, drawn from the CPU's generator: on
# CPUs that is each rank's own. All other dropouts of adapters are torch's, of tokens.
_DROPS_ON_CPU: Mapping[str, Sequence[str]] = {
    "LOHA": ("module_dropout", "rank_dropout"),
    "LOKR": ("module_dropout", "rank_dropout"),
    "BOFT": ("boft_dropout",),
}
# Settings by which it samples weights where the tokens are, or draws for tokens by its own seed.
_DRAWS: Mapping[str, tuple[str, str]] = {
    "LORA": ("monteclora_config", "ranks would sample other weights of it: make it without"),
    "PVERA": ("generator_seed", "ranks would draw the same for other tokens: make it without"),
}
_DROPPED = "ranks on CPUs would drop other parts of it: make it with that at 0, or train on GPUs"


def check_adapters(model: PreTrainedModel, batch: WholeArguments) -> None:
    """UnsupportedAttentionError where ranks would drop other parts of an adapter, or sample other
    weights of it; or draw one noise for all shards. PEFT sets ``peft_config`` of what it wraps."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    on_cpu = next(iter(batch.tensors.values())).device.type == "cpu"
    for name, config in configs.items():
        kind = getattr(config, "peft_type", "")
        drops = [x for x in _DROPS_ON_CPU.get(kind, ()) if on_cpu and getattr(config, x, False)]
        drawn, reason = (drops[0], _DROPPED) if drops else _DRAWS.get(kind, ("", ""))
        if getattr(config, drawn, None) is not None and _trains_with(model, name):
            raise UnsupportedAttentionError(
                f"the {config.peft_type.value} adapter {name!r} draws random numbers in training "
                f"({drawn}), and {reason}"
            )


def _trains_with(model: PreTrainedModel, adapter: str) -> bool:
    layers: Iterator[Any] = (x for x in without_towers(model) if hasattr(x, "_disable_adapters"))
    return any(
        x.training and not x.disable_adapters and adapter in x.active_adapters for x in layers
    )


def check_query_chunks(model: PreTrainedModel, options: Options) -> None:
    """ConfigError for ``query_chunks`` where no layer would compute its queries in chunks."""
    if options.query_chunks in (AUTO, 1) or any(sparse_layers(model)):
        return
    if not gathered_layers(model):
        raise ConfigError(
            f"query_chunks={options.query_chunks}: {type(model).__name__} has no layers whose "
            "indexer picks the keys, or that compute attention themselves: leave query_chunks out"
        )


def check_tree(model: PreTrainedModel, at_text: bool, routers: bool) -> None:
    """UnsupportedAttentionError where a tree of shared prefixes would give other numbers than a row
    for each of its branches.

    Args:
        at_text: the model is given whole arguments, and its text model shards.
        routers: a loss of routers is asked for of a tree that is given.
    """
    reason = ""
    if any(sparse_layers(model)):
        reason = "picks keys by an indexer, which is tried with documents and not with trees"
    elif gathered_layers(model):
        reason = "computes attention itself, by masks that know documents and not trees"
    elif at_text:
        reason = (
            "is given more than tokens, or has a head that reads single tokens of a row, and a "
            "tree's row has the tokens of many"
        )
    elif routers:
        reason = (
            "has a loss of its routers (output_router_logits), which counts the tokens of each "
            "row, and a tree does not say how many have a prefix"
        )
    if reason:
        others = " and share_prefixes"
        if routers:
            others = " (share_prefixes counts them), or leave output_router_logits out"
        raise UnsupportedAttentionError(
            f"{type(model).__name__} {reason}: give each answer with its prompt as a row of its "
            f"own, without tree{others}"
        )


def _check_loss_weights(arguments: Mapping[str, Any], has_loss: bool) -> None:
    """DataError for loss_weights that nothing is multiplied by, whose sum the loss is not divided
    by, or that are no numbers."""
    weights = arguments.get(LOSS_WEIGHTS)
    if not isinstance(weights, Tensor):
        return
    if not has_loss:
        raise DataError(
            f"{LOSS_WEIGHTS} {list(weights.shape)} weigh the losses of tokens, and the loss is the "
            "model's own of whole rows, or none: leave them out, and weigh in a loss of your own "
            "what you compute of out.logits"
        )
    labeled = any(arguments.get(x) is not None for x in ("labels", "shift_labels"))
    if not labeled or arguments.get(TRL_FUSED_HEAD):
        raise DataError(
            f"{LOSS_WEIGHTS} {list(weights.shape)} weigh the losses of tokens, and this pass "
            f"{'returns log-probabilities' if labeled else 'has no labels'}: leave them out, and "
            "weigh what you compute of its outputs"
        )
    # A Trainer that is not attached counts labels.
    count = torch.as_tensor(arguments.get("num_items_in_batch", 1.0))
    if not count.is_floating_point():
        raise DataError(
            f"num_items_in_batch={int(count)} is a number of labels, and losses with "
            f"{LOSS_WEIGHTS} are divided by the sum of the weights: give that as a float, leave it "
            "out, or attach(trainer, mesh)"
        )
    if weights.dtype in (torch.float16, torch.bfloat16):
        raise DataError(
            f"{LOSS_WEIGHTS} arrive in {weights.dtype}, rounded to 3 digits and fewer: give fp32 "
            "or whole numbers, and of FSDP2 MixedPrecisionPolicy(cast_forward_inputs=False)"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise DataError(
            f"{LOSS_WEIGHTS} must be finite and 0 or more: what a token's loss is times"
        )


def check_loss(model: PreTrainedModel) -> None:
    """UnsupportedAttentionError for a model that computes its loss without ``loss_function``, which
    has the whole batch's labels (heads of Gemma 3 and Llama 4 before 5.17)."""
    kind: Any = type(model)
    source = source_of_forward(kind)
    if "CrossEntropyLoss(" in source and "loss_function(" not in source:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} of transformers {transformers.__version__} computes its loss "
            "in its own way: leave labels out and compute the loss from logits (logits='whole'), "
            "or use a model whose loss is model.loss_function"
        )


def needs_whole_head(model: PreTrainedModel) -> bool:
    """Whether head and loss are computed of whole sequences on every rank: the loss is no sum over
    tokens, as those of heads for classification and rewards."""
    parameters = inspect.signature(model.forward).parameters
    takes_targets = "labels" in parameters or "start_positions" in parameters
    return takes_targets and model.loss_function not in SUMS_OVER_TOKENS


def check_whole_head(model: PreTrainedModel, options: Options) -> None:
    """ConfigError for options that a head of whole sequences cannot have."""
    loss = f"its loss ({_name_of_loss(model)}) is not known to be a sum over tokens"
    name = f"{type(model).__name__}: {loss}"
    if options.loss_chunks:
        raise ConfigError(f"{name}: leave loss_chunks={options.loss_chunks} out")
    if options.gradients != "mean":
        raise ConfigError(
            f"{name}, so each rank computes its head and its loss of whole sequences, and "
            f"gradients={options.gradients!r} would count the head's once for each rank: leave it "
            "out, and let the engine average gradients over all ranks"
        )
    if options.logits == "shard":
        raise ConfigError(f"{name}, so outputs are of whole sequences: leave logits='shard' out")
    if model.get_output_embeddings() is not None and options.logits != "whole":
        raise ConfigError(
            f"{name}. enable(..., logits='whole') computes head and loss of whole sequences on "
            "every rank, and its logits take tokens x vocabulary there; or keep the model's own "
            "loss, which is computed of shards"
        )


def check_padding(model: PreTrainedModel, batch: WholeArguments, labels: Any) -> None:
    """DataError for padding that a head of whole rows would read, or that has ``labels`` of it."""
    mask = batch.arguments.get("attention_mask")
    if mask is None or not batch.documents:
        return
    if isinstance(labels, Tensor) and tuple(labels.shape) == (batch.size, batch.seq_len):
        batch.check_targets(labels)
    name = type(model).__name__
    if "start_positions" in inspect.signature(model.forward).parameters:
        raise DataError(
            f"{name} compares all tokens of a row, padding too: give rows without padding, as one "
            "row in a batch, and leave attention_mask out"
        )
    if "SequenceClassification" not in name:
        return
    if batch.left_padded and not isinstance(model, GenericForSequenceClassification):
        raise DataError(
            f"{name} may score the first token of a row, and the batch is padded on the left: pad "
            "on the right (tokenizer.padding_side='right')"
        )
    ids, pad = batch.arguments.get("input_ids"), model.config.get_text_config().pad_token_id
    scored = torch.full((batch.size,), batch.seq_len - 1, device=mask.device)
    if ids is not None and pad is not None:  # the last that is no padding, as the model chooses it
        index = torch.arange(batch.seq_len, device=ids.device)
        scored = (index * (ids != pad)).argmax(1).to(mask.device)
    rows = (mask.gather(1, scored[:, None]) == 0).flatten().nonzero().flatten().tolist()
    if rows:
        raise DataError(
            f"{name} scores the last token of a row that is not config.pad_token_id={pad}, and in "
            f"rows {rows[:8]} that token is padding: set config.pad_token_id to the tokenizer's, "
            "or pad on the left (tokenizer.padding_side='left')"
        )


def _name_of_loss(model: PreTrainedModel) -> str:
    return getattr(model.loss_function, "__name__", repr(model.loss_function))


def positional_arguments(model: nn.Module, inner: PreTrainedModel) -> tuple[str, ...]:
    """The names of a forward pass's arguments, in order: PEFT's models have an order of their own,
    or hand on what they are given."""
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in parameters.values())
    return tuple(inspect.signature(inner.forward).parameters if hands_on else parameters)


def has_head(model: PreTrainedModel) -> bool:
    """Whether a model takes labels."""
    return "labels" in inspect.signature(model.forward).parameters


def positions_are_offset(model: PreTrainedModel) -> bool:
    """Whether positions do not begin at 0 where none are given (RoBERTa's begin after padding)."""
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in text_modules(model))


def positions_follow_padding(modules: Iterable[nn.Module]) -> bool:
    """Whether a class of some modules counts positions from the first real token, so that in a row
    padded on the left they are not the tokens' indices."""
    classes = {kind for module in modules for kind in type(module).__mro__}
    return any(map(_counts_from_mask, filter(_is_of_a_model, classes)))


def _is_of_a_model(kind: type) -> bool:
    """Whether a class is a model's own, and none of what all models have in common."""
    name = kind.__module__
    is_common = name.startswith(("builtins", "torch", "transformers."))
    return name.startswith("transformers.models.") or not is_common


@lru_cache(maxsize=1024)
def _counts_from_mask(kind: type) -> bool:
    pattern = re.compile(r"mask\S*\.cumsum|cumsum\(\w*mask|mask\.long\(\)\.cumsum")
    try:
        # To find a class in its file Python before 3.13 parses all of it, which takes 0.1 s.
        if not pattern.search(inspect.getsource(sys.modules[kind.__module__])):
            return False
        return pattern.search(inspect.getsource(kind)) is not None
    except (KeyError, OSError, TypeError):  # made at run time, of others that are asked too
        return False


def others_than_tokens(arguments: Mapping[str, Any]) -> list[str]:
    """The names of arguments with tensors that are not known to have a value for each token."""
    return [name for name, x in arguments.items() if name not in _ARGUMENTS and holds_tensor(x)]


def check_arguments(arguments: Mapping[str, Any], takes_others: bool, has_loss: bool) -> None:
    """UnsupportedAttentionError for arguments of a forward pass that a shard cannot serve.

    Args:
        takes_others: the text model is another one than the model, which is given whole tensors.
        has_loss: the loss is summed over shards here, and not the model's own of whole rows.
    """
    for name in ("past_key_values", "cache_params"):
        if arguments.get(name) is not None:
            raise UnsupportedAttentionError(f"{name}: {_FLAGS['use_cache']}")
    for name, advice in _FLAGS.items():
        value = arguments.get(name)
        if value is not None and not isinstance(value, Tensor) and value:
            raise UnsupportedAttentionError(f"{name}={value!r}: {advice}")
    if arguments.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise UnsupportedAttentionError(
            f"ignore_index={arguments['ignore_index']!r}: labels that do not count are "
            f"{IGNORE_INDEX}; leave ignore_index out"
        )
    _check_loss_weights(arguments, has_loss)
    if arguments.get("return_dict") is False:
        raise UnsupportedAttentionError(
            "return_dict=False, and ds_usp takes outputs by their names: leave it out"
        )
    for name in others_than_tokens(arguments) if not takes_others else ():
        raise UnsupportedAttentionError(
            f"{name}: a tensor that is not known here. Tokens are sharded over the ranks; "
            "images, audio and other inputs that are placed by the whole sequence are not "
            "served by this model, which has no text model of its own that takes embeddings. Give "
            "inputs_embeds that hold them already"
        )


def check_generate(model: PreTrainedModel) -> None:
    """UnsupportedAttentionError for generation with gradients enabled, on this rank alone: no
    gradient goes through the model as it was, which generates."""
    if torch.is_grad_enabled():
        raise UnsupportedAttentionError(
            f"{type(model).__name__}.generate: a new token's forward pass is too short to be "
            "sharded, and there is no KV cache over a mesh: call generate before enable or after "
            "disable(), or on every rank of the mesh in torch.no_grad() or in enabled.paused(), "
            "where each runs the model as it was"
        )
