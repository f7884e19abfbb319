"""Functions of Megatron-DeepSpeed that a patched run bypasses: an edit of them is refused.

``tests/megatron_deepspeed/test_mds_edits.py`` finds them: lines that the stock run executes and a
patched run does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_patches.guards import source_guard
from megatron_patches.patch import Bypass

_LAYER = "megatron.model.transformer"
_CORE = "megatron.core"
_SP_LOSS = f"{_CORE}.sequence_parallel.cross_entropy"
_SOFTMAX = "megatron.model.fused_softmax"
_ATTENTION = "usp_attention computes scores, softmax and scale"
_FLASH = "with a ring usp_attention computes it"
_PARALLEL = f"{_CORE}.tensor_parallel"
_LINEAR = f"{_PARALLEL}.layers"

# What computes the same instead: the functions, each with its fingerprint.
_ALWAYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "batch.get_batch_pipe shards the batch": {
            "__main__:get_batch_pipe": "71d4e30651baae75",
        },
        "batch.make_batch makes no dense mask, and reads the documents": {
            "megatron.utils:get_ltor_masks_and_position_ids": "73f9a52ff7d8dee6",
        },
        "attention.SequenceParallelAttention applies rotary positions": {
            "megatron.model.rotary_pos_embedding:RotaryEmbedding.__init__": "218d9b97b2f1fadb",
            "megatron.model.rotary_pos_embedding:RotaryEmbedding.forward": "1ff6d2d798f6cb0e",
            "megatron.model.rotary_pos_embedding:_rotate_half": "bb5f37f56940d10c",
            "megatron.model.rotary_pos_embedding:apply_rotary_pos_emb": "6438d0b1cfdca1eb",
            "megatron.model.language_model:TransformerLanguageModel.forward": "5d8e488d98014267",
            "megatron.utils:update_rotary_pos_emb": "688323f8fae87dab",
        },
        _ATTENTION: {
            f"{_LAYER}:CoreAttention.__init__": "d15bd23c7c7f2d10",
            f"{_LAYER}:ParallelAttention._checkpointed_attention_forward": "8e8915105ee7d020",
            f"{_LAYER}:ParallelAttention.repeat_kv": "f9228eed5f94aa40",
            f"{_LAYER}:ParallelAttention.split_tensor": "36508fb42472c44c",
            "megatron.model.utils:attention_mask_func": "ae9714990f30a2db",
            f"{_SOFTMAX}:FusedScaleMaskSoftmax.__init__": "8ea2529d6400bf4e",
            f"{_SOFTMAX}:FusedScaleMaskSoftmax.forward": "781cf0c1cd407b24",
            f"{_SOFTMAX}:FusedScaleMaskSoftmax.is_kernel_available": "3bfa863900df4a73",
            f"{_SOFTMAX}:FusedScaleMaskSoftmax.forward_fused_softmax": "5527710daa080abf",
            f"{_SOFTMAX}:FusedScaleMaskSoftmax.forward_torch_softmax": "26d2436c5ff92d39",
            f"{_SOFTMAX}:ScaledUpperTriangMaskedSoftmax": "1e29fe81828e64e4",
            f"{_SOFTMAX}:ScaledMaskedSoftmax": "b33868f51bb5c5bc",
            f"{_SOFTMAX}:ScaledSoftmax": "ba10bbc949c40c3d",
            "megatron.core.parallel_state:get_global_memory_buffer": "4eb46795b33c00a5",
            "megatron.core.utils:GlobalMemoryBuffer": "c7df8bf354696357",
        },
        _FLASH: {
            f"{_LAYER}:FlashSelfAttention.__init__": "e1d0cd939d9d4958",
            f"{_LAYER}:FlashSelfAttention.forward": "291b36c206dda369",
            f"{_LAYER}:FlashSelfAttentionTriton.__init__": "5e1050617c5be7cf",
            f"{_LAYER}:FlashSelfAttentionTriton.forward": "0bc9872af236d70a",
        },
        "loss.gather_losses gathers the losses of all ranks": {
            f"{_SP_LOSS}:_VocabSequenceParallelCrossEntropy": "8e7725253db87b0d",
        },
        "on GPUs GeLUFunction runs in two kernels of torch": {
            "megatron.model.fused_bias_gelu:bias_gelu": "0475d0767aace867",
            "megatron.model.fused_bias_gelu:bias_gelu_back": "8b3aac3794240c98",
        },
    }
)
# With a flag alone, with which ``arguments.validate_args`` calls ``verify_flag``: as above.
_WITH_FLAG: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "--usp-loss-chunks": (
            "chunked_token_losses computes the losses without logits",
            {
                "megatron.model.language_model:parallel_lm_logits": "51103b2cf92422b1",
                f"{_PARALLEL}.cross_entropy:vocab_parallel_cross_entropy": "91046d1e87f30023",
                f"{_PARALLEL}.cross_entropy:_VocabParallelCrossEntropy": "c077bc1a990c7ac2",
            },
        ),
    }
)


def rows() -> tuple[Bypass, ...]:
    """Every bypassed function, with its fingerprint and what computes the same."""
    always = (
        Bypass(target, reason, source_guard(digest))
        for reason, functions in _ALWAYS.items()
        for target, digest in functions.items()
    )
    with_flag = (
        Bypass(target, reason, source_guard(digest), flag=flag)
        for flag, (reason, functions) in _WITH_FLAG.items()
        for target, digest in functions.items()
    )
    return (*always, *with_flag)
