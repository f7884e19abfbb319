"""The function that transformers' models call for flash attention, over a mesh of ranks.

Trainers that bring sequence parallelism of their own to transformers shard the batch themselves and
replace this one function, ``_flash_attention_forward``. This replacement knows neither the model
nor the trainer, so it serves every transformers from 4.51 on. Each layer calls it on every rank,
once more where it is recomputed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from itertools import groupby
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ds_usp.attention.functional import usp_attention
from ds_usp.attention.scores import Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning, check_tuning
from ds_usp.attention.validation import check_layout_kind
from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.mesh import SequenceMesh, check_mesh
from ds_usp.comm.readings import TensorMemory, calling_modules, version_of
from ds_usp.compat.models_on_shards import ENABLE, ShardLimits, calling_model
from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import Borders, MaskSpec, Parents, has_only
from ds_usp.kernels.registry import AUTO, check_kernel_name
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.training.whole_batch import RealTokens, agreed_documents, local_positions

__all__ = ["PatchedFlashAttention", "flash_attention_forward", "patch_flash_attention"]

FlashAttentionForward = Callable[..., Tensor]

FUNCTION: Final = "_flash_attention_forward"
HOME: Final = "transformers.modeling_flash_attention_utils"
CALLER: Final = "transformers.integrations.flash_attention"
_PACKAGES = ("transformers", "transformers_modules")  # its own models, and those of the hub

# Arguments that transformers' own function hands to this one, and that choose among its kernels.
_OF_KERNELS = frozenset({"s_aux", "layer_idx", "attn_implementation", "implementation"})

# Padding in gathered positions: of attention_mask, and of position_ids, which trainers (swift) fill
# up with -1. In the last two bits, what a mask says of a token: 0 real, 1 padding, 2 and 3 neither.
_MASKED, _FILLED = -2, -1


@explain_keywords
def flash_attention_forward(
    mesh: SequenceMesh,
    *,
    layout: str = TokenLayout.CALLERS_KIND,
    kernel: str = AUTO,
    tuning: Tuning = AUTO_TUNING,
    equal_documents: bool = False,
    towers: FlashAttentionForward | None = None,
) -> FlashAttentionForward:
    """A replacement for transformers' ``_flash_attention_forward``, with its arguments, on shards.

    Rank ``r`` of the mesh holds the ``r``-th of as many equal, contiguous pieces of every sequence
    and calls with its own tokens. Collective over the mesh.

    Shapes:
        of a call: queries ``[b, s_local, h, d]``, keys and values ``[b, s_local, h_kv, d]`` ->
        ``[b, s_local, h, d]``; ``position_ids`` ``[b or 1, s_local]``, ``attention_mask`` of
        padding ``[b, s_local]``; ``cu_seq_lens_q`` and ``_k`` of the whole sequence, on every rank.

    Documents are what the positions of the whole sequence say, which start anew at 0 in each: they
    are gathered once a pass; or they are ``cu_seq_lens_q``, and nothing is gathered. Documents see
    themselves alone, beside padding too (transformers' flash attention lets them see each other
    there). A sliding window of ``w`` tokens counts the token itself, as in transformers' eager
    attention (its flash attention has one more in old versions).

    Args:
        mesh: the process groups; any degrees.
        layout: another kind of :class:`ds_usp.TokenLayout`, if the caller shards by it.
        kernel, tuning: as of :func:`ds_usp.usp_attention`.
        equal_documents: positions that start at 0 on every rank, and nowhere else, are documents of
            the length of a shard. False refuses them: this is what a model makes of its own
            tokens where it is given no ``position_ids``.
        towers: computes calls of full attention without ``position_ids``, which are those of towers
            of images and sounds, whose tokens are not sharded: transformers' own function. None
            refuses them.

    Raises:
        ConfigError, LayoutError, UnsupportedAttentionError: no mesh, or an unknown layout or
            kernel.

    The call raises, on every rank, ConfigError, DataError, LayoutError,
    UnsupportedAttentionError: it cannot be computed exactly; MeshError: the ranks disagree.
    """
    check_mesh(mesh)
    check_layout_kind(layout, mesh)
    check_kernel_name(kernel)
    check_tuning(tuning)
    return _FlashAttentionForward(mesh, layout, kernel, tuning, equal_documents, towers)


@explain_keywords
def patch_flash_attention(
    mesh: SequenceMesh,
    *,
    layout: str = TokenLayout.CALLERS_KIND,
    kernel: str = AUTO,
    tuning: Tuning = AUTO_TUNING,
    equal_documents: bool = False,
    towers: bool = False,
) -> PatchedFlashAttention:
    """Put :func:`flash_attention_forward` in the place of transformers' function, wherever its
    modules hold it, until ``restore()`` or the end of a ``with`` block.

    It is called by the models whose attention implementation is ``flash_attention_2`` (or any other
    that transformers' flash attention serves); flash-attn itself need not be installed.

    Args:
        mesh, layout, kernel, tuning, equal_documents: as of :func:`flash_attention_forward`.
        towers: full attention without ``position_ids``, of towers of images and sounds, is computed
            by transformers' own function; False refuses it.

    Raises:
        ConfigError: no mesh, no transformers from 4.51 on, or its function is replaced already.
    """
    original = _own_function()
    replacement = flash_attention_forward(
        mesh,
        layout=layout,
        kernel=kernel,
        tuning=tuning,
        equal_documents=equal_documents,
        towers=original if towers else None,
    )
    return PatchedFlashAttention(original, replacement)


class PatchedFlashAttention(AbstractContextManager["PatchedFlashAttention"]):
    """transformers with the function replaced; made by :func:`patch_flash_attention`.

    Attributes:
        original, replacement: the functions.
    """

    def __init__(self, original: FlashAttentionForward, replacement: FlashAttentionForward) -> None:
        self.original, self.replacement = original, replacement
        _replace_references(original, replacement)

    def restore(self) -> None:
        """Put transformers' own function back; again does nothing. What others have put over it
        since stays."""
        # Looked for anew: a module that was loaded meanwhile has imported the replacement.
        _replace_references(self.replacement, self.original)

    def __exit__(self, *_: object) -> None:
        self.restore()


def _replace_references(old: object, new: object) -> None:
    """Put ``new`` where modules of transformers hold ``old``; those that imported it by name have
    references of their own."""
    for name, module in list(sys.modules.items()):
        in_package = name.partition(".")[0] in _PACKAGES and isinstance(module, ModuleType)
        if in_package and vars(module).get(FUNCTION) is old:
            setattr(module, FUNCTION, new)


def _own_function() -> FlashAttentionForward:
    """Return transformers' function; ConfigError where there is none, or another in its place."""
    try:
        home, caller = importlib.import_module(HOME), importlib.import_module(CALLER)
        functions = {vars(module)[FUNCTION] for module in (home, caller)}
    except (ImportError, KeyError) as error:
        raise ConfigError(
            f"{CALLER} has no {FUNCTION} to replace: transformers from 4.51 on is needed "
            f"({type(error).__name__}: {error})"
        ) from error
    for function in functions:
        if getattr(function, "__module__", None) != HOME:
            named = function if hasattr(function, "__qualname__") else type(function)
            raise ConfigError(
                f"transformers' {FUNCTION} is replaced already, by {named.__module__}."
                f"{named.__qualname__}: restore() what replaced it, or turn the trainer's own "
                "sequence parallelism off"
            )
    return functions.pop()


def _arguments_of_transformers() -> frozenset[str]:
    """Name the arguments of flash attention that transformers reads, if it is loaded."""
    home = sys.modules.get(HOME)
    names = FUNCTION, "_process_flash_attention_kwargs"
    functions = [getattr(home, name, None) for name in names]
    parameters = [signature(function).parameters for function in functions if callable(function)]
    return frozenset(name for names in parameters for name in names)


# Note [positions are gathered once a pass]
#
# Where documents begin is known from the positions of all ranks, and all layers of a pass are given
# the same ones. So the first layer gathers them, a collective, and its pass keeps the documents
# (``comm/readings.py`` finds where a pass begins). What is gathered is read on the CPU, where all
# ranks come to one result, after one transfer from the device.
#
# Padding travels in the same gather: a model drops its mask where a shard has no padding, so only
# some ranks have one, and nothing may be posted where one is found.
@dataclass(eq=False)
class _Pass:
    """The documents of one pass.

    Args:
        real: this rank's tokens that are no padding, ``[b, s_local]``; None: all.
        parents: of the documents of a tree.
        padding_masks: GPU tensors that its layers were given and that say the same; versions.
        masks: of its layers, by is_causal and sliding window.
    """

    documents: tuple[Borders, ...]
    real: Tensor | None = None
    parents: tuple[Parents, ...] = ()
    padding_masks: list[tuple[TensorMemory, int]] = field(default_factory=list)
    masks: dict[tuple[bool, int | None], MaskSpec] = field(default_factory=dict)

    def mask(self, is_causal: bool, window: int | None) -> MaskSpec:
        """Return a layer's mask; ``window``: tokens that a query sees with itself, None: all."""
        mask = self.masks.get((is_causal, window))
        if mask is None:
            left, right = None if window is None else window - 1, 0 if is_causal else None
            mask = self.masks[is_causal, window] = MaskSpec(
                left, right, self.documents, parents=self.parents
            )
        return mask

    def check_padding(self, mask: Tensor | None) -> None:
        """DataError if a layer is given other padding than the first one of its pass."""
        if mask is None:
            is_same = self.real is None
        elif any(x.is_of(mask) and n == version_of(mask) for x, n in self.padding_masks):
            return
        elif self.real is None:
            is_same = bool((mask != 0).all())
        else:
            real = mask.to(self.real.device) != 0
            is_same = self.real.shape == real.shape and bool((self.real == real).all())
        if not is_same:
            raise DataError(
                "layers of one pass are given different padding: attention_mask must be the same "
                "for all that get the same position_ids. Give each pass position_ids of its own"
            )
        if mask is not None and not mask.is_cpu:
            self.padding_masks.append((TensorMemory.of(mask), version_of(mask)))


class _FlashAttentionForward:
    """The function that :func:`flash_attention_forward` returns.

    Attributes:
        tree: the mask of the tree that the next calls are of, until another is set, by
            ``verl_trees.py``; None: documents are read.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        layout: str,
        kernel: str,
        tuning: Tuning,
        equal_documents: bool,
        towers: FlashAttentionForward | None,
    ) -> None:
        self.tree: MaskSpec | None = None
        self._equal_documents, self._towers = equal_documents, towers
        self._mesh, self._layout, self._kernel, self._tuning = mesh, layout, kernel, tuning
        # Of the model that a layer is of: its name and limits; None: of none of transformers'.
        self._limits: WeakKeyDictionary[nn.Module, tuple[str, ShardLimits] | None] = (
            WeakKeyDictionary()
        )
        self._unknown = _arguments_of_transformers() - _OF_KERNELS - {*signature(self).parameters}

    @disable_in_compile("documents are read from positions")
    def __call__(
        self,
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Tensor | None,
        query_length: int,
        is_causal: bool,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        use_top_left_mask: bool = False,
        softcap: float | None = None,
        deterministic: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        target_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> Tensor:
        """See :func:`flash_attention_forward`. ``query_length`` and ``max_length_*`` are known from
        the tensors; ``use_top_left_mask`` changes nothing where there are as many keys as
        queries."""
        if self._towers is not None and not is_causal and position_ids is None:
            return self._towers(
                query_states,
                key_states,
                value_states,
                attention_mask,
                query_length,
                is_causal,
                dropout=dropout,
                softmax_scale=softmax_scale,
                sliding_window=sliding_window,
                use_top_left_mask=use_top_left_mask,
                softcap=softcap,
                deterministic=deterministic,
                cu_seq_lens_q=cu_seq_lens_q,
                cu_seq_lens_k=cu_seq_lens_k,
                max_length_q=max_length_q,
                max_length_k=max_length_k,
                target_dtype=target_dtype,
                **others,
            )
        sinks, layer = others.pop("s_aux", None), others.pop("layer_idx", None)
        with self._mesh.consistency.raising_everywhere():
            _check_tensors(
                query_states=query_states,
                key_states=key_states,
                value_states=value_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cu_seq_lens_q=cu_seq_lens_q,
                cu_seq_lens_k=cu_seq_lens_k,
            )
            _refuse(query_states, key_states, is_causal, dropout, sliding_window, deterministic)
            self._refuse_unknown(others)
            if self.tree is not None:
                pass_ = self._pass_of_tree(query_states, self.tree, position_ids)
                pass_.check_padding(attention_mask)
            elif cu_seq_lens_q is not None or cu_seq_lens_k is not None:
                lengths = cu_seq_lens_q, cu_seq_lens_k
                pass_ = self._pass_of_lengths(query_states, lengths, attention_mask, position_ids)
            elif position_ids is not None:
                pass_ = self._pass_of_positions(query_states, position_ids, attention_mask)
            else:
                pass_ = self._pass_without_positions(query_states, is_causal, attention_mask)
            mask = pass_.mask(is_causal, sliding_window)
            scores = Scores(softcap or None, sinks=sinks)
        q, k, v = query_states, key_states, value_states
        if target_dtype is not None and q.dtype == torch.float32:
            # Norms and rotary embeddings in fp32, as PEFT leaves them, before weights in bf16.
            q, k, v = (x.to(target_dtype) for x in (q, k, v))
        out = usp_attention(
            q,
            k,
            v,
            mesh=self._mesh,
            layout=self._layout,
            mask=mask,
            softmax_scale=softmax_scale,
            kernel=self._kernel,
            tuning=self._tuning,
            scores=scores,
            label="" if layer is None else f"layer {layer}",
        )
        if pass_.real is not None:  # as transformers' own, which leaves padding out, fills with 0
            out = out.masked_fill(~pass_.real[:, :, None, None], 0.0)
        return out

    # Models hand down whatever their forward() was given, and transformers' function ignores what
    # it does not know. What the installed one knows, and this one does not, is refused.
    def _refuse_unknown(self, others: Mapping[str, Any]) -> None:
        if others.get("output_attentions"):
            raise UnsupportedAttentionError(
                "output_attentions: weights of tokens x tokens are never made; use one rank for "
                "them"
            )
        for name in sorted(self._unknown & others.keys()):
            if others[name] is not None:
                raise UnsupportedAttentionError(
                    f"attention is given {name}, which transformers' function reads and this one "
                    "does not know: a KV cache in pages, or something newer than this ds_usp"
                )

    def _pass_of_lengths(
        self,
        q: Tensor,
        lengths: Sequence[Tensor | None],
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> _Pass:
        """Read the pass from cumulative lengths of the whole sequence; nothing is sent."""
        if mask is not None:
            raise DataError(
                f"attention_mask {list(mask.shape)} beside cu_seq_lens_q: padding is a document of "
                "its own there; leave attention_mask out"
            )
        if any(x is None for x in lengths):
            raise DataError("cu_seq_lens_q and cu_seq_lens_k belong together: give both")
        tensors = [x for x in (*lengths, positions) if x is not None]
        return self._read_in_pass("lengths", q, tensors, lambda: self._read_lengths(q, tensors))

    def _pass_of_tree(self, q: Tensor, tree: MaskSpec, positions: Tensor | None) -> _Pass:
        """Return the pass of a tree; positions are not read: they tell one pass from the next."""

        def read() -> _Pass:
            seq_len, degree = q.shape[1] * self._mesh.sp_degree, self._mesh.sp_degree
            tree.check_length(seq_len, q.shape[0])
            if tree.right != 0 or not has_only(tree, "right", "documents", "parents"):
                raise ConfigError(f"tree={tree}: windows are of calls. Set MaskSpec.tree(segments)")
            layout = self._mesh.layout(self._layout, seq_len)

            def largest() -> list[int]:
                return [max(layout.positions(rank, mask=tree)) + 1 for rank in range(degree)]

            self._check_model(seq_len, largest)
            return _Pass(tree.documents, parents=tree.parents)

        return self._read_in_pass("tree", q, [] if positions is None else [positions], read)

    def _read_in_pass(
        self, kind: str, q: Tensor, tensors: Sequence[Tensor], read: Callable[[], _Pass]
    ) -> _Pass:
        """Return what ``read()`` has returned in this pass: see :meth:`Readings.of`."""
        key = kind, self._layout, self._equal_documents, q.shape[:2]
        return self._mesh.readings.of(tensors, key, read)

    def _read_lengths(self, q: Tensor, tensors: Sequence[Tensor]) -> _Pass:
        """Read documents from two lengths; positions, if ``tensors`` ends with some, must agree."""
        local, ranks, rank = q.shape[1], self._mesh.sp_degree, self._mesh.rank
        seq_len = local * ranks
        lengths, kv_lengths, *positions = on_host(tensors)
        if lengths.tolist() != kv_lengths.tolist():
            raise UnsupportedAttentionError(
                "cu_seq_lens_q and cu_seq_lens_k differ: cross-attention, or a KV cache, is not "
                "sharded here"
            )
        if q.shape[0] != 1:
            raise DataError(
                f"cu_seq_lens_q with a batch of {q.shape[0]} rows: pack them into one row, or give "
                "position_ids, which say each row's documents"
            )
        borders = lengths.tolist()
        if not borders or borders[-1] != seq_len:
            raise DataError(
                f"cu_seq_lens_q end at {borders[-1] if borders else None}, and the {ranks} ranks "
                f"hold {local} tokens each, {seq_len}: give every rank the cumulative lengths of "
                "the whole sequence (padding is a document of its own)"
            )
        documents = MaskSpec.causal(borders).documents
        layout = self._mesh.layout(self._layout, seq_len)
        text_positions = [x for x in positions if x.shape == (1, local)]
        if text_positions:
            steps = _local_steps(text_positions[0][0], layout, rank, documents[0])
            real = RealTokens(first=0, stop=seq_len, num=seq_len, num_others=0)
            agreed_documents({"cu_seq_lens_q": documents[:1]}, [steps], [real])
        end = int(text_positions[0].max()) + 1 if text_positions else 0
        self._check_model(seq_len, lambda: _largest_by_documents(layout, rank, documents[0], end))
        return _Pass(() if documents == ((0, seq_len),) else documents)

    def _pass_of_positions(self, q: Tensor, positions: Tensor, mask: Tensor | None) -> _Pass:
        pass_ = self._read_in_pass(
            "positions", q, [positions], lambda: self._read_positions(q, positions, mask)
        )
        pass_.check_padding(mask)
        return pass_

    def _read_positions(self, q: Tensor, positions: Tensor, mask: Tensor | None) -> _Pass:
        """Read documents and padding from the positions of all ranks; collective over the mesh."""
        encoded = _encode(positions, mask, q)
        layout = self._mesh.layout(self._layout, q.shape[1] * self._mesh.sp_degree)
        whole, is_real = _decode(self._mesh.gather(encoded, layout, dim=1).cpu())
        marked = whole if is_real is None else whole.masked_fill(~is_real, _MASKED)
        documents = _documents(marked)
        if not self._equal_documents:
            self._refuse_forgotten(marked, documents)
        self._check_model(
            whole.shape[1],
            lambda: [
                int(layout.shard(whole, 1, rank).max()) + 1 for rank in range(self._mesh.sp_degree)
            ],
        )
        if mask is None or is_real is None or layout.shard(is_real, 1, self._mesh.rank).all():
            return _Pass(documents)
        return _Pass(documents, mask.to(q.device) != 0)

    def _pass_without_positions(self, q: Tensor, is_causal: bool, mask: Tensor | None) -> _Pass:
        """Return one document, for a model that hands on neither positions nor lengths."""
        if not is_causal:
            raise UnsupportedAttentionError(
                "full attention without position_ids: whether these tokens are a shard of a "
                "sequence or whole, as those of a tower of images, is unknown. If they are whole, "
                "give towers"
            )
        if mask is not None:
            raise DataError(
                f"attention_mask {list(mask.shape)} without position_ids, with which padding of "
                "all ranks is found: this model hands none on. Pack the rows, or give batches "
                "without padding"
            )
        return self._read_in_pass("nothing", q, [], lambda: self._one_document(q))

    def _one_document(self, q: Tensor) -> _Pass:
        """Return one document; DataError if positions of the model that calls say several."""
        seq_len, rank = q.shape[1] * self._mesh.sp_degree, self._mesh.rank
        layout = self._mesh.layout(self._layout, seq_len)
        self._check_model(seq_len, lambda: _largest_by_documents(layout, rank, (0, seq_len), 0))
        model, variables = calling_model()
        positions = variables.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim in (2, 3):
            rows = positions.reshape(-1, *positions.shape[-2:])  # one, or those of images (M-RoPE)
            starts = ((rows[..., :-1] == 0) & (rows[..., 1:] == 1)).all(0)
            if bool(starts[:, 0 if rank else 1 :].any()):
                raise DataError(
                    f"{type(model).__name__} has position_ids that start anew, and hands none on "
                    "to its attention, which would see all documents as one: give one document a "
                    "row, or cu_seq_lens_q and cu_seq_lens_k"
                )
        return _Pass(())

    def _check_model(self, seq_len: int, largest: Callable[[], Sequence[int]]) -> None:
        """Refuse a model of which more than attention depends on other ranks' tokens.

        Args:
            largest: of each rank's positions, plus 1, as far as is known.
        """
        layer = next(calling_modules(), None)
        if self._mesh.sp_degree == 1 or layer is None:
            return
        if layer not in self._limits:
            model, _ = calling_model()
            limits = None if model is None else ShardLimits.of(model)
            self._limits[layer] = None if limits is None else (type(model).__name__, limits)
        if (name_and_limits := self._limits[layer]) is not None:
            name, limits = name_and_limits
            if reason := limits.reason_against(seq_len, largest):
                raise UnsupportedAttentionError(
                    f"{name} on shards of a sequence: {reason}. {ENABLE}"
                )

    def _refuse_forgotten(self, whole: Tensor, documents: tuple[Borders, ...]) -> None:
        """DataError for ``whole`` positions, ``[b, seq_len]``, that each rank has counted."""
        ranks, seq_len = self._mesh.sp_degree, whole.shape[1]
        local = seq_len // ranks
        shards = tuple(range(0, seq_len + 1, local))
        if ranks > 1 and documents == (shards,) and bool((whole[:, ::local] == 0).all()):
            raise DataError(
                f"position_ids start at 0 on each of the {ranks} ranks and go up to {local - 1}: "
                "so does a model that is given none and counts its own tokens. Give the model this "
                "rank's shard of the whole sequence's position_ids; if these are documents of "
                f"{local} tokens each, say equal_documents=True"
            )


def _check_tensors(**arguments: Any) -> None:
    """ConfigError for an argument that is neither None nor a tensor of real numbers."""
    for name, x in arguments.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}: give a tensor")
        if x.is_complex():
            raise ConfigError(f"{name} is complex, {x.dtype}: give real numbers")


def _refuse(
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    dropout: float,
    window: int | None,
    deterministic: bool | None,
) -> None:
    """Refuse a call that is not exact on shards, whatever documents it has."""
    if q.shape[1] != k.shape[1]:
        raise UnsupportedAttentionError(
            f"{q.shape[1]} queries and {k.shape[1]} keys: cross-attention, or a KV cache, is not "
            "sharded here. Train with use_cache=False, and generate() without the patch"
        )
    if dropout:
        raise UnsupportedAttentionError(
            f"attention dropout of {dropout}: which weights are dropped would depend on the "
            "degrees. Set the configuration's attention_dropout to 0"
        )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(f"sliding_window={window!r} must be 1 or more, a whole number, or None")
    if window is not None and not is_causal:
        raise UnsupportedAttentionError(
            f"sliding_window={window} of full attention: transformers' versions count its tokens "
            "differently. Use ds_usp.integrations.transformers.enable"
        )
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedAttentionError(
            "deterministic=True: kernels are chosen by torch.use_deterministic_algorithms(True); "
            "call that"
        )


def _encode(positions: Tensor, mask: Tensor | None, q: Tensor) -> Tensor:
    """Return the tensor to gather: positions, and in the last two bits what the mask says."""
    batch, local = q.shape[:2]
    rows = positions.shape[0] if positions.ndim == 2 else 0
    if positions.ndim != 2 or positions.shape[1] != local or rows not in (1, batch):
        raise DataError(
            f"position_ids {list(positions.shape)} with queries of {batch} rows of {local} tokens: "
            "they must be this rank's shard, [rows, tokens]; of three rows for images (M-RoPE) "
            "give those of the text"
        )
    if positions.is_floating_point():
        raise DataError(f"position_ids of {positions.dtype}: they are integers of 0 and more")
    encoded = positions.to(q.device, torch.int64).expand(batch, local) << 2
    if mask is None:
        return encoded
    if mask.shape != (batch, local):
        raise DataError(
            f"attention_mask is {list(mask.shape)}, expected this rank's shard of the padding, "
            f"[{batch}, {local}]: masks of pairs of tokens are not served"
        )
    mask = mask.to(q.device)
    return encoded + (mask == 0) + 2 * ((mask != 0) & (mask != 1))


def _decode(encoded: Tensor) -> tuple[Tensor, Tensor | None]:
    """Positions of the whole sequence, and which of its tokens are real; None: all.

    Raises:
        DataError: values that are no positions, or say no padding.
    """
    positions, state = encoded >> 2, encoded & 3
    if bool(positions.min() < _FILLED):
        raise DataError(
            f"position_ids go from {int(positions.min())} on: they are integers of 0 and more, "
            f"{_FILLED} where there is padding"
        )
    largest = int(state.max())
    if largest > 1:
        raise DataError(
            "attention_mask has numbers other than 0 and 1: it says which tokens are real. Packed "
            "documents are given by position_ids that start anew, or by cu_seq_lens_q"
        )
    return positions, state == 0 if largest else None


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return whole numbers on the CPU, in one transfer; DataError for others."""
    for x in tensors:
        if x.is_floating_point():
            raise DataError(f"cu_seq_lens or position_ids of {x.dtype}: they are integers")
    devices = [x.device for x in tensors if x.device.type != "cpu"]
    if not devices:
        return list(tensors)
    flat = torch.cat([x.flatten().to(devices[0], torch.int64) for x in tensors]).cpu()
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _local_steps(
    positions: Tensor, layout: TokenLayout, rank: int, borders: Borders
) -> dict[int, int]:
    """:func:`ds_usp.training.whole_batch.position_steps` of a rank's positions ``[s_local]``, by
    index in the whole sequence: 0 where they start anew, 2 where this rank cannot know."""
    index = local_positions(layout, rank)
    goes_on = (index.diff() == 1) & (positions.diff() == 1)
    # A 0 that no 1 follows may be one of padding, of which positions say nothing.
    starts = (positions == 0) & pad(goes_on, (0, 1))
    unclear = ~pad(goes_on, (1, 0)) & ~starts
    begins = pad(index.diff() != 1, (1, 0), value=True)  # a piece of the sequence
    elsewhere = torch.tensor(borders)
    elsewhere = elsewhere[~torch.isin(elsewhere, index)]
    steps = dict.fromkeys(torch.cat([elsewhere, index[unclear]]).tolist(), 2)
    steps |= dict.fromkeys(index[starts].tolist(), 0)
    for first, position in zip(index[begins].tolist(), positions[begins].tolist(), strict=True):
        start = first - position  # of the document of a piece's first token
        if position == 1 or (position > 0 and start in borders):
            for border in borders:  # its document goes on through these
                if start < border <= first:
                    steps.pop(border, None)
            steps |= {start: 0} if start else {}
    return steps


def _largest_by_documents(layout: TokenLayout, rank: int, borders: Borders, end: int) -> list[int]:
    """Return each rank's largest position, plus 1, if positions start anew in each document. Where
    this rank's is another, ``end`` (0: unknown), also those if they go on through all."""
    index = [local_positions(layout, each) for each in range(layout.ulysses * layout.ring)]
    through = [int(x.max()) + 1 for x in index]
    starts = torch.tensor(borders[:-1])
    anew = [
        int((x - starts[torch.searchsorted(starts, x, right=True) - 1]).max()) + 1 for x in index
    ]
    return anew if end == anew[rank] else anew + through


def _documents(whole: Tensor) -> tuple[Borders, ...]:
    """Documents and runs of padding in the positions of whole rows ``[b, seq_len]``: one tuple of
    borders for all, or one each; () without any.

    Raises:
        DataError: positions that neither go on by one nor start anew at 0.
    """
    seq_len, padding = whole.shape[1], whole < 0
    padded_pairs, changes = padding[:, 1:] & padding[:, :-1], padding[:, 1:] != padding[:, :-1]
    # From -1 to 0 positions go on by one, and padding ends.
    starts = pad(((whole.diff(dim=1) != 1) & ~padded_pairs) | changes, (1, 0), value=True)
    runs = zip(starts.nonzero().tolist(), whole[starts].tolist(), strict=True)
    documents = []
    for row, row_runs in groupby(runs, key=lambda run: run[0][0]):
        firsts = [(column, position) for (_, column), position in row_runs]
        real = [first for first in firsts if first[1] >= 0]
        for column, position in real[1:]:
            if position != 0:
                raise DataError(
                    f"position ids of row {row} of the whole sequence are {position} at token "
                    f"{column}, which does not follow the token before: they must go on by one, or "
                    "start anew at 0 where the next packed document begins, with padding between "
                    "documents only"
                )
        documents.append((*(column for column, _ in firsts), seq_len))
    if len(set(documents)) == 1:
        documents = documents[:1]
    return () if documents == [(0, seq_len)] else tuple(documents)
