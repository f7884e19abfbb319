"""megatron-core's ``core_attention`` module computed by ``ds_usp.usp_attention``.

Options are refused when layers are built, on each rank. ``forward`` is collective over the mesh, in
backward too.
"""

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
from ds_usp.errors import UnsupportedAttentionError
from megatron_patches.megatron_core.groups import check_size
from megatron_patches.megatron_core.packed_documents import packed_documents

# ------------------------------------------------------------------------------------------------
# What a megatron-core configuration asks of one layer's core attention: served, or refused.


_DETERMINISTIC_ERROR = 2  # torch's mode that refuses nondeterministic kernels; 1 warns of them


def layer_mask(
    attn_mask_type: AttnMaskType, config: TransformerConfig, layer_number: int
) -> ds_usp.MaskSpec:
    """The mask rule of a layer, numbered from 1: causal or full, with its window."""
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


def refuse_inexact_options(
    config: TransformerConfig,
    layer_number: int,
    attention_type: str,
    attention_dropout: float,
    num_splits: int | None,
) -> None:
    """UnsupportedAttentionError for options of the configuration or of the layer that attention
    over ranks could not compute exactly."""
    refused = {
        f"attention_type={attention_type!r}": (
            attention_type != "self",
            "the keys of another sequence need a layout of their own; call ds_usp.usp_attention "
            "with kv_layout=",
        ),
        f"attention_dropout={attention_dropout}": (
            attention_dropout > 0.0,
            "ranks would drop different entries in forward and backward; set attention_dropout=0",
        ),
        f"softmax_type={config.softmax_type!r}": (
            config.softmax_type not in ("vanilla", "off-by-one", "learnable"),
            "use vanilla, off-by-one or learnable",
        ),
        "log_max_attention_logit / qk_clip": (
            config.log_max_attention_logit or config.qk_clip,
            "flash kernels do not return the largest logit; switch both off",
        ),
        "fp8_dot_product_attention / fp8_multi_head_attention": (
            config.fp8_dot_product_attention or config.fp8_multi_head_attention,
            "scores are computed in the dtype of q, k and v; switch both off (linear layers may "
            "stay in FP8)",
        ),
        "deterministic_mode": (
            config.deterministic_mode
            and torch.get_deterministic_debug_mode() != _DETERMINISTIC_ERROR,
            "kernels with a deterministic backward are used under "
            "torch.use_deterministic_algorithms(True) only; call it before the model is built",
        ),
        f"batch_invariant_mode / num_splits={num_splits}": (
            config.batch_invariant_mode or num_splits is not None,
            "the order of sums is the kernel's and depends on the degrees; leave both out",
        ),
        **_refused_experts(config),
    }
    for option, (is_set, fix) in refused.items():
        if is_set:
            raise UnsupportedAttentionError(f"layer {layer_number}: {option}: {fix}")


def _refused_experts(config: TransformerConfig) -> dict[str, tuple[bool, str]]:
    """Return by option whether it is set, and the fix: what routers decide by a rank's tokens,
    another model at other degrees."""
    balancing, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = balancing if isinstance(balancing, list) else [balancing]
    losses = coefficients if isinstance(coefficients, list) else [coefficients]
    over_ranks = config.num_moe_experts is not None and config.context_parallel_size > 1
    return {
        f"moe_expert_capacity_factor={config.moe_expert_capacity_factor}": (
            over_ranks and (config.moe_expert_capacity_factor or 0) > 0,
            "each rank would drop tokens by what its own shard of the sequence sends to an expert; "
            "leave it out",
        ),
        "moe_router_load_balancing_type='sinkhorn'": (
            over_ranks and "sinkhorn" in kinds,
            "each rank would balance its own shard of the sequence; use aux_loss, seq_aux_loss, "
            "global_aux_loss or none",
        ),
        "moe_router_force_load_balancing": (
            over_ranks and config.moe_router_force_load_balancing,
            "routers draw experts at random, other ones at other degrees; leave it out",
        ),
        f"calculate_per_token_loss with moe_aux_loss_coeff={coefficients}, "
        f"moe_z_loss_coeff={config.moe_z_loss_coeff}": (
            over_ranks
            and config.calculate_per_token_loss
            and any([*losses, config.moe_z_loss_coeff]),
            "megatron-core divides the gradient of the routers' losses by the number of "
            "context-parallel ranks; set these coefficients to 0, or "
            "calculate_per_token_loss=False",
        ),
    }


