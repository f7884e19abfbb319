"""Models of Hugging Face transformers on ulysses x ring, by one call of :func:`enable`."""

from ds_usp.integrations.transformers.alst import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    patch_accelerate,
    sequence_mesh,
)
from ds_usp.integrations.transformers.model import EnabledModel, enable
from ds_usp.integrations.transformers.replicated_accelerator import share_batches
from ds_usp.integrations.transformers.trainer import attach, replicate_batches

__all__ = [
    "EnabledModel",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "attach",
    "enable",
    "patch_accelerate",
    "replicate_batches",
    "sequence_mesh",
    "share_batches",
]
