"""The text model inside of a model: the part whose tokens are sharded, and what runs whole.

Towers for images and sounds, projectors, draft models and heads other than output embeddings are
given whole inputs, or none: what ``enable`` changes of modules and configurations is changed in
the text model only, whose modules all files find here. Nothing here communicates.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from ds_usp.errors import DataError, UnsupportedAttentionError
from ds_usp.integrations.transformers.whole_arguments import WholeArguments


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
    outside = dict.fromkeys(_without_towers(model, model))
    children = dict.fromkeys(child for module in outside for child in module.children())
    return [x for x in _models(children) if x not in outside]


def _without_towers(module: nn.Module, model: PreTrainedModel) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, PreTrainedModel) or any(
            isinstance(x, PreTrainedModel) and _is_text(x, model) for x in child.modules()
        ):
            yield from _without_towers(child, model)


# By the class of the configuration and not by the object, which some models copy, and users may.
def _is_text(module: PreTrainedModel, model: PreTrainedModel) -> bool:
    return type(module.config) is type(model.config.get_text_config())


class ReplacedImplementation:
    """The attention implementation of the text model, set to another one until :meth:`restore`.

    The configurations around the text model's are set too, as masks are made from either; those of
    towers keep their own.
    """

    def __init__(self, model: PreTrainedModel, implementation: str) -> None:
        everything = {id(c): c for c in _configs(model.config)}
        everything |= {id(m.config): m.config for m in _models(model.modules())}
        self._before = [(c, c._attn_implementation) for c in everything.values()]
        text_configs = {id(model.config.get_text_config())}
        text_configs |= {id(m.config) for m in _models(_without_towers(model, model))}
        # By transformers' own rules, which know what a model can set. Then back again in towers,
        # and set where a rule about source code left the text model (ModernBERT of 5.6): a model
        # whose layers do not read it is refused after its first pass.
        model.set_attn_implementation(implementation)
        for config, before in self._before:
            value = implementation if id(config) in text_configs else before
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


_MAKES, _DELTAS = "get_rope_index", "rope_deltas"  # of models with M-RoPE
_GRIDS = frozenset({"image_grid_thw", "video_grid_thw"})
_OF_SAMPLES = frozenset({"images_per_sample", "target_sizes"})  # with an entry for each row


class ImagePositions:
    """Positions of time, height and width (M-RoPE) where positions of text are given beside images.

    ``EnabledModel`` calls :meth:`begin` and :meth:`end` around each pass, and :meth:`check_made`
    where the text model is called.
    """

    # By positions [batch, tokens], which show documents, a model computes an image as text: it gets
    # none, and the function by which it makes its own sees each document as a row. What that leaves
    # in the model for tokens generated next is not kept; embeddings get nothing of earlier batches.
    def __init__(self, model: PreTrainedModel) -> None:
        self._name, self._text = type(model).__name__, text_model(model)
        self._owners: list[Any] = [x for x in model.modules() if hasattr(type(x), _MAKES)]
        self._batch: WholeArguments | None = None
        self._before_pass: list[tuple[Any, Tensor | None]] = []  # owners and their deltas

    def begin(self, batch: WholeArguments) -> bool:
        """Prepare a pass. Returns whether the model gets no positions, as they are made here.

        Raises:
            DataError: positions of 2 dims that do not count each document's tokens from 0.
            UnsupportedAttentionError: a model whose text model takes no positions of text beside
                those of images.
        """
        self.end()
        owners = [x for x in self._owners if hasattr(x, _DELTAS)]
        self._before_pass = [(owner, owner.rope_deltas) for owner in owners]
        if batch.arguments.get("input_ids") is None:  # else models do not read them
            for owner in owners:
                owner.rope_deltas = None
        positions = batch.arguments.get("position_ids")
        is_packed = positions is not None or bool(batch.documents)  # else no tensor is read
        if not self._owners or not is_packed or not _GRIDS & batch.arguments.keys():
            return False
        runs = list(batch.runs())
        must_make = len(runs) > batch.size if positions is None else positions.ndim == 2
        if not must_make:  # the model itself does, or the caller did
            return False
        expected = f"[4, {batch.size}, {batch.seq_len}], of which the first counts tokens as text"
        rows = () if positions is None else positions.cpu().long().expand(batch.size, -1)
        for row, start, stop in runs if len(rows) else ():
            if not torch.equal(rows[row][start:stop], torch.arange(stop - start)):
                raise DataError(
                    f"position_ids of row {row} do not count tokens {start} to {stop - 1} from 0, "
                    f"and images of {self._name} have positions of time, height and width: let "
                    f"them begin at 0 with each document, leave them out, or give {expected}"
                )
        takes_text = "shape[0] == 4" in inspect.getsource(type(self._text).forward)
        takes = inspect.signature(getattr(type(self._owners[0]), _MAKES)).parameters.keys()
        if takes & _OF_SAMPLES or not takes_text:
            raise UnsupportedAttentionError(
                f"{self._name} makes positions of images for whole rows, and its documents would "
                "have those of text: give rows of one document, without position_ids"
            )
        missing = takes & {"input_ids", "mm_token_type_ids"} - batch.arguments.keys()
        if missing:
            raise DataError(
                f"{self._name} makes positions of images by {' and '.join(sorted(missing))}: give "
                f"what its processor makes, or position_ids {expected}"
            )
        self._batch = batch
        for owner in self._owners:
            owner.__dict__[_MAKES] = partial(self._of_documents, owner)
        return True

    def end(self) -> None:
        """Undo :meth:`begin`, after a pass or one that was interrupted."""
        for owner in self._owners:
            owner.__dict__.pop(_MAKES, None)
        for owner, deltas in self._before_pass:
            if self._batch is not None or owner.rope_deltas is None:  # set by make, or by begin
                owner.rope_deltas = deltas
        self._batch, self._before_pass = None, []

    def check_made(self, positions: Tensor | None) -> None:
        """UnsupportedAttentionError where the model has made none in this pass."""
        if self._batch is not None and positions is None:
            raise UnsupportedAttentionError(
                f"{self._name} has not made positions of its images: give position_ids "
                f"[4, {self._batch.size}, {self._batch.seq_len}], of which the first counts tokens "
                "as text"
            )

    def _of_documents(self, owner: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Stands for ``owner.get_rope_index``: positions ``[4, batch, tokens]`` of whole rows, of
        which the first counts tokens as text, each document made as a row; and its deltas."""
        batch, make = cast(WholeArguments, self._batch), getattr(type(owner), _MAKES)
        bound = inspect.signature(make).bind(owner, *args, **kwargs)
        ids, runs = bound.arguments["input_ids"], list(batch.runs())
        bound.arguments["attention_mask"] = torch.ones_like(ids)
        for name in ("input_ids", "mm_token_type_ids", "attention_mask"):
            x = bound.arguments.get(name)
            if x is not None:
                parts = [x[row, start:stop] for row, start, stop in runs]
                bound.arguments[name] = pad_sequence(parts, batch_first=True)
        positions, deltas = make(*bound.args, **bound.kwargs)
        out = positions.new_zeros(4, *ids.shape)
        for index, (row, start, stop) in enumerate(runs):
            out[0, row, start:stop] = torch.arange(stop - start)
            out[1:, row, start:stop] = positions[:, index, : stop - start]
        return out, deltas
