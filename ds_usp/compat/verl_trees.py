"""Samples with a common prefix, as a tree inside of verl's FSDP engines.

An engine packs a micro batch before it runs its model, and makes outputs of each sample after.
Between the two the samples are one: a tree, of which a prompt is computed once. Losses, metrics,
and what verl counts are of the samples. ``verl.py`` calls ``change_engine``; nothing communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.masks import MaskSpec
from ds_usp.training.prefix_tree import SharedPrefixes

_TREE: Final = "_ds_usp_tree"  # attribute of an engine: the micro batch that runs


# verl compares each output with the token behind it, and drops the last one of each sample. In a
# tree of SharedPrefixes, depth first, that is the next token too: a shared segment ends one token
# before its samples part, and is followed by a branch that begins with this token.
@dataclass(frozen=True)
class _SamplesAsTree:
    """A micro batch whose samples share prefixes, as one sample.

    Args:
        shared: where the tokens are.
        batch: verl's batch of the tree.
        index: of each token of the samples the token of the tree that stands for it.
        offsets: where samples begin and end among all of their tokens.
    """

    shared: SharedPrefixes
    batch: Any
    index: Tensor
    offsets: Tensor

    @classmethod
    def read(cls, samples: Any) -> _SamplesAsTree | None:
        """The tree of a micro batch, a TensorDict; None where no samples share a prefix.

        Raises:
            ConfigError, UnsupportedAttentionError: options of verl that a tree does not go with.
        """
        verl = import_module("verl.utils.tensordict_utils")
        plain = import_module("tensordict").NonTensorData
        names = [name for name in list(samples.keys()) if isinstance(samples.get(name), plain)]
        others = {name: verl.get_non_tensor_data(samples, name, None) for name in names}
        if not others.get("use_remove_padding", True):
            raise ConfigError("share_prefixes: set model.use_remove_padding=True")
        if others.get("distillation_use_topk"):
            raise UnsupportedAttentionError(
                "share_prefixes: a teacher's top-k is of packed samples, and not of a tree: leave "
                "share_prefixes out of the student's engine"
            )
        temperature = samples["temperature"]
        if isinstance(temperature, Tensor) and bool((temperature != temperature[0]).any()):
            raise UnsupportedAttentionError(
                "share_prefixes: samples of one micro batch have several temperatures, and a token "
                "that they share has one: leave share_prefixes out"
            )
        ids = samples["input_ids"]  # jagged, as positions: of one kind, verl.py refuses others
        rows, positions = (
            [row.cpu() for row in x.unbind()] for x in (ids, samples["position_ids"])
        )
        shared = SharedPrefixes.of(rows, [int(x[0]) for x in positions])
        if shared.tokens == shared.row_tokens:
            return None
        fields = {"input_ids": rows, "position_ids": positions}
        tokens = {name: shared.gather_from(x).to(ids.device) for name, x in fields.items()}
        nested = {
            name: torch.nested.as_nested_tensor([x], layout=torch.jagged)
            for name, x in tokens.items()
        }
        if isinstance(temperature, Tensor):
            nested["temperature"] = temperature[:1]
        batch = type(samples)(nested, batch_size=[1])
        verl.assign_non_tensor(batch, **others)
        return cls(shared, batch, torch.cat(shared.places).to(ids.device), ids.offsets())

    def mask(self, padding: int) -> MaskSpec:
        """Return what the tokens see, with so many more of padding behind them."""
        end = self.shared.tokens
        rest = [(end, end + padding, -1)] if padding else []
        return MaskSpec.tree([*self.shared.segments, *rest])

    def of_samples(self, x: Tensor) -> Tensor:
        """Values of the tree's tokens as those of the samples'; their gradients are summed."""
        return torch.nested.nested_tensor_from_jagged(x.values()[self.index], self.offsets)


def change_engine(module: ModuleType, attention_of: Callable[[Any], Any]) -> None:
    """Let verl's engines run micro batches as trees.

    Args:
        attention_of: returns an engine's attention, of ``flash_attention_forward.py``, which gets
            the trees; None for an engine whose samples stay as they are.
    """
    actor = module.FSDPEngineWithLMHead
    prepare = actor.prepare_model_inputs

    @wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        attention = attention_of(self)
        tree = None if attention is None else _SamplesAsTree.read(micro_batch)
        setattr(self, _TREE, tree)
        if attention is not None:
            attention.tree = None
        if tree is None:
            return prepare(self, micro_batch)
        inputs, output_args = prepare(self, tree.batch)
        attention.tree = tree.mask(output_args["pad_size"])
        return inputs, output_args

    actor.prepare_model_inputs = prepare_model_inputs
    for engine in (actor, module.FSDPEngineWithValueHead):  # which inherits actor's inputs
        engine.prepare_model_outputs = _outputs_of_samples(engine.prepare_model_outputs)


def _outputs_of_samples(prepare: Any) -> Any:
    """Wrap an engine's ``prepare_model_outputs``: outputs of a tree become those of its samples."""

    @wraps(prepare)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        tree = getattr(self, _TREE, None)
        batch = micro_batch if tree is None else tree.batch
        results = prepare(self, output, output_args, batch, logits_processor_func)
        return results if tree is None else {x: tree.of_samples(y) for x, y in results.items()}

    return prepare_model_outputs
