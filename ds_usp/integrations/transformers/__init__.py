"""Models of Hugging Face transformers on ulysses x ring, by one call of :func:`enable`."""

from ds_usp.integrations.transformers.alst import UlyssesSPAttentionHF
from ds_usp.integrations.transformers.alst_accelerate import patch_accelerate, sequence_mesh
from ds_usp.integrations.transformers.alst_data_loader import UlyssesSPDataLoaderAdapter
from ds_usp.integrations.transformers.data_loader import replicate_batches, share_batches
from ds_usp.integrations.transformers.model import EnabledModel, enable
from ds_usp.integrations.transformers.trainer import attach

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
