"""Layer 1: what is saved for backward, recomputed, or offloaded to the host."""

from ds_usp.memory.chunks import in_chunks
from ds_usp.memory.gemm_last import GemmLast, recompute_before
from ds_usp.memory.layers import RECOMPUTE, LayerMemory, run_for_gradients
from ds_usp.memory.offload import Offload
from ds_usp.memory.saved_attention import keep_attention

__all__ = [
    "RECOMPUTE",
    "GemmLast",
    "LayerMemory",
    "Offload",
    "in_chunks",
    "keep_attention",
    "recompute_before",
    "run_for_gradients",
]