# ------------------------------------------------------------------------------------------------
# megatron-core's dense masks, compared with a layer's mask rule.


_ROWS = 1024  # compared at a time, to bound the memory of the comparison


def check_dense_mask(
    mask: Any,
    rule: ds_usp.MaskSpec,
    layout: ds_usp.TokenLayout | str,
    mesh: ds_usp.SequenceMesh,
    local_tokens: int,
) -> None:
    """Refuse a dense mask that differs from the layer's ``rule``. Collective over the mesh.

    Compared once in a forward pass for each rule, on all ranks: the layers share the tensor.

    Args:
        layout: of the tokens, or the kind of one.
        local_tokens: number of this rank's tokens, ``s_local``.

    Shapes:
        mask: bool ``[b or 1, 1, s_local, seq_len]``, True where a query must not look.

    Raises:
        UnsupportedAttentionError: on the ranks whose rows of the mask differ, or that have another
            value for one.
        MeshError: on the others.
    """

    def compare() -> None:
        with mesh.agreeing("a dense mask that equals the layer's rule"):
            seq_len = local_tokens * mesh.sp_degree
            token_layout = mesh.layout(layout, seq_len) if isinstance(layout, str) else layout
            if not _equals_rule(mask, rule, token_layout, mesh.rank):
                raise UnsupportedAttentionError(
                    f"attention_mask was given and is not the rule of this layer, {rule}, for the "
                    f"tokens of this rank in {token_layout}. USP attention computes one rule over "
                    "global positions for every sequence. Pass attention_mask=None, and documents "
                    "as packed_seq_params"
                )

    tensors = [mask] if isinstance(mask, Tensor) else []
    mesh.readings.of(tensors, ("dense mask", rule, layout, local_tokens), compare)


