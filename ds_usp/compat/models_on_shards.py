"""Finds what a model of transformers computes, besides attention, from tokens of other ranks.

A trainer that shards the batch itself gives each rank's model that rank's tokens: but for attention
over the mesh, whatever looks at more than one token sees a shard of them.
``flash_attention_forward.py`` asks in each pass, ``verl.py`` when a model is made.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

from torch import nn

from ds_usp.attention.model_sources import counts_tokens, source_of_forward
from ds_usp.comm.readings import calling_code

ENABLE = (
    "Use ds_usp.integrations.transformers.enable in the place of the trainer's own sharding: it "
    "computes the model over all ranks"
)
_LARGEST = re.compile(r"max\(\s*position_ids|position_ids\.(max|amax)\(")
_SHIFT = re.compile(r"time_shift|token_shift|torch\.roll\(")


def calling_model() -> tuple[nn.Module | None, Mapping[str, Any]]:
    """The innermost model of transformers whose code calls, and the variables of that code."""
    for module, variables in calling_code():
        if any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
            return module, variables
    return None, {}


@dataclass(frozen=True)
class ShardLimits:
    """Says what of a model is not exact on shards, and from which length on.

    Attributes:
        reason: what is never exact; empty without.
        counted: classes of layers, and from how many tokens on they count their own.
        model: it, whose configuration a program may change between passes.
        rotary: where modules with a kind of RoPE are, each by its parent and name: a program may
            put another one there, or give it another kind.
    """

    reason: str
    counted: tuple[tuple[str, int], ...]
    model: weakref.ref[Any]
    rotary: tuple[tuple[weakref.ref[nn.Module], str], ...]

    @classmethod
    def of(cls, model: Any) -> ShardLimits:
        text = model.config.get_text_config()
        kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
        modules = list(model.modules())
        counted = {
            (type(x).__name__, getattr(x, "floor_scale", 0)) for x in modules if counts_tokens(x)
        }
        reason = next(_reasons(model, kinds, modules), "")
        rotary = tuple(
            (weakref.ref(parent), name)
            for parent in modules
            for name, child in parent.named_children()
            if hasattr(child, "rope_type")
        )
        return cls(reason, tuple(counted), weakref.ref(model), rotary)

    def reason_against(self, seq_len: int, largest: Callable[[], Sequence[int]]) -> str:
        """Why a whole sequence of so many tokens is not exact on shards; empty where it is.

        Args:
            largest: of each rank's positions, plus 1.
        """
        if self.reason:
            return self.reason
        text = cast(Any, self.model()).config.get_text_config()  # a layer of it calls
        chunk = getattr(text, "attention_chunk_size", None)
        kinds = getattr(text, "layer_types", None) or ("chunked_attention",)
        if chunk is not None and chunk < seq_len and "chunked_attention" in kinds:
            return (
                f"attention in chunks of {chunk} tokens (attention_chunk_size), which "
                f"transformers compares with the tokens of a rank; the sequence has {seq_len}"
            )
        for name, first in self.counted:
            if seq_len >= first:
                return f"{name} counts the tokens that it is given, which are a rank's, from 0 on"
        modules = (getattr(parent(), name, None) for parent, name in self.rotary)
        for kind, limit in set(_ropes(modules)):
            tops = largest()
            seen = {max(top, limit) if kind == "dynamic" else top > limit for top in tops}
            if len(seen) > 1:
                return (
                    f"its RoPE ({kind}) chooses frequencies by the largest position, above "
                    f"{limit} tokens others, and each rank would by its own, from {min(tops)} to "
                    f"{max(tops)} tokens"
                )
        return ""


def _reasons(model: Any, kinds: Sequence[str], modules: Sequence[nn.Module]) -> Iterator[str]:
    """Yield what of a model is never exact on shards; ``kinds``: its ``layer_types``, or none."""
    # refusals._reasons_against_states of transformers' models tells such layers in the same way.
    stateful = sorted({kind for kind in kinds if "attention" not in kind or "linear" in kind})
    convolved = {type(x) for x in modules if any(map(_is_convolution, x.children()))}
    if stateful or convolved or getattr(model, "_is_stateful", False):
        names = ", ".join(stateful or sorted(x.__name__ for x in convolved)) or "stateful"
        yield f"its layers ({names}) carry a state from token to token, which stays on a rank"
    if "position_ids" not in signature(type(model).forward).parameters:
        yield "it takes no position_ids, and each rank would count its tokens from 0"
    for kind in dict.fromkeys(map(type, modules)):
        source, name = source_of_forward(kind), kind.__name__
        if "indexer" in name.lower():
            yield f"{name} chooses the tokens that attention sees, of those of a rank"
        if _SHIFT.search(source):
            yield f"{name} shifts tokens, and a rank does not have the one before its first"
        if _LARGEST.search(source) and "rope_type" not in source:
            yield f"{name} computes from the largest position, and each rank would from its own"


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1


def _ropes(modules: Iterable[nn.Module | None]) -> Iterator[tuple[str, int]]:
    """The kinds that ``dynamic_rope_update`` of transformers computes anew, and their limits."""
    for module in modules:
        kinds: Any = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            config: Any = getattr(module, "config", None)
            if not isinstance(kind, str) or config is None:
                continue
            parameters = getattr(config, "rope_parameters", None) or {}
            parameters = parameters if layer is None else parameters.get(layer, {})
            limit: Any = getattr(config, "max_position_embeddings", None)
            if "dynamic" in kind:
                yield "dynamic", getattr(module, "original_max_seq_len", limit)
            elif kind == "longrope":
                original = getattr(config, "original_max_position_embeddings", None) or limit
                yield kind, parameters.get("original_max_position_embeddings", original)
