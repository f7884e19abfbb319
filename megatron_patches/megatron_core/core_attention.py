"""megatron-core's ``core_attention`` module computed by ``ds_usp.usp_attention``."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

import ds_usp
from ds_usp.errors import MeshError, UnsupportedAttentionError
from megatron_patches.megatron_core.masks import check_dense_mask, packed_layout, packed_mask


class USPCoreAttention(torch.nn.Module):
    """Core attention of one layer over the ranks of a mesh.

    Named in a layer spec as ``ModuleSpec(USPCoreAttention, params={"mesh": ..., "layout": ...})``,
    or put in place of megatron-core's classes by ``megatron_patches.apply("megatron_core")``.

    Args:
        mesh, kernel: as for ``ds_usp.usp_attention``.
        layout: kind of token layout where every rank has equally many tokens; or a
            ``TokenLayout``, also of a sequence that does not divide.
        config, layer_number, attn_mask_type, attention_dropout, softmax_scale: from megatron-core.
        unused: megatron-core's further arguments of any core attention.

    Raises:
        UnsupportedAttentionError: what the configuration asks for cannot be computed exactly.
        MeshError: the mesh is not megatron-core's context-parallel group.
    """

    def __init__(
        self,
        *,
        mesh: ds_usp.SequenceMesh,
        layout: str | ds_usp.TokenLayout,
        kernel: str = "auto",
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != mesh.sp_degree:
            raise MeshError(
                f"TransformerConfig.context_parallel_size={config.context_parallel_size} but the "
                f"mesh has {mesh.sp_degree} ranks (ulysses {mesh.ulysses_degree} x ring "
                f"{mesh.ring_degree}); they must be the same group"
            )
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_inexact_options(config, dropout, layer_number)
        self.mesh, self.layout, self.kernel = mesh, layout, kernel
        self.softmax_scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        self.mask = _mask(attn_mask_type, config, layer_number)
        self.softmax_type = config.softmax_type
        if config.softmax_type == "learnable":
            self.softmax_offset = _softmax_offset(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention over the whole sequence.

        Args:
            attention_mask: None, or a dense mask that equals ``attn_mask_type``.
            packed_seq_params: the documents of packed sequences (see :func:`packed_mask`).

        Shapes:
            query: ``[s_local, b, h, d]``; key, value: ``[s_local, b, h_kv, d]``, not repeated;
            result: ``[s_local, b, h * d]``. Packed in format ``thd`` without ``b``, which is 1 in
            the result.
        """
        if attention_bias is not None:
            raise UnsupportedAttentionError(
                "attention_bias was given: the mask of USP attention is a rule over global "
                f"positions ({self.mask}). Pass attention_bias=None"
            )
        mask = self.mask
        if packed_seq_params is not None:
            mask = packed_mask(packed_seq_params, mask)
        if attn_mask_type not in (None, self.attn_mask_type):
            raise UnsupportedAttentionError(
                f"the call asks for mask {attn_mask_type}, the layer was built for "
                f"{self.attn_mask_type}. Set attn_mask_type in the layer's spec"
            )
        layout = self.layout
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            kind = layout if isinstance(layout, str) else layout.kind
            layout = packed_layout(mask, kind, query.shape[0], self.mesh)
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if isinstance(layout, str):
            layout = self.mesh.layout(layout, query.shape[0] * self.mesh.sp_degree)
        if attention_mask is not None:
            check_dense_mask(attention_mask, mask, layout, self.mesh)
        out = ds_usp.usp_attention(
            *(x.transpose(0, 1) for x in (query, key, value)),
            mesh=self.mesh,
            layout=layout,
            mask=mask,
            softmax_scale=self.softmax_scale,
            kernel=self.kernel,
            scores=ds_usp.Scores(sinks=self._sinks(query)),
        )
        return out.transpose(0, 1).flatten(2)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Attention sinks: extra logits in the softmax, ``[h]``; None without."""
        if self.softmax_type == "learnable":
            return self.softmax_offset
        return query.new_zeros(query.shape[2]) if self.softmax_type == "off-by-one" else None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """The sink parameter for megatron-core's checkpoints, sharded by heads."""
        groups = {"dp_cp_group": metadata["dp_cp_group"]} if metadata else {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            **groups,
        )

    def extra_repr(self) -> str:
        return f"{self.mesh}, {self.layout}, {self.mask}, kernel {self.kernel}"


def _softmax_offset(config: TransformerConfig) -> torch.nn.Parameter:
    """Learnable attention sinks ``[heads of this tensor-parallel rank]``, initialized as
    megatron-core does."""
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    device = torch.cuda.current_device() if on_gpu else "cpu"
    offset = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(offset, True, 0, 1)
    if config.perform_initialization:
        config.init_method(offset)
    return offset


def _mask(
    attn_mask_type: AttnMaskType, config: TransformerConfig, layer_number: int
) -> ds_usp.MaskSpec:
    """The mask rule of a layer: causal or full, with its window."""
    right_of = {AttnMaskType.causal: 0, AttnMaskType.no_mask: None}
    if attn_mask_type not in right_of:
        raise UnsupportedAttentionError(
            f"mask type {attn_mask_type} has no rule over global positions; USP attention serves "
            "AttnMaskType.causal and AttnMaskType.no_mask, with or without a window"
        )
    left, right = None, right_of[attn_mask_type]
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        left, lookahead = (None if bound < 0 else bound for bound in config.window_size)
        if right == 0 and lookahead:
            raise UnsupportedAttentionError(
                f"layer {layer_number}: window_size={config.window_size} looks {lookahead} tokens "
                f"beyond a causal mask. Use window_size=({config.window_size[0]}, 0)"
            )
        right = lookahead if right is None else right
    return ds_usp.MaskSpec.window(left, right)


def _refuse_inexact_options(
    config: TransformerConfig, attention_dropout: float, layer_number: int
) -> None:
    """Refuse options of the model that attention over ranks could not compute exactly.

    Raises:
        UnsupportedAttentionError: attention dropout, or a log of the largest attention logit.
    """
    refused = {
        f"attention_dropout={attention_dropout}": (
            attention_dropout > 0.0,
            "ranks would drop different entries in forward and backward; set attention_dropout=0",
        ),
        "log_max_attention_logit / qk_clip": (
            config.log_max_attention_logit or config.qk_clip,
            "flash kernels do not return the largest logit; switch both off",
        ),
    }
    for option, (is_set, fix) in refused.items():
        if is_set:
            raise UnsupportedAttentionError(f"layer {layer_number}: {option}: {fix}")
