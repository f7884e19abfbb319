"""Models of Hugging Face transformers on ulysses x ring, by one call of :func:`enable`."""

from ds_usp.integrations.transformers.data_loader import replicate_batches, share_batches
from ds_usp.integrations.transformers.model import EnabledModel, enable
from ds_usp.integrations.transformers.trainer import attach

__all__ = ["EnabledModel", "attach", "enable", "replicate_batches", "share_batches"]
