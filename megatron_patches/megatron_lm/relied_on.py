"""Functions of Megatron-LM whose edits are refused: the patches bypass them or rely on them.

They are compared when patches are applied; those of ``__main__`` by ``arguments.validate_args``,
where USP computes attention over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from megatron_patches.guards import Guard, megatron_core_guard
from megatron_patches.patch import Bypass

FRAMEWORK = "megatron_lm"
_CORE = "megatron.core"
_LOCAL = f"{_CORE}.transformer.dot_product_attention"
_ROPE = f"{_CORE}.models.common.embeddings"
_SOFTMAX = f"{_CORE}.fusions.fused_softmax:FusedScaleMaskSoftmax"
_ATTENTION = f"{_CORE}.transformer.attention:Attention"
_LATENT = f"{_CORE}.transformer.multi_latent_attention:MultiLatentAttention"
_LAYER = f"{_CORE}.transformer.transformer_layer:TransformerLayer"
_TE = f"{_CORE}.extensions.transformer_engine"
_DDP = f"{_CORE}.distributed.distributed_data_parallel:DistributedDataParallel"

# A fingerprint, or those of a script and of another one.
Known: TypeAlias = str | tuple[str, ...]
# What computes the same instead: the functions, each with its fingerprint.
_BYPASSED: Mapping[str, Mapping[str, Known]] = MappingProxyType(
    {
        "USPCoreAttention computes scores, softmax and scale": {
            f"{_LOCAL}:DotProductAttention.forward": "4f0b126ce3055070",
            f"{_TE}:TEDotProductAttention.forward": "ca5c4bb415e97a63",
            f"{_SOFTMAX}.__init__": "e7d5130d80fdec14",
            f"{_SOFTMAX}.forward": "463fdbe15b1f1ced",
            f"{_SOFTMAX}.is_kernel_available": "5efbc0ad01f72e36",
            f"{_SOFTMAX}.forward_fused_softmax": "7b63cda66dd02b23",
            f"{_SOFTMAX}.forward_torch_softmax": "8807e55a6653e7dd",
            f"{_CORE}.transformer.utils:attention_mask_func": "7301aa794bb96e81",
        },
    }
)
# What the patches take from the functions.
_RELIED_ON: Mapping[str, Mapping[str, Known]] = MappingProxyType(
    {
        "which tokens a rank holds": {
            f"{_CORE}.utils:get_batch_on_this_cp_rank": "4a8bd913664ee40c",
            "__main__:get_batch": ("63f43ba8b876741c", "3cc3c2f494251b6f"),
        },
        "the rotary positions of a rank's tokens": {
            f"{_ROPE}.rope_utils:_get_thd_freqs_on_this_cp_rank": "dc7c49752a695324",
            f"{_ROPE}.rope_utils:_apply_rotary_pos_emb_thd": "263d74c9f8a7e165",
            f"{_ROPE}.rotary_pos_embedding:RotaryEmbedding.forward": "860fc60987890182",
            f"{_ROPE}.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len": "e7d0b8c9b7140c29",
            f"{_ROPE}.rotary_pos_embedding:MultimodalRotaryEmbedding.forward": "8a01bd06d65e6e2e",
            f"{_ROPE}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward": "9714f9befce29622",
        },
        "the options with which a core attention is built": {
            f"{_ATTENTION}.__init__": "caafbbdf6b12dc52",
            f"{_LATENT}.__init__": "92f0ff254e442de1",
        },
        "norm, MLP and residual of a layer, which --usp-mlp-chunks calls for each chunk": {
            f"{_LAYER}._forward_mlp": "535fe3118379a740",
        },
        "the scale of losses and gradients, summed over context-parallel ranks": {
            f"{_DDP}.__init__": "007febeacd8d9445",
            f"{_CORE}.distributed.finalize_model_grads:finalize_model_grads": "fb4172e64097f919",
            "__main__:loss_func": ("775eaad47937bd3b", "a9b94acc4f8a678d"),
        },
    }
)
GEMM_LAST = "--usp-recompute gemm-last"
_BYPASSED_BY_GEMM_LAST: Mapping[str, Mapping[str, Known]] = MappingProxyType(
    {
        "layer_memory recomputes its activation function": {
            f"{_CORE}.transformer.mlp:MLP.forward": "3b351fb8a1efa8d7",
        },
    }
)
_MIXER = f"{_CORE}.ssm.mamba_mixer:MambaMixer"
_BYPASSED_IN_MAMBA: Mapping[str, Mapping[str, Known]] = MappingProxyType(
    {
        "over ranks a Mamba mixer computes what it does without use_mamba_mem_eff_path": {
            f"{_MIXER}._ssm_training": "f543ac895dde591b",
        },
    }
)


def rows() -> tuple[Bypass, ...]:
    """Every such function, with its fingerprint and why its source matters."""
    bypassed = (Bypass(*row) for row in _rows(_BYPASSED))
    relied_on = (Bypass(*row, kind="rely") for row in _rows(_RELIED_ON))
    in_mamba = (Bypass(*row, needs="mamba_ssm") for row in _rows(_BYPASSED_IN_MAMBA))
    by_flag = (Bypass(*row, flag=GEMM_LAST) for row in _rows(_BYPASSED_BY_GEMM_LAST))
    return (*bypassed, *in_mamba, *by_flag, *relied_on)


def _rows(groups: Mapping[str, Mapping[str, Known]]) -> Iterator[tuple[str, str, Guard]]:
    """Target, reason and guard of every function, the first fields of :class:`Bypass`."""
    for reason, functions in groups.items():
        for target, digest in functions.items():
            yield target, reason, megatron_core_guard(digest)
