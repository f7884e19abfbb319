"""``usp`` among the attention backends of diffusers, for its own context parallelism."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from ds_usp.attention.plan import AttentionOptions
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.masks import MaskSpec
from ds_usp.integrations.diffusers.pass_state import LAYOUT, mesh_attention

NAME = "usp"
_ENABLE = "ds_usp.integrations.diffusers.enable(transformer, mesh)"
_MESHES: Final[WeakKeyDictionary[dist.ProcessGroup, SequenceMesh]] = WeakKeyDictionary()


def register_backend() -> None:
    """Add ``usp`` to the attention backends of diffusers, in this process.

    Then ``transformer.set_attention_backend("usp")`` and, after it,
    ``transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=, ring_degree=))``
    run attention over ulysses x ring, exactly, where diffusers' own hooks shard the tokens: of
    classes with a plan of diffusers, for sampling, of tokens that the ranks divide. Where a
    transformer is not parallel the backend is ``native``. Calling it again changes nothing.

    Raises:
        ConfigError: diffusers' table of backends is not as it was in 0.42.
    """
    if NAME in AttentionBackendName._value2member_map_:
        return
    try:
        member = str.__new__(AttentionBackendName, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[NAME] = member
        AttentionBackendName._member_names_.append(member._name_)
        register = _AttentionBackendRegistry.register(member, supports_context_parallel=True)
        register(_attention)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the attention backends of this diffusers cannot be added to ({error}): use {_ENABLE}"
        ) from error


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    # diffusers' signature of a backend: tensors [b, s_local, h, d]. Called by every attention of a
    # pass, on every rank; collective where the transformer is parallel.
    config = getattr(_parallel_config, "context_parallel_config", None)
    if config is None:
        native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        return native(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=enable_gqa
        )
    group = config._flattened_mesh.get_group()
    if group not in _MESHES:  # in the first attention of all ranks: collective
        _MESHES[group] = SequenceMesh.from_device_mesh(config._mesh["ring", "ulysses"])
    mesh = _MESHES[group]
    # diffusers' hooks give every rank the same options and as many tokens, so all ranks refuse the
    # same call, without an exchange.
    problem = None
    if config.ulysses_anything or config.ring_anything:
        problem = "uneven shards (ulysses_anything, ring_anything)"
    elif torch.is_grad_enabled() and query.requires_grad:
        problem = "gradients, which diffusers' hooks do not sum over the ranks"
    elif attn_mask is not None:
        problem = f"a mask {list(attn_mask.shape)}, cut to a shard"
    elif dropout_p or is_causal:
        problem = f"dropout {dropout_p}" if dropout_p else "is_causal"
    elif query.shape[1] != key.shape[1]:
        problem = f"{query.shape[1]} queries and {key.shape[1]} keys on rank {mesh.rank}"
    if problem is not None:
        raise UnsupportedAttentionError(
            f"the attention backend {NAME!r} under enable_parallelism was given {problem}. "
            f"Use {_ENABLE} instead, without enable_parallelism"
        )
    layout = mesh.layout(LAYOUT, query.shape[1] * mesh.sp_degree)
    return mesh_attention(query, key, value, AttentionOptions(mesh, layout, MaskSpec.full(), scale))
