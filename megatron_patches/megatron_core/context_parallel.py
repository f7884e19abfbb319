"""Unified sequence parallelism as megatron-core's context parallelism.

What takes ``original`` is called in its place (``patch_table.py``), on every rank: when groups,
configurations and layers are made, :meth:`ContextParallel.rotary_shard` and
:meth:`ContextParallel.prepare_inputs` in forward passes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, SupportsIndex
from unittest import mock

import torch.distributed as dist
from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from megatron_patches.megatron_core.groups import LAYOUT, RANK_ORDER, check_size
from megatron_patches.megatron_core.packed_documents import packed_documents
from megatron_patches.megatron_core.recurrent_layers import ATTRIBUTE, LayerSharding, OneRank
from megatron_patches.settings import MeshSettings

USP = "usp"  # the cp_comm_type of a layer with USP attention
KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        **ds_usp.Degrees.KEYWORDS,
        "sp": "context_parallel_size",
        "levels": "hierarchical_context_parallel_sizes",
    }
)


@dataclass(frozen=True, kw_only=True)
class Settings(MeshSettings):
    """Settings that ``megatron_patches.apply("megatron_core", ...)`` takes.

    Args:
        ulysses_degree: None: the first of ``hierarchical_context_parallel_sizes`` where the program
            gives them, otherwise all ranks of a context-parallel group. No effect at size 1.
        layout: ``context_parallel`` is the order of megatron-core's own batch slicing and rotary
            embedding; with another one the program has to shard the batch.
        everywhere: USP attention also where ``context_parallel_size`` is 1.
    """

    layout: str | ds_usp.TokenLayout = LAYOUT
    everywhere: bool = False


class ContextParallel:
    """The functions that one :func:`megatron_patches.apply` puts into megatron-core.

    Attributes:
        settings: may be set until groups and layers are made, as by Megatron-LM's parsed arguments;
            None: megatron-core's attention and groups stay.
    """

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings

    def initialize_model_parallel(
        self, original: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Check degrees, create megatron-core's groups, then the mesh; ConfigError for degrees that
        do not multiply to the context-parallel size. Collective over the world."""
        if self.settings is None:
            original(*args, **kwargs)
            return
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        size = bound.arguments["context_parallel_size"]
        levels = bound.arguments["hierarchical_context_parallel_sizes"]
        if size > 1 or levels:  # a program may be debugged on one rank without a change
            check_degrees(size, self.settings.ulysses_degree, levels)
        original(*args, **kwargs)
        if size > 1:
            self.sequence_mesh()

    def sequence_mesh(self) -> ds_usp.SequenceMesh:
        """The mesh over this rank's context-parallel group."""
        return self.mesh_over(None)

    def ulysses_group(self) -> dist.ProcessGroup | None:
        """The head all-to-all group of this rank."""
        return self.sequence_mesh().ulysses_group

    def ring_group(self) -> dist.ProcessGroup | None:
        """The ring-attention group of this rank; None without a ring."""
        return self.sequence_mesh().ring_group

    def build_attention(
        self, original: Callable[..., None], core: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Initialize ``core``, an attention of megatron-core, as :class:`USPCoreAttention`.

        The object changes its class, because layer specs and modules hold megatron-core's by name.

        Raises:
            ConfigError: a layer that asks for another kind of context parallelism.
            UnsupportedAttentionError, MeshError: as :class:`USPCoreAttention`; for a subclass with
                a ``forward`` of its own.
        """
        settings, signature = self.settings, inspect.signature(original)
        # MLA gives them to any core attention; megatron-core's local one does not take them.
        head_dims = {x: kwargs[x] for x in ("k_channels", "v_channels") if x in kwargs}
        accepted = {x: kwargs[x] for x in kwargs if x not in head_dims or x in signature.parameters}
        arguments = signature.bind(core, *args, **accepted).arguments
        one_rank = arguments["config"].context_parallel_size == 1
        if (
            settings is None
            or (one_rank and not settings.everywhere)
            or not (one_rank or _uses_usp(arguments))
        ):
            original(core, *args, **kwargs)
            return
        _refuse_own_forward(original, core, arguments["layer_number"])
        from megatron_patches.megatron_core.core_attention import USPCoreAttention

        keywords = dict(list(arguments.items())[1:])  # without self
        core.__class__ = USPCoreAttention
        USPCoreAttention.__init__(
            core,
            mesh=self.mesh_over(getattr(keywords.get("pg_collection"), "cp", None)),
            layout=settings.layout,
            kernel=settings.kernel,
            **keywords,
        )

    def build_recurrent(
        self,
        original: Callable[..., None],
        layer: Any,
        config: Any,
        *args: Any,
        check: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """``MambaMixer.__init__``, ``GatedDeltaNet.__init__``: the layer computes over the mesh;
        MeshError for one that is not the context-parallel group of the configuration.

        Args:
            check: raises for a layer, complete but for its sharding, that cannot be served.
        """
        if self.settings is None or config.context_parallel_size == 1:
            original(layer, config, *args, **kwargs)
            return
        kwargs.pop("cp_comm_type", None)  # a transformer layer gives it to whatever attends
        bound = inspect.signature(original).bind(layer, config, *args, **kwargs)
        groups = bound.arguments["pg_collection"]
        # Built as on one rank: it neither divides its heads nor exchanges them.
        bound.arguments["pg_collection"] = one_rank_groups = copy.copy(groups)
        one_rank_groups.cp = OneRank()
        original(*bound.args, **bound.kwargs)
        layer.pg_collection = groups
        mesh = self.mesh_over(getattr(groups, "cp", None))
        check_size(config, mesh)
        if check:
            check(layer)
        setattr(layer, ATTRIBUTE, LayerSharding(mesh, self.settings.layout))

    def configure(self, original: Callable[..., None], config: Any) -> None:
        """``TransformerConfig.__post_init__``, which refuses ``gated_delta_net`` with context
        parallelism: its checks of these layers are run as for one rank, all others as they are.
        """
        variant = config.experimental_attention_variant
        if self.settings and config.context_parallel_size > 1 and variant == "gated_delta_net":
            one_rank_config = copy.copy(config)
            one_rank_config.context_parallel_size = 1
            original(one_rank_config)
            config.experimental_attention_variant = None
            original(config)
            config.experimental_attention_variant = variant
        else:
            original(config)

    def rotary_shard(
        self, original: Callable[..., Tensor], frequencies: Tensor, dim: int, group: Any
    ) -> Tensor:
        """``get_pos_emb_on_this_cp_rank`` of the whole sequence, whose tokens are along ``dim``, in
        the settings' layout."""
        if self.settings is None or self.settings.layout == LAYOUT:
            return original(frequencies, dim, group)
        mesh, layout = self.mesh_over(group), self.settings.layout
        if isinstance(layout, str):
            layout = mesh.layout(layout, frequencies.shape[dim])
        return layout.shard(frequencies, dim, mesh.rank)

    def prepare_inputs(self, original: Any, model: Any, *args: Any, **kw: Any) -> Any:
        """``GPTModel._preprocess``, and checks before rotary embedding, which splits tokens by the
        lengths of documents as they are: USPError for documents of format ``thd`` that do not fit,
        UnsupportedAttentionError for M-RoPE positions that are not those of the whole sequence."""
        config, settings = model.config, self.settings
        arguments = inspect.signature(original).bind(model, *args, **kw).arguments
        packed, ranks = arguments.get("packed_seq_params"), config.context_parallel_size
        is_thd = getattr(packed, "qkv_format", None) == "thd"
        has_axes = model.position_embedding_type == "mrope" and not config.multi_latent_attention
        is_checked = is_thd or (has_axes and ranks > 1)
        if settings is None or not is_checked or (ranks == 1 and not settings.everywhere):
            return original(model, *args, **kw)
        rotary = model.rotary_pos_emb if has_axes and is_thd else SimpleNamespace(cp_group=None)
        with mock.patch.object(rotary, "cp_group", OneRank()):  # layers shard them
            inputs, *rest = original(model, *args, **kw)
        hidden = model.decoder.input_tensor if inputs is None else inputs  # of an earlier stage
        local = len(hidden) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        tokens = arguments["position_ids"].shape[-1] if has_axes else local * ranks
        mesh = self.mesh_over(model.cp_group)
        with mesh.consistency.raising_everywhere():
            if inputs is not None and tokens != local * ranks:
                raise UnsupportedAttentionError(
                    f"position_ids of M-RoPE are of {tokens} tokens, and the {ranks} "
                    f"context-parallel ranks have {local} each: give every rank those of the whole "
                    "sequence, [3, batch, tokens]"
                )
            if is_thd:
                like = hidden.new_empty(local, 0)
                packed_documents(packed, ds_usp.MaskSpec.causal(), settings.layout, mesh, like)
        return inputs, *rest

    def mesh_over(self, group: dist.ProcessGroup | None) -> ds_usp.SequenceMesh:
        """The shared mesh of a group, with the Ulysses degree of the settings or of the program, as
        :func:`check_degrees` chooses it too. The first call for a group is collective over it.

        Args:
            group: of a layer or a model; None: megatron-core's context-parallel group.
        """
        from megatron.core import parallel_state

        if group is None:
            group = parallel_state.get_context_parallel_group()
        levels = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
        degree = self.settings.ulysses_degree if self.settings else None
        if dist.get_world_size(group) == 1:
            degree = 1
        elif degree is None and levels:
            degree = dist.get_world_size(levels[0])
        return ds_usp.SequenceMesh.shared(group, degree, RANK_ORDER)


def check_degrees(
    size: int,
    ulysses_degree: int | None,
    levels: Sequence[int] | None,
    names: Mapping[str, str] = KEYWORDS,
    **model: int,
) -> int:
    """The Ulysses degree that ``mesh_over`` gives context-parallel groups, before there are any;
    Megatron-LM's patched arguments ask too, earlier, with flags as ``names``.

    Args:
        size: ranks of a group.
        ulysses_degree: of the settings; None: the first of ``levels``, else ``size``.
        levels: the program's ``hierarchical_context_parallel_sizes``.
        names: what the user calls the sizes, by field of ``ds_usp.Degrees``, and ``levels``.
        model: further fields of ``ds_usp.Degrees``: ``tp``, ``heads``, ``kv_heads``.

    Raises:
        ConfigError: degrees that do not multiply to the size, or that differ from ``levels``.
    """
    degree = ulysses_degree or (levels[0] if levels else size)
    ds_usp.Degrees(sp=size, ulysses=degree, **model).check(names)
    if levels and list(levels) != [degree, size // degree]:
        raise ConfigError(
            f"{names['levels']}={list(levels)} is not ulysses x ring = {[degree, size // degree]} "
            f"({names['sp']}={size}, {names['ulysses']}={ulysses_degree}). Give those, or leave "
            "one of the two out"
        )
    return degree


def _uses_usp(arguments: dict[str, Any]) -> bool:
    """Whether a layer's ``cp_comm_type`` selects USP attention; ConfigError if it is another kind,
    and no entry of the configuration is ``usp``."""
    kind, config = arguments.get("cp_comm_type"), arguments["config"]
    if kind in (None, USP):
        return True
    if USP in (config.cp_comm_type or ()):
        return False
    raise ConfigError(
        f"layer {arguments['layer_number']} asks for cp_comm_type={kind!r}, and megatron_patches "
        f"was applied to replace it by USP. Leave cp_comm_type out or set it to {USP!r}; to mix "
        f"both, give a list with one entry a layer, {USP!r} for some"
    )


def _refuse_own_forward(original: Callable[..., None], core: Any, layer_number: int) -> None:
    """UnsupportedAttentionError for a subclass of megatron-core's attention, of which ``original``
    is ``__init__``, whose own ``forward`` would not be called, as its object changes its class."""
    for cls in type(core).__mro__:
        if getattr(vars(cls).get("__init__"), "__wrapped__", None) is original:
            return
        if "forward" in vars(cls):
            raise UnsupportedAttentionError(
                f"layer {layer_number}: {cls.__module__}.{cls.__name__} has a forward of its own, "
                "which USP attention in its place would leave out. Name in the layer spec a "
                "subclass of megatron_patches.megatron_core.core_attention.USPCoreAttention that "
                "computes the same of this rank's tokens, or use context_parallel_size=1"
            )


class ListByLayerNumber(list):
    """``TransformerConfig.cp_comm_type`` as a list, indexed by layer number from 1."""

    def __getitem__(self, number: SupportsIndex | slice) -> Any:
        if isinstance(number, slice):
            return super().__getitem__(number)
        return super().__getitem__(number.__index__() - 1)


def index_from_one(
    original: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """``TransformerLayer.__init__``, which indexes ``cp_comm_type`` by a number from 1."""
    kinds = config.cp_comm_type
    if isinstance(kinds, list) and not isinstance(kinds, ListByLayerNumber):
        config.cp_comm_type = ListByLayerNumber(kinds)
    original(layer, config, *args, **kwargs)


def without_transformer_engine(
    original: Callable[..., None], attention: Any, *args: Any, **kwargs: Any
) -> None:
    """``MultiLatentAttention.__init__``, which compares a layer with a mock for a class where
    TransformerEngine is not installed."""
    from megatron.core.transformer import multi_latent_attention as module

    is_installed = module.HAVE_TE and isinstance(module.TELinear, type)
    with mock.patch.object(module, "HAVE_TE", is_installed):
        original(attention, *args, **kwargs)