def _equals_rule(mask: Any, rule: ds_usp.MaskSpec, layout: ds_usp.TokenLayout, rank: int) -> bool:
    """Whether the rows of this rank's queries hide the same keys as the rule."""
    rows = layout.positions(rank)
    # Documents too: packed_seq_params carry them, so a dense mask beside them is refused.
    if rule != ds_usp.MaskSpec.window(rule.left, rule.right):
        return False
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim < 2:
        return False
    if mask.shape[-2:] != (len(rows), layout.seq_len):
        return False
    keys, differs = torch.arange(layout.seq_len, device=mask.device), []
    for begin in range(0, len(rows), _ROWS):
        queries = torch.tensor(rows[begin : begin + _ROWS], device=mask.device)
        distance = keys - queries[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if rule.left is not None:
            hidden |= distance < -rule.left
        if rule.right is not None:
            hidden |= distance > rule.right
        differs.append((mask[..., begin : begin + _ROWS, :] != hidden).any())
    return not bool(torch.stack(differs).any())  # waits for a GPU once


class USPCoreAttention(torch.nn.Module):
    """Core attention of one layer over the ranks of a mesh.

    Named in a layer spec as ``ModuleSpec(USPCoreAttention, params={"mesh": ..., "layout": ...})``,
    or put in place of megatron-core's classes by ``megatron_patches.apply("megatron_core")``.

    Args:
        mesh, kernel: as for ``ds_usp.usp_attention``.
        layout: kind of token layout where every rank has equally many tokens; or a
            ``TokenLayout``, also of a sequence that does not divide.
        k_channels, v_channels, cp_comm_type: without effect.
        Others: megatron-core's, as of ``DotProductAttention`` and ``TEDotProductAttention``.

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
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        check_size(config, mesh)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refuse_inexact_options(config, layer_number, attention_type, dropout, num_splits)
        self.mesh, self.layout = mesh, layout
        self._options = {"mesh": mesh, "softmax_scale": softmax_scale, "kernel": kernel}
        self.attn_mask_type = attn_mask_type
        self.mask = layer_mask(attn_mask_type, config, layer_number)
        self.softmax_type = config.softmax_type
        self._tp_group = getattr(pg_collection, "tp", None)
        self._scores: ds_usp.Scores | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = _learnable_offset(config)
        elif config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", _offset(config).zero_(), persistent=False)

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
            attention_mask: None, or a dense mask that equals the layer's rule.
            packed_seq_params: the documents of packed sequences (see :func:`packed_documents`).

        Shapes:
            query: ``[s_local, b, h, d]``; key: ``[s_local, b, h_kv, d]``, not repeated; value:
            ``[s_local, b, h_kv, e]``; result: ``[s_local, b, h * e]``. Packed in format ``thd``
            without ``b``, which is 1 in the result.
        """
        if attention_bias is not None:
            raise UnsupportedAttentionError(
                "attention_bias was given: the mask of USP attention is a rule over global "
                f"positions ({self.mask}). Pass attention_bias=None"
            )
        if attn_mask_type is not self.attn_mask_type and attn_mask_type is not None:
            raise UnsupportedAttentionError(
                f"the call asks for mask {attn_mask_type}, the layer was built for "
                f"{self.attn_mask_type}. Set attn_mask_type in the layer's spec"
            )
        options, padding = self._call_options(packed_seq_params, query)
        if packed_seq_params is not None and query.ndim == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        if attention_mask is not None:
            mask, layout = options["mask"], options["layout"]
            check_dense_mask(attention_mask, mask, layout, self.mesh, query.shape[0])
        out = ds_usp.usp_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), **options
        )
        # The tensors of one sample need no transposition, which autograd would run backward, too.
        one_sample = query.shape[1] == 1
        out = out.reshape(*query.shape[:2], -1) if one_sample else out.transpose(0, 1).flatten(2)
        # Whatever the program does with padding, nothing of it reaches a gradient.
        return out if padding is None else out.masked_fill(padding, 0.0)

    def _call_options(
        self, packed_seq_params: Any, tokens: Tensor
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Arguments of ``ds_usp.usp_attention`` for a call, and where this rank has padding.

        Args:
            packed_seq_params: the documents, as of :meth:`forward`; None: one a sequence.
            tokens: ``[s_local, ...]``.

        Returns:
            The arguments, and True for padding tokens, ``[s_local, 1 or b, 1]``; None without any.
        """
        mask, layout, padding = self.mask, self.layout, None
        if packed_seq_params is not None:
            documents = packed_documents(packed_seq_params, mask, layout, self.mesh, tokens)
            mask, layout, padding = documents.mask, documents.layout, documents.padding
        options: dict[str, Any] = {**self._options, "layout": layout, "mask": mask}
        if self.softmax_type != "vanilla":
            options["scores"] = self._with_sinks()
        return options, padding

    def _with_sinks(self) -> ds_usp.Scores:
        """Attention sinks, extra logits in the softmax ``[h]``."""
        if self._scores is None or self._scores.sinks is not self.softmax_offset:
            self._scores = ds_usp.Scores(sinks=self.softmax_offset)
        return self._scores

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """The sink parameter for megatron-core's checkpoints, sharded by heads."""
        groups = {"dp_cp_group": metadata["dp_cp_group"]} if metadata else {}
        if groups and self._tp_group is not None:
            groups["tp_group"] = self._tp_group
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            **groups,
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load the sink parameter, also from a checkpoint of ``TEDotProductAttention``, whose
        extra state belongs to attention in FP8."""
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.mesh}, {self.layout}, {self.mask}, kernel {self._options['kernel']}"


def _offset(config: TransformerConfig) -> Tensor:
    """Memory for the sinks ``[heads of this tensor-parallel rank]``, where megatron-core has it."""
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    device = torch.cuda.current_device() if on_gpu else "cpu"
    return torch.empty(heads, device=device, dtype=config.params_dtype)


def _learnable_offset(config: TransformerConfig) -> torch.nn.Parameter:
    """Learnable sinks, initialized as megatron-core does."""
    offset = torch.nn.Parameter(_offset(config))
    set_tensor_model_parallel_attributes(offset, True, 0, 1)
    if config.perform_initialization:
        config.init_method(offset)
    return offset
