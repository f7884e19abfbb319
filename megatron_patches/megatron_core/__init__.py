"""ds_usp in megatron-core 0.16, as installed from a package index."""

from megatron_patches.megatron_core.core_attention import USPCoreAttention, usp_layer_spec
from megatron_patches.megatron_core.groups import initialize_groups

__all__ = ["USPCoreAttention", "initialize_groups", "usp_layer_spec"]
