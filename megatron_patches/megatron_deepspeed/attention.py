"""Self-attention of Megatron-DeepSpeed by ``ds_usp.usp_attention``, with rotary positions.

Layers are built when :mod:`.groups` has set the state. Their forward passes, also those of a
recomputation, are collective over the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.training import apply_rotary, local_positions, rotary_frequencies
from megatron_patches.megatron_deepspeed.state import (
    FrameworkState,
    current_mask,
    get_state,
    is_active,
)


class SequenceParallelAttention(torch.nn.Module):
    """Causal sequence-parallel attention of one layer, without weights of its own.

    Args:
        state: mesh, layout and kernel.
        layer: the ``ParallelAttention`` around it, for its numbers of heads.
        rotary_dim: features of each head that are rotated; 0: none.
        rotary_base: base of the angles.
        flash: Megatron-DeepSpeed's flash attention, where the user selected it; else None.
    """

    def __init__(
        self,
        state: FrameworkState,
        layer: Any,
        *,
        rotary_dim: int,
        rotary_base: float,
        flash: torch.nn.Module | None,
    ) -> None:
        super().__init__()
        self.state = state
        self.heads = layer.num_attention_heads_per_partition
        self.kv_heads = layer.num_key_value_heads_per_partition
        self.head_dim = layer.hidden_size_per_attention_head
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        self.flash = flash and ds_usp.USPAttention(
            flash, mesh=state.mesh, gather_idx=1, layout=state.layout
        )

    def forward(self, qkv: Tensor) -> Tensor:
        """Attention over the whole sequence.

        Shapes:
            qkv: ``[s_local, b, (h + 2 * h_kv) * d]``, all queries, then keys, then values, as
            Megatron-DeepSpeed's projection has them; result ``[s_local, b, h * d]``.
        """
        counts = (self.heads, self.kv_heads, self.kv_heads)
        parts = qkv.split([count * self.head_dim for count in counts], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        state, mask = self.state, current_mask()
        if self.rotary_dim:
            layout_and_rank = state.layout, state.mesh.rank
            table = rotary_table(*layout_and_rank, self.rotary_dim, self.rotary_base, q.device)
            q, k = apply_rotary((q, k), *table, token_dim=0)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        # Flash attention here has no document mask; with documents dropout is refused.
        if self.flash and mask.is_causal:
            out = self._flash(q, k, v)
        else:
            out = ds_usp.usp_attention(
                q, k, v, mesh=state.mesh, layout=state.layout, mask=mask, kernel=state.kernel
            )
        return out.transpose(0, 1).flatten(2).contiguous()  # viewed as [s * b, h * d]

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The local flash attention under Megatron's tracked random state."""
        from megatron.core import tensor_parallel

        # For dropout: the tracked random state differs over tensor- and sequence-parallel ranks.
        with tensor_parallel.get_cuda_rng_tracker().fork():
            out: Tensor = self.flash(q, k, v, batch_dim_idx=0)  # type: ignore[misc]
        return out


def build_attention(
    original: Callable[..., None],
    layer: Any,
    config: Any,
    layer_number: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``ParallelAttention.__init__``: its weights, and sequence-parallel attention beside them, if
    the state is active; :func:`attend` looks for it.

    Raises:
        UnsupportedAttentionError: an attention that is not causal self-attention.
    """
    from megatron import get_args
    from megatron.model.enums import AttnMaskType, AttnType

    state = get_state()
    if not state.active:
        original(layer, config, layer_number, *args, **kwargs)
        return
    with _without_sequence_parallelism():
        original(layer, config, layer_number, *args, **kwargs)
    kinds = (layer.attention_type, layer.attn_mask_type)
    if kinds != (AttnType.self_attn, AttnMaskType.causal):
        raise UnsupportedAttentionError(
            f"layer {layer.layer_number} is {kinds[0].name} with mask {kinds[1].name}; only causal "
            "self-attention can be sequence parallel. Use --ds-sequence-parallel-size 1"
        )
    flags = get_args()
    rotary_dim = int(layer.hidden_size_per_attention_head * flags.rotary_percent)
    layer.sequence_parallel_attention = SequenceParallelAttention(
        state,
        layer,
        rotary_dim=rotary_dim if flags.use_rotary_position_embeddings else 0,
        rotary_base=flags.rope_theta,
        flash=getattr(layer, "core_attention_flash", None),
    )


@contextmanager
def _without_sequence_parallelism() -> Iterator[None]:
    """Build the layer as Megatron-DeepSpeed does without sequence parallelism."""
    from megatron.core import parallel_state

    # With it, a layer needs a head a rank, no grouped queries and no tensor parallelism.
    parallel_state.set_sequence_parallel_world_size(1)
    try:
        yield
    finally:
        parallel_state.set_sequence_parallel_world_size(None)  # the group's size counts again


def attend(
    original: Callable[..., Any],
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    encoder_output: Tensor | None = None,
    inference_params: Any = None,
    rotary_pos_emb: Any = None,
    cpu_offloading: Any = None,  # without it the caller's ``except TypeError`` attends once more
) -> tuple[Tensor, Tensor | None]:
    """``ParallelAttention.forward``: projections around sequence-parallel attention, which takes
    the mask from the state.

    Raises:
        UnsupportedAttentionError: token by token inference.
    """
    if not hasattr(layer, "sequence_parallel_attention"):
        return original(
            layer, hidden_states, attention_mask, encoder_output, inference_params, rotary_pos_emb
        )
    if inference_params is not None:
        raise UnsupportedAttentionError(
            "inference attends one token at a time, with a cache; it has no sequence parallelism. "
            "Generate without these patches"
        )
    qkv, _ = layer.query_key_value(hidden_states)
    return layer.dense(layer.sequence_parallel_attention(qkv))


def contiguous_core_attention(
    original: Callable[..., Tensor], core: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any
) -> Tensor:
    """``CoreAttention.forward`` on contiguous inputs, which its views need."""
    return original(core, q.contiguous(), k.contiguous(), v.contiguous(), mask)


def build_language_model(original: Callable[..., None], model: Any, *args: Any, **kw: Any) -> None:
    """``TransformerLanguageModel.__init__``; its ``forward`` makes no rotary tables where attention
    applies rotary positions."""
    from megatron import get_args

    original(model, *args, **kw)
    if is_active(get_args()):
        model.use_rotary_position_embeddings = False


@lru_cache(maxsize=8)
def rotary_table(
    layout: ds_usp.TokenLayout, rank: int, dim: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine at the global positions of one rank's tokens, cached for all layers.

    Shapes:
        two of ``[s_local, dim]``, fp32; rank: of the mesh.
    """
    angles = rotary_frequencies(local_positions(layout, rank, device), dim, base)[:, 0, 0]
    return angles.cos(), angles.sin()
